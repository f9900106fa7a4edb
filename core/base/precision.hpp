// Where a run computes and in which type.
#pragma once
#include "core/base/enum_names.hpp"
#include "core/base/tensor.hpp"

namespace ballast {

enum class Backend { host, cuda };
template <>
struct EnumNames<Backend> {
  static constexpr EnumTable<Backend, 2> table{{{Backend::host, "host"}, {Backend::cuda, "cuda"}}};
};

enum class Precision { fp32, fp64, bf16 };
template <>
struct EnumNames<Precision> {
  static constexpr EnumTable<Precision, 3> table{
      {{Precision::fp32, "fp32"}, {Precision::fp64, "fp64"}, {Precision::bf16, "bf16"}}};
};

/// Type of parameter values and activations: CUDA computes in bf16, the host in fp32 or fp64.
inline DType compute_type(Backend backend, Precision precision) {
  if (backend == Backend::cuda) return DType::bf16;
  return precision == Precision::fp64 ? DType::f64 : DType::f32;
}

}  // namespace ballast

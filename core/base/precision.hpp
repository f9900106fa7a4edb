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

/// fp8: products of layers' matrices with operands rounded to E4M3 (kernels/ops/fp8.hpp); all else
/// in bf16 on CUDA, in fp32 on the host.
enum class Precision { fp32, fp64, bf16, fp8 };
template <>
struct EnumNames<Precision> {
  static constexpr EnumTable<Precision, 4> table{{{Precision::fp32, "fp32"},
                                                  {Precision::fp64, "fp64"},
                                                  {Precision::bf16, "bf16"},
                                                  {Precision::fp8, "fp8"}}};
};

/// Type of parameter values and activations: CUDA computes in bf16, the host in fp32 or fp64.
inline DType compute_type(Backend backend, Precision precision) {
  if (backend == Backend::cuda) return DType::bf16;
  return precision == Precision::fp64 ? DType::f64 : DType::f32;
}

}  // namespace ballast

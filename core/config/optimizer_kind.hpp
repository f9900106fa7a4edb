// The optimizers that a deck can choose, and in what they keep their moments.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

enum class OptimizerKind { adamw, muon };
template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumTable<OptimizerKind, 2> table{
      {{OptimizerKind::adamw, "adamw"}, {OptimizerKind::muon, "muon"}}};
};

/// full: as gradients (fp32; fp64 under run.precision = "fp64").
enum class MomentPrecision { full, bf16 };
template <>
struct EnumNames<MomentPrecision> {
  static constexpr EnumTable<MomentPrecision, 2> table{
      {{MomentPrecision::full, "full"}, {MomentPrecision::bf16, "bf16"}}};
};

}  // namespace ballast

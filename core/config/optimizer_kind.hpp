// The optimizers that a deck can choose, and in what they keep moments and gradients.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

enum class OptimizerKind { adamw, muon };
template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumTable<OptimizerKind, 2> table{
      {{OptimizerKind::adamw, "adamw"}, {OptimizerKind::muon, "muon"}}};
};

/// full: as master weights (fp32; fp64 under run.precision = "fp64").
enum class StatePrecision { full, bf16 };
template <>
struct EnumNames<StatePrecision> {
  static constexpr EnumTable<StatePrecision, 2> table{
      {{StatePrecision::full, "full"}, {StatePrecision::bf16, "bf16"}}};
};

}  // namespace ballast

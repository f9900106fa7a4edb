// The optimizers that a deck can choose.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

enum class OptimizerKind { adamw, muon };
template <>
struct EnumNames<OptimizerKind> {
  static constexpr EnumTable<OptimizerKind, 2> table{
      {{OptimizerKind::adamw, "adamw"}, {OptimizerKind::muon, "muon"}}};
};

}  // namespace ballast

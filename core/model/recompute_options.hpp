// Which layers of a stage run their forward again in backward, in place of keeping activations.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

/// selective: norms and SwiGLU products; full: whole layers from their input.
enum class Recompute { none, selective, full };
template <>
struct EnumNames<Recompute> {
  static constexpr EnumTable<Recompute, 3> table{
      {{Recompute::none, "none"}, {Recompute::selective, "selective"}, {Recompute::full, "full"}}};
};

struct RecomputeOptions {
  Recompute mode = Recompute::none;
  /// Layers [0, layers) of the stage recompute, the others keep everything (with `full` HBP's "GC
  /// layers"); -1 means all.
  int layers = -1;
  /// Those of a micro-batch that asks for `micro_batch_layers` layers
  /// (MicroBatch::recompute_layers): `full` with that many; -1: these.
  RecomputeOptions with(int micro_batch_layers) const {
    return micro_batch_layers < 0 ? *this : RecomputeOptions{Recompute::full, micro_batch_layers};
  }
  /// Mode of a layer of the stage, counted from the stage's first.
  Recompute of(long layer_in_stage) const {
    return layers >= 0 && layer_in_stage >= layers ? Recompute::none : mode;
  }
};

}  // namespace ballast

// Costs as placement asks for them: seconds of a micro-batch on one pipeline stage.
#pragma once
#include <cstdint>

#include "core/model/recompute_options.hpp"
#include "core/plan/batch/placement.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/predict/costs.hpp"

namespace ballast {

struct PlacedWork {
  std::int64_t layers = 1;  ///< of the model
  MeshShape mesh;
  RecomputeOptions recompute;
  std::int64_t budget = 0;  ///< key blocks a query; 0: every visible key
};

/// Means over the stages of mesh.pp; layers as costs time them, kept and recomputed ones by their
/// numbers.  bytes() are the tokens of one data-parallel rank's part of the micro-batch.
class StepPlacementCosts final : public PlacementCosts {
 public:
  /// `costs` must outlive it.
  StepPlacementCosts(const Costs& costs, const PlacedWork& work);
  double rest_s(std::int64_t tokens, const PlacementSplit& split) const override;
  double attention_s(std::int64_t query_tokens, std::int64_t prefix_tokens,
                     const PlacementSplit& split) const override;
  double transfer_s(std::int64_t tokens, double attention_s,
                    const PlacementSplit& split) const override;
  double bytes(std::int64_t tokens, std::int64_t prefix_tokens,
               const PlacementSplit& split) const override;

 private:
  ContextSplit context(const PlacementSplit& split) const;

  const Costs& costs_;
  PlacedWork work_;
  double kept_ = 1, recomputed_ = 0;  ///< layers of a stage, in the costs' unit
};

}  // namespace ballast

// One transformer layer, its attention and the head, timed apart on this rank's device.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "app/measure/profile_grid.hpp"
#include "core/base/device.hpp"
#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"
#include "core/observe/events.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/budgeted_pattern.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// Times of one piece of work: the median over batches of runs, which last long enough that neither
/// launches nor the clock's grain decide.
struct MeasuredTime {
  double median_s = 0, spread_s = 0;  ///< spread: distance of the quartiles
  std::int64_t bytes = 0;  ///< forward: activations kept for backward; backward: peak of both
                           ///< passes, scratch included
};
struct MeasuredPasses {
  MeasuredTime forward, backward;
  MeasuredTime again;  ///< attention: a forward that has its choice already, as recomputation has
};

class LayerProfiler {
 public:
  struct Options {
    std::int64_t head_chunk_tokens = 1024;
    std::uint64_t seed = 1;
    std::int64_t layers = 1;     ///< of a stage
    bool fp8 = false;            ///< run.precision = "fp8"
    AttentionOptions attention;  ///< of the deck; budgets are the calls'
  };
  /// Allocates layers, the embedding and the head of `shape` with random values.  Layers of a stage
  /// run one after another, so weights are not in the caches any more when their layer's turn comes
  /// again.  As many as that takes, at most those of a stage, are timed in turn.
  LayerProfiler(const ModelShape& shape, DType type, Device& device, Clock& clock,
                const Options& options);
  ~LayerProfiler();
  /// How often a pass runs from now on.
  void repeat(const RepeatRule& rule);

  /// The layer with its attention left out; `recompute` is what backward recomputes first: none,
  /// selective or full.
  MeasuredPasses rest(std::int64_t tokens, Recompute recompute);
  /// Attention alone under a budget (0: dense), the choice included (BudgetedAttention).
  MeasuredPasses attention(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                           std::int64_t block_tokens);
  /// Embedding, final norm, head and loss.
  MeasuredPasses head(std::int64_t tokens);
  /// The whole layer as it runs, for held-out points.
  MeasuredPasses whole(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                       std::int64_t block_tokens, Recompute recompute);
  /// FLOPs of the layer, forward and backward, with `pairs` (query, key) pairs a head.
  double flops(std::int64_t tokens, double pairs) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

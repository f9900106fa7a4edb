// What a GPU holds of the patterns of a micro-batch, and what choosing and running them takes
// beside: kernels/cuda/index and kernels/cuda/attention by their shapes alone.
//
// What a pattern chooses by mass is counted as of attention that is spread evenly over its keys, as
// at the start of training: it chooses less of attention that is not.  Budgets and caps count as
// bounds: as many slashes and as many columns as either allows.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"

namespace ballast {

/// How a run chooses its patterns on GPUs.
struct GpuIndexRule {
  AttentionOptions options;
  std::int64_t query_heads = 1, kv_heads = 1, head_dim = 1;  ///< of the model
  std::vector<std::int64_t> budgets{};  ///< of a BudgetPolicy, ascending, in key blocks a query
  bool deterministic = false;           ///< run.deterministic: no routed lists
};

/// One rank's part of a micro-batch.
struct GpuIndexPart {
  std::int64_t queries = 0;  ///< tokens of its ring rank's shard
  int ring = 1, sp = 1;      ///< ranks
  struct Calls {
    std::int64_t keys = 0, times = 1;
    bool operator==(const Calls&) const = default;
  };
  std::vector<Calls> calls{};  ///< of attention; those alike together
  bool operator==(const GpuIndexPart&) const = default;
};

struct GpuIndexBytes {
  std::int64_t micro_batch = 0;  ///< workspace from its first forward to its last operation
  /// Likewise of each layer, the model's first at 0; one value: of all alike.
  std::vector<std::int64_t> layers{0};
  std::int64_t choosing = 0;  ///< workspace while a layer's pattern is chosen
  std::int64_t recall = 0;    ///< and afterwards, where recall is measured (recall_scores)
  std::int64_t kernels = 0;   ///< scratch that kernels share and keep
  std::int64_t cached = 0;    ///< of all micro-batches of this shape: generated indexes, of which
                              ///< a run keeps the latest kCachedIndexes shapes
  std::int64_t layer(std::int64_t number) const {
    return layers.size() == 1 ? layers.front() : layers.at(static_cast<std::size_t>(number));
  }
  bool operator==(const GpuIndexBytes&) const = default;
};

/// `segments`: of the micro-batch, on all ranks of the ring.  Recorded indexes count as nothing:
/// what they hold is in their files.
GpuIndexBytes gpu_index_bytes(const GpuIndexRule& rule, std::span<const Segment> segments,
                              const GpuIndexPart& part);

}  // namespace ballast

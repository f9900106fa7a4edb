// What choosing a sparse pattern takes on the host while it looks at Q and K, in a layer's first
// forward of a micro-batch: what core/predict/memory_replay counts beside the layers' own tensors.
// GPUs keep no scores (core/predict/gpu_index).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"

namespace ballast {

/// How a run chooses its patterns.
struct IndexRule {
  AttentionOptions options;
  bool budgeted = false;  ///< by a BudgetPolicy
};

/// Queries that are looked at together, and the keys that they see on the rank of a ring that has
/// most of them.
struct ObservedKeys {
  std::int64_t rows = 0, pairs = 0;
  bool operator==(const ObservedKeys&) const = default;
};

/// Rows that columns and slashes are observed for at a time.
struct ObservedBatch {
  ObservedKeys keys;
  std::int64_t slots = 0, parts = 0;  ///< that slashes and columns are summed in
  std::int64_t sent = 0;              ///< columns of a head that a rank may send to the others
  bool operator==(const ObservedBatch&) const = default;
};

/// Of one micro-batch; nothing where no keys are looked at.
struct IndexWork {
  std::vector<ObservedBatch> batches;
  ObservedKeys recall;             ///< for trace.recall_every
  std::int64_t recall_blocks = 0;  ///< blocks of 64 keys up to the ends of the rows' segments
  bool operator==(const IndexWork&) const = default;
};
/// What recall looks at alone, on hosts and GPUs alike.
IndexWork recall_work(const AttentionOptions& options, std::span<const Segment> segments, int ring);
/// `ring`: ranks; `carries`: segments are a dependent chunk.
IndexWork index_work(const IndexRule& rule, std::span<const Segment> segments, int ring,
                     bool carries);

/// One rank's part of a layer.
struct ChoiceShape {
  std::int64_t query_heads = 1, kv_heads = 1, head_dim = 1;
  std::int64_t keys = 0;  ///< its own, padding included
  int ring = 1;
  DType type = DType::f32;
};
struct ChoiceBytes {
  std::int64_t observed = 0;  ///< workspace while columns and slashes are observed (slash_scores)
  std::int64_t message = 0;   ///< columns of all ranks of a ring, meanwhile
  std::int64_t recall = 0;    ///< workspace afterwards (recall_scores)
  std::int64_t reduced = 0;   ///< receive space of the ring's sums, which stays
};
ChoiceBytes choice_bytes(const IndexWork& work, const ChoiceShape& shape);

}  // namespace ballast

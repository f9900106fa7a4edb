// Vertical-slash patterns on the GPU (MTraining, Algorithm 1): observe, select, build.
// Plain structs of device pointers and a stream; nothing returns to the host, sizes are capacities.
//
// Slots: the 64-token blocks of the whole key axis (every shard, stored prefix included), segment
// after segment.  Block i of segment s is slot segment_slot[s] + i; a column is slot * 64 + offset;
// the block diagonal d of segment s (query block i with key block i - d) has slot segment_slot[s] +
// d.  Queries and the shard's keys are blocks of 64 that each lie in one slot.
#pragma once
#include <vector>

#include "kernels/cuda/index/device_index.hpp"

namespace ballast::cuda {

/// Where a rank's queries and one shard's keys lie.  All arrays on the device.
struct PatternAxes {
  int segments = 0;
  int slots = 0;
  const std::int32_t* segment_slot = nullptr;  ///< [segments + 1] first slot of a segment
  const std::int32_t* slot_segment = nullptr;  ///< [slots]
  const std::uint8_t* whole = nullptr;  ///< [segments] 1: too short for a pattern, computed whole
  const std::int32_t* query_slot = nullptr;  ///< [q_blocks] ascending, -1 for padding
  const std::int32_t* key_slot = nullptr;    ///< [k_blocks] ascending
  const std::int32_t* slot_key = nullptr;  ///< [slots] key block of the shard, -1: on another shard
};

/// The observation queries: whole query blocks, of which some rows may see nothing.
struct Observation {
  int tiles = 0;                       ///< query blocks
  const std::int32_t* slot = nullptr;  ///< [tiles] slot of a query block
  const Interval* visible =
      nullptr;              ///< [64 tiles] keys of the shard that a row sees, ascending or empty
  const void* q = nullptr;  ///< bf16 [64 tiles, q_heads, head_dim], dense
  const void* k =
      nullptr;  ///< bf16 [k_tokens, kv_heads, head_dim], k_stride elements between tokens
  std::int64_t k_stride = 0, k_tokens = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;  ///< attention_head_dim()
  float scale = 0;
  const std::int32_t* part = nullptr;  ///< [tiles] of `columns` that a tile's mass goes to; null: 0
};

/// Fixed point of all sums: 2^40 stands for 1, so that adding is exact and has no order.
inline constexpr int kMassBits = 40;
/// Byte of an fp32 value below every score: `top` starts as a memset of it.
inline constexpr int kBelowScores = 0xFE;

// Three passes over the shard's keys.  Between them the caller reduces over the ranks that hold the
// other shards: the maximum of `top`, the sum of `sum`, then of `columns` and `slashes`.  All four
// are added to (maximised) in place: fill `top` with kBelowScores and the others with 0.
/// top [q_heads, 64 tiles] = max of scale * q.k over visible keys.
cudaError_t observe_maximum(const Observation& x, float* top, cudaStream_t stream);
/// sum [q_heads, 64 tiles] += exp(scale * q.k - top), fixed point.
cudaError_t observe_sum(const Observation& x, const float* top, std::int64_t* sum,
                        cudaStream_t stream);
/// columns [parts, q_heads, 64 slots] and slashes [q_heads, slots] += exp(scale * q.k - top) / sum,
/// fixed point: the softmax mass of every column, and of the 64 x 64 blocks of every block
/// diagonal.
cudaError_t observe_mass(const Observation& x, const PatternAxes& axes, const float* top,
                         const std::int64_t* sum, std::int64_t* columns, std::int64_t* slashes,
                         cudaStream_t stream);

/// Lists of slashes (width 1) or columns (width 64), per head and segment.  List (h, s) begins at
/// entries + width * (h * slots + segment_slot[s]); entries ascend and count from the segment's
/// start: diagonals d, or columns.
struct PatternLists {
  std::int32_t* entries = nullptr;  ///< [heads, width * slots]
  std::int32_t* counts = nullptr;   ///< [heads, segments]
  int width = 1;
};

/// What `most` leaves out of each list though the share asked for it, [heads, segments]; entries
/// below Selection::given are never left out.
struct ListCuts {
  std::int32_t* count = nullptr;  ///< entries
  float* share = nullptr;         ///< of the list's mass, that lies on them
};

/// How much of each list's mass is kept.
struct Selection {
  double share = 0;  ///< top-p: the heaviest entries up to and including the one that reaches this
                     ///< share; (0, 1]
  std::int32_t most = 0;  ///< and no more than this many
  bool first_always =
      false;  ///< entry 0 (the main diagonal) is in, whatever its mass, beside `most` others
  const std::int32_t* most_of = nullptr;  ///< [heads, segments] so many of each list in place of
                                          ///< share and most, where not null
  int given = 0;                          ///< entries below it are computed whatever is chosen
};
/// For each head and segment the heaviest of values [heads, width * slots]; ties go to the lower
/// entry.  Whole segments keep every entry when `first_always` (every slash), else none (no column
/// is needed there).
cudaError_t select_heaviest(const std::int64_t* values, int heads, const PatternAxes& axes,
                            const Selection& selection, const PatternLists& lists,
                            const ListCuts& cuts, cudaStream_t stream);

/// Budgets of a BudgetPolicy, in 64-key blocks a query row, and what they buy (SlashPurchases of
/// core/plan/attention/slash_purchases.hpp).  All pointers on the device.
struct BudgetPrices {
  const std::int64_t* budget = nullptr;  ///< [budgets] ascending
  int budgets = 0;
  const std::int64_t* queries = nullptr;        ///< [segments] queries, on all ranks
  const std::int32_t* window_blocks = nullptr;  ///< [segments] blocks of 64 observed queries, the
                                                ///< last ones of the segment
  std::int32_t most_columns = 0;                ///< that a list may have
  std::int64_t* coverage = nullptr;  ///< [budgets] += share of the mass that is computed,
                                     ///< in kCoverageUnit, summed over queries and heads
  std::int32_t* most =
      nullptr;  ///< [budgets, 2, heads, segments] slashes and columns that a budget buys
  /// Slashes [heads, slots], then columns [heads, 64 slots]: 0 where it is never bought, else the
  /// higher, the earlier.  The highest `most` are what a budget buys: values of select_heaviest().
  std::int64_t* order = nullptr;
};
/// mass: slashes [heads, slots], then columns [parts, heads, 64 slots], part w of the w-th block of
/// observed queries, of all ranks.  Whole segments are covered by any budget.  `scratch`:
/// budget_scratch_bytes() of device memory.
std::size_t budget_scratch_bytes(int heads, const PatternAxes& axes);
cudaError_t price_budgets(const std::int64_t* mass, int heads, const PatternAxes& axes,
                          const BudgetPrices& x, void* scratch, cudaStream_t stream);

/// Most entries that each list may have, [heads, segments]; the main diagonal need not be counted.
struct PatternCaps {
  std::vector<std::int32_t> slashes, columns;
};
/// Capacities of an index that build_slash_index() fills.  query_slot as in PatternAxes;
/// segment_slot [segments + 1] and whole likewise.  block_pairs: (query block, key block) pairs of
/// heads that go by blocks.
IndexShape slash_shape(std::int64_t q_tokens, std::int64_t k_tokens, int q_heads, int kv_heads,
                       const PatternCaps& caps, const std::vector<std::int32_t>& query_slot,
                       const std::vector<std::int32_t>& segment_slot,
                       const std::vector<std::uint8_t>& whole, std::int64_t block_pairs = 0);
/// Heads that go by blocks chosen for each block of queries, in place of slashes and columns, of
/// which they have none.
struct BlockLists {
  const std::uint8_t* by_blocks = nullptr;  ///< [heads, slots] 1 at a segment's first slot where
                                            ///< the head does; null: nowhere
  const std::uint64_t* words = nullptr;     ///< [heads, q_blocks, width] not 0 where the block of
                                            ///< keys, counted from the segment's first, is computed
  int width = 0;
};
/// Fills runs, columns and cover words of `index` (one pattern a query head) from the lists: a
/// query block computes the key blocks on the chosen diagonals and its segment's first block whole,
/// and the chosen columns beside them, as far as they are on this shard. key_begin and key_end are
/// there already; derive_index() comes after.  `scratch`: slash_scratch_bytes() of device memory.
std::size_t slash_scratch_bytes(int q_heads, const PatternAxes& axes);
cudaError_t build_slash_index(const DeviceIndex& index, const PatternAxes& axes,
                              const PatternLists& slashes, const PatternLists& columns,
                              const BlockLists& blocks, void* scratch, cudaStream_t stream);
/// *pairs += (query, key) pairs that an index (not a dense one) computes, summed over index heads.
/// After derive_index().
cudaError_t count_pairs(const DeviceIndex& index, std::uint64_t* pairs, cudaStream_t stream);

}  // namespace ballast::cuda

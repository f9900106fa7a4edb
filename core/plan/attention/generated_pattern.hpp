// Generated vertical-slash patterns: plain descriptions of sparse work, for the planner and for
// benchmarks, since random weights are not sparse; and the work that each rank does at each ring
// step under a layout. Source: MTraining Section 3.2 (slashes cluster around relative positions,
// vertical lines are single keys), Section 5.5 and Table 5.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/attention/vertical_slash.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

struct GeneratedPattern {
  std::int64_t tokens = 0;  ///< of the sequence, a multiple of 64
  int heads = 1;
  double density =
      0.05;  ///< share of the causal pairs that is computed; met to within one slash a head
  std::int64_t band_tokens = 1024;  ///< local band, always in
  std::int64_t columns = 1024;      ///< single keys of a head
  std::uint64_t seed = 0;
  int first_head =
      0;  ///< number of the first, where a rank computes some heads of a layer (Ulysses)
};

/// Shapes of micro-batches whose indexes a run keeps, the latest.
inline constexpr std::size_t kCachedIndexes = 8;

/// One head; its first slash is the diagonal.
using GeneratedHead = VerticalSlash;

/// Heads of a pattern, each a function of seed and head number alone.  Beside the band, slashes
/// come in clusters of 4 to 16 neighbours at log-uniform distances; every eighth column lies in the
/// first 64th of the sequence.  Band and columns stay where density asks for less. Errors: tokens
/// no positive multiple of 64, density outside (0, 1], more columns than tokens, sizes below what
/// they count.
std::vector<GeneratedHead> generate(const GeneratedPattern& pattern);

/// The same of a segment of `tokens` keys, as runs have it: at most one column in 16 keys, and all
/// pairs for a density of 1.
std::vector<GeneratedHead> generated_heads(GeneratedPattern pattern, std::int64_t tokens);

/// Generated vertical-slash patterns over the whole key axis, one per head: every segment has the
/// pattern of its own number of keys (generated_heads).  Errors: those of generate and
/// query_blocks.
AttentionPattern generated_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                   const GeneratedPattern& pattern);

/// Calls visit(query block, key block, pairs) for all work of the heads; a block pair comes once
/// for each head and slash, and once for its columns.  A pair under a slash and a column counts
/// once.  Memory: the columns' counts; time: what is visited.
template <class Visit>
void for_each_work(const std::vector<GeneratedHead>& heads, std::int64_t tokens, Visit&& visit) {
  constexpr double kWhole = kBlock * kBlock, kTriangle = kBlock * (kBlock + 1) / 2;
  const std::int64_t blocks = tokens / kBlock;
  std::vector<std::int32_t> all(blocks, 0), own(blocks, 0);
  for (const GeneratedHead& head : heads) {
    for (std::int64_t c : head.columns) ++own[c / kBlock];
    for (std::int32_t d : head.slashes)
      for (std::int64_t i = d; i < blocks; ++i)
        visit(i, i - d, d == 0 ? kTriangle : kWhole - static_cast<double>(kBlock * own[i - d]));
    for (std::int64_t c : head.columns)
      all[c / kBlock] += own[c / kBlock] > 0 ? std::exchange(own[c / kBlock], 0) : 0;
  }
  for (std::int64_t k = 0; k < blocks; ++k)
    for (std::int64_t i = k + 1; all[k] > 0 && i < blocks; ++i)
      visit(i, k, static_cast<double>(kBlock) * all[k]);
}

/// Computed pairs / causal pairs.
double density(const std::vector<GeneratedHead>& heads, std::int64_t tokens);

/// Rank of every 64-token block.  Error: a layout that cuts a block (stripes that are no multiple
/// of 64, zigzag not aligned to 64).
std::vector<int> block_owners(const SequenceLayout& layout);

/// work[w][t]: pairs, summed over heads, that rank w computes at step t of the ring of outer x
/// inner ranks; owner[b] holds block b.
std::vector<std::vector<double>> ring_work(const std::vector<GeneratedHead>& heads,
                                           const std::vector<int>& owner, int outer, int inner);

/// The same of between[query rank * ranks + key rank], pairs of whatever lies there.
std::vector<std::vector<double>> ring_work(const std::vector<double>& between, int outer,
                                           int inner);

/// How evenly work lies over ranks and ring steps; all ratios, from work[w][t] and the plan alone
/// (communication costs nothing).
struct RingBalance {
  double worker_imbalance = 1, step_imbalance = 1;  ///< core/observe/metrics.hpp
  double computation_ratio = 1;  ///< mean over ranks and steps of work / largest work of the step:
                                 ///< ranks that start each step together
  double critical_path = 1;  ///< time / ideal when ranks wait for their ring neighbours alone, as
                             ///< the executor does; ideal: all work spread evenly
  double lockstep_path = 1;  ///< the same when all ranks begin each step together
};
RingBalance ring_balance(const std::vector<std::vector<double>>& work, int outer, int inner);

}  // namespace ballast

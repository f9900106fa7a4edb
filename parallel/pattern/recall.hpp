// Recall of a layer's index: sampled queries, exact softmax over the ring, estimates with their
// errors.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/slash_scores.hpp"

namespace ballast {

/// A sampled query, and how many it stands for.
struct SampledQuery {
  int segment = 0;
  std::int64_t position = 0;
  double weight = 0;
};
/// `rows` queries of every segment that has more than `least` keys (all of its queries where these
/// are fewer), one of each of as many equal stretches, drawn from (seed, step, layer) and what
/// names the segment ([segments]; empty: its place) alone: the same on every rank and layout.
std::vector<SampledQuery> sample_queries(const AttentionAxes& axes, const KeyAxis& axis,
                                         std::int64_t rows, std::int64_t least, std::uint64_t seed,
                                         std::int64_t step, int layer,
                                         std::span<const std::uint64_t> names = {});

/// In place of a layer, for rows that coverage is told of: others than those that recall samples.
inline constexpr int kCoverageDraw = 1 << 20;

/// Weighted mean of the queries' shares, its standard error (0 where every query was sampled), and
/// their 10th percentile.  shares [queries].
struct Estimate {
  double mean = 0, error = 0, low = 0;
};
Estimate estimate(std::span<const SampledQuery> queries, std::span<const double> shares);

/// One row a head of the call, heads counted from `first_head`; none where no segment is sampled.
/// The same on every rank of the ring.  Collective over it.
std::vector<RecallRow> measure_recall(const AttentionAxes& axes, const KeyAxis& axis,
                                      const std::vector<SampledQuery>& queries,
                                      const AttentionInputs& in,
                                      const std::vector<AttentionWork>& calls, int first_head,
                                      const RingJoin& ring);

}  // namespace ballast

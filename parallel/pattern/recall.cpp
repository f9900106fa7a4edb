#include "parallel/pattern/recall.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>

#include "core/base/random.hpp"
#include "kernels/attention/recall_scores.hpp"

namespace ballast {

std::vector<SampledQuery> sample_queries(const AttentionAxes& axes, const KeyAxis& axis,
                                         std::int64_t rows, std::int64_t least, std::uint64_t seed,
                                         std::int64_t step, int layer,
                                         std::span<const std::uint64_t> names) {
  require(names.empty() || static_cast<int>(names.size()) >= axis.segments(),
          "recall: {} names of {} segments", names.size(), axis.segments());
  const std::uint64_t stream = stream_of("recall") + static_cast<std::uint64_t>(step);
  std::vector<SampledQuery> drawn;
  for (int s = 0; s < axis.segments(); ++s) {
    const std::int64_t first = axes.first_query[s],
                       count = axis.first_position[s] + axis.count[s] - first;
    if (axis.count[s] <= least || count <= 0) continue;
    const std::int64_t n = std::min(rows, count);
    const std::uint64_t named = names.empty() ? static_cast<std::uint64_t>(s) : names[s];
    const std::uint64_t key = random_bits(seed, stream, named);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t begin = i * count / n, width = (i + 1) * count / n - begin;
      const std::uint64_t bits =
          random_bits(key, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(i));
      drawn.push_back(
          {s, first + begin + static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(width)),
           static_cast<double>(width)});
    }
  }
  return drawn;
}

Estimate estimate(std::span<const SampledQuery> queries, std::span<const double> shares) {
  Estimate found;
  double all = 0, variance = 0;
  for (const SampledQuery& q : queries) all += q.weight;
  for (std::size_t first = 0, last; first < queries.size(); first = last) {
    double weight = 0, sum = 0, squares = 0;
    for (last = first; last < queries.size() && queries[last].segment == queries[first].segment;
         ++last) {
      weight += queries[last].weight;
      sum += queries[last].weight * shares[last];
    }
    for (std::size_t i = first; i < last; ++i)
      squares +=
          queries[i].weight / weight * (shares[i] - sum / weight) * (shares[i] - sum / weight);
    // Of a random sample: one that is spread over positions is closer, if anything.
    const auto n = static_cast<double>(last - first);
    found.mean += sum / all;
    if (n > 1) variance += weight / all * (weight / all) * squares / (n - 1) * (1 - n / weight);
  }
  found.error = std::sqrt(std::max(0.0, variance));
  std::vector<std::size_t> order(queries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return shares[a] < shares[b]; });
  double below = 0;
  for (const std::size_t i : order) {
    found.low = shares[i];
    if ((below += queries[i].weight) >= 0.1 * all) break;
  }
  return found;
}

std::vector<RecallRow> measure_recall(const AttentionAxes& axes, const KeyAxis& axis,
                                      const std::vector<SampledQuery>& queries,
                                      const AttentionInputs& in,
                                      const std::vector<AttentionWork>& calls, int first_head,
                                      const RingJoin& ring) {
  if (queries.empty()) return {};
  AxisRanges ranges;
  for (const SampledQuery& q : queries) ranges.push_back({q.segment, q.position, 1});
  const std::unique_ptr<RecallScores> scores = recall_scores(axes, axis, ranges, in.q.space());
  Tensor q = scores->queries(in.q), computed = scores->computed(calls);
  ring.sum(q);
  ring.sum(computed);
  Tensor maximum = scores->maximum(q, in.k, in.scale);
  ring.maximum(maximum);
  Tensor joined = scores->sums(maximum, computed);
  ring.sum(joined);
  const Tensor sums = joined.to(host_device());

  std::vector<RecallRow> rows;
  const auto heads = static_cast<int>(sums.size(0));
  const std::int64_t* sum = sums.data<std::int64_t>();
  for (int h = 0; h < heads; ++h) {
    std::array<std::vector<double>, 1 + kRecallParts> shares;  // computed, then by part
    for (std::size_t r = 0; r < queries.size(); ++r, sum += 1 + kRecallParts) {
      const auto all = static_cast<double>(sum[0]);
      shares[0].push_back(static_cast<double>(sum[1] + sum[2] + sum[3] + sum[4]) / all);
      for (int p = 1; p <= kRecallParts; ++p)
        shares[p].push_back(static_cast<double>(sum[p]) / all);
    }
    RecallRow& row = rows.emplace_back();
    const Estimate recall = estimate(queries, shares[0]);
    row.layer = in.layer;
    row.head = first_head + h;
    row.rows = static_cast<std::int32_t>(queries.size());
    for (const SampledQuery& query : queries) row.queries += query.weight;
    row.mean = recall.mean;
    row.error = recall.error;
    row.low = recall.low;
    double* const parts[] = {&row.sink, &row.own, &row.blocks, &row.columns};
    for (int p = 0; p < kRecallParts; ++p) *parts[p] = estimate(queries, shares[p + 1]).mean;
  }
  return rows;
}

}  // namespace ballast

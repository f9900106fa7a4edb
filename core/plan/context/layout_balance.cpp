#include "core/plan/context/layout_balance.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/error.hpp"

namespace ballast {
namespace {

/// Calls f(segment, first, last) for every segment's own tokens, places inside it, that lie on
/// packed positions [begin, end).
template <class F>
void for_segments(const MicroBatch& micro_batch, const PackedAxis& axis, std::int64_t begin,
                  std::int64_t end, F&& f) {
  if (begin >= end) return;
  for (auto s = static_cast<std::size_t>(axis.segment_of(begin));
       s < micro_batch.segments.size() && axis.offset[s] < end; ++s) {
    const std::int64_t first = std::max<std::int64_t>(0, begin - axis.offset[s]),
                       last = std::min(micro_batch.segments[s].tokens(), end - axis.offset[s]);
    if (first < last) f(micro_batch.segments[s], first, last);
  }
}

/// Query i of a segment sees its prefix and i + 1 tokens of its own.
double pairs_of(const Segment& segment, std::int64_t first, std::int64_t last) {
  const double n = static_cast<double>(last - first);
  return n * (static_cast<double>(segment.begin + first) + (n + 1) / 2);
}

}  // namespace

double visible_pairs(const MicroBatch& micro_batch, const PackedAxis& axis, std::int64_t begin,
                     std::int64_t end) {
  double sum = 0;
  for_segments(micro_batch, axis, begin, end,
               [&](const Segment& segment, std::int64_t first, std::int64_t last) {
                 sum += pairs_of(segment, first, last);
               });
  return sum;
}

double LayoutBalance::imbalance(double token_pairs) const {
  double most = 0, all = 0;
  for (std::size_t r = 0; r < pairs.size(); ++r) {
    const double work = tokens[r] * token_pairs + pairs[r];
    most = std::max(most, work);
    all += work;
  }
  return all > 0 ? most * static_cast<double>(pairs.size()) / all : 1;
}

LayoutBalance balance(const MicroBatch& micro_batch, const SequenceLayout& layout) {
  const PackedAxis axis(micro_batch);
  require(axis.offset.back() == layout.tokens(),
          "the layout spreads {} tokens, the micro-batch has {}", layout.tokens(),
          axis.offset.back());
  LayoutBalance result;
  for (int r = 0; r < layout.ranks(); ++r) {
    double tokens = 0, pairs = 0;
    for (const auto& [begin, end] : layout.pieces(r))
      for_segments(micro_batch, axis, begin, end,
                   [&](const Segment& segment, std::int64_t first, std::int64_t last) {
                     tokens += static_cast<double>(last - first);
                     pairs += pairs_of(segment, first, last);
                   });
    result.tokens.push_back(tokens);
    result.pairs.push_back(pairs);
  }
  return result;
}

LayoutRule LayoutChoice::of(const MicroBatch& micro_batch, int ranks) const {
  if (rule.kind != LayoutKind::automatic) return rule;
  require(!kinds.empty(), "no layout to choose from");
  LayoutRule best = rule;
  best.kind = LayoutKind::contiguous;
  if (ranks == 1) return best;
  double least = std::numeric_limits<double>::infinity();
  for (const LayoutKind kind : kinds) {
    const double uneven =
        balance(micro_batch, SequenceLayout(kind, micro_batch, ranks, rule.stripe, rule.align))
            .imbalance(token_pairs);
    if (uneven < least) least = uneven, best.kind = kind;
    if (uneven <= 1.001) break;
  }
  return best;
}

}  // namespace ballast

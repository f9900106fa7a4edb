#include "core/plan/context/layout_balance.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/error.hpp"

namespace ballast {
namespace {

constexpr double kGoodCost = 1.005;

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
    if (first < last) f(s, first, last);
  }
}

/// Query i of a segment sees its prefix and i + 1 tokens of its own.
double pairs_of(const Segment& segment, std::int64_t first, std::int64_t last) {
  const double n = static_cast<double>(last - first);
  return n * (static_cast<double>(segment.begin + first) + (n + 1) / 2);
}

/// LayoutBalance::rounding of a token whose segment begins at `offset` of the packed axis.  Ends
/// that fall anywhere in a tile leave half of it unused, a whole tile at both; ends that fall on
/// blocks half of that.
double rounding(const SequenceLayout& layout, const Segment& segment, std::int64_t offset) {
  const std::int64_t ranks = layout.ranks();
  const auto cut_by = [&](std::int64_t unit) {
    if (deals_stripes(layout.kind())) return layout.stripe() % unit == 0;
    return layout.align() % unit == 0 ||
           (offset % (ranks * unit) == 0 && segment.tokens() % (2 * ranks * unit) == 0);
  };
  if (!deals_stripes(layout.kind()) && layout.kind() != LayoutKind::document_zigzag) return 0;
  const std::int64_t tokens = cut_by(kKeyTile) ? 0 : cut_by(kBlock) ? kBlock : kKeyTile;
  return static_cast<double>(tokens * (ranks - 1));
}

}  // namespace

double LayoutBalance::cost(double token_pairs) const {
  double most = 0, all = 0;
  for (std::size_t r = 0; r < pairs.size(); ++r) {
    const double work = tokens[r] * token_pairs + pairs[r];
    most = std::max(most, work + rounding[r]);
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
  std::vector<double> rounded;  // [segment], pairs a token
  for (std::size_t s = 0; s < micro_batch.segments.size(); ++s)
    rounded.push_back(rounding(layout, micro_batch.segments[s], axis.offset[s]));
  for (int r = 0; r < layout.ranks(); ++r) {
    double tokens = 0, pairs = 0, tiles = 0;
    for (const auto& [begin, end] : layout.pieces(r))
      for_segments(micro_batch, axis, begin, end,
                   [&](std::size_t s, std::int64_t first, std::int64_t last) {
                     const double n = static_cast<double>(last - first);
                     tokens += n;
                     pairs += pairs_of(micro_batch.segments[s], first, last);
                     tiles += n * rounded[s];
                   });
    result.tokens.push_back(tokens);
    result.pairs.push_back(pairs);
    result.rounding.push_back(tiles);
  }
  return result;
}

std::vector<LayoutRule> even_layouts(std::int64_t stripe, std::int64_t align) {
  const std::int64_t tile = std::lcm(kKeyTile, align), whole = (stripe + tile - 1) / tile * tile;
  std::vector<LayoutRule> among{{LayoutKind::contiguous, stripe, align},
                                {LayoutKind::document_zigzag, stripe, align},
                                {LayoutKind::striped, stripe, align}};
  if (whole != stripe) among.push_back({LayoutKind::striped, whole, align});
  return among;
}

LayoutRule LayoutChoice::of(const MicroBatch& micro_batch, int ranks) const {
  if (rule.kind != LayoutKind::automatic) return rule;
  if (ranks == 1) return {LayoutKind::contiguous, rule.stripe, rule.align};
  if (striped) return {LayoutKind::striped, rule.stripe, rule.align};
  LayoutRule best;
  double least = std::numeric_limits<double>::infinity();
  for (const LayoutRule& l : even_layouts(rule.stripe, rule.align)) {
    const double cost =
        balance(micro_batch, SequenceLayout(l.kind, micro_batch, ranks, l.stripe, l.align))
            .cost(token_pairs);
    if (cost < least) least = cost, best = l;
    if (cost <= kGoodCost) break;  // stripes of millions of tokens are dear to add up
  }
  return best;
}

}  // namespace ballast

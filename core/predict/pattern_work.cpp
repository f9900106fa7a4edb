#include "core/predict/pattern_work.hpp"

#include <algorithm>
#include <cmath>

#include "core/base/division.hpp"
#include "core/base/hash.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

std::int64_t whole_blocks(std::int64_t tokens) { return divided_up(tokens, kBlock); }

/// Rank of every block of the axis: of its first token, where a layout cuts blocks.
std::vector<int> owners(const SequenceLayout& layout) {
  std::vector<int> owner(static_cast<std::size_t>(whole_blocks(layout.tokens())), 0);
  for (int r = 0; r < layout.ranks(); ++r)
    for (const auto& [begin, end] : layout.pieces(r))
      for (std::int64_t b = whole_blocks(begin); b * kBlock < end; ++b)
        owner[static_cast<std::size_t>(b)] = r;
  return owner;
}

}  // namespace

double PatternWork::density(std::int64_t tokens) const {
  if (!heads_ || tokens <= 0) return stated_;
  // Four lengths to the octave: data has thousands.
  const std::lock_guard lock(mutex_);
  const auto bin = std::llround(4 * std::log2(static_cast<double>(tokens)));
  const auto [at, fresh] = densities_.try_emplace(bin, 1.0);
  if (fresh) {
    const auto like =
        whole_blocks(std::llround(std::exp2(static_cast<double>(bin) / 4))) * std::int64_t{kBlock};
    at->second = std::min(1.0, ballast::density(heads_(like), like));
  }
  return at->second;
}

double PatternWork::uneven(const MicroBatch& micro_batch, const SequenceLayout& layout, int outer,
                           int inner) const {
  if (!heads_ || outer * inner == 1) return 1;
  Hash hash;
  for (const Segment& s : micro_batch.segments) {
    if (s.begin > 0) return 1;
    hash.add(s.end);
  }
  hash.add(outer).add(inner).add(layout.kind()).add(layout.tokens());
  for (const auto& [begin, end] : layout.pieces(0)) hash.add(begin).add(end);
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = uneven_.try_emplace(hash.value(), 1.0);
  if (fresh) at->second = critical_path(micro_batch, layout, outer, inner);
  return at->second;
}

double PatternWork::critical_path(const MicroBatch& micro_batch, const SequenceLayout& layout,
                                  int outer, int inner) const {
  const auto ranks = static_cast<std::size_t>(outer * inner);
  const std::vector<int> owner = owners(layout);
  std::vector<double> between(ranks * ranks, 0);  // [query rank][key rank]
  std::int64_t first = 0;                         // block that the segment begins in
  for (const Segment& s : micro_batch.segments) {
    const std::int64_t blocks = whole_blocks(s.tokens());
    const auto rank = [&](std::int64_t block) {
      const auto at = static_cast<std::size_t>(first + block);
      return static_cast<std::size_t>(owner[std::min(at, owner.size() - 1)]);
    };
    if (blocks > 0)
      for_each_work(heads_(blocks * kBlock), blocks * kBlock,
                    [&](std::int64_t q, std::int64_t k, double pairs) {
                      between[rank(q) * ranks + rank(k)] += pairs;
                    });
    first += blocks;
  }
  return std::max(1.0, ring_balance(ring_work(between, outer, inner), outer, inner).critical_path);
}

}  // namespace ballast

#include "core/plan/attention/generated_pattern.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/observe/metrics.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

double causal_pairs(std::int64_t tokens) {
  return 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
}

/// Uniform numbers of one head, in order.
class Draw {
 public:
  Draw(std::uint64_t seed, int head)
      : seed_(seed), stream_(stream_of("generated_index") + static_cast<std::uint64_t>(head)) {}
  double uniform() { return random_uniform(seed_, stream_, count_++); }
  std::int64_t below(std::int64_t n) {
    return std::min(n - 1, static_cast<std::int64_t>(uniform() * static_cast<double>(n)));
  }

 private:
  std::uint64_t seed_, stream_, count_ = 0;
};

GeneratedHead generate_head(const GeneratedPattern& p, int head) {
  const std::int64_t blocks = p.tokens / kBlock;
  Draw draw(p.seed, head);
  GeneratedHead out;
  std::vector<char> column(p.tokens, 0);
  for (std::int64_t c = 0; c < p.columns; ++c) {
    std::int64_t key = draw.below(c % 8 == 0 ? std::max<std::int64_t>(1, p.tokens / 64) : p.tokens);
    while (column[key] != 0) key = (key + 1) % p.tokens;
    column[key] = 1;
  }
  std::vector<std::int64_t> columns_of(blocks, 0);
  for (std::int64_t key = 0; key < p.tokens; ++key)
    if (column[key] != 0) {
      out.columns.push_back(key);
      ++columns_of[key / kBlock];
    }
  // A slash adds its blocks less the columns that they cover: prefix sums of columns give that at
  // once.
  std::vector<std::int64_t> prefix(blocks + 1, 0);
  std::partial_sum(columns_of.begin(), columns_of.end(), prefix.begin() + 1);
  double pairs = 0;
  for (std::int64_t k = 0; k < blocks; ++k)
    pairs += static_cast<double>(kBlock * columns_of[k] * (blocks - 1 - k));
  std::vector<char> slash(blocks, 0);
  const auto add = [&](std::int64_t d) {
    if (slash[d] != 0) return;
    slash[d] = 1;
    const double n = static_cast<double>(blocks - d);
    pairs += d == 0 ? n * (kBlock * (kBlock + 1) / 2)
                    : n * kBlock * kBlock - static_cast<double>(kBlock * prefix[blocks - d]);
  };
  const std::int64_t band =
      std::clamp<std::int64_t>((p.band_tokens + kBlock - 1) / kBlock, 1, blocks);
  for (std::int64_t d = 0; d < band; ++d) add(d);
  const double target = p.density * causal_pairs(p.tokens);
  std::int64_t chosen = band;
  for (int cluster = 0; pairs < target && chosen < blocks && cluster < 64 * 1024; ++cluster) {
    const double reach = static_cast<double>(blocks) / static_cast<double>(band);
    const auto centre =
        static_cast<std::int64_t>(static_cast<double>(band) * std::pow(reach, draw.uniform()));
    const std::int64_t width = 4 + draw.below(13);
    for (std::int64_t d = centre; d < std::min(blocks, centre + width) && pairs < target; ++d)
      add(d);
    chosen = std::count(slash.begin(), slash.end(), 1);
  }
  // Densities near 1 take what no cluster hit.
  for (std::int64_t d = 0; d < blocks && pairs < target; ++d) add(d);
  for (std::int64_t d = 0; d < blocks; ++d)
    if (slash[d] != 0) out.slashes.push_back(static_cast<std::int32_t>(d));
  return out;
}

}  // namespace

std::vector<int> block_owners(const SequenceLayout& layout) {
  require(layout.tokens() % kBlock == 0, "generated index: {} tokens are no multiple of {}",
          layout.tokens(), kBlock);
  std::vector<int> owner(layout.tokens() / kBlock, -1);
  for (int r = 0; r < layout.ranks(); ++r)
    for (const auto& [begin, end] : layout.pieces(r)) {
      require(begin % kBlock == 0 && end % kBlock == 0,
              "generated index: rank {} holds [{}, {}), which cuts a block of {} tokens; use "
              "zigzag, or a stripe that is a multiple of {}",
              r, begin, end, kBlock, kBlock);
      for (std::int64_t b = begin / kBlock; b < end / kBlock; ++b) owner[b] = r;
    }
  return owner;
}

std::vector<GeneratedHead> generate(const GeneratedPattern& p) {
  require(p.tokens > 0 && p.tokens % kBlock == 0,
          "generated index: {} tokens; must be a positive multiple of {}", p.tokens, kBlock);
  require(p.heads >= 1, "generated index: {} heads; must be at least 1", p.heads);
  require(p.density > 0 && p.density <= 1, "generated index: density {} must lie in (0, 1]",
          p.density);
  require(p.band_tokens >= 1, "generated index: a local band of {} tokens; must be at least 1",
          p.band_tokens);
  require(p.columns >= 0 && p.columns <= p.tokens, "generated index: {} columns for {} tokens",
          p.columns, p.tokens);
  std::vector<GeneratedHead> heads;
  for (int h = 0; h < p.heads; ++h) heads.push_back(generate_head(p, p.first_head + h));
  return heads;
}

double density(const std::vector<GeneratedHead>& heads, std::int64_t tokens) {
  double pairs = 0;
  for_each_work(heads, tokens, [&](std::int64_t, std::int64_t, double n) { pairs += n; });
  return pairs / (static_cast<double>(heads.size()) * causal_pairs(tokens));
}

std::vector<std::vector<double>> ring_work(const std::vector<GeneratedHead>& heads,
                                           const std::vector<int>& owner, int outer, int inner) {
  const int ranks = outer * inner;
  for (int r : owner)
    require(r >= 0 && r < ranks, "generated index: a block on rank {} of a ring of {} x {}", r,
            outer, inner);
  std::vector<double> between(static_cast<std::size_t>(ranks) * ranks,
                              0);  // [query rank][key rank]
  for_each_work(heads, static_cast<std::int64_t>(owner.size()) * kBlock,
                [&](std::int64_t q, std::int64_t k, double pairs) {
                  between[owner[q] * ranks + owner[k]] += pairs;
                });
  return ring_work(between, outer, inner);
}

std::vector<std::vector<double>> ring_work(const std::vector<double>& between, int outer,
                                           int inner) {
  const int ranks = outer * inner;
  std::vector<std::vector<double>> work(ranks);
  for (int w = 0; w < ranks; ++w)
    for (const RingStep& step : plan_ring(w, outer, inner).forward)
      work[w].push_back(between[w * ranks + step.shard]);
  return work;
}

RingBalance ring_balance(const std::vector<std::vector<double>>& work, int outer, int inner) {
  const int ranks = outer * inner, steps = ranks;
  RingBalance b;
  b.worker_imbalance = worker_imbalance(work);
  b.step_imbalance = step_imbalance(work);
  std::vector<RingPlan> plans;
  for (int w = 0; w < ranks; ++w) plans.push_back(plan_ring(w, outer, inner));
  // Both ends post a hop when they begin the step; it is over once both have, and each end waits
  // for it after step `complete`.
  std::vector<std::vector<double>> ready(ranks, std::vector<double>(steps + 1, 0)), wall(work);
  std::vector<double> done(ranks, 0), begin(ranks, 0);
  double total = 0, lockstep = 0;
  for (int t = 0; t < steps; ++t) {
    double most = 0;
    for (int w = 0; w < ranks; ++w) {
      begin[w] = std::max(done[w], ready[w][t]);
      done[w] = begin[w] + work[w][t];
      total += work[w][t];
      most = std::max(most, work[w][t]);
    }
    for (int w = 0; w < ranks; ++w) {
      wall[w][t] = most;
      for (const auto& hop : {plans[w].forward[t].kv_inner, plans[w].forward[t].kv_outer})
        if (hop)
          ready[w][hop->complete + 1] =
              std::max({ready[w][hop->complete + 1], begin[hop->from], begin[hop->to]});
    }
    lockstep += most;
  }
  if (total <= 0) return b;
  b.computation_ratio = computation_ratio(work, wall);
  b.critical_path = *std::max_element(done.begin(), done.end()) * ranks / total;
  b.lockstep_path = lockstep * ranks / total;
  return b;
}

std::vector<GeneratedHead> generated_heads(GeneratedPattern pattern, std::int64_t tokens) {
  if (pattern.density >= 1)
    return std::vector<GeneratedHead>(static_cast<std::size_t>(pattern.heads), dense_head(tokens));
  pattern.tokens = tokens;
  pattern.columns = std::min(pattern.columns, tokens / 16);
  return generate(pattern);
}

AttentionPattern generated_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                   const GeneratedPattern& pattern) {
  std::map<std::int64_t, std::vector<GeneratedHead>> of_length;
  std::vector<std::vector<GeneratedHead>> of_segment;
  for (int s = 0; s < axis.segments(); ++s) {
    const std::int64_t tokens = axis.offset[s + 1] - axis.offset[s];
    auto& heads = of_length[tokens];
    if (heads.empty() && tokens > 0) heads = generated_heads(pattern, tokens);
    of_segment.push_back(heads);
  }
  return vertical_slash_pattern(queries, axis, of_segment, false);
}

}  // namespace ballast

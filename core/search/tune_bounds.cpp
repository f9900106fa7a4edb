#include "core/search/tune_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"

namespace ballast {
namespace {

constexpr double kSlack = 0.98;  // tables interpolate: rates between two points may be a bit better

/// The least of time(n) / n over powers of two up to `most`.
template <class Time>
double least_rate(std::int64_t most, const Time& time) {
  double least = std::numeric_limits<double>::infinity();
  for (std::int64_t n = 64; n < 2 * std::max<std::int64_t>(64, most); n *= 2)
    least = std::min(least, time(n) / static_cast<double>(n));
  return least;
}

/// Whether samples may be cut into pieces, which may be quicker by the pair than the whole.
bool cuts(Batching method) { return method == Batching::chunkflow || method == Batching::balanced; }

}  // namespace

TuneBounds::TuneBounds(const TuneInput& input, TuneTrials& trials)
    : input_(input), trials_(trials) {
  for (const SampleLength& s : input.steps.front()) {
    tokens_ += static_cast<double>(s.tokens);
    longest_ = std::max(longest_, s.tokens);
  }
}

std::vector<int> TuneBounds::joined(const Candidate& c) const {
  std::vector<int> list{1};
  if (c.method == Batching::hbp) {
    list.clear();
    for (const PackGroup& g : c.groups) list.push_back(g.ranks);
  } else if (c.method == Batching::balanced && c.mesh.sp == 1) {
    const std::vector<std::int64_t>& named = input_.base.batching.select_ranks;
    for (int ranks = 2; ranks <= c.mesh.dp; ++ranks)
      if (c.mesh.dp % ranks == 0 &&
          (named.empty() || std::find(named.begin(), named.end(), ranks) != named.end()))
        list.push_back(ranks);
  }
  return list;
}

const TuneBounds::Attention& TuneBounds::attention(const Candidate& c, const ContextSplit& split) {
  const auto [at, fresh] = attention_.try_emplace(
      {c.mesh.pp, split.sp, split.ring_outer, split.ring_inner, c.budget, cuts(c.method)});
  if (!fresh) return at->second;
  const Config config = with(input_.base, c);
  const SimulationOptions simulation = simulation_options(config, RunOptions::from(config));
  // Tuning may lower the budget of any micro-batch.
  const std::int64_t usual = simulation.base_budget,
                     least = simulation.tune ? simulation.dst.candidates.front() : usual;
  const Costs& costs = trials_.costs(c);
  const auto seconds = [&](std::int64_t tokens, std::int64_t budget) {
    return costs.attention(tokens, 0, budget, split, Recompute::none).total_s();
  };
  const auto pair_s = [&](std::int64_t tokens) {
    return seconds(tokens, least) /
           (static_cast<double>(tokens) *
            computed_keys(tokens, 0, least, simulation.block_tokens, costs.pattern()));
  };
  for (const SampleLength& s : input_.steps.front()) {
    double layer = seconds(s.tokens, least);
    if (cuts(c.method)) {
      const double whole = pair_s(s.tokens);
      double quickest = whole;
      for (std::int64_t n = 64; n < s.tokens; n *= 2) quickest = std::min(quickest, pair_s(n));
      if (whole > 0) layer *= quickest / whole;
    }
    at->second.all_s += layer;
    at->second.longest_s = std::max(at->second.longest_s, layer);
    at->second.usual_s += seconds(s.tokens, usual);
  }
  return at->second;
}

std::int64_t TuneBounds::most_tokens(const Candidate& c) const {
  const std::int64_t most = 2 * std::max({longest_, c.capacity, std::int64_t{1}});
  const bool by_samples =
      c.method == Batching::none || c.method == Batching::lbb || c.method == Batching::sab;
  return by_samples && input_.base.batching.micro_batch_samples > 1
             ? std::max(most, static_cast<std::int64_t>(tokens_))
             : most;
}

TuneBounds::Work TuneBounds::measure(const Candidate& c, int joined) {
  const Costs& costs = trials_.costs(c);
  const ContextSplit split = joined_split(c.mesh, joined, input_.base.model.query_heads);
  const std::int64_t each = input_.base.model.layers / c.mesh.pp,
                     more = input_.base.model.layers % c.mesh.pp;
  // Layers of all stages, in the costs' unit.
  const double scale = static_cast<double>(more * (each + 1)) * costs.layer_scale(each + 1) +
                       static_cast<double>((c.mesh.pp - more) * each) * costs.layer_scale(each);
  const std::int64_t most = most_tokens(c);
  Work w;
  const Link exchanges = exchange_link(c.mesh, split);
  const double token_s = scale * least_rate(most, [&](std::int64_t n) {
                           return costs.rest(n, split, Recompute::none).total_s() +
                                  2 * costs.exchange(n, split, exchanges);
                         });
  w.head_s =
      tokens_ * least_rate(most, [&](std::int64_t n) { return costs.head(n, split).total_s(); });
  const double attention_s = scale * attention(c, split).usual_s;
  w.lane_s = tokens_ * token_s + scale * attention(c, split).all_s;
  w.usual_s = tokens_ * token_s + attention_s;
  w.longest_s = scale * attention(c, split).longest_s + static_cast<double>(longest_) * token_s;
  if (c.ring() > 1) {
    const std::int64_t pack = std::max<std::int64_t>(c.capacity, 1);
    const RingLevel level = c.mesh.cp_outer > 1 ? RingLevel::outer : RingLevel::inner;
    const Link link = ring_link(c.mesh, split, level);
    const double hops = tokens_ / static_cast<double>(pack) * scale * (c.ring() - 1) *
                        (2 * costs.ring_hop(pack, split, level, false, link) +
                         costs.ring_hop(pack, split, level, true, link));
    w.ring_s = std::max(0.0, hops - attention_s * (c.ring() - 1) / c.ring()) + 0.02 * attention_s;
  }
  return w;
}

const TuneBounds::Work& TuneBounds::work(const Candidate& c, int ranks) {
  const ContextSplit split = joined_split(c.mesh, ranks, input_.base.model.query_heads);
  const auto [at, fresh] = work_.try_emplace(
      {c.mesh.pp, split.sp, split.ring_outer, split.ring_inner, c.budget, c.capacity,
       most_tokens(c), cuts(c.method), static_cast<int>(exchange_link(c.mesh, split)),
       static_cast<int>(ring_link(c.mesh, split, RingLevel::inner)),
       static_cast<int>(ring_link(c.mesh, split, RingLevel::outer))});
  if (fresh) at->second = measure(c, ranks);
  return at->second;
}

TuneBounds::Figures TuneBounds::of(const Candidate& c) {
  const double pp = c.mesh.pp, dp = c.mesh.dp;
  const std::int64_t layers = input_.base.model.layers;
  // A sample on r data-parallel ranks takes r of them for as long as it takes.
  double all_s = std::numeric_limits<double>::infinity(), longest_s = all_s, head_s = all_s,
         usual_s = all_s, ring_s = 0;
  int widest = 1;
  for (const int ranks : joined(c)) {
    const Work& w = work(c, ranks);
    all_s = std::min(all_s, ranks * w.lane_s);
    usual_s = std::min(usual_s, ranks * w.usual_s);
    head_s = std::min(head_s, ranks * w.head_s);
    longest_s = std::min(longest_s, w.longest_s);
    widest = std::max(widest, ranks);
    if (ranks == 1 || ring_s == 0) ring_s = w.ring_s;
  }
  const bool cut = cuts(c.method);
  const double fullest_stage =
      static_cast<double>((layers + c.mesh.pp - 1) / c.mesh.pp) / static_cast<double>(layers);
  double end_s = std::numeric_limits<double>::infinity();
  Candidate at = c;
  Figures f;
  f.bytes = std::numeric_limits<std::int64_t>::max();
  for (const int zero : zero_choices(input_.base)) {
    at.zero = zero;
    end_s = std::min(end_s, trials_.end_s(at));
    f.bytes = std::min(f.bytes, trials_.standing_bytes(at));
  }
  // A zero bubble's weight gradients, at most half of a sample's time, run on all stages at once.
  const double in_turn = c.schedule == ScheduleKind::zero_bubble ? 0.5 + 0.5 / pp : 1;
  const double lane_s = std::max(all_s / pp, head_s) / dp,
               alone_s = cut ? longest_s / pp : longest_s * in_turn;
  // The stage whose collectives take longest may be done before the others.
  f.bound_s = kSlack * std::max(lane_s, alone_s) + (c.mesh.pp > 1 ? 0.5 : 1.0) * end_s;

  // Packs of whole capacity on as many ranks as there are packs; a pipeline fills and drains.
  const double pack = std::max<double>(
      c.method == Batching::none ? tokens_ / static_cast<double>(input_.steps.front().size())
                                 : static_cast<double>(c.capacity),
      1);
  const double packs = std::max(1.0, std::ceil(tokens_ / pack)), lanes = std::min(dp, packs),
               each = std::max(1.0, packs / lanes);
  double lane = ((usual_s + ring_s) * std::max(fullest_stage, 1 / pp) + head_s / pp) / lanes;
  if (c.method == Batching::none) lane *= 1.2;
  if (c.method == Batching::hbp && widest > 1) lane *= 1.2;
  if (c.method == Batching::chunkflow) {
    const double chunks = static_cast<double>(longest_) / pack;
    lane *= 1 + std::max(0.0, 1 - static_cast<double>(c.chunk_k) / std::max(1.0, chunks)) / 6;
  }
  const double ahead = c.schedule == ScheduleKind::zero_bubble ? 0.5 : 1;
  const double fill = ahead * (pp - 1) * std::max(lane / each, cut ? 0 : longest_s / pp / 4);
  f.estimate_s = std::max({lane + fill, alone_s + (cut ? 0 : 0.2 * lane), f.bound_s}) + end_s;
  return f;
}

}  // namespace ballast

#include "core/search/tune_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/plan/batch/pairs.hpp"

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

/// What attention to a document takes in one layer.
struct DocumentClock {
  const Costs& costs;
  const ContextSplit& split;
  std::vector<std::int64_t> budgets;  ///< that a micro-batch may get, ascending
  std::int64_t block_tokens = 0;

  double seconds(std::int64_t query, std::int64_t prefix, std::int64_t budget) const {
    return costs.attention(query, prefix, budget, split, Recompute::none).total_s();
  }
  double pairs(std::int64_t query, std::int64_t prefix, std::int64_t budget) const {
    return static_cast<double>(query) *
           computed_keys(query, prefix, budget, block_tokens, costs.pattern());
  }
  /// The least of what(budget): a small budget may be dearer than dense attention, and all that
  /// hold the document are that.
  template <class What>
  double least(std::int64_t tokens, const What& what) const {
    double least_s = std::numeric_limits<double>::infinity();
    for (const std::int64_t budget : budgets) {
      least_s = std::min(least_s, what(budget));
      if (budget_takes_all(budget, block_tokens, tokens)) break;
    }
    return least_s;
  }
  double whole_s(std::int64_t tokens) const {
    return least(tokens, [&](std::int64_t budget) { return seconds(tokens, 0, budget); });
  }
  /// In any pieces, each with its own budget: no fewer pairs than by the smallest, none quicker
  /// than by the quickest.
  double cut_s(std::int64_t tokens) const {
    const double pair_s = least(tokens, [&](std::int64_t budget) {
      double quickest = seconds(tokens, 0, budget) / pairs(tokens, 0, budget);
      for (std::int64_t n = 64; n < tokens; n *= 2)
        for (const std::int64_t prefix : {std::int64_t{0}, tokens - n})
          quickest = std::min(quickest, seconds(n, prefix, budget) / pairs(n, prefix, budget));
      return quickest;
    });
    return std::min(whole_s(tokens), pairs(tokens, 0, budgets.front()) * pair_s);
  }
};

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
  // Tuning may take any candidate for any micro-batch.
  const std::int64_t usual = simulation.base_budget;
  const DocumentClock clock{
      trials_.costs(c), split,
      simulation.tune ? simulation.dst.candidates : std::vector<std::int64_t>{usual},
      simulation.block_tokens};
  std::map<std::int64_t, std::pair<double, double>> known;  // at least and usually, by tokens
  for (const SampleLength& s : input_.steps.front()) {
    double least_s = 0;
    for (const std::int64_t tokens : document_lengths(s)) {
      if (tokens == 0) continue;
      const auto [length, first] = known.try_emplace(tokens);
      if (first)
        length->second = {cuts(c.method) ? clock.cut_s(tokens) : clock.whole_s(tokens),
                          clock.seconds(tokens, 0, usual)};
      least_s += length->second.first;
      at->second.usual_s += length->second.second;
    }
    at->second.all_s += least_s;
    at->second.samples.emplace_back(s.tokens, least_s);
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
  const Attention& attention = this->attention(c, split);
  const double attention_s = scale * attention.usual_s;
  w.lane_s = tokens_ * token_s + scale * attention.all_s;
  w.usual_s = tokens_ * token_s + attention_s;
  for (const auto& [tokens, seconds] : attention.samples)
    w.longest_s = std::max(w.longest_s, scale * seconds + static_cast<double>(tokens) * token_s);
  if (const int ring = split.ring(); ring > 1) {
    const std::int64_t pack = std::max<std::int64_t>(c.capacity, 1);
    const RingLevel level = split.ring_outer > 1 ? RingLevel::outer : RingLevel::inner;
    const Link link = ring_link(c.mesh, split, level);
    const double hops = tokens_ / static_cast<double>(pack) * scale * (ring - 1) *
                        (2 * costs.ring_hop(pack, split, level, false, link) +
                         costs.ring_hop(pack, split, level, true, link));
    w.ring_s = std::max(0.0, hops - attention_s * (ring - 1) / ring) + 0.02 * attention_s;
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
  const std::vector<int> joined = this->joined(c);
  for (const int ranks : joined) {
    const Work& w = work(c, ranks);
    all_s = std::min(all_s, ranks * w.lane_s);
    usual_s = std::min(usual_s, ranks * w.usual_s);
    head_s = std::min(head_s, ranks * w.head_s);
    longest_s = std::min(longest_s, w.longest_s);
    widest = std::max(widest, ranks);
    if (ranks == joined.front()) ring_s = w.ring_s;
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

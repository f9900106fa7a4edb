#include "core/predict/micro_batch_times.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/attention/block_budget.hpp"

namespace ballast {
namespace {

double mean_s(const std::vector<PassParts>& stages) {
  double sum = 0;
  for (const PassParts& p : stages) sum += p.total_s();
  return stages.empty() ? 0 : sum / static_cast<double>(stages.size());
}

}  // namespace

double simulated_coverage(std::int64_t tokens, std::int64_t budget, std::int64_t blocks90,
                          std::int64_t block_tokens) {
  const auto visible = static_cast<double>(blocks_of_keys(tokens, block_tokens)),
             k = static_cast<double>(budget), scale = static_cast<double>(blocks90);
  if (k >= visible) return 1;
  return (1 - std::pow(10.0, -k / scale)) / (1 - std::pow(10.0, -visible / scale));
}

double MicroBatchTimes::stage_hop_s(int stage, int peer) const {
  return stage_hops_s.at(static_cast<std::size_t>(std::min(stage, peer)));
}
double MicroBatchTimes::forward_s() const { return mean_s(forward); }
double MicroBatchTimes::backward_s() const { return mean_s(backward); }

MicroBatchClock::MicroBatchClock(const StepPlan& plan, const SimulationOptions& options,
                                 const Costs& costs)
    : plan_(plan), options_(options), costs_(costs), layer_(plan, costs) {
  require(!plan.layer_begin.empty() && options.layers > plan.layer_begin.back(),
          "{} layers on {} stages: a stage needs at least one", options.layers,
          plan.layer_begin.size());
  require(!options.tune || !options.coverage_blocks.empty(),
          "dst.simulated_coverage is empty; name at least one budget that covers 90 %");
  for (std::size_t s = 0; s + 1 < plan.layer_begin.size(); ++s)
    stage_links_.push_back(stage_link(plan.mesh, static_cast<int>(s)));
  facts_.sums.assign(BudgetAverages::kBins, 0);
  facts_.counts.assign(BudgetAverages::kBins, 0);
}

std::int64_t MicroBatchClock::stage_layers(std::size_t stage) const {
  const bool last = stage + 1 == plan_.layer_begin.size();
  return (last ? options_.layers : plan_.layer_begin[stage + 1]) - plan_.layer_begin[stage];
}

void MicroBatchClock::count(const PlannedMicroBatch& m, std::int64_t budget, double layers) {
  choices_ += layers;
  budget_sum_ += layers * static_cast<double>(budget);
  for (const Segment& s : m.segments) {
    const auto bin = static_cast<std::size_t>(BudgetAverages::bin(s.end));
    facts_.sums[bin] += layers * static_cast<double>(budget);
    facts_.counts[bin] += layers;
  }
}

std::shared_ptr<const MicroBatchTimes> MicroBatchClock::times(int id) {
  const PlannedMicroBatch& m = plan_.micro_batches.at(static_cast<std::size_t>(id));
  if (options_.tune) return std::make_shared<const MicroBatchTimes>(tuned(m));
  count(m, options_.base_budget, static_cast<double>(options_.layers));
  const auto [at, fresh] = known_.try_emplace(shape_hash(m));
  if (fresh) at->second = std::make_shared<const MicroBatchTimes>(untuned(m));
  return at->second;
}

MicroBatchTimes MicroBatchClock::untuned(const PlannedMicroBatch& m) {
  const RecomputeOptions recompute = options_.recompute.with(m.recompute_layers);
  MicroBatchTimes times;
  // Of the layers at a stage's beginning, and of those behind them that recompute nothing.
  const LayerParts first = layer_.layer(m, options_.base_budget, recompute.of(0));
  const bool mixed = recompute.mode != Recompute::none && recompute.layers > 0;
  const LayerParts others = mixed ? layer_.layer(m, options_.base_budget, Recompute::none) : first;
  for (std::size_t s = 0; s < plan_.layer_begin.size(); ++s) {
    const std::int64_t layers = stage_layers(s);
    const double scale = costs_.layer_scale(layers),
                 head = static_cast<double>(mixed ? std::min<std::int64_t>(recompute.layers, layers)
                                                  : layers),
                 tail = static_cast<double>(layers) - head;
    times.forward.push_back(PassParts().add(first.forward, head * scale));
    times.backward.push_back(PassParts().add(first.backward, head * scale));
    times.weight_s.push_back(scale * (head * first.weight_s + tail * others.weight_s));
    if (tail > 0) {
      times.forward.back().add(others.forward, tail * scale);
      times.backward.back().add(others.backward, tail * scale);
    }
  }
  finish(m, times);
  return times;
}

std::vector<double> MicroBatchClock::coverage(const PlannedMicroBatch& m,
                                              std::int64_t layer) const {
  std::vector<double> curve(options_.dst.candidates.size(), 0);
  std::int64_t tokens = 0;
  for (const Segment& s : m.segments) tokens += s.tokens();
  for (const Segment& s : m.segments) {
    const std::uint64_t at =
        static_cast<std::uint64_t>(s.sample) * 4096 + static_cast<std::uint64_t>(layer);
    const std::uint64_t drawn = random_bits(options_.seed + static_cast<std::uint64_t>(plan_.step),
                                            stream_of("simulated coverage"), at);
    const std::int64_t blocks90 = options_.coverage_blocks[drawn % options_.coverage_blocks.size()];
    const double share = static_cast<double>(s.tokens()) / static_cast<double>(tokens);
    for (std::size_t k = 0; k < curve.size(); ++k)
      curve[k] += share * simulated_coverage(s.end, options_.dst.candidates[k], blocks90,
                                             options_.block_tokens);
  }
  return curve;
}

MicroBatchTimes MicroBatchClock::tuned(const PlannedMicroBatch& m) {
  const RecomputeOptions recompute = options_.recompute.with(m.recompute_layers);
  const TuningTarget& target = m.tuning;
  std::map<std::pair<std::int64_t, Recompute>, LayerParts> at_budget;
  MicroBatchTimes times;
  for (std::size_t s = 0; s < plan_.layer_begin.size(); ++s) {
    const std::int64_t layers = stage_layers(s);
    const double scale = costs_.layer_scale(layers);
    LayerBudgets budgets(options_.dst, target);
    PassParts forward, backward;
    double weight_s = 0;
    for (std::int64_t l = 0; l < layers; ++l) {
      const std::vector<double> curve = coverage(m, plan_.layer_begin[s] + l);
      const std::int64_t budget = budgets.next(curve);
      const double loss = coverage_loss(target, options_.dst.candidates, curve, budget);
      loss_sum_ += loss;
      facts_.largest_coverage_loss = std::max(facts_.largest_coverage_loss, loss);
      count(m, budget, 1);
      const auto [at, fresh] = at_budget.try_emplace({budget, recompute.of(l)});
      if (fresh) at->second = layer_.layer(m, budget, recompute.of(l));
      forward.add(at->second.forward, scale);
      backward.add(at->second.backward, scale);
      weight_s += scale * at->second.weight_s;
    }
    times.forward.push_back(forward);
    times.backward.push_back(backward);
    times.weight_s.push_back(weight_s);
  }
  finish(m, times);
  return times;
}

void MicroBatchClock::finish(const PlannedMicroBatch& m, MicroBatchTimes& times) const {
  const std::int64_t tokens = m.axis_tokens();
  const PassTime head = costs_.head(tokens, m.split);
  times.head_s = head.forward_s + head.backward_s;
  times.forward.back().compute_s += times.head_s;
  if (plan_.layer_begin.size() > 1) times.host_copy_s = costs_.host_copy(tokens, m.split);
  for (const Link link : stage_links_)
    times.stage_hops_s.push_back(costs_.stage_hop(tokens, m.split, link));
}

SimulatedBudgets MicroBatchClock::budgets() const {
  SimulatedBudgets facts = facts_;
  if (choices_ > 0) {
    facts.mean_budget = budget_sum_ / choices_;
    facts.mean_coverage_loss = loss_sum_ / choices_;
  }
  return facts;
}

}  // namespace ballast

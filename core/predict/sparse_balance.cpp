#include "core/predict/sparse_balance.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/observe/metrics.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/predict/latency_model.hpp"

namespace ballast {
namespace {

/// One micro-batch: seconds of its passes on each stage.
struct StageTimes {
  std::vector<double> forward, backward;
  double mean(const std::vector<double>& of) const {
    double sum = 0;
    for (const double s : of) sum += s;
    return sum / static_cast<double>(of.size());
  }
};

}  // namespace

double simulated_coverage(std::int64_t tokens, std::int64_t budget, std::int64_t blocks90,
                          std::int64_t block_tokens) {
  const auto visible = static_cast<double>((tokens + block_tokens - 1) / block_tokens),
             k = static_cast<double>(budget), scale = static_cast<double>(blocks90);
  if (k >= visible) return 1;
  return (1 - std::pow(10.0, -k / scale)) / (1 - std::pow(10.0, -visible / scale));
}

SimulatedStep simulate_step(const Batch& batch, const LatencyModel& model,
                            const SparseBalanceOptions& options) {
  require(options.stages >= 1 && options.layers >= options.stages,
          "{} layers on {} stages: a stage needs at least one", options.layers, options.stages);
  require(!options.coverage_blocks.empty(),
          "dst.simulated_coverage is empty; name at least one budget that covers 90 %");
  const auto targets =
      options.tune ? dst_targets(batch, model, options.dst) : std::vector<std::vector<DstTarget>>();
  SimulatedStep step;
  step.budget_sums.assign(BudgetAverages::kBins, 0);
  step.budget_counts.assign(BudgetAverages::kBins, 0);
  std::vector<double> totals, forwards;
  double useful_s = 0, choices = 0;
  for (std::size_t d = 0; d < batch.micro_batches.size(); ++d) {
    const auto& list = batch.micro_batches[d];
    std::vector<StageTimes> times;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const MicroBatch& m = list[i];
      StageTimes& t = times.emplace_back(StageTimes{std::vector<double>(options.stages, 0),
                                                    std::vector<double>(options.stages, 0)});
      std::map<std::int64_t, LayerTime> at_budget;
      std::optional<DstPolicy> policy;
      if (options.tune) policy.emplace(options.dst, targets[d][i]);
      for (std::int64_t layer = 0; layer < options.layers; ++layer) {
        std::int64_t budget = options.dst.base_budget;
        if (policy && m.tokens() > 0) {
          std::vector<double> coverage(options.dst.candidates.size(), 0);
          for (const Segment& s : m.segments) {
            const std::uint64_t at =
                static_cast<std::uint64_t>(s.sample) * 4096 + static_cast<std::uint64_t>(layer);
            const std::uint64_t drawn =
                random_bits(options.seed + static_cast<std::uint64_t>(batch.step),
                            stream_of("simulated coverage"), at);
            const std::int64_t blocks90 =
                options.coverage_blocks[drawn % options.coverage_blocks.size()];
            const double share = static_cast<double>(s.tokens()) / static_cast<double>(m.tokens());
            for (std::size_t k = 0; k < coverage.size(); ++k)
              coverage[k] += share * simulated_coverage(s.end, options.dst.candidates[k], blocks90,
                                                        model.block_tokens());
          }
          budget = policy->choose(static_cast<int>(layer), coverage);
          const double loss = policy->choices().back().coverage_loss;
          step.mean_coverage_loss += loss;
          step.largest_coverage_loss = std::max(step.largest_coverage_loss, loss);
        }
        step.mean_budget += static_cast<double>(budget);
        ++choices;
        for (const Segment& s : m.segments) {
          const auto bin = static_cast<std::size_t>(BudgetAverages::bin(s.end));
          step.budget_sums[bin] += static_cast<double>(budget);
          step.budget_counts[bin] += 1;
        }
        const auto [known, fresh] = at_budget.try_emplace(budget);
        if (fresh) known->second = model.predict(m, budget);
        const LayerTime& one = known->second;
        const auto stage = static_cast<std::size_t>(layer * options.stages / options.layers);
        t.forward[stage] += one.forward_s;
        t.backward[stage] += one.backward_s;
      }
      const LayerTime head = model.head(m.tokens());
      t.forward.back() += head.forward_s;
      t.backward.back() += head.backward_s;
      if (m.tokens() == 0) continue;
      forwards.push_back(t.mean(t.forward));
      totals.push_back(forwards.back() + t.mean(t.backward));
    }
    const ScheduleCosts costs{[&](int stage, const Op& op) {
      const StageTimes& t = times[static_cast<std::size_t>(op.micro_batch)];
      if (op.kind == OpKind::forward) return t.forward[static_cast<std::size_t>(stage)];
      return op.kind == OpKind::backward ? t.backward[static_cast<std::size_t>(stage)] : 0.0;
    }};
    const SimulatedSchedule result =
        simulate(one_f_one_b_schedule(chunk_groups(list), options.stages), costs);
    step.step_time_s = std::max(step.step_time_s, result.step_time_s);
    useful_s += (1 - result.bubble_ratio) * result.step_time_s * options.stages;
  }
  step.imbalance = imbalance_degree(totals);
  const double available =
      step.step_time_s * options.stages * static_cast<double>(batch.micro_batches.size());
  step.bubble_ratio = available > 0 ? 1 - useful_s / available : 0;
  if (choices > 0) step.mean_budget /= choices, step.mean_coverage_loss /= choices;
  for (const double s : forwards) step.forward_mean_s += s / static_cast<double>(forwards.size());
  if (!forwards.empty()) {
    step.forward_max_s = *std::max_element(forwards.begin(), forwards.end());
    step.forward_min_s = *std::min_element(forwards.begin(), forwards.end());
  }
  return step;
}

}  // namespace ballast

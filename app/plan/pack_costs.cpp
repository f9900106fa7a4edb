#include "app/plan/pack_costs.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "app/plan/planned_run.hpp"
#include "core/base/division.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/model/fp8_specs.hpp"
#include "core/model/tensor_specs.hpp"
#include "core/predict/micro_batch_times.hpp"
#include "core/predict/step_memory.hpp"
#include "core/predict/table_costs.hpp"

namespace ballast {
namespace {

/// A step in which `dp` ranks run packs of every group, one after the other: first some a little
/// shorter, as samples make them, so that full ones need larger buffers beside those that are left.
Batch full_packs(std::span<const PackGroup> groups, int dp, std::int64_t align) {
  Batch batch;
  batch.micro_batches.resize(static_cast<std::size_t>(dp));
  std::int64_t sample = 0;
  for (const int round : {0, 1, 2})
    for (const PackGroup& group : groups)
      for (int d = 0; d < dp; ++d) {
        MicroBatch& pack = batch.micro_batches[static_cast<std::size_t>(d)].emplace_back();
        pack.sp = group.ranks;
        pack.recompute_layers = group.recompute_layers;
        pack.align = align;
        const std::int64_t short_by = round == 0 ? group.tokens / 512 : 0;
        if (d % group.ranks == 0) pack.segments = {{sample++, 0, group.tokens - short_by, 0}};
      }
  return batch;
}

/// Bytes that activations of a full pack take more on a rank where `table` has measured them.
double measured_more(const RunOptions& options, const StageMemory& stage, const PackGroup& group,
                     const TableCosts& table) {
  const ContextSplit split = joined_split(options.mesh, group.ranks, options.model.query_heads);
  const std::int64_t tokens = divided_up(divided_up(group.tokens, split.ring()), split.sp);
  double more = 0;
  const auto correct = [&](Recompute mode, std::int64_t layers) {
    const double measured = table.activation_bytes(tokens, mode);
    Keep keep = mode == Recompute::full ? Keep::input : Keep::all;
    if (stage.fp8) keep = fp8_keep(keep, stage.model);
    if (measured > 0)
      more += static_cast<double>(layers) *
              (measured - static_cast<double>(kept_bytes(stage.model, tokens, stage.type, keep)));
  };
  correct(Recompute::none, stage.layers - group.recompute_layers);
  correct(Recompute::full, group.recompute_layers);
  return more;
}

/// Peak of the fullest rank by the memory that `check` states; activations as measured where the
/// table has them.
class PackBytes {
 public:
  PackBytes(const Config& config, const RunOptions& options, SimulationOptions simulation,
            std::shared_ptr<const Costs> costs)
      : options_(options),
        simulation_(std::move(simulation)),
        costs_(std::move(costs)),
        table_(std::dynamic_pointer_cast<const TableCosts>(costs_)) {
    simulation_.memory = stage_memories(config, options);  // one: pp is 1
    step_ = step_options(config, options, simulation_, *costs_);
  }
  PackBytes(const PackBytes&) = delete;  // options of a step refer to what is beside them
  PackBytes& operator=(const PackBytes&) = delete;

  double operator()(std::span<const PackGroup> groups) const {
    StepOptions step = step_;
    step.mesh.dp = 1;  // as many as share packs of any group: all others have the same
    for (const PackGroup& group : groups) step.mesh.dp = std::lcm(step.mesh.dp, group.ranks);
    const Batch batch = full_packs(groups, step.mesh.dp, options_.layout.rule.align);
    return bytes_of(step_memory(plan_batch_step(batch, step), simulation_), groups);
  }
  /// Over steps of packs of these groups.
  double of_steps(const std::vector<StepPlan>& steps, std::span<const PackGroup> groups) const {
    return bytes_of(run_memory(steps, simulation_), groups);
  }

 private:
  double bytes_of(const std::vector<MemoryEstimate>& stages,
                  std::span<const PackGroup> groups) const {
    if (stages.empty()) return 0;
    double more = -std::numeric_limits<double>::infinity();
    for (const PackGroup& group : groups)
      more = std::max(
          more, table_ ? measured_more(options_, simulation_.memory.front(), group, *table_) : 0);
    return static_cast<double>(stages.front().total()) + more;
  }

  RunOptions options_;
  SimulationOptions simulation_;
  std::shared_ptr<const Costs> costs_;
  std::shared_ptr<const TableCosts> table_;
  StepOptions step_;
};

}  // namespace

std::optional<PackCosts> pack_costs(const Config& config, std::vector<std::string>& notes) {
  if (!has_costs(config)) return std::nullopt;
  const RunOptions options = RunOptions::from(config);
  PackCosts packs;
  packs.costs = plan_costs(config, notes);
  SimulationOptions all = simulation_options(config, options);
  all.tune = false;  // one pack has nothing to be tuned to
  packs.seconds = [costs = packs.costs, mesh = options.mesh, layout = options.layout,
                   heads = options.model.query_heads,
                   all](const MicroBatch& pack, int ranks, int layers) {
    StepPlan plan;
    plan.mesh = mesh;
    PlannedMicroBatch& m = plan.micro_batches.emplace_back();
    m.segments = pack.segments;
    m.split = joined_split(mesh, ranks, heads);
    plan.layouts = {layout.of(pack, m.split.ring())};
    SimulationOptions simulation = all;
    simulation.recompute = {Recompute::full, layers};
    const auto times = MicroBatchClock(plan, simulation, *costs).times(0);
    return times->forward_s() + times->backward_s();
  };
  const auto bytes = std::make_shared<const PackBytes>(config, options, all, packs.costs);
  packs.bytes = [bytes](std::span<const PackGroup> groups) { return (*bytes)(groups); };
  packs.step_bytes = [bytes](const std::vector<StepPlan>& steps,
                             std::span<const PackGroup> groups) {
    return bytes->of_steps(steps, groups);
  };
  return packs;
}

}  // namespace ballast

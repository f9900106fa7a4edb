#include "app/plan/pack_costs.hpp"

#include <algorithm>
#include <memory>

#include "app/plan/planned_run.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/model/fp8_specs.hpp"
#include "core/model/tensor_specs.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/micro_batch_times.hpp"
#include "core/predict/table_costs.hpp"

namespace ballast {
namespace {

/// Peak of one rank's part of a pack, forward and backward, with what `stage` (all layers) holds;
/// activations as measured where the table has them.
double rank_bytes(const RunOptions& options, const StageMemory& stage, std::int64_t tokens,
                  int ranks, int layers, const TableCosts* table) {
  const MeshShape& mesh = options.mesh;
  StageMemory in = stage;
  in.recompute = {Recompute::full, layers};
  RankMicroBatch part;
  part.split = joined_split(mesh, ranks, options.model.query_heads);
  part.shard_tokens = part.hop_tokens = (tokens + part.split.ring() - 1) / part.split.ring();
  part.tokens = (part.shard_tokens + part.split.sp - 1) / part.split.sp;
  part.longest = tokens;
  auto bytes = static_cast<double>(
      replay_memory(in, {{{OpKind::forward}, {OpKind::backward}}, {part}}).total());
  const auto correct = [&](bool recomputed, double of_layers) {
    const double measured =
        table ? table->activation_bytes(part.tokens, recomputed ? Recompute::full : Recompute::none)
              : 0;
    Keep keep = recomputed ? Keep::input : Keep::all;
    if (in.fp8) keep = fp8_keep(keep, in.model);
    if (measured > 0)
      bytes += of_layers *
               (measured - static_cast<double>(kept_bytes(in.model, part.tokens, in.type, keep)));
  };
  correct(false, static_cast<double>(in.layers - layers));
  correct(true, layers);
  return bytes;
}

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
  const auto table = std::dynamic_pointer_cast<const TableCosts>(packs.costs);
  const std::vector<StageMemory> stages = stage_memories(config, options);  // one: pp is 1
  packs.bytes = [options, stages, table](std::int64_t tokens, int ranks, int layers) {
    return stages.empty() ? 0
                          : rank_bytes(options, stages.front(), tokens, ranks, layers, table.get());
  };
  return packs;
}

}  // namespace ballast

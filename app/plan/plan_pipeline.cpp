// ballast plan: the pipeline schedule of the deck's first global batch, simulated.
#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"

namespace ballast {

std::optional<PlanPart> plan_pipeline(const Config& config) {
  if (!config.is_set(&Config::pipeline) && !config.is_set(&Config::chunk)) return std::nullopt;
  const RunOptions options = RunOptions::from(config);
  std::vector<std::string> notes;
  const std::shared_ptr<const Costs> costs = plan_costs(config, notes);
  const std::int64_t batches = config.pipeline.plan_steps;
  const RunFacts facts = first_steps(config, costs, batches);
  const double step_s = facts.mean_step_s();

  PlanPart part;
  part.title = fmt::format(
      "pipeline, {}, {}",
      batches == 1 ? "first global batch" : fmt::format("first {} global batches", batches),
      costs->source());
  part.header = {"stages",       "schedule",   "batching",
                 "chunk_tokens", "k",          "micro_batches",
                 "recomputed",   "step_time",  "bubble_ratio",
                 "load_balance", "idle_ranks", "peak_live_activations"};
  part.note =
      "bubble_ratio: 1 - forward and backward time / (stages x time of a pipeline from its first "
      "operation to its last): a chunk's second forward, transfers and waits are bubble, layers "
      "that recompute.mode makes again inside a backward are its work; step_time "
      "in seconds, mean of the batches; load_balance: mean / max of useful seconds over all ranks, "
      "idle_ranks: without a micro-batch, means of the batches;\npeak_live_activations: "
      "micro-batches whose activations a stage holds at once, those that wait for a weight half "
      "among them, first stage first; micro_batches, recomputed: of all batches";
  const ScheduleKind schedule = options.pipeline.schedule;
  const bool chunked = options.batching.method == Batching::chunkflow,
             aware = state_aware(schedule);
  part.rows.push_back(
      {fmt::to_string(options.mesh.pp), name(schedule), name(options.batching.method),
       chunked ? fmt::to_string(options.batching.micro_batch_tokens) : "-",
       aware ? fmt::to_string(config.chunk.k) : "-", fmt::to_string(facts.micro_batches),
       fmt::to_string(facts.recomputed), fmt::format("{:.6g}", step_s),
       fmt::format("{:.4f}", facts.pipelines.bubble_ratio()),
       fmt::format("{:.4f}", facts.mean(facts.load_balance)),
       fmt::format("{:g}", facts.mean(facts.idle_ranks)),
       fmt::format("{}", fmt::join(facts.live, " "))});
  part.values = {{"schedule", name(schedule)},
                 {"bubble_ratio", facts.pipelines.bubble_ratio()},
                 {"step_time", step_s},
                 {"load_balance", facts.mean(facts.load_balance)},
                 {"idle_ranks", facts.mean(facts.idle_ranks)},
                 {"peak_live_activations", facts.live},
                 {"micro_batches", facts.micro_batches},
                 {"recomputed", facts.recomputed}};
  for (const std::string& note : notes) part.note += "\nnote: " + note;
  return part;
}

}  // namespace ballast

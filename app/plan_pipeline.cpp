// ballast plan: the pipeline schedule of the deck's first global batch, simulated.
#include <algorithm>

#include "app/plan.hpp"
#include "core/pipeline_schedule.hpp"
#include "core/run_options.hpp"
#include "core/sampler.hpp"
#include "io/dataset.hpp"

namespace ballast {
namespace {

/// First global batch of the deck's data, in the order that training takes.
Batch first_batch(const Deck& deck, const RunOptions& options) {
  DataOptions data = data_options(deck);
  if (data.vocabulary == 0) data.vocabulary = 1 << 17;  // a deck without a model: only lengths are read here
  const std::unique_ptr<Dataset> dataset = open_dataset(data);
  Sampler sampler(dataset->samples(), data.seed, deck.real("data.validation_share"), deck.boolean("batching.shuffle"),
                  [&](std::int64_t s) { return dataset->document(s); }, dataset->held_out());
  SamplerPosition position;
  std::vector<SampleLength> samples;
  for (const std::int64_t s : sampler.next(position, deck.integer("batching.global_tokens"), deck.integer("batching.global_samples"),
                                           [&](std::int64_t sample) { return dataset->length(sample); }))
    samples.push_back({s, dataset->length(s), 0});
  return plan_batch(0, samples, options.batching);
}

}  // namespace

std::optional<PlanPart> plan_pipeline(const Deck& deck) {
  if (!deck.block_set("pipeline") && !deck.block_set("chunk")) return std::nullopt;
  const RunOptions options = RunOptions::from(deck);
  const int stages = options.mesh.pp;
  const Batch batch = first_batch(deck, options);

  double step_s = 0, useful_s = 0;
  std::size_t micro_batches = 0, recomputed = 0;
  std::vector<int> live(stages, 0);
  for (const std::vector<MicroBatch>& list : batch.micro_batches) {
    const ScheduleCosts costs = schedule_costs(options.pipeline.costs, list);
    const Schedule schedule = plan_schedule(list, options.pipeline);
    const std::string wrong = problems(schedule);
    require(wrong.empty(), "pipeline.schedule = \"{}\": {}", deck.text("pipeline.schedule"), wrong);
    const SimulatedSchedule result = simulate(schedule, costs);
    step_s = std::max(step_s, result.step_time_s);
    useful_s += (1 - result.bubble_ratio) * result.step_time_s * stages;
    micro_batches += list.size();
    for (const Op& op : schedule.stages.front()) recomputed += op.kind == OpKind::recompute;
    for (int s = 0; s < stages; ++s) live[s] = std::max(live[s], result.peak_live_activations[s]);
  }
  // Data-parallel ranks wait for the slowest one.
  const double bubble = step_s > 0 ? 1 - useful_s / (step_s * stages * static_cast<double>(batch.micro_batches.size())) : 0;

  PlanPart part;
  part.title = fmt::format("pipeline of {} stages, first global batch", stages);
  part.header = {"schedule",  "batching",     "chunk_tokens",         "k", "micro_batches", "recomputed",
                 "step_time", "bubble_ratio", "peak_live_activations"};
  part.note =
      "bubble_ratio: 1 - forward and backward time / (ranks x step_time), in which recomputation, transfers and waits are bubble; "
      "step_time "
      "in seconds;\npeak_live_activations: micro-batches whose activations a stage holds at once, first stage first";
  const std::string& schedule = deck.text("pipeline.schedule");
  const bool chunked = options.batching.method == "chunkflow", aware = schedule == "state_aware_1f1b";
  part.rows.push_back({schedule, options.batching.method, chunked ? fmt::to_string(options.batching.micro_batch_tokens) : "-",
                       aware ? fmt::to_string(deck.integer("chunk.k")) : "-", fmt::to_string(micro_batches), fmt::to_string(recomputed),
                       fmt::format("{:.6g}", step_s), fmt::format("{:.4f}", bubble), fmt::format("{}", fmt::join(live, " "))});
  part.values = {{"schedule", schedule},          {"bubble_ratio", bubble},         {"step_time", step_s},
                 {"peak_live_activations", live}, {"micro_batches", micro_batches}, {"recomputed", recomputed}};
  return part;
}

}  // namespace ballast

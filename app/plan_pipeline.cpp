// ballast plan: the pipeline schedule of the deck's first global batch, simulated.
#include "app/pipeline_simulation.hpp"
#include "app/plan.hpp"

namespace ballast {

std::optional<PlanPart> plan_pipeline(const Deck& deck) {
  if (!deck.block_set("pipeline") && !deck.block_set("chunk")) return std::nullopt;
  const RunOptions options = RunOptions::from(deck);
  std::vector<std::string> notes;
  const StageTimes times(deck, notes);
  PipelineFacts facts;
  simulate_batch(first_batches(deck, options, 1).front(), options, times, facts);

  PlanPart part;
  part.title = fmt::format("pipeline of {} stages, first global batch, {}", options.mesh.pp, times.measured() ? "times of " + deck.text("profile.table") : "stated costs");
  part.header = {"schedule",  "batching",     "chunk_tokens",         "k", "micro_batches", "recomputed",
                 "step_time", "bubble_ratio", "peak_live_activations"};
  part.note =
      "bubble_ratio: 1 - forward and backward time / (ranks x step_time), in which recomputation, transfers and waits are bubble; "
      "step_time "
      "in seconds;\npeak_live_activations: micro-batches whose activations a stage holds at once, first stage first";
  const std::string& schedule = deck.text("pipeline.schedule");
  const bool chunked = options.batching.method == "chunkflow", aware = state_aware(schedule);
  part.rows.push_back({schedule, options.batching.method, chunked ? fmt::to_string(options.batching.micro_batch_tokens) : "-",
                       aware ? fmt::to_string(deck.integer("chunk.k")) : "-", fmt::to_string(facts.micro_batches), fmt::to_string(facts.recomputed),
                       fmt::format("{:.6g}", facts.step_s), fmt::format("{:.4f}", facts.bubble_ratio()), fmt::format("{}", fmt::join(facts.live, " "))});
  part.values = {{"schedule", schedule},          {"bubble_ratio", facts.bubble_ratio()}, {"step_time", facts.step_s},
                 {"peak_live_activations", facts.live}, {"micro_batches", facts.micro_batches}, {"recomputed", facts.recomputed}};
  for (const std::string& note : notes) part.note += "\n" + note;
  return part;
}

}  // namespace ballast

// ballast plan: search over chunk sizes and K (ChunkFlow Section 5): the fastest pair whose fullest
// rank fits the memory limit.
#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/run_summary.hpp"

namespace ballast {

std::optional<PlanPart> plan_search(const Config& config) {
  const auto& sizes = config.chunk.search_tokens;
  if (sizes.empty()) return std::nullopt;
  const double limit = config.chunk.search_memory_gib * (1 << 30);
  std::vector<std::string> notes;
  const std::shared_ptr<const Costs> costs = plan_costs(config, notes);
  const std::int64_t steps = config.chunk.search_steps;

  std::vector<std::int64_t> ks = config.chunk.search_k;
  if (ks.empty()) ks = {1, 2, 4, 8, 16};
  struct Best {
    double step_s = 0;
    std::int64_t tokens = 0, k = 0;
  };
  std::optional<Best> best;
  const ScheduleKind schedule = state_aware(config.pipeline.schedule)
                                    ? config.pipeline.schedule
                                    : ScheduleKind::state_aware_1f1b;
  PlanPart part;
  part.title = fmt::format("chunk size and K over {} global batch{}, {}", steps,
                           steps == 1 ? "" : "es", costs->source());
  part.header = {"chunk_tokens",
                 "k",
                 "micro_batches",
                 "recomputed",
                 "step_time",
                 "bubble_ratio",
                 "peak_live_activations",
                 "fullest_rank",
                 "fits"};
  auto rows = nlohmann::ordered_json::array();
  for (const std::int64_t tokens : sizes)
    for (const std::int64_t k : ks) {
      Config point = config;
      point.batching.method = Batching::chunkflow;
      point.pipeline.schedule = schedule;
      point.chunk.tokens = tokens;
      point.chunk.k = k;
      const RunOptions options = RunOptions::from(point);
      const RunFacts facts = first_steps(point, costs, steps);
      const double step_s = facts.mean_step_s();
      const bool model = options.model.layers > 0;
      const std::int64_t bytes = model ? CheckFacts::of(point).largest_rank_bytes() : 0;
      const bool fits = limit == 0 || static_cast<double>(bytes) <= limit;
      if (fits && (!best || step_s < best->step_s)) best = Best{step_s, tokens, k};
      part.rows.push_back({fmt::to_string(tokens), fmt::to_string(k),
                           fmt::to_string(facts.micro_batches), fmt::to_string(facts.recomputed),
                           fmt::format("{:.6g}", step_s),
                           fmt::format("{:.4f}", facts.bubble_ratio()),
                           fmt::format("{}", fmt::join(facts.live, " ")),
                           model ? bytes_text(static_cast<double>(bytes)) : "-",
                           limit == 0 ? "-"
                           : fits     ? "yes"
                                      : "no"});
      rows.push_back({{"chunk_tokens", tokens},
                      {"k", k},
                      {"step_time", step_s},
                      {"bubble_ratio", facts.bubble_ratio()},
                      {"fullest_rank_bytes", bytes},
                      {"fits", fits}});
    }
  require(limit == 0 || best.has_value(),
          "{}: no pair of chunk.search_tokens and chunk.search_k fits chunk.search_memory_gib = "
          "{}; raise it, lower the chunk sizes, or "
          "set recompute.mode, chunk.offload or optimizer.zero",
          config.from.file, config.chunk.search_memory_gib);
  part.note = "step_time: mean seconds of a step; fullest_rank: memory estimate of `ballast check`";
  part.values = {{"search", rows}};
  if (best) {
    const std::vector<std::string> overrides{
        "batching.method=chunkflow", fmt::format("pipeline.schedule={}", schedule),
        fmt::format("chunk.tokens={}", best->tokens), fmt::format("chunk.k={}", best->k)};
    part.note += fmt::format("\nfastest that fits; train with it: ballast train {} {}",
                             config.from.file, fmt::join(overrides, " "));
    part.values["best_chunk_tokens"] = best->tokens;
    part.values["best_k"] = best->k;
    part.values["best_step_time"] = best->step_s;
    part.values["best_overrides"] = overrides;
  }
  for (const std::string& note : notes) part.note += "\nnote: " + note;
  return part;
}

}  // namespace ballast

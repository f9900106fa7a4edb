// ballast plan: search over chunk sizes and K (ChunkFlow Section 5): the fastest pair whose fullest
// rank fits the memory limit.
#include <algorithm>
#include <memory>

#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/planned_samples.hpp"
#include "app/plan/run_summary.hpp"
#include "core/base/shell_word.hpp"
#include "core/config/deck_rules.hpp"
#include "core/config/deck_schema.hpp"

namespace ballast {

namespace {

/// A pair of chunk size and K, planned.
struct Point {
  std::int64_t tokens = 0, k = 0, bytes = 0;  ///< bytes: of the fullest rank; 0 without a model
  double step_s = 0;
  bool fits = false;
  std::string refused = "";  ///< by the deck's rules, in their words
  RunFacts facts = {};
};

ScheduleKind schedule_of(const Config& config) {
  return state_aware(config.pipeline.schedule) ? config.pipeline.schedule
                                               : ScheduleKind::state_aware_1f1b;
}

/// `files`: what memory is counted with, the longest sample above all.
Point planned_point(const Config& config, const std::shared_ptr<const Costs>& costs,
                    const OpenedFiles& files, std::int64_t tokens, std::int64_t k) {
  Config point = config;
  point.batching.method = Batching::chunkflow;
  point.pipeline.schedule = schedule_of(config);
  point.chunk.tokens = tokens;
  point.chunk.k = k;
  Point result{tokens, k};
  const DeckNeeds needs{.model = config.model.layers > 0, .data = true};
  if (const auto wrong = problems(point, needs); !wrong.empty()) {
    result.refused = wrong.front().message();
    return result;
  }
  result.facts = first_steps(point, costs, config.chunk.search_steps);
  result.step_s = result.facts.mean_step_s();
  if (config.model.layers > 0) result.bytes = CheckFacts::of(point, files).largest_rank_bytes();
  const double limit = config.chunk.search_memory_gib * (1 << 30);
  result.fits = limit == 0 || static_cast<double>(result.bytes) <= limit;
  return result;
}

void add_row(const Config& config, const Point& point, PlanPart& part) {
  if (!point.refused.empty()) {
    part.rows.push_back({fmt::to_string(point.tokens), fmt::to_string(point.k), "-", "-", "-", "-",
                         "-", "-", "refused"});
    part.values["search"].push_back(
        {{"chunk_tokens", point.tokens}, {"k", point.k}, {"refused", point.refused}});
    return;
  }
  const bool limited = config.chunk.search_memory_gib > 0;
  part.rows.push_back({fmt::to_string(point.tokens), fmt::to_string(point.k),
                       fmt::to_string(point.facts.micro_batches),
                       fmt::to_string(point.facts.recomputed), fmt::format("{:.6g}", point.step_s),
                       fmt::format("{:.4f}", point.facts.pipelines.bubble_ratio()),
                       fmt::format("{}", fmt::join(point.facts.live, " ")),
                       config.model.layers > 0 ? bytes_text(static_cast<double>(point.bytes)) : "-",
                       !limited     ? "-"
                       : point.fits ? "yes"
                                    : "no"});
  part.values["search"].push_back({{"chunk_tokens", point.tokens},
                                   {"k", point.k},
                                   {"step_time", point.step_s},
                                   {"bubble_ratio", point.facts.pipelines.bubble_ratio()},
                                   {"fullest_rank_bytes", point.bytes},
                                   {"fits", point.fits}});
}

/// What trains the deck with `overrides`: its case and the command line's other settings stay, but
/// for those of the search.
std::string training_command(const Config& config, const std::vector<std::string>& overrides) {
  const int ranks = config.mesh.size();
  std::string text = ranks > 1 ? fmt::format("mpiexec -n {} ", ranks) : "";
  text += "ballast train " + shell_word(config.from.file);
  if (!config.from.case_name.empty()) text += " --case " + shell_word(config.from.case_name);
  for (const KeySpec& spec : deck_schema()) {
    const std::string path = spec.path();
    const bool taken = path.starts_with("chunk.search_") ||
                       std::any_of(overrides.begin(), overrides.end(), [&](const std::string& one) {
                         return one.starts_with(path + "=");
                       });
    if (!taken && config.from.of(path).origin == Origin::command_line)
      text += " " + shell_word(path + "=" + to_text(spec.value(config)));
  }
  for (const std::string& one : overrides) text += " " + shell_word(one);
  return text;
}

void add_best(const Config& config, const Point& best, PlanPart& part) {
  const std::vector<std::string> overrides{
      "batching.method=chunkflow", fmt::format("pipeline.schedule={}", schedule_of(config)),
      fmt::format("chunk.tokens={}", best.tokens), fmt::format("chunk.k={}", best.k)};
  part.note += "\nfastest that fits; train with it: " + training_command(config, overrides);
  part.values["best_chunk_tokens"] = best.tokens;
  part.values["best_k"] = best.k;
  part.values["best_step_time"] = best.step_s;
  part.values["best_overrides"] = overrides;
}

}  // namespace

std::optional<PlanPart> plan_search(const Config& config) {
  if (config.chunk.search_tokens.empty()) return std::nullopt;
  std::vector<std::string> notes;
  const std::shared_ptr<const Costs> costs = plan_costs(config, notes);
  OpenedFiles files;
  const std::unique_ptr<Dataset> data = open_planned_data(config);
  files.longest = sample_length(*data, longest_sample(*data));
  files.heads = head_table_here(config);
  std::vector<std::int64_t> ks = config.chunk.search_k;
  if (ks.empty()) ks = {1, 2, 4, 8, 16};
  const std::int64_t steps = config.chunk.search_steps;
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
  part.note = "step_time: mean seconds of a step; fullest_rank: memory estimate of `ballast check`";
  part.values = {{"search", nlohmann::ordered_json::array()}};
  std::optional<Point> best;
  std::string refused;  // what is, and why
  for (const std::int64_t tokens : config.chunk.search_tokens)
    for (const std::int64_t k : ks) {
      const Point point = planned_point(config, costs, files, tokens, k);
      add_row(config, point, part);
      if (!point.refused.empty()) refused += "\n" + point.refused;
      if (point.fits && (!best || point.step_s < best->step_s)) best = point;
    }
  require(best.has_value(),
          "{}: no pair of chunk.search_tokens and chunk.search_k is allowed and fits "
          "chunk.search_memory_gib = {}; raise it, lower the chunk sizes, or "
          "set recompute.mode, chunk.offload{} or optimizer.zero{}",
          config.from.file, config.chunk.search_memory_gib,
          config.optimizer.kind == OptimizerKind::muon ? ""
                                                       : ", optimizer.moments, optimizer.gradients",
          refused);
  part.note += refused;
  add_best(config, *best, part);
  for (const std::string& note : notes) part.note += "\nnote: " + note;
  return part;
}

}  // namespace ballast

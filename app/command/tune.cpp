// ballast tune: the fastest plan of a deck on a number of ranks within a memory limit, and a deck
// of it.  Starts no ranks.
#include "core/search/tune.hpp"

#include <chrono>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/observe/text_table.hpp"
#include "app/plan/drift_sample.hpp"
#include "app/plan/opened_files.hpp"
#include "app/plan/planned_run.hpp"
#include "core/base/shell_word.hpp"
#include "core/config/run_options.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/search/tune_reasons.hpp"
#include "io/deck/deck_reader.hpp"
#include "io/files/text_file.hpp"

namespace ballast {
namespace {

using nlohmann::ordered_json;

constexpr double kGib = 1 << 30;
constexpr int kRowsOfAKind = 6;

/// Samples of the first steps and of what passes forward between them, and the longest of all; a
/// curriculum's short samples are passed over.
void take_samples(const Config& config, std::int64_t steps, TuneInput& input) {
  PlannedSamples samples(config);
  SamplerPosition position;
  for (std::int64_t s = 0; s < steps; ++s) input.steps.push_back(samples.next(position));
  const Dataset& data = samples.dataset();
  refuse_missing_held_out(config, data, samples.sampler());
  refuse_missing_drift_sample(config, data, samples.sampler());
  input.longest = sample_length(data, longest_sample(data), false);
  input.longest_document = longest_document(data);
  const auto add = [&](const std::vector<SampleLength>& list) {
    if (!list.empty()) input.evaluated.push_back(list);
  };
  if (config.eval.every_steps > 0) add(samples.evaluated());
  if (config.eval.every_steps > 0 && config.eval.generate.tokens > 0) add(samples.written());
  if (measures_drift(config, attention_options(config))) input.drifting = samples.drifting();
}

/// The command, as one would type it once more.
std::string typed(const CommandLine& line) {
  const TuneLine& t = line.tune;
  std::string text = "ballast tune " + shell_word(line.deck_file);
  for (const std::string& setting : line.overrides) text += " " + shell_word(setting);
  if (!line.case_name.empty()) text += " --case " + shell_word(line.case_name);
  if (t.ranks > 0) text += fmt::format(" --ranks {}", t.ranks);
  if (t.memory_gib > 0) text += fmt::format(" --memory {}", t.memory_gib);
  if (t.coverage > 0) text += fmt::format(" --coverage {}", t.coverage);
  const TuneLine usual;
  if (t.trials != usual.trials) text += fmt::format(" --trials {}", t.trials);
  if (t.steps != usual.steps) text += fmt::format(" --steps {}", t.steps);
  if (t.list != usual.list) text += fmt::format(" --list {}", t.list);
  return text;
}

std::string summary(const Trial& t) {
  return fmt::format(
      "{:.4g} s a step, {:.6g} tokens/s, {} on the fullest rank, load balance {:.3f} over all "
      "ranks",
      t.step_s, t.tokens_per_s(), bytes_text(static_cast<double>(t.bytes)), t.load_balance);
}

void print_best(const TuneResult& result, const TuneInput& input, const std::string& source) {
  const double limit = input.limits.memory_bytes;
  const std::int64_t steps = result.best.front().steps;
  fmt::print(
      "best plans of {} on {} ranks{}, by {}, means of {}; memory: the most of {} and of the first "
      "with the data's longest sample\n",
      input.base.from.file, input.limits.ranks,
      limit > 0 ? fmt::format(" of {}", bytes_text(limit)) : ", no memory limit (--memory)", source,
      steps == 1 ? "1 step" : fmt::format("{} steps", steps), steps == 1 ? "it" : "these");
  TextTable table(
      {"", "plan", "step_s", "tokens_per_s", "memory", "load_balance", "idle", "bubble_ratio"});
  for (std::size_t i = 0; i < result.best.size(); ++i) {
    const Trial& t = result.best[i];
    table.row({fmt::to_string(i + 1), describe(t.candidate), fmt::format("{:.4g}", t.step_s),
               fmt::format("{:.6g}", t.tokens_per_s()), bytes_text(static_cast<double>(t.bytes)),
               fmt::format("{:.3f}", t.load_balance), fmt::format("{:.0f}", t.idle_ranks),
               fmt::format("{:.3f}", t.pipelines.bubble_ratio())});
  }
  fmt::print("{}", table.text());
}

void print_losses(const std::vector<Loss>& list) {
  fmt::print("\nwhy others lose: the best plan with each choice against the first above\n");
  TextTable table({"choice", "slower", "why", "plan"});
  std::map<std::string, int> shown;  // the twin has all
  for (const Loss& loss : list)
    if (++shown[loss.choice.substr(0, loss.choice.find(' '))] <= kRowsOfAKind)
      table.row({loss.choice, loss.slower > 0 ? fmt::format("{:.3f} x", loss.slower) : "-",
                 loss.why, loss.plan.empty() ? "-" : loss.plan});
  fmt::print("{}", table.text());
}

void print_effort(const TuneResult& r, double seconds) {
  fmt::print(
      "\n{} candidates: {} simulated, {} with a lower bound above those listed, {} too large for "
      "memory whatever they compute, {} left out by estimate{}; {} refused; {:.1f} s\n",
      r.candidates, r.trials, r.bounded, r.too_large, r.left,
      r.left > 0 ? fmt::format(" (lower bound {:.4g} s, --trials simulates more)", r.left_bound_s)
                 : "",
      r.refused, seconds);
  if (r.cut_short)
    fmt::print(
        "cut short, so that it ends within half a minute: another machine may simulate more; "
        "--trials says how many plans, however long they take\n");
}

ordered_json json(const Trial& t, const Config& base) {
  ordered_json terms;
  for (const auto& [term, seconds] : t.terms.list()) terms[term + "_s"] = seconds;
  const Config changed = with(base, t.candidate);
  return {{"plan", describe(t.candidate)},
          {"overrides", overrides(base, changed)},
          {"step_time", t.step_s},
          {"tokens_per_s", t.tokens_per_s()},
          {"largest_rank_bytes", t.bytes},
          {"load_balance", t.load_balance},
          {"idle_ranks", t.idle_ranks},
          {"bubble_ratio", t.pipelines.bubble_ratio()},
          {"steps", t.steps},
          {"first_step_time", t.first_step_s},
          {"terms", terms}};
}

ordered_json json(const TuneResult& r, const std::vector<Loss>& lost, const TuneInput& input) {
  ordered_json out{{"deck", input.base.from.file},
                   {"ranks", input.limits.ranks},
                   {"memory_limit_bytes", static_cast<std::int64_t>(input.limits.memory_bytes)},
                   {"candidates", r.candidates},
                   {"trials", r.trials},
                   {"bounded", r.bounded},
                   {"too_large", r.too_large},
                   {"left", r.left},
                   {"refused", r.refused},
                   {"cut_short", r.cut_short}};
  auto& best = out["best"] = ordered_json::array();
  for (const Trial& t : r.best) best.push_back(json(t, input.base));
  auto& list = out["losses"] = ordered_json::array();
  for (const Loss& loss : lost)
    list.push_back(
        {{"choice", loss.choice}, {"slower", loss.slower}, {"why", loss.why}, {"plan", loss.plan}});
  return out;
}

std::string write_problem(const TuneLine& asked) {
  if (asked.write.empty()) return "";
  if (!asked.overwrite && std::filesystem::exists(asked.write))
    return asked.write + " is there already; choose another name for --write, or --overwrite";
  const std::string why = unwritable(asked.write);
  return why.empty() ? "" : fmt::format("--write {}: cannot be written: {}", asked.write, why);
}

/// The best plan's deck; parsed before it is written, so that it is sound.
void write_deck(const CommandLine& line, const Config& base, const Trial& best,
                const std::string& source) {
  const std::string &file = line.tune.write, typed_file = shell_word(file);
  std::string text = fmt::format("# {}\n", describe(best.candidate));
  text += fmt::format("# Chosen by: {}\n# Predicted: {};\n", typed(line), summary(best));
  text += fmt::format("# means of {} steps, memory the most of them, by {}.\n", best.steps,
                      comment_text(source));
  text += fmt::format("#   ballast check {}\n#   mpiexec -n {} ballast train {}\n", typed_file,
                      best.candidate.mesh.size(), typed_file);
  text += stated_deck(with(base, best.candidate));
  parse_config(text, file);
  require_written(file, text);
  fmt::print("\nwrote {}; train with it: mpiexec -n {} ballast train {}\n", file,
             best.candidate.mesh.size(), typed_file);
}

TuneResult search(const CommandLine& line, TuneInput& input, std::string& source,
                  std::vector<std::string>& notes) {
  const TuneLine& asked = line.tune;
  take_samples(input.base, asked.steps, input);
  input.heads = head_table_here(input.base);
  source = plan_costs(input.base, notes)->source();
  // Tables are read by one thread after another.
  const auto reading = std::make_shared<std::mutex>();
  input.costs = [reading](const Config& config) {
    const std::lock_guard lock(*reading);
    std::vector<std::string> told;
    return plan_costs(config, told);
  };
  TuneOptions options;
  options.list = asked.list, options.steps = asked.steps, options.trials = asked.trials;
  options.threads =
      static_cast<int>(std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, 8));
  return tune(input, options);
}

}  // namespace

int tune_command(const CommandLine& line) {
  const TuneLine& asked = line.tune;
  const std::string problem = write_problem(asked);
  require(problem.empty(), "{}", problem);
  const DeckNeeds needs{.model = true, .data = true, .groups = false, .chooses_groups = true};
  const std::vector<Config> configs = line.configs(needs);
  require(configs.size() == 1, "{} has {} cases; choose one with --case", line.deck_file,
          configs.size());
  TuneInput input;
  input.base = configs.front();
  input.limits.ranks = asked.ranks > 0 ? static_cast<int>(asked.ranks) : input.base.mesh.size();
  input.limits.memory_bytes = asked.memory_gib * kGib;
  input.limits.coverage = asked.coverage;
  std::string source;
  std::vector<std::string> notes;
  const auto begin = std::chrono::steady_clock::now();
  const TuneResult result = search(line, input, source, notes);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  require(!result.best.empty(), "{}", nothing_fits(result, input.limits));
  const std::vector<Loss> lost = losses(result, input.limits);
  print_best(result, input, source);
  print_losses(lost);
  print_effort(result, seconds);
  for (const std::string& note : notes) fmt::print("note: {}\n", note);
  if (!asked.write.empty()) write_deck(line, input.base, result.best.front(), source);
  ordered_json twin = json(result, lost, input);
  twin["costs"] = source, twin["search_seconds"] = seconds;
  if (!asked.write.empty()) twin["written"] = asked.write;
  write_json(line.json, twin);
  return 0;
}

}  // namespace ballast

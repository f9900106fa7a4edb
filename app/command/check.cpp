// ballast check: parse, validate, and show mesh, shards, schedule and memory for any number of
// ranks without starting one.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/observe/text_table.hpp"
#include "app/plan/expected_balance.hpp"
#include "app/plan/first_plans.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/run_summary.hpp"
#include "app/plan/simulated_steps.hpp"
#include "app/plan/stored_groups.hpp"
#include "core/predict/step_memory.hpp"

namespace ballast {
namespace {

constexpr std::size_t kRows = 16;  // of a table on the terminal; the twin has all

std::string text(std::int64_t value) { return fmt::to_string(value); }

/// 1234567 as 1.235 M.
std::string count_text(std::int64_t value) {
  const double v = static_cast<double>(value);
  if (v >= 1e9) return fmt::format("{:.3f} G", v / 1e9);
  if (v >= 1e6) return fmt::format("{:.3f} M", v / 1e6);
  return text(value);
}

void print_mesh(const CheckFacts& f) {
  const MeshShape& mesh = f.options.mesh;
  fmt::print("\nmesh: {}\n", describe(mesh));
  TextTable table({"rank", "node", "dp", "pp", "cp_outer", "cp_inner", "cp", "sp", "tp"});
  // Rows in the middle are never shown, so a few at both ends stand for a large mesh.
  const int size = mesh.size(), ends = static_cast<int>(kRows);
  for (int r = 0; r < size; ++r) {
    if (r == ends && size > 3 * ends) r = size - ends;
    const MeshCoordinates at = coordinates(mesh, r);
    table.row({text(r), f.node(r) < 0 ? "-" : text(f.node(r)), text(at.dp), text(at.pp),
               text(at.cp_outer), text(at.cp_inner), text(at.cp(mesh)), text(at.sp), text(at.tp)});
  }
  fmt::print("{}", table.text(kRows, static_cast<std::size_t>(size)));
}

void print_model(const CheckFacts& f) {
  const ModelShape& m = f.options.model;
  fmt::print("\nmodel {}: {} parameters ({} without embedding and head), computed in {}\n",
             m.preset, m.parameters(), m.parameters_without_embedding(),
             fmt::format("{}{}", name(f.type), f.fp8 ? ", its layers' products in fp8" : ""));
  fmt::print(
      "  {} layers, hidden {}, intermediate {}, {} query and {} key/value heads of {}, vocabulary "
      "{}{}{}\n",
      m.layers, m.hidden, m.intermediate, m.query_heads, m.kv_heads, m.head_dim, m.vocabulary,
      m.qkv_bias  ? ", qkv bias"
      : m.qk_norm ? ", qk norm"
                  : "",
      m.tied_embedding ? ", tied embedding" : "");
}

std::string pieces_text(const ShardFacts& shard) {
  if (shard.pieces.empty()) return "-";
  std::string out;
  for (std::size_t i = 0; i < shard.pieces.size() && i < 3; ++i)
    out +=
        fmt::format("{}[{}, {})", i == 0 ? "" : " ", shard.pieces[i].first, shard.pieces[i].second);
  return shard.pieces.size() > 3 ? out + fmt::format(" ... {} pieces", shard.pieces.size()) : out;
}

void print_shards(const CheckFacts& f) {
  const RunOptions& o = f.options;
  const SequenceLayout layout = o.sequence_layout(f.micro_batch_tokens);
  fmt::print(
      "\nshards of a micro-batch of one sample of {} tokens, layout {}{}: causal pairs max / mean "
      "{:.4f}\n",
      f.micro_batch_tokens, name(layout.kind()),
      deals_stripes(layout.kind()) ? fmt::format(" of {}", layout.stripe()) : "",
      f.pair_imbalance());
  TextTable table({"cp", "tokens", "causal_pairs", "pieces"});
  for (const ShardFacts& shard : f.shards)
    table.row({text(shard.cp), text(shard.tokens), fmt::format("{:.0f}", shard.pairs),
               pieces_text(shard)});
  fmt::print("{}", table.text(kRows));
}

std::string hop_text(const std::optional<RingHop>& hop) {
  return hop ? fmt::format("shard {} to {}, {} from {}", hop->send_shard, hop->to, hop->recv_shard,
                           hop->from)
             : "-";
}

void print_ring(const CheckFacts& f) {
  const MeshShape& mesh = f.options.mesh;
  if (f.ring.forward.empty() || mesh.cp() == 1) return;
  fmt::print(
      "\nring plan of context-parallel rank 0 ({} x {}): {} forward and {} backward steps a layer; "
      "KV hop {}, dKV hop {}; {} KV and {} dKV "
      "buffers\n",
      mesh.cp_outer, mesh.cp_inner, f.ring.forward.size(), f.ring.backward.size(),
      bytes_text(static_cast<double>(f.kv_hop_bytes)),
      bytes_text(static_cast<double>(f.dkv_hop_bytes)), f.ring.kv_buffers, f.ring.dkv_buffers);
  TextTable forward({"forward", "outer", "inner", "computes", "kv_inner", "kv_outer"});
  for (std::size_t t = 0; t < f.ring.forward.size(); ++t) {
    const RingStep& s = f.ring.forward[t];
    forward.row({text(static_cast<std::int64_t>(t)), text(s.outer), text(s.inner),
                 s.shard < 0 ? "-" : fmt::format("shard {}", s.shard), hop_text(s.kv_inner),
                 hop_text(s.kv_outer)});
  }
  TextTable backward(
      {"backward", "outer", "inner", "computes", "kv_inner", "kv_outer", "dkv_inner", "dkv_outer"});
  for (std::size_t t = 0; t < f.ring.backward.size(); ++t) {
    const RingStep& s = f.ring.backward[t];
    backward.row({text(static_cast<std::int64_t>(t)), text(s.outer), text(s.inner),
                  s.shard < 0 ? "-" : fmt::format("shard {}", s.shard), hop_text(s.kv_inner),
                  hop_text(s.kv_outer), hop_text(s.dkv_inner), hop_text(s.dkv_outer)});
  }
  fmt::print("{}{}", forward.text(kRows), backward.text(kRows));
}

/// How many micro-batches a rank has, in words.
std::string micro_batches_text(const CheckFacts& f) {
  const int dp = f.options.mesh.dp;
  const std::string count = fmt::format("{} micro-batch{} a step", f.micro_batches,
                                        f.micro_batches == 1 ? "" : "es"),
                    each = fmt::format("{} on each of {} data-parallel ranks", count, dp);
  switch (f.micro_batches_are) {
    case MicroBatchCount::exact:
      return each;
    case MicroBatchCount::at_most:
      return "at most " + each;
    case MicroBatchCount::about:
      return fmt::format("about {} on the fullest of {} data-parallel ranks", count, dp);
    case MicroBatchCount::of_full_packs:
      return each + " when packs are full";
  }
  return "";
}

void print_schedule(const CheckFacts& f) {
  fmt::print(
      "\nschedule: {}: that many are accumulated before each update (gradient accumulation)\n",
      micro_batches_text(f));
  TextTable table(
      {"stage", "layers", "parameters", "optimizer_shard", "live_micro_batches", "ops"});
  for (std::size_t s = 0; s < f.stages.size(); ++s) {
    const StageFacts& stage = f.stages[s];
    std::string ops;
    for (std::size_t i = 0; i < stage.ops.size() && i < 6; ++i)
      ops += fmt::format("{}{} {}", i == 0 ? "" : ", ", name(stage.ops[i].kind),
                         stage.ops[i].micro_batch);
    if (stage.ops.size() > 6) ops += fmt::format(" ... {} ops", stage.ops.size());
    table.row({text(static_cast<std::int64_t>(s)),
               fmt::format("{}..{}", stage.layer_begin, stage.layer_end - 1),
               text(stage.parameters), text(stage.shard_parameters), text(stage.live_micro_batches),
               ops});
  }
  fmt::print("{}", table.text(kRows));
}

constexpr double kMuchLess = 0.99;  ///< of full micro-batches: below, what is planned is told

void print_memory(const CheckFacts& f) {
  fmt::print("\nmemory estimate of a rank: ZeRO stage {} over {} ranks, recompute {}\n", f.zero,
             f.options.mesh.replicas(), f.recompute);
  std::vector<std::string> header{"stage"};
  std::vector<MemoryCategory> used;
  for (int c = 0; c < kMemoryCategories; ++c) {
    const auto category = static_cast<MemoryCategory>(c);
    bool any = false;
    for (const StageFacts& stage : f.stages) any = any || stage.memory[category] > 0;
    if (!any) continue;
    used.push_back(category);
    header.push_back(name(category));
  }
  const bool context = f.stages.front().memory.context_bytes > 0;
  if (context) header.push_back("context");
  header.push_back("total");
  TextTable table(header);
  double all = 0;
  for (std::size_t s = 0; s < f.stages.size(); ++s) {
    std::vector<std::string> row{text(static_cast<std::int64_t>(s))};
    for (MemoryCategory category : used)
      row.push_back(bytes_text(static_cast<double>(f.stages[s].memory[category])));
    if (context) row.push_back(bytes_text(static_cast<double>(f.stages[s].memory.context_bytes)));
    row.push_back(bytes_text(static_cast<double>(f.stages[s].memory.total())));
    table.row(row);
    all += static_cast<double>(f.stages[s].memory.total()) * (f.ranks() / f.options.mesh.pp);
  }
  fmt::print("{}  fullest rank {}, all {} ranks at most {}\n", table.text(kRows),
             bytes_text(static_cast<double>(f.largest_rank_bytes())), f.ranks(), bytes_text(all));
  const double full = static_cast<double>(f.fullest_rank(&StageFacts::full)),
               planned = static_cast<double>(f.fullest_rank(&StageFacts::planned));
  if (f.planned_steps == 0 || planned > kMuchLess * full) return;
  if (f.all_planned)
    fmt::print("  full micro-batches, which this run's steps do not have, would take {}\n",
               bytes_text(full));
  else
    fmt::print("  that is of full micro-batches; the first {} as planned: at most {}\n",
               f.planned_steps == 1 ? "step" : fmt::format("{} steps", f.planned_steps),
               bytes_text(planned));
}

struct FirstSteps {
  std::vector<StepPlan> plans;
  SimulationOptions memory;
};

/// The first steps as they are planned, and the balance of the first.
void plan_first_steps(const Config& config, const std::shared_ptr<const Costs>& costs,
                      CheckFacts& f, nlohmann::ordered_json& twin, FirstSteps& first) {
  PlannedRun run(config, costs);
  first.memory = run.memory_options();
  const std::int64_t steps =
      std::clamp(config.run.steps, std::int64_t{1}, std::int64_t{kCountedSteps});
  std::size_t micro_batches = 0;
  for (std::int64_t i = 0; i < steps && micro_batches < kCountedMicroBatches; ++i) {
    PlannedRun::Step step = run.next();
    micro_batches += step.plan.micro_batches.size();
    f.add_planned(step.plan, step.simulated);
    if (i == 0) {
      f.balance = expected_balance(config, step.plan, step.simulated);
      twin["expected_balance"] = {{"idle_ranks", step.simulated.idle_ranks},
                                  {"load_balance", step.simulated.load_balance},
                                  {"text", f.balance}};
    }
    first.plans.push_back(std::move(step.plan));
  }
}

/// What the planned steps hold at once: of a run that was planned whole its own peaks.
void count_planned(const FirstSteps& first, bool all, CheckFacts& f) {
  const auto take = [&](const std::vector<MemoryEstimate>& peaks) {
    for (std::size_t s = 0; s < f.stages.size(); ++s) f.stages[s].planned.take_larger(peaks.at(s));
  };
  if (all) return take(run_memory(first.plans, first.memory));
  for (const StepPlan& plan : first.plans) take(step_memory(plan, first.memory));
}

/// The first step's balance and what the first steps hold at once, where the deck has data that can
/// be opened: of samples shorter than a sparse pattern's blocks more micro-batches live than of
/// full ones.
void tell_balance(const Config& config, CheckFacts& f, nlohmann::ordered_json& twin) {
  if (!config.is_set(&Config::data)) return;
  const auto note = [&](const Error& e) {
    f.notes.push_back(fmt::format("the first step's balance cannot be told: {}", e.what()));
  };
  FirstSteps first;
  try {
    std::vector<std::string> notes;
    plan_first_steps(config, plan_costs(config, notes), f, twin, first);
  } catch (const UnplannableStep& e) {
    if (f.files.problems.empty())
      f.unplannable = e.what();
    else  // it may come of files that are not here
      note(e);
  } catch (const Error& e) {  // a run goes on where its steps cannot be timed
    note(e);
  }
  if (f.planned_steps == 0) return;
  const bool all = f.planned_steps == config.run.steps;
  count_planned(first, all, f);
  f.take_planned(all);
}

/// What the simulator says of the first steps, in the twin and as a trace.
void simulate_steps(const CommandLine& line, const Config& config, const CheckFacts& f,
                    nlohmann::ordered_json& twin) {
  if (line.json.empty() && line.trace.empty()) return;
  require(line.trace.empty() || config.is_set(&Config::data),
          "no trace of simulated steps: the deck has no block data; state what is trained on");
  if (!config.is_set(&Config::data)) return;
  const std::string folder = line.trace + (f.case_name.empty() ? "" : "/" + f.case_name);
  bool made = false;
  try {
    made = !line.trace.empty() && SimulatedSteps::prepare_trace(folder);
    const SimulatedSteps steps(config, line.steps);
    twin["simulated"] = steps.json();
    if (!line.trace.empty()) steps.write_trace(folder, f);
  } catch (const Error& e) {
    std::error_code holds_files;
    if (made) std::filesystem::remove(folder, holds_files);
    require(line.trace.empty(), "no trace of simulated steps: {}", e.what());
    twin["simulation_refused"] = e.what();
  }
}

void print_whole(const CheckFacts& f) {
  fmt::print("deck {}{}: {}\n", f.file,
             f.case_name.empty() ? "" : fmt::format(", case {}", f.case_name),
             !f.unplannable.empty()     ? "sound, but not all of its steps"
             : f.files.problems.empty() ? "no problems"
                                        : "sound, but not all of its files");
  if (!f.files.data.empty()) fmt::print("\ndata: {}\n", f.files.data);
  print_mesh(f);
  print_model(f);
  print_shards(f);
  print_ring(f);
  print_schedule(f);
  if (!f.balance.empty()) fmt::print("  {}\n", f.balance);
  print_memory(f);
  for (const std::string& note : f.notes) fmt::print("note: {}\n", note);
}

void print_cases(const std::vector<CheckFacts>& cases) {
  const bool whole = std::all_of(cases.begin(), cases.end(), [](const CheckFacts& f) {
    return f.files.problems.empty() && f.unplannable.empty();
  });
  fmt::print("deck {}: {} in {} cases (--case NAME shows one whole)\n\n", cases.front().file,
             whole ? "no problems" : "files are missing or damaged, or steps cannot be planned",
             cases.size());
  TextTable table({"case", "ranks", "dp", "pp", "cp_outer", "cp_inner", "sp", "tp", "parameters",
                   "micro_batch_tokens", "micro_batches", "pair_imbalance", "fullest_rank",
                   "notes"});
  for (const CheckFacts& f : cases) {
    const MeshShape& m = f.options.mesh;
    table.row({f.case_name, text(m.size()), text(m.dp), text(m.pp), text(m.cp_outer),
               text(m.cp_inner), text(m.sp), text(m.tp), count_text(f.options.model.parameters()),
               text(f.micro_batch_tokens), text(f.micro_batches),
               fmt::format("{:.4f}", f.pair_imbalance()),
               bytes_text(static_cast<double>(f.largest_rank_bytes())),
               text(static_cast<std::int64_t>(f.notes.size()))});
  }
  fmt::print("{}", table.text());
}

/// Groups of the profile table; before a selection one group of the longest length stands for all.
/// What is wrong with a table whose groups `train` would take is a problem.
void take_groups(Config& config, DeckNeeds needs, std::vector<std::string>& notes,
                 std::vector<std::string>& problems) {
  const bool stored = takes_stored_groups(config);
  try {
    require(stored, "they are to be selected with `ballast plan`");
    take_stored_groups(config, needs, notes);
  } catch (const Error& e) {
    if (stored) problems.emplace_back(e.what());
    const BatchingConfig& batching = config.batching;
    const std::int64_t tokens = batching.select_lengths.empty() ? batching.micro_batch_tokens
                                                                : batching.select_lengths.back();
    use_groups(config, {{tokens, 1, -1}}, needs);
    notes.push_back(
        fmt::format("batching.groups: {}; one group of {} tokens is shown", e.what(), tokens));
  }
}

/// What is wrong with files, each once, and with steps; whether that is a problem here.
bool tell_problems(const std::vector<CheckFacts>& cases, bool elsewhere) {
  std::vector<std::string> told;
  for (const CheckFacts& f : cases)
    for (const std::string& problem : f.files.problems)
      if (std::find(told.begin(), told.end(), problem) == told.end()) told.push_back(problem);
  for (const std::string& problem : told)
    if (elsewhere)
      fmt::print("note: {}\n", problem);
    else
      fmt::print(stderr,
                 "ballast: {}; `train` would stop here (--elsewhere: it is for another "
                 "machine)\n",
                 problem);
  bool stops = !elsewhere && !told.empty();
  for (const CheckFacts& f : cases) {
    if (f.unplannable.empty()) continue;
    fmt::print(stderr, "ballast: {}{}; `train` would stop there\n", f.unplannable,
               f.case_name.empty() ? "" : fmt::format(" (case {})", f.case_name));
    stops = true;
  }
  return stops;
}

}  // namespace

int check_command(const CommandLine& line) {
  std::vector<CheckFacts> cases;
  std::vector<nlohmann::ordered_json> twins;
  const DeckNeeds needs{.model = true, .data = false, .groups = false};
  for (Config& config : line.configs(needs)) {
    std::vector<std::string> notes, problems;
    if (takes_stored_groups(config) || lacks_groups(config))
      take_groups(config, needs, notes, problems);
    OpenedFiles opened = open_files_of(config);
    opened.problems.insert(opened.problems.end(), problems.begin(), problems.end());
    cases.push_back(CheckFacts::of(config, std::move(opened)));
    cases.back().notes.insert(cases.back().notes.end(), notes.begin(), notes.end());
    nlohmann::ordered_json balance = nlohmann::ordered_json::object();
    tell_balance(config, cases.back(), balance);
    twins.push_back(cases.back().json());
    twins.back().update(balance);
    simulate_steps(line, config, cases.back(), twins.back());
    const OpenedFiles& files = cases.back().files;
    twins.back()["data"] = {{"text", files.data}, {"loss_share", files.loss_share}};
    twins.back()["file_problems"] = files.problems;
    twins.back()["unplannable"] = cases.back().unplannable;
    add_plans(twins.back(), config, line.plans);
  }
  if (cases.size() == 1) {
    print_whole(cases.front());
    write_json(line.json, twins.front());
  } else {
    print_cases(cases);
    write_json(line.json, {{"deck", line.deck_file}, {"cases", twins}});
  }
  return tell_problems(cases, line.elsewhere) ? 1 : 0;
}

}  // namespace ballast

// ballast pack: the Batch plans of one epoch over the deck's data, without ranks, and how well they
// are balanced.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <optional>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/observe/text_table.hpp"
#include "app/plan/compared_placements.hpp"
#include "app/plan/first_plans.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/planned_samples.hpp"
#include "core/base/error.hpp"
#include "core/config/deck_rules.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/batch_metrics.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/placed_batch.hpp"
#include "core/predict/placement_costs.hpp"

namespace ballast {
namespace {

struct PackFacts {
  std::string case_name, data;
  RunOptions options;
  BatchMetrics metrics;
  double plan_seconds = 0;
  std::shared_ptr<const Costs> costs;  ///< where the deck has a profile table or states them
  SimulationOptions simulation;
  StepOptions step;
  std::optional<BudgetAverages> averages;  ///< sab balances by, as the steps before left them
  RunFacts run, full;                      ///< all and the full batches by those costs
  /// Rank-seconds of every sample alone on one rank, over the ranks; of full batches.
  double bound_s = 0, full_bound_s = 0;
  std::string not_trained;  ///< why `train` runs other batches; "" where it runs these
  std::string source;       ///< of a compared placement
  bool apart = false;       ///< a bound without plans
  double transfers_s = 0;   ///< of it: sum over steps
  std::vector<std::string> notes;

  void time(const Batch& batch, bool is_full) {
    if (costs) time(plan_batch_step(batch, step), is_full);
  }
  void time(const StepPlan& plan, bool is_full) {
    const SimulatedStep simulated = simulate(plan, simulation, *costs);
    if (averages) averages->update(simulated.budgets.sums, simulated.budgets.counts);
    run.add({plan, simulated, 0});
    if (is_full) full.add({plan, simulated, 0});
    add_bound(plan, is_full);
  }
  /// Attention apart from tokens has no plan: its steps are a bound by the same costs.
  void time_apart(const std::vector<SampleLength>& samples, bool is_full) {
    const AttentionApart apart =
        attention_apart(samples, placement_options(step.batching), *step.batching.placement_costs);
    for (RunFacts* facts : {&run, &full})
      if (facts == &run || is_full)
        ++facts->steps, facts->step_s += apart.even_s, facts->load_balance += 1;
    transfers_s += apart.transfers_s;
    add_bound(plan_batch_step(plan_batch(0, samples, step.batching), step), is_full);
  }
  double step_over_bound() const { return bound_s > 0 ? run.step_s / bound_s : 0; }
  /// What means are of: what an epoch leaves at its end is no step of a run.
  const RunFacts& steps() const { return full.steps > 0 ? full : run; }

 private:
  void add_bound(const StepPlan& plan, bool is_full) {
    const double seconds = alone_seconds(plan);
    bound_s += seconds;
    if (is_full) full_bound_s += seconds;
  }
  /// Seconds of a step whose samples each run alone on one rank of every stage, work spread evenly.
  double alone_seconds(const StepPlan& plan) const {
    PlacedWork work;
    work.layers = simulation.layers;
    work.mesh.pp = options.mesh.pp;
    work.recompute = simulation.recompute;
    work.budget = simulation.base_budget;
    const StepPlacementCosts alone(*costs, work);
    double sum = 0;
    for (const PlannedMicroBatch& m : plan.micro_batches)
      for (const Segment& s : m.segments) sum += seconds({s}, {}, alone, m.align);
    return sum / (options.mesh.replicas());
  }
};

/// Wall time of `plan`, added to `seconds`.
template <class F>
auto timed(double& seconds, F&& plan) {
  const auto begin = std::chrono::steady_clock::now();
  auto result = plan();
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

/// batching.scope = "epoch": the whole epoch packed at once.
void pack_epoch(PlannedSamples& planned, PackFacts& f, BatchMeter& meter) {
  const auto samples = planned.first(planned.training_samples());
  const std::vector<Batch> batches =
      timed(f.plan_seconds, [&] { return plan_epoch(samples, f.options.batching); });
  for (const Batch& batch : batches) {
    const bool is_full = BatchMeter::is_full(batch);
    meter.add(batch, is_full);
    f.time(batch, is_full);
  }
}

/// One step's samples, by the deck's method or by that of a compared placement.
Batch batch_of_step(std::int64_t step, const std::vector<SampleLength>& samples, bool is_full,
                    const ComparedPlacement* compared, PackFacts& f) {
  if (!compared || !compared->place) {
    Batch batch =
        timed(f.plan_seconds, [&] { return plan_batch(step, samples, f.options.batching); });
    if (f.apart)
      f.time_apart(samples, is_full);
    else
      f.time(batch, is_full);
    return batch;
  }
  const Placement placed = timed(f.plan_seconds, [&] {
    return compared->place(samples, placement_options(f.step.batching),
                           *f.step.batching.placement_costs);
  });
  f.time(plan_placement_step(step, placed, samples, f.step), is_full);
  return plan_placed(step, placed, samples, f.step.batching);
}

/// batching.scope = "step": each global batch by itself, as training does.
void pack_steps(PlannedSamples& planned, const ComparedPlacement* compared, PackFacts& f,
                BatchMeter& meter) {
  SamplerPosition position;
  for (std::int64_t step = 0; position.epoch == 0; ++step) {
    // The batch that would reach into the next epoch ends with this one, so that every sample
    // counts once.
    const std::size_t left = static_cast<std::size_t>(planned.training_samples() - position.index);
    auto samples = planned.next(position);
    const bool is_full = samples.size() <= left;
    if (!is_full) samples.resize(left);
    meter.add(batch_of_step(step, samples, is_full, compared, f), is_full);
  }
}

/// Into `f`, which stays where it is: its plans refer to its members.
void pack(const Config& config, const ComparedPlacement* compared, PackFacts& f) {
  PlannedSamples planned(config);
  planned.begin_with_curriculum();
  if (const std::string note = short_curriculum(config, planned.sampler()); !note.empty())
    f.notes.push_back(note);
  f.case_name = compared ? compared->name : config.from.case_name;
  if (compared) f.source = compared->source, f.apart = compared->apart;
  f.data = planned.dataset().description();
  if (const auto wrong = problems(config, {.model = false, .data = true}); !wrong.empty())
    f.not_trained = wrong.front().message();
  if (compared && compared->only_planned())
    f.not_trained = "planned for comparison alone, `train` has no such method";
  f.options = RunOptions::from(config);
  const Batching method = config.batching.method;
  if (compared || has_costs(config) || method == Batching::balanced || method == Batching::sab) {
    f.costs = plan_costs(config, f.notes);
    f.simulation = simulation_options(config, f.options);
    if (method == Batching::sab) {
      f.averages.emplace(static_cast<double>(f.simulation.dst.base_budget), config.sab.decay);
      f.options.batching.sample_cost = [&f](std::int64_t tokens) {
        return sample_seconds(*f.costs, tokens, f.averages->budget(tokens),
                              own_split(f.options.mesh), f.simulation.recompute.of(0));
      };
    }
    f.step = step_options(config, f.options, f.simulation, *f.costs);
    f.options.batching.placement_costs = f.step.batching.placement_costs;
  }
  BatchMeter meter(f.options.batching, f.options.mesh.cp() * f.options.mesh.sp);
  if (config.batching.scope == BatchScope::epoch)
    pack_epoch(planned, f, meter);
  else
    pack_steps(planned, compared, f, meter);
  f.metrics = meter.result();
}

nlohmann::ordered_json histogram(const std::vector<std::int64_t>& counts,
                                 const std::vector<double>& edges) {
  return {{"edges", edges}, {"counts", counts}};
}

nlohmann::ordered_json json(const GroupMetrics& g) {
  std::vector<double> shares, powers{0};
  for (int b = 0; b <= GroupMetrics::kBins; ++b)
    shares.push_back(static_cast<double>(b) / GroupMetrics::kBins);
  for (std::size_t b = 0; b < g.lengths.size(); ++b)
    powers.push_back(static_cast<double>(std::int64_t{1} << b));
  return {{"group_tokens", g.group.tokens},
          {"group_ranks", g.group.ranks},
          {"group_recompute", g.group.recompute_layers},
          {"samples", g.samples},
          {"tokens", g.tokens},
          {"packs", g.packs},
          {"tail_packs", g.tail_packs},
          {"batches", g.batches},
          {"dbr", g.dbr},
          {"pr", g.pr},
          {"abr", g.abr},
          {"histograms",
           {{"fill", histogram(g.fill, shares)},
            {"attention", histogram(g.attention, shares)},
            {"lengths", histogram(g.lengths, powers)}}}};
}

nlohmann::ordered_json json(const PackFacts& f) {
  const BatchMetrics& m = f.metrics;
  nlohmann::ordered_json out;
  if (!f.case_name.empty()) out["name"] = f.case_name;
  out.update({{"method", ballast::name(f.options.batching.method)},
              {"dp", f.options.mesh.dp},
              {"dbr", m.dbr},
              {"pr", m.pr},
              {"abr", m.abr},
              {"cr", m.cr},
              {"cr_bound", m.cr_bound},
              {"ave_t", m.ave_t},
              {"samples", m.samples},
              {"tokens", m.tokens},
              {"longest", m.longest},
              {"packs", m.packs},
              {"tail_packs", m.tail_packs},
              {"batches", m.batches},
              {"plan_seconds", f.plan_seconds},
              {"data", f.data}});
  out["length_share"] = m.length_share;
  out["trains"] = f.not_trained.empty();
  if (!f.not_trained.empty()) out["not_trained"] = f.not_trained;
  if (!f.source.empty()) out["source"] = f.source;
  if (f.apart) out["transfer_seconds"] = f.run.mean(f.transfers_s);
  if (f.costs)
    out.update({{"run_seconds", f.run.step_s},
                {"step_seconds", f.steps().mean_step_s()},
                {"bound_seconds", f.steps().mean(f.full.steps > 0 ? f.full_bound_s : f.bound_s)},
                {"step_over_bound", f.step_over_bound()},
                {"load_balance", f.steps().mean(f.steps().load_balance)},
                {"idle_ranks", f.steps().mean(f.steps().idle_ranks)}});
  out["groups"] = nlohmann::ordered_json::array();
  for (const GroupMetrics& g : m.groups) out["groups"].push_back(json(g));
  return out;
}

/// Columns from the left: `labels`, then what a group and the whole have in common.
template <class M>
std::vector<std::string> balance_row(std::vector<std::string> labels, const M& m) {
  for (const double value : {m.dbr, m.pr, m.abr}) labels.push_back(fmt::format("{:.4f}", value));
  for (const std::int64_t value : {m.samples, m.tokens, m.packs, m.batches, m.tail_packs})
    labels.push_back(fmt::to_string(value));
  return labels;
}

std::vector<std::string> labels_of(const std::vector<PackFacts>& cases, const std::string& label) {
  return std::vector<std::string>(cases.front().case_name.empty() ? 0 : 1, label);
}

/// Columns of planned times; "-" for a case without costs.
std::vector<std::string> times_of(const PackFacts& f) {
  if (!f.costs) return std::vector<std::string>(5, "-");
  const RunFacts& steps = f.steps();
  return {fmt::format("{:.2f}", f.run.step_s), fmt::format("{:.4f}", steps.mean_step_s()),
          fmt::format("{:.4f}", f.step_over_bound()),
          fmt::format("{:.4f}", steps.mean(steps.load_balance)),
          fmt::format("{:.2f}", steps.mean(steps.idle_ranks))};
}

void print_balance(const std::vector<PackFacts>& cases, bool timed) {
  std::vector<std::string> header = labels_of(cases, "case");
  for (const char* column :
       {"method", "dp", "dbr", "pr", "abr", "samples", "tokens", "packs", "batches", "tail_packs",
        "cr", "cr_bound", "ave_t", "length_share", "plan_seconds"})
    header.push_back(column);
  if (timed)
    for (const char* column : {"run_s", "step_s", "over_bound", "load_balance", "idle_ranks"})
      header.push_back(column);
  header.push_back("trains");
  TextTable table(header);
  for (const PackFacts& f : cases) {
    std::vector<std::string> row = labels_of(cases, f.case_name);
    row.push_back(ballast::name(f.options.batching.method));
    row.push_back(fmt::to_string(f.options.mesh.dp));
    row = balance_row(row, f.metrics);
    const bool hbp = f.options.batching.method == Batching::hbp;
    for (const std::string& value :
         {fmt::format("{:.4f}", f.metrics.cr),
          hbp ? fmt::format("{:.4f}", f.metrics.cr_bound) : std::string("-"),
          fmt::format("{:.1f}", f.metrics.ave_t), fmt::format("{:.4f}", f.metrics.length_share),
          fmt::format("{:.6f}", f.plan_seconds)})
      row.push_back(value);
    if (timed) std::ranges::copy(times_of(f), std::back_inserter(row));
    row.push_back(f.not_trained.empty() ? "yes" : "not trained");
    table.row(row);
  }
  fmt::print("{}", table.text());
}

void print_groups(const std::vector<PackFacts>& cases) {
  std::vector<std::string> header = labels_of(cases, "case");
  for (const char* column : {"group", "ranks", "dbr", "pr", "abr", "samples", "tokens", "packs",
                             "batches", "tail_packs"})
    header.push_back(column);
  TextTable groups(header);
  bool grouped = false;
  for (const PackFacts& f : cases) {
    if (f.options.batching.method != Batching::hbp) continue;
    grouped = true;
    for (const GroupMetrics& g : f.metrics.groups) {
      std::vector<std::string> row = labels_of(cases, f.case_name);
      row.push_back(fmt::to_string(g.group.tokens));
      row.push_back(fmt::to_string(g.group.ranks));
      groups.row(balance_row(row, g));
    }
  }
  if (grouped) fmt::print("packing groups\n{}", groups.text());
}

void print_legend(bool timed) {
  fmt::print(
      "dbr, abr: sum(max - x) / (max N) over data-parallel ranks, x = tokens, x = sum of squared "
      "lengths; pr: sum(length - tokens) / "
      "(length packs), length = that of\n"
      "the pack's group (none, sorted: padded to the longest sample); means over the full batches "
      "of one epoch, the others' packs are "
      "tail_packs;\n"
      "cr: share of tokens in micro-batches spread over several ranks, cr_bound: in samples longer "
      "than every group of one rank; ave_t: tokens of a rank in a "
      "batch;\nlength_share: share of the variance of log length that the step explains, near "
      "batches / samples where steps are drawn at random; trains: whether `train` runs these "
      "batches\n");
  if (timed)
    fmt::print(
        "run_s: planned seconds of all batches, from the deck's profile table or costs; a rank "
        "waits for those it shares packs with and for the step's end; over_bound: over the time of "
        "every sample alone on one rank, divided by ranks;\n"
        "step_s, and load_balance (mean / max of useful seconds over all ranks) and idle_ranks "
        "(without a micro-batch): means over the full batches\n");
}

void print_notes(const std::vector<PackFacts>& cases) {
  for (const PackFacts& f : cases)
    if (!f.not_trained.empty())
      fmt::print("not trained{}: {}\n", f.case_name.empty() ? "" : ", " + f.case_name,
                 f.not_trained);
  const auto in_all = [&](const std::string& note) {
    return std::all_of(cases.begin(), cases.end(), [&](const PackFacts& f) {
      return std::find(f.notes.begin(), f.notes.end(), note) != f.notes.end();
    });
  };
  for (const PackFacts& f : cases)
    for (const std::string& note : f.notes)
      if (!in_all(note))
        fmt::print("note: {}: {}\n", f.case_name, note);
      else if (&f == &cases.front())
        fmt::print("note: {}\n", note);
}

void print(const std::vector<PackFacts>& cases) {
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (i == 0 || cases[i].data != cases[i - 1].data) fmt::print("data {}\n", cases[i].data);
  const bool timed = std::any_of(cases.begin(), cases.end(),
                                 [](const PackFacts& f) { return f.costs != nullptr; });
  print_balance(cases, timed);
  print_groups(cases);
  print_legend(timed);
  print_notes(cases);
}

/// Rows of one deck's placements, the first one's time in all of them.
void print_compared(const std::vector<PackFacts>& cases) {
  const PackFacts& first = cases.front();
  fmt::print("data {}\n{} samples, {} tokens, {} steps; times: {}\n", first.data,
             first.metrics.samples, first.metrics.tokens, first.run.steps, first.costs->source());
  const std::string over_first = "over_" + first.case_name;
  TextTable table({"placement", "step_s", "over_bound", over_first, "load_balance", "idle_ranks",
                   "cr", "length_share", "plan_ms", "trains"});
  for (const PackFacts& f : cases) {
    const double steps = static_cast<double>(std::max<std::int64_t>(1, f.run.steps));
    const RunFacts& means = f.steps();
    table.row({f.case_name, fmt::format("{:.4f}", means.mean_step_s()),
               fmt::format("{:.4f}", f.step_over_bound()),
               fmt::format("{:.4f}", f.run.step_s / first.run.step_s),
               fmt::format("{:.4f}", means.mean(means.load_balance)),
               !f.apart ? fmt::format("{:.2f}", means.mean(means.idle_ranks)) : "-",
               !f.apart ? fmt::format("{:.4f}", f.metrics.cr) : "-",
               fmt::format("{:.4f}", f.metrics.length_share),
               !f.apart ? fmt::format("{:.2f}", 1e3 * f.plan_seconds / steps) : "-",
               f.not_trained.empty() ? "yes" : "not trained"});
  }
  fmt::print(
      "{}step_s: mean planned seconds of a step; over_bound: over the time of every sample alone "
      "on one rank, divided by ranks; {}: over the first row's;\ncr: share of tokens in "
      "micro-batches spread over several ranks; length_share: share of the variance of log length "
      "that the step explains; plan_ms: planning a step\n",
      table.text(), over_first);
  for (const PackFacts& f : cases)
    fmt::print("{}: {}{}\n", f.case_name, f.source,
               f.not_trained.empty() ? "" : "; not trained: " + f.not_trained);
  for (const PackFacts& f : cases)
    if (f.apart)
      fmt::print("{}: transfers that do not hide add {:.4f} s a step\n", f.case_name,
                 f.run.mean(f.transfers_s));
}

/// What has no plan of some step is left out.
int compare(const Config& config, const CommandLine& line) {
  std::vector<std::string> notes;
  std::vector<PackFacts> cases;
  const std::vector<ComparedPlacement> placements = compared_placements(config, notes);
  cases.reserve(placements.size());
  auto list = nlohmann::ordered_json::array();
  for (const ComparedPlacement& placement : placements) try {
      pack(placement.config, &placement, cases.emplace_back());
      list.push_back(json(cases.back()));
      if (!placement.only_planned()) add_plans(list.back(), placement.config, line.plans);
    } catch (const Error& e) {
      cases.pop_back();
      notes.push_back(fmt::format("{} is left out: {}", placement.name, e.what()));
    }
  require(!cases.empty(), "nothing to compare: {}", fmt::join(notes, "; "));
  print_compared(cases);
  for (const std::string& note : notes) fmt::print("note: {}\n", note);
  write_json(line.json, nlohmann::ordered_json{{"cases", list}});
  return 0;
}

}  // namespace

int pack_command(const CommandLine& line) {
  const std::vector<Config> configs =
      line.configs({.model = false, .data = true, .executes = false});
  if (line.compare) {  // whose rows read the keys of other methods too
    require(configs.size() == 1,
            "--compare sets one deck's placements side by side; choose one of "
            "its cases with --case");
    return compare(configs.front(), line);
  }
  tell_deck_notes(configs);
  std::vector<PackFacts> cases(configs.size());
  for (std::size_t c = 0; c < configs.size(); ++c) pack(configs[c], nullptr, cases[c]);
  print(cases);
  auto list = nlohmann::ordered_json::array();
  for (std::size_t c = 0; c < cases.size(); ++c) {
    list.push_back(json(cases[c]));
    add_plans(list.back(), configs[c], line.plans);
  }
  write_json(line.json, cases.size() == 1 ? list.front() : nlohmann::ordered_json{{"cases", list}});
  return 0;
}

}  // namespace ballast

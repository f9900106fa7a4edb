// ballast profile: measures a layer over lengths and budgets, and the links of the mesh, into a
// profile table; then times layers that the table did not see and prints how well it, the FLOPs
// alone and the length alone predict them (SparseBalance Section IV-B, Figure 6).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "app/command/command_line.hpp"
#include "app/measure/profile_layer.hpp"
#include "app/measure/profile_links.hpp"
#include "app/observe/json_output.hpp"
#include "app/observe/text_table.hpp"
#include "app/plan/deck_profile.hpp"
#include "app/plan/plan.hpp"
#include "app/train/session.hpp"
#include "ballast_version.hpp"
#include "core/base/random.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/predict/latency_model.hpp"
#include "io/profile/profile_file.hpp"

namespace ballast {
namespace {

/// Measured times are the slowest rank's: all ranks measure at once.
class Measurement {
 public:
  Measurement(const Communicator& world, ProfileTable& table) : world_(world), table_(table) {}
  void add(ProfileRow row, const MeasuredPasses& passes) {
    for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward}) {
      const MeasuredTime& t = pass == ProfilePass::forward ? passes.forward : passes.backward;
      row.pass = pass;
      row.median_s = world_.all_reduce(t.median_s, Reduction::max);
      row.spread_s = world_.all_reduce(t.spread_s, Reduction::max);
      row.bytes = world_.all_reduce(t.bytes, Reduction::max);
      table_.rows.push_back(row);
    }
  }

 private:
  const Communicator& world_;
  ProfileTable& table_;
};

/// Measures a point and adds its rows.  Full recompute runs the forward of attention again in
/// backward: its rows are sums of measured ones.
void measure(const ProfileBins& bins, const ProfilePoint& point, LayerProfiler& layer,
             Measurement& rows) {
  const auto& [part, pattern, n, p, k, recompute] = point;
  if (part == ProfilePart::rest) {
    rows.add({part, {}, n, 0, 0, 1, recompute}, layer.rest(n, recompute));
    return;
  }
  const MeasuredPasses once =
      part == ProfilePart::head ? layer.head(n) : layer.attention({{n, p}}, k, bins.block_tokens);
  for (const Recompute mode : bins.recompute) {
    MeasuredPasses passes = once;
    if (part == ProfilePart::attention && mode == Recompute::full) {
      passes.backward.median_s += once.again.median_s;
      passes.backward.spread_s += once.again.spread_s;
    }
    rows.add({part, pattern, n, p, k, 1, mode}, passes);
  }
}

/// A step works for seconds at the device's power limit, where clocks are lower than in the short
/// runs of a point: the ratio of a layer that runs again and again for some seconds, after others
/// that make the device hot, to what the rows say of it.  The rows become times of such work.
/// Collective.
double sustain(const Communicator& world, const ProfileBins& bins, double seconds,
               LayerProfiler& layer, ProfileTable& measured) {
  constexpr std::int64_t kTokens = 16384;  // enough that launches do not decide
  RepeatRule rule;  // of each pass a third of the time goes by before the timed sixth
  rule.heat_s = seconds / 3, rule.batch_s = seconds / 6, rule.pass_s = 2 * rule.heat_s;
  rule.least = rule.most = 1;
  rule.most_runs = std::numeric_limits<std::int32_t>::max();  // `seconds` decide
  layer.repeat(rule);
  std::int64_t tokens = bins.lengths.front();
  for (const std::int64_t n : bins.lengths)
    if (n <= kTokens) tokens = n;
  const std::vector<BudgetSegment> segments{{tokens, 0}};
  const MeasuredPasses hot = layer.whole(segments, 0, bins.block_tokens, bins.recompute.front());
  double said = 0;
  for (const ProfileRow& r : measured.rows)
    if (r.part != ProfilePart::head && r.query_tokens == tokens && r.prefix_tokens == 0 &&
        r.budget == 0 && r.recompute == bins.recompute.front())
      said += r.median_s;
  const double ratio =
      world.all_reduce((hot.forward.median_s + hot.backward.median_s) / said, Reduction::max);
  for (ProfileRow& r : measured.rows) r.median_s *= ratio, r.spread_s *= ratio;
  return ratio;
}

/// Chooses how often passes run, so that all take about profile.target_s, and says how long that
/// will be.  Collective.
RepeatRule repeat_rule(const Communicator& world, const Config& config, const ProfileBins& bins,
                       const std::vector<ProfilePoint>& points, bool gpu, LayerProfiler& layer) {
  RepeatRule rule;
  rule.warmup = config.profile.warmup;
  rule.most = config.profile.repeats;
  rule.heat_s = gpu ? 0.1 : 0;
  rule.pass_s = 0;
  layer.repeat(rule);
  const auto both = [&](const MeasuredPasses& passes) {
    return world.all_reduce(passes.forward.median_s + passes.backward.median_s, Reduction::max);
  };
  PilotTimes pilot;
  pilot.tokens = bins.lengths[bins.lengths.size() / 2];
  pilot.rest_s = both(layer.rest(pilot.tokens, bins.recompute.front()));
  pilot.attention_s = both(layer.attention({{pilot.tokens, 0}}, 0, bins.block_tokens));
  pilot.head_s = both(layer.head(pilot.tokens));
  std::vector<double> runs = estimated_run_seconds(points, pilot, bins.block_tokens);
  const std::int64_t held_out = config.profile.held_out;
  const double low_n = static_cast<double>(bins.lengths.front()),
               times_n = static_cast<double>(bins.lengths.back()) / low_n;
  for (std::int64_t i = 0; i < held_out; ++i) {  // log-uniform lengths, as draw_points has them
    const auto n = std::llround(
        low_n * std::pow(times_n, (static_cast<double>(i) + 0.5) / static_cast<double>(held_out)));
    const auto parts = estimated_run_seconds(
        {{ProfilePart::rest, {}, n}, {ProfilePart::attention, {}, n}}, pilot, bins.block_tokens);
    runs.push_back(parts[0] + parts[1]);
  }
  const auto total = [&] {
    double s = 0;
    for (const double run : runs) s += 2 * rule.seconds(run);
    return s;
  };
  // The share of a pass that fits; time in it never falls when the share grows.
  const double target = config.profile.target_s;
  double low = 0, high = target;
  for (int i = 0; i < 40; ++i) {
    rule.pass_s = (low + high) / 2;
    (total() <= target ? low : high) = rule.pass_s;
  }
  rule.pass_s = low;
  if (world.rank() == 0) {
    fmt::print("profile: {} points and {} held-out layers, about {:.0f} s of timed runs{}\n",
               points.size(), held_out, std::ceil(total()),
               total() > target
                   ? fmt::format(": more than profile.target_s = {}, even with {} repeats a point; "
                                 "shorten profile.lengths, prefixes or budgets",
                                 target, std::min(rule.least, rule.most))
                   : "");
    std::fflush(stdout);
  }
  return rule;
}

/// A layer that the table did not see, and what each predictor says of it.  Seconds, forward and
/// backward.
struct HeldOut {
  std::vector<BudgetSegment> segments;
  std::int64_t budget = 0;
  double measured_s = 0, table_s = 0, flops_s = 0, length_s = 0;
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const BudgetSegment& s : segments) sum += s.query_tokens;
    return sum;
  }
};

/// Log-uniform lengths between the bins, alone and (every other point) with up to three more in one
/// pack; budgets between theirs.
std::vector<HeldOut> draw_points(const ProfileBins& bins, std::int64_t count, std::uint64_t seed) {
  std::vector<HeldOut> points(static_cast<std::size_t>(count));
  std::uint64_t drawn = 0;
  const auto between = [&](std::int64_t low, std::int64_t high) {
    const double u = random_uniform(seed, stream_of("profile held out"), drawn++);
    return std::exp(std::log(static_cast<double>(low)) +
                    u * (std::log(static_cast<double>(high)) - std::log(static_cast<double>(low))));
  };
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::int64_t low = bins.lengths.front(), high = bins.lengths.back();
    std::int64_t left = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(between(low, high)) / kBlock * kBlock, low, high);
    const int pieces = i % 2 == 0 ? 1 : 2 + static_cast<int>(i / 2 % 3);
    for (int s = 1; s < pieces && left >= 2 * low; ++s) {
      points[i].segments.push_back(
          {std::max(low, static_cast<std::int64_t>(between(low, left - low)) / kBlock * kBlock),
           0});
      left -= points[i].segments.back().query_tokens;
    }
    points[i].segments.push_back({std::max(low, left), 0});
    if (!bins.budgets.empty())
      points[i].budget = std::lround(between(bins.budgets.front(), bins.budgets.back()));
  }
  return points;
}

MicroBatch micro_batch(const std::vector<BudgetSegment>& segments) {
  MicroBatch m;
  for (const BudgetSegment& s : segments)
    m.segments.push_back({static_cast<std::int64_t>(m.segments.size()), s.prefix_tokens,
                          s.prefix_tokens + s.query_tokens, 0});
  return m;
}

double pairs(const std::vector<BudgetSegment>& segments, std::int64_t budget, std::int64_t block) {
  double sum = 0;
  for (const BudgetSegment& s : segments)
    sum += static_cast<double>(s.query_tokens) *
           mean_keys(s.query_tokens, s.prefix_tokens, budget, block);
  return sum;
}

/// The two analytic predictors, fitted to the layers of the table: FLOPs over one rate, and a curve
/// of the tokens alone.
struct Analytic {
  double rate = 1;
  PowerCurve by_length;
  Analytic(const ProfileBins& bins, const LatencyModel& model, const LayerProfiler& layer) {
    std::vector<double> rates, tokens, seconds;
    for (const std::int64_t n : bins.lengths) {
      double logs = 0, count = 0;
      const auto add = [&](std::int64_t budget) {
        const std::vector<BudgetSegment> one{{n, 0}};
        const double s = model.predict(micro_batch(one), budget).total_s();
        rates.push_back(layer.flops(n, pairs(one, budget, bins.block_tokens)) / s);
        logs += std::log(s), ++count;
      };
      if (bins.budgets.empty()) add(0);
      for (const std::int64_t k : bins.budgets) add(k);
      tokens.push_back(static_cast<double>(n));
      seconds.push_back(std::max(seconds.empty() ? 0.0 : seconds.back(), std::exp(logs / count)));
    }
    std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2),
                     rates.end());
    rate = rates[rates.size() / 2];
    by_length = PowerCurve(tokens, seconds);
  }
};

double median_error(const std::vector<HeldOut>& points, double HeldOut::*predicted) {
  std::vector<double> errors;
  for (const HeldOut& p : points) errors.push_back(std::abs(p.*predicted / p.measured_s - 1));
  std::sort(errors.begin(), errors.end());
  return errors.empty() ? 0 : errors[errors.size() / 2];
}

TextTable table_text(const PlanPart& part) {
  TextTable table(part.header);
  for (const auto& row : part.rows) table.row(row);
  return table;
}

nlohmann::ordered_json rows_json(const ProfileTable& table) {
  auto list = nlohmann::ordered_json::array();
  for (const ProfileRow& r : table.rows)
    list.push_back({{"part", name(r.part)},
                    {"pattern", pattern_text(r)},
                    {"query_tokens", r.query_tokens},
                    {"prefix_tokens", r.prefix_tokens},
                    {"budget", r.budget},
                    {"sp", r.sp},
                    {"recompute", name(r.recompute)},
                    {"pass", name(r.pass)},
                    {"median_s", r.median_s},
                    {"spread_s", r.spread_s},
                    {"bytes", r.bytes}});
  return list;
}

void print(const ProfileTable& table) {
  TextTable text({"part", "pattern", "tokens", "prefix", "budget", "recompute", "forward_ms",
                  "backward_ms", "spread_ms", "bytes"});
  for (std::size_t i = 0; i + 1 < table.rows.size(); i += 2) {
    const ProfileRow &f = table.rows[i], &b = table.rows[i + 1];
    text.row({name(f.part), f.pattern ? pattern_text(f) : "-", fmt::to_string(f.query_tokens),
              fmt::to_string(f.prefix_tokens), f.budget == 0 ? "-" : fmt::to_string(f.budget),
              name(f.recompute), fmt::format("{:.4f}", 1e3 * f.median_s),
              fmt::format("{:.4f}", 1e3 * b.median_s),
              fmt::format("{:.4f}", 1e3 * (f.spread_s + b.spread_s)), fmt::to_string(f.bytes)});
  }
  fmt::print("{}", text.text());
  for (const ProfileLink& l : table.links)
    fmt::print("link {}: {:.2f} us, {:.2f} GB/s each way\n", l.level, 1e6 * l.latency_s,
               1e-9 * l.bytes_per_s);
}

/// What one run of the command found.
struct Profiled {
  std::string path;
  ProfileTable measured;
  std::vector<HeldOut> held_out;
  std::vector<std::string> notes;
  PatternKind pattern = PatternKind::dense;
  std::optional<PlanPart> selected;
  double seconds = 0;
  double sustained = 1;  ///< times of sustained work over those of the points' own runs
  double error(double HeldOut::*predicted) const { return median_error(held_out, predicted); }
};

/// Writes the table and returns it as it will be read.  One that would be refused goes elsewhere:
/// an earlier one at `path` stays.  Collective.
ProfileTable keep(const Communicator& world, const Config& config, Profiled& found) {
  ProfileTable table;
  together(world, [&] {
    const bool writes = world.rank() == 0;
    try {
      table = checked(found.measured, config.profile.repair_limit, found.notes);
    } catch (const Error& e) {
      const std::string kept =
          std::filesystem::path(found.path).replace_extension(".refused.h5").string();
      if (writes) write_profile(kept, found.measured);
      fail(
          "{}; what was measured is kept in {}, which profile.table may name with a larger "
          "profile.repair_limit",
          e.what(), kept);
    }
    if (writes) write_profile(found.path, found.measured);
  });
  return table;
}

/// Times layers that the table did not see, in runs as short as those of its points, and scales the
/// times as theirs were.  Collective.
std::vector<HeldOut> measure_held_out(const Communicator& world, const Config& config,
                                      const ProfileBins& bins, const ProfileTable& table,
                                      double sustained, LayerProfiler& layer) {
  LatencyOptions series;
  series.pattern = bins.pattern;
  series.recompute = bins.recompute.front();
  const LatencyModel model(table, series);
  const Analytic analytic(bins, model, layer);
  std::vector<HeldOut> held_out = draw_points(bins, config.profile.held_out, config.run.seed);
  for (HeldOut& p : held_out) {
    const MeasuredPasses m = layer.whole(p.segments, p.budget, bins.block_tokens, series.recompute);
    p.measured_s =
        sustained * world.all_reduce(m.forward.median_s + m.backward.median_s, Reduction::max);
    p.table_s = model.predict(micro_batch(p.segments), p.budget).total_s();
    p.flops_s =
        layer.flops(p.tokens(), pairs(p.segments, p.budget, bins.block_tokens)) / analytic.rate;
    p.length_s = analytic.by_length(static_cast<double>(p.tokens()));
  }
  return held_out;
}

void print(const Profiled& found, const std::string& backend_note) {
  fmt::print("profile of one layer on {} ({})\n", found.measured.identity.at("hardware"),
             found.measured.identity.at("layer"));
  if (!backend_note.empty()) fmt::print("note: {}\n", backend_note);
  for (const std::string& note : found.notes) fmt::print("note: {}\n", note);
  fmt::print("measured in {:.1f} s, preparations included\n", found.seconds);
  if (found.sustained != 1)
    fmt::print(
        "note: times are those of work that goes on for seconds, {:.3f} x what short runs of each "
        "point took\n",
        found.sustained);
  print(found.measured);
  if (found.measured.links.empty())
    fmt::print("links: none measured, every level of the mesh has one rank\n");
  if (!found.held_out.empty()) {
    fmt::print(
        "{} held-out layers, median error: table {:.1f} %, FLOPs alone {:.1f} %, length alone "
        "{:.1f} %\n",
        found.held_out.size(), 100 * found.error(&HeldOut::table_s),
        100 * found.error(&HeldOut::flops_s), 100 * found.error(&HeldOut::length_s));
    fmt::print(
        "# FLOPs alone: FLOPs of the layer over one rate, length alone: a curve of the tokens, "
        "both fitted to the table's layers\n");
  }
  fmt::print("{}\n", found.path);
  if (found.selected)
    fmt::print("\n{}\n{}{}\n", found.selected->title, table_text(*found.selected).text(),
               found.selected->note);
}

nlohmann::ordered_json json_of(const Profiled& found) {
  nlohmann::ordered_json json{{"table", found.path},
                              {"identity", found.measured.identity},
                              {"block_tokens", found.measured.block_tokens},
                              {"pattern", name(found.pattern)},
                              {"notes", found.notes},
                              {"measure_seconds", found.seconds},
                              {"sustained", found.sustained}};
  json["rows"] = rows_json(found.measured);
  json["links"] = nlohmann::ordered_json::array();
  for (const ProfileLink& l : found.measured.links)
    json["links"].push_back(
        {{"level", l.level}, {"latency_s", l.latency_s}, {"bytes_per_s", l.bytes_per_s}});
  json["held_out"] = nlohmann::ordered_json::array();
  for (const HeldOut& p : found.held_out) {
    auto lengths = nlohmann::ordered_json::array();
    for (const BudgetSegment& s : p.segments) lengths.push_back(s.query_tokens);
    json["held_out"].push_back({{"lengths", lengths},
                                {"budget", p.budget},
                                {"measured_s", p.measured_s},
                                {"table_s", p.table_s},
                                {"flops_s", p.flops_s},
                                {"length_s", p.length_s}});
  }
  if (!found.held_out.empty()) {
    json["held_out_error"] = found.error(&HeldOut::table_s);
    json["flops_error"] = found.error(&HeldOut::flops_s);
    json["length_error"] = found.error(&HeldOut::length_s);
  }
  if (found.selected) json["selection"] = found.selected->values;
  return json;
}

}  // namespace

int profile_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Config config = line.config(world, {.data = false, .groups = false});
  const RunOptions options = RunOptions::from(config);
  const Mesh mesh(world, options.mesh);
  const BackendChoice backend = choose_backend(config, world);
  const std::string folder = line.output_folder(config);
  const bool gpu = backend.device->space() == Space::cuda;
  const ProfileBins bins(config, gpu);
  const auto begin = std::chrono::steady_clock::now();

  Profiled found;
  found.path = config.profile.table.empty() ? folder + "/profile.h5" : config.profile.table;
  found.pattern = bins.pattern;
  together(world, [&] {
    if (world.rank() == 0) require_writable_profile(found.path);
  });
  ProfileTable& measured = found.measured;
  measured.identity = measured_identity(config, *backend.device, backend.dtype);
  measured.identity["software"] = fmt::format("ballast {} ({})", version(), git_hash());
  measured.identity["ranks"] = fmt::to_string(world.size());
  measured.block_tokens = bins.block_tokens;
  LayerProfiler layer(options.model, backend.dtype, *backend.device, *backend.clock,
                      {config.model.head_chunk_tokens, config.run.seed,
                       (options.model.layers + options.mesh.pp - 1) / options.mesh.pp,
                       config.run.fp8(), options.attention});
  const std::vector<ProfilePoint> points = profile_points(bins);
  const RepeatRule rule = repeat_rule(world, config, bins, points, gpu, layer);
  layer.repeat(rule);
  Measurement rows(world, measured);
  for (const ProfilePoint& point : points) measure(bins, point, layer, rows);
  const double sustained_s = config.profile.sustained_s;
  if (gpu || sustained_s > 0)
    found.sustained = sustain(world, bins, sustained_s > 0 ? sustained_s : 6, layer, measured);
  measured.links =
      measure_links(mesh, *backend.device, config.profile.repeats, config.profile.largest_message);

  const ProfileTable table = keep(world, config, found);
  layer.repeat(rule);
  found.held_out = measure_held_out(world, config, bins, table, found.sustained, layer);
  together(world, [&] {
    if (world.rank() != 0) return;
    Config with_table = config;
    with_table.profile.table = found.path;
    found.selected = plan_groups(with_table);
  });
  if (world.rank() != 0) return 0;
  found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print(found, backend.note);
  std::filesystem::create_directories(folder);
  write_json(folder + "/profile.json", json_of(found));
  write_json(line.json, json_of(found));
  return 0;
}

}  // namespace ballast

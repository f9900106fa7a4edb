#include "app/command/command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "app/plan/stored_groups.hpp"
#include "ballast_version.hpp"
#include "core/base/decimal.hpp"
#include "core/base/nearest_name.hpp"
#include "core/config/combinations.hpp"
#include "core/config/deck_notes.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "io/deck/deck_reader.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

constexpr std::array kCommands = {
    Command{"train", "train a model: one process a rank, started by mpiexec or srun", true,
            train_command},
    Command{"check",
            "validate a deck; show ranks, shards, schedule, memory and expected balance for any "
            "number of ranks, without starting them",
            false, check_command},
    Command{"pack",
            "show how the deck's samples are packed into steps, and how evenly, without starting "
            "ranks",
            false, pack_command},
    Command{"profile",
            "measure a layer's latency and memory and the links' speed; write a profile table",
            true, profile_command},
    Command{"plan",
            "time steps without running them: pipelines, rings, packing groups and sparse balance, "
            "from stated costs or a profile table",
            false, plan_command},
    Command{"tune",
            "search mesh, batching, chunks, layout, schedule and what saves memory for the fastest "
            "plan on a number of ranks; say why others lose; write its deck",
            false, tune_command},
    Command{"eval", "held-out loss of a checkpoint or of model.weights; needle accuracy", true,
            eval_command},
    Command{"reference",
            "write the log probabilities of pairs under the model that training begins with "
            "(loss.kind = \"dpo\")",
            true, reference_command},
    Command{"export",
            "write a checkpoint's weights as a Hugging Face folder: config.json and safetensors",
            true, export_command},
    Command{"bench", "time an operation against a reference", true, bench_command},
};

constexpr const char* kAbout =
    "Trains language models on long texts over many ranks (processes with a GPU or CPU cores each) "
    "and keeps all of them equally loaded.  A deck, a TOML file, says what to train and how:\n\n"
    "  ballast check DECK                     is it sound; ranks, memory, balance\n"
    "  mpiexec -n RANKS ballast train DECK    train\n\n"
    "--help deck lists every key of a deck (--help deck BLOCK those of a block), --help "
    "combinations what runs together.  Options --kokkos-* pass through to Kokkos.";

/// CLI11's own checks take "nan" for a number of any size.
std::string finite_problem(const std::string& text) {
  return std::isfinite(std::atof(text.c_str())) ? "" : "must be a finite number";
}

/// An option that is a whole number.  CLI11 alone would read 010 as octal and take 0x10.
CLI::Option* add_count(CLI::App& sub, const char* option, std::int64_t& value, std::int64_t least,
                       std::int64_t most, const char* meaning) {
  return sub.add_option(option, value, meaning)
      ->check([](const std::string& text) {
        return is_decimal(text) ? "" : "must be a whole number without leading zeros";
      })
      ->check(CLI::Range(least, most));
}

void add_tune_options(CLI::App& sub, TuneLine& tune) {
  add_count(sub, "--ranks", tune.ranks, 1, std::int64_t{1} << 20,
            "ranks to plan for (default: those of the deck's mesh)");
  sub.add_option("--memory", tune.memory_gib, "GiB of a rank (default: no limit)")
      ->check(CLI::PositiveNumber)
      ->check(finite_problem);
  sub.add_option(
         "--coverage", tune.coverage,
         "of a sparse pattern with budgets: the least mean coverage of attention, between 0 "
         "and 1; budgets that reach it are searched (default: the deck's budget stays)")
      ->check(CLI::Range(0.0, 1.0))
      ->check(finite_problem);
  add_count(sub, "--steps", tune.steps, 1, std::int64_t{1} << 10,
            "steps that the best plans are simulated over")
      ->capture_default_str();
  add_count(sub, "--list", tune.list, 1, std::int64_t{1} << 10, "plans to list")
      ->capture_default_str();
  add_count(sub, "--trials", tune.trials, 1, std::int64_t{1} << 30,
            "plans to simulate at most (default: what half a minute of two cores allows)");
  sub.add_option("--write", tune.write, "file for the deck of the best plan");
  sub.add_flag("--overwrite", tune.overwrite, "--write may replace a file");
}

void add_check_options(CLI::App& sub, CommandLine& line) {
  add_count(sub, "--steps", line.steps, 1, std::int64_t{1} << 20,
            "steps that are simulated, for the twin and --trace")
      ->capture_default_str();
  sub.add_option("--trace", line.trace,
                 "new run folder for the trace of every rank as simulated, for ballast-report");
  sub.add_flag("--elsewhere", line.elsewhere,
               "data and weights lie on another machine: those missing here are notes");
}

/// Options of one subcommand, bound to `line`.  `wall_time` is read later, so that its message is
/// ours.
void add_options(CLI::App& sub, const std::string& command, CommandLine& line,
                 std::string& wall_time) {
  if (command == "export") {
    sub.add_option("CHECKPOINT", line.checkpoint,
                   "checkpoint file, RUN/checkpoints/step_XXXXXXXX.h5")
        ->required();
    sub.add_option("DIR", line.folder, "folder to write")->required();
    sub.add_option("--dtype", line.dtype, "bf16 (rounded to nearest even) or f32")
        ->check(CLI::IsMember({"bf16", "f32"}))
        ->capture_default_str();
    sub.add_flag("--adapter", line.adapter,
                 "of a checkpoint with adapters: those alone, as a PEFT folder; else they are "
                 "merged into the weights");
    sub.add_option("--json", line.json, "file for the machine-readable twin of what is printed");
    return;
  }
  const bool bench = command == "bench", runs = command == "train" || command == "eval",
             profile = command == "profile";
  if (bench)
    sub.add_option("NAME", line.name, "what to measure: attention, gemm, heads, leak, ring or step")
        ->required();
  auto* deck = sub.add_option("DECK", line.deck_file, "input deck (TOML)");
  if (!bench) deck->required();
  sub.add_option("block.key=value", line.overrides,
                 "overrides of deck keys, last wins; values are TOML, bare words are text");
  sub.add_option("--case", line.case_name, "case of the deck's [[case]] list");
  if (runs)
    sub.add_option("-r,--restart", line.restart,
                   "checkpoint file to continue, or latest: the newest sound one of the run "
                   "folder, or best: "
                   "that of the lowest held-out loss")
        ->check([](const std::string& value) {
          return value.empty() ? "names no checkpoint; is a variable of a script unset?" : "";
        });
  if (command == "train")
    sub.add_flag("--force-model", line.force_model,
                 "continue a checkpoint whose block model differs from the deck's");
  if (runs || profile)
    sub.add_option("-d,--output", line.output,
                   "run folder (default: run.output of the deck, or runs/NAME of the deck file)");
  if (command == "train")
    sub.add_option(
           "-t,--time", wall_time,
           "wall-time limit HH:MM:SS or D-HH:MM:SS: checkpoint in time and leave with status 75")
        ->check([](const std::string& value) {
          return value.empty() ? "states no time; is a variable of a script unset?" : "";
        });
  sub.add_option("--json", line.json, "file for the machine-readable twin of what is printed");
  if (command == "tune") add_tune_options(sub, line.tune);
  if (command == "check") add_check_options(sub, line);
  if (command == "pack")
    sub.add_flag("--compare", line.compare,
                 "set balanced, packed, hbp, longalign and, planned alone, the placements of other "
                 "systems side by side on the deck's samples, timed by one clock");
  if (command == "check" || command == "pack" || command == "plan")
    add_count(sub, "--plans", line.plans, 0, std::int64_t{1} << 20,
              "steps whose whole plans the twin holds")
        ->capture_default_str();
}

bool is_setting(const std::string& argument) { return argument.find('=') != std::string::npos; }

}  // namespace

std::span<const Command> commands() { return kCommands; }

double parse_wall_time(const std::string& text) {
  long days = 0, hours = 0, minutes = 0, seconds = 0;
  char end = 0;
  const bool with_days = text.find('-') != std::string::npos;
  const int read =
      with_days ? std::sscanf(text.c_str(), "%5ld-%5ld:%5ld:%5ld%c", &days, &hours, &minutes,
                              &seconds, &end) -
                      1
                : std::sscanf(text.c_str(), "%5ld:%5ld:%5ld%c", &hours, &minutes, &seconds, &end);
  const bool digits = text.find_first_not_of("0123456789:-") == std::string::npos &&
                      !text.empty() && text.front() != '-';
  const double total = 86400.0 * static_cast<double>(days) + 3600.0 * static_cast<double>(hours) +
                       60.0 * static_cast<double>(minutes) + static_cast<double>(seconds);
  require(
      read == 3 && digits && days >= 0 && hours >= 0 && minutes >= 0 && seconds >= 0 &&
          minutes < 60 && seconds < 60 && total > 0,
      "-t {}: a wall-time limit is HH:MM:SS or D-HH:MM:SS, above zero, with minutes and seconds "
      "below 60 and at most five digits a number",
      text);
  return total;
}

std::string version_text() {
  return fmt::format(
      "ballast {} ({})\nbuild     {}\ncompiler  {}\nMPI       {}\nKokkos    {}\nCUDA      {}\nNCCL "
      "     {}\nHDF5      {}\n",
      version(), git_hash(), build_type(), compiler_version(), mpi_version(), kokkos_version(),
      cuda_version(), nccl_version(), hdf5_version());
}

bool is_command(const std::string& word) {
  return std::any_of(kCommands.begin(), kCommands.end(),
                     [&](const Command& command) { return word == command.name; });
}

/// `--help deck [BLOCK]` and `--help combinations` are topics, not commands.
std::optional<ParsedLine> help_topic(const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i + 1 < arguments.size(); ++i) {
    if (arguments[i] != "--help" && arguments[i] != "-h") continue;
    const std::string& topic = arguments[i + 1];
    if (topic == "combinations") return ParsedLine{std::nullopt, combinations_text(), 0};
    if (topic == "combinations.json") return ParsedLine{std::nullopt, combinations_json(), 0};
    if (topic != "deck") {
      const bool known = topic.starts_with("-") || is_command(topic);
      if (known || i > 0) continue;
      const std::string near = nearest_name(topic, {"deck", "combinations"});
      return ParsedLine{
          std::nullopt,
          fmt::format("ballast --help {}: no such topic{}; topics: deck [BLOCK], combinations, and "
                      "the commands\n",
                      topic, near.empty() ? "" : " (did you mean " + near + "?)"),
          2};
    }
    const std::string block = i + 2 < arguments.size() ? arguments[i + 2] : "";
    std::string text = deck_help(block);
    if (!text.empty()) return ParsedLine{std::nullopt, std::move(text), 0};
    std::vector<std::string> names;
    for (const auto& b : deck_blocks()) names.push_back(b.name);
    const std::string near = nearest_name(block, names);
    return ParsedLine{
        std::nullopt,
        fmt::format("ballast --help deck {}: no such block{}; blocks: {}\n", block,
                    near.empty() ? "" : " (did you mean " + near + "?)", fmt::join(names, ", ")),
        2};
  }
  return std::nullopt;
}

ParsedLine parse_command_line(const std::vector<std::string>& arguments) {
  if (auto topic = help_topic(arguments)) return *std::move(topic);
  if (!arguments.empty() && !arguments[0].starts_with("-") && !is_command(arguments[0])) {
    std::vector<std::string> known;
    for (const Command& command : kCommands) known.emplace_back(command.name);
    const std::string near = nearest_name(arguments[0], known);
    return {
        std::nullopt,
        fmt::format("ballast: unknown command {}{}; commands: {}\n", arguments[0],
                    near.empty() ? "" : " (did you mean " + near + "?)", fmt::join(known, ", ")),
        2};
  }

  CommandLine line;
  std::string wall_time;
  CLI::App app(kAbout, "ballast");
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  for (const Command& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.meaning);
    add_options(*sub, command.name, line, wall_time);
    sub->callback([&line, &command] { line.command = command.name; });
  }
  try {
    std::vector<std::string> reversed(arguments.rbegin(),
                                      arguments.rend());  // the order that CLI11 wants
    app.parse(std::move(reversed));
    if (line.command == "bench" &&
        is_setting(line.deck_file)) {  // bench takes settings without a deck
      line.overrides.insert(line.overrides.begin(), line.deck_file);
      line.deck_file.clear();
    }
    if (!wall_time.empty()) line.wall_time_s = parse_wall_time(wall_time);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out, err;
    const bool good = app.exit(e, out, err) == 0;
    return {std::nullopt, good ? out.str() : "ballast: " + err.str(), good ? 0 : 2};
  } catch (const Error& e) {
    return {std::nullopt, fmt::format("ballast: {}\n", e.what()), 2};
  }
  if (line.json.empty()) line.plans = 0;  // nobody asks for them
  return {line, "", 0};
}

Config CommandLine::config(const Communicator& world, DeckNeeds needs) const {
  std::string text;
  together(world, [&] {
    if (world.rank() == 0) text = read_deck_text(deck_file);
  });
  text = world.broadcast(text, 0);
  Config result;
  std::vector<std::string> notes;
  together(world, [&] {
    result = parse_config(text, deck_file, overrides, case_name, needs);
    if (needs.groups && takes_stored_groups(result)) take_stored_groups(result, needs, notes);
  });
  set_wait_limit(result.run.hang_timeout_s);
  for (const std::string& note : notes)
    if (world.rank() == 0) fmt::print("note: {}\n", note);
  return result;
}

void tell_deck_notes(std::span<const Config> cases) {
  std::map<Key, std::size_t> counts;
  for (const Config& config : cases)
    for (const Problem& note : deck_notes(config))
      if (++counts[note.keys.front()] == cases.size())
        fmt::print(stderr, "note: {}\n", note.message());
}

std::vector<Config> CommandLine::configs(DeckNeeds needs) const {
  const std::string text = deck_file.empty() ? "" : read_deck_text(deck_file);
  const std::string file = deck_file.empty() ? "command line" : deck_file;
  const auto parse = [&](const std::string& name) {
    Config config = parse_config(text, file, overrides, name, needs);
    if (std::vector<std::string> notes; needs.groups && takes_stored_groups(config)) {
      take_stored_groups(config, needs, notes);
      for (const std::string& note : notes) fmt::print(stderr, "note: {}\n", note);
    }
    return config;
  };
  if (!case_name.empty()) return {parse(case_name)};
  // Without a sound base deck the list of cases is unknown: then its problems are the message.
  std::vector<std::string> names;
  try {
    names = parse_deck_cases(text, file);
  } catch (const Error&) {
    return {parse("")};
  }
  if (names.empty()) return {parse("")};
  std::vector<Config> list;
  std::string problems;
  for (const auto& name : names) try {
      list.push_back(parse(name));
    } catch (const Error& e) {
      problems += fmt::format("{}case \"{}\": {}", problems.empty() ? "" : "\n", name, e.what());
    }
  require(problems.empty(), "{}", problems);
  return list;
}

std::string CommandLine::output_folder(const Config& config) const {
  if (!output.empty()) return output;
  if (const std::string& stated = config.run.output; !stated.empty()) return stated;
  const std::string stem = std::filesystem::path(config.from.file).stem().string();
  return "runs/" + stem + (config.from.case_name.empty() ? "" : "-" + config.from.case_name);
}

}  // namespace ballast

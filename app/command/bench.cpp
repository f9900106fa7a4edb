#include "app/measure/bench.hpp"

#include <optional>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "core/base/nearest_name.hpp"
#include "core/config/run_options.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {

namespace {

std::vector<Benchmark> benchmarks() {
  return {attention_benchmark(), gemm_benchmark(), ring_benchmark(),
          step_benchmark(),      leak_benchmark(), heads_benchmark()};
}

Benchmark find_benchmark(const std::string& name) {
  std::string list;
  std::vector<std::string> names;
  for (auto& benchmark : benchmarks()) {
    if (benchmark.name == name) return benchmark;
    list += fmt::format("\n  {:<10} {}", benchmark.name, benchmark.meaning);
    names.push_back(benchmark.name);
  }
  const std::string near = nearest_name(name, names);
  fail("bench {} is unknown{}; benchmarks are:{}", name,
       near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near), list);
}

struct BenchCase {
  std::string name;
  std::optional<Config> config;
  BenchSettings settings;
};

/// Settings for every case of the deck, or for the one case without a deck.  Words with a dot
/// belong to the deck.
std::vector<BenchCase> cases_of(const Benchmark& benchmark, const CommandLine& line) {
  CommandLine deck_line = line;
  deck_line.overrides.clear();
  std::vector<std::string> words;
  for (const auto& word : line.overrides)
    (word.substr(0, word.find('=')).find('.') == std::string::npos || line.deck_file.empty()
         ? words
         : deck_line.overrides)
        .push_back(word);
  require(!benchmark.run_deck || !line.deck_file.empty(),
          "bench {} needs a deck: ballast bench {} DECK", benchmark.name, benchmark.name);
  if (line.deck_file.empty()) return {{"", std::nullopt, BenchSettings(benchmark.settings, words)}};
  const bool runs = benchmark.run_deck != nullptr;
  std::vector<BenchCase> cases;
  const std::vector<Config> configs =
      deck_line.configs({.model = true, .data = runs, .executes = runs});
  if (runs && Communicator::world().rank() == 0) tell_deck_notes(configs);
  for (const Config& config : configs) {
    const ModelShape model = model_shape(config);
    const std::string layout = name(RunOptions::from(config).sequence_layout(1 << 20).kind());
    auto settings = benchmark.settings;
    for (auto& setting : settings)
      for (const auto& [key, value] : {std::pair{"q_heads", fmt::to_string(model.query_heads)},
                                       {"kv_heads", fmt::to_string(model.kv_heads)},
                                       {"head_dim", fmt::to_string(model.head_dim)},
                                       {"backend", std::string(name(config.run.backend))},
                                       {"outer", fmt::to_string(config.mesh.cp_outer)},
                                       {"layout", layout},
                                       {"stripe", fmt::to_string(config.ring.stripe)}})
        if (setting.key == key) setting.default_value = value;
    cases.push_back({config.from.case_name, config, BenchSettings(settings, words)});
  }
  return cases;
}

}  // namespace

int bench_command(const CommandLine& line) {
  // Every rank measures, so that with several of them the figures are those of a shared machine;
  // rank 0 speaks.
  const Communicator world = Communicator::world();
  Benchmark benchmark;
  std::vector<BenchCase> cases;
  together(world, [&] {
    benchmark = find_benchmark(line.name);
    cases = cases_of(benchmark, line);
  });
  check_all(world, cases.size() < 2 || benchmark.name != "heads",
            "bench heads: one table is written, of one case; choose it with --case");
  nlohmann::ordered_json json;
  for (const auto& [name, config, settings] : cases) {
    // One rank's error is nobody's to catch: the others wait for its transfers, and main ends them.
    BenchResult result =
        benchmark.run_deck ? benchmark.run_deck(*config, settings) : benchmark.run(settings);
    if (world.rank() == 0)
      fmt::print("{}{}", name.empty() ? "" : fmt::format("case {}: ", name), result.text);
    if (name.empty()) {
      json = result.json;
    } else {
      result.json["name"] = name;
      json["cases"].push_back(result.json);
    }
  }
  if (world.rank() == 0 && !line.json.empty()) write_json(line.json, json);
  return 0;
}

}  // namespace ballast

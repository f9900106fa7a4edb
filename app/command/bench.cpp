#include "app/command/bench.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <optional>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "core/base/nearest_name.hpp"
#include "core/base/precision.hpp"
#include "core/config/run_options.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/comm/waits.hpp"

#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/runtime/device.hpp"
#include "parallel/comm/nccl_group.hpp"
#endif

namespace ballast {

BenchSettings::BenchSettings(std::vector<Setting> known, const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const auto& setting : known) {
    values_[setting.key] = setting.default_value;
    names.push_back(setting.key);
  }
  std::string wrong;
  for (const auto& word : words) {
    const auto equals = word.find('=');
    const std::string key = word.substr(0, equals);
    if (equals == std::string::npos) {
      wrong += fmt::format("\n  \"{}\" is not key=value", word);
    } else if (!values_.count(key)) {
      const std::string near = nearest_name(key, names);
      wrong += fmt::format("\n  \"{}\" is unknown{}", key,
                           near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
    } else {
      values_[key] = word.substr(equals + 1);
    }
  }
  if (wrong.empty()) return;
  wrong += "\nsettings are:";
  for (const auto& setting : known)
    wrong += fmt::format("\n  {:<10} {} (default: {})", setting.key, setting.meaning,
                         setting.default_value.empty() ? "none" : setting.default_value);
  throw Error("bench settings:" + wrong +
              "\nwith a deck, words with a dot (block.key=value) override deck keys");
}

const std::string& BenchSettings::text(const std::string& key) const { return values_.at(key); }

namespace {
template <class T>
T number(const std::string& key, const std::string& text, const char* what) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size(), "bench setting {}={} is not {}",
          key, text, what);
  return value;
}
}  // namespace

std::int64_t BenchSettings::integer(const std::string& key, std::int64_t minimum) const {
  const auto value = number<std::int64_t>(key, text(key), "an integer");
  require(value >= minimum, "bench setting {}={} must be at least {}", key, value, minimum);
  return value;
}

double BenchSettings::real(const std::string& key, double minimum, double maximum) const {
  const auto value = number<double>(key, text(key), "a number");
  require(value >= minimum && value <= maximum, "bench setting {}={} must lie in [{}, {}]", key,
          value, minimum, maximum);
  return value;
}

bool BenchSettings::boolean(const std::string& key) const {
  require(text(key) == "true" || text(key) == "false", "bench setting {}={} must be true or false",
          key, text(key));
  return text(key) == "true";
}

DType BenchSettings::float_type(Space space) const {
  const std::string& type = text("dtype");
  if (space == Space::cuda) {
    require(type.empty() || type == name(DType::bf16),
            "bench setting dtype={}: backend=cuda computes in bf16", type);
    return DType::bf16;
  }
  require(type.empty() || type == "f32" || type == "f64",
          "bench setting dtype={} must be f32 or f64 on the host", type);
  return type == "f64" ? DType::f64 : DType::f32;
}

std::uint64_t BenchSettings::seed() const {
  if (text("seed").empty())
    return static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  return static_cast<std::uint64_t>(integer("seed", 0));
}

nlohmann::ordered_json to_json(const Timing& timing) {
  return {{"median_s", timing.median_s}, {"min_s", timing.min_s}, {"max_s", timing.max_s}};
}

BenchDevice::BenchDevice(const BenchSettings& settings) : device_(&host_device()) {
  const std::string& stated = settings.text("backend");
  const std::optional<Backend> backend = parse<Backend>(stated);
  require(backend.has_value(), "bench setting backend={} must be host or cuda", stated);
  if (*backend == Backend::host) return;
#ifdef BALLAST_HAVE_CUDA
  std::string why;
  require(cuda::device_count(why) > 0,
          "bench setting backend=cuda: no GPU here ({}); backend=host measures the host", why);
  const Communicator machine = Communicator::world().split_by_machine();
  owned_ = std::make_unique<cuda::CudaDevice>(machine.rank());
#ifdef BALLAST_HAVE_NCCL
  const std::string shared =
      NcclGroup::let_ranks_share_gpus(Communicator::world(), machine, cuda::device_count(why));
  if (!shared.empty() && Communicator::world().rank() == 0) fmt::print("# {}\n", shared);
#endif
  device_ = owned_.get();
  set_cuda_device(device_);
#else
  fail(
      "bench setting backend=cuda: this program was built without CUDA; rebuild where nvcc is "
      "found, or use backend=host");
#endif
}

BenchDevice::~BenchDevice() {
  if (owned_) set_cuda_device(nullptr);
}

std::vector<Timing> BenchDevice::time_in_turn(
    std::int64_t repeats, const std::vector<std::function<void()>>& work) const {
  for (const auto& piece : work) piece();
  device_->synchronize();
  Clock* clock = &host_clock();
#ifdef BALLAST_HAVE_CUDA
  std::unique_ptr<Clock> events;  // a new one: its times are finest near its origin
  if (cuda()) clock = (events = cuda::device_clock()).get();
#endif
  std::vector<std::vector<double>> times(work.size());
  for (std::int64_t i = 0; i < repeats; ++i)
    for (std::size_t w = 0; w < work.size(); ++w) {
      const std::int64_t begin = clock->mark();
      work[w]();
      const std::int64_t end = clock->mark();
      device_->synchronize();
      times[w].push_back(clock->seconds(end) - clock->seconds(begin));
    }
  std::vector<Timing> result;
  for (auto& t : times) {
    std::sort(t.begin(), t.end());
    result.push_back({t[t.size() / 2], t.front(), t.back()});
  }
  return result;
}

namespace {

std::vector<Benchmark> benchmarks() {
  return {attention_benchmark(), gemm_benchmark(), ring_benchmark(), step_benchmark()};
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
  for (const Config& config : deck_line.configs({.model = true, .data = runs, .executes = runs})) {
    const ModelShape model = model_shape(config);
    auto settings = benchmark.settings;
    for (auto& setting : settings)
      for (const auto& [key, value] : {std::pair{"q_heads", fmt::to_string(model.query_heads)},
                                       {"kv_heads", fmt::to_string(model.kv_heads)},
                                       {"head_dim", fmt::to_string(model.head_dim)},
                                       {"backend", std::string(name(config.run.backend))},
                                       {"outer", fmt::to_string(config.mesh.cp_outer)},
                                       {"layout", std::string(name(config.ring.layout))},
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
  std::string problem;
  try {
    benchmark = find_benchmark(line.name);
    cases = cases_of(benchmark, line);
  } catch (const Error& e) {
    problem = e.what();
  }
  check_all(world, problem.empty(), problem);
  nlohmann::ordered_json json;
  for (const auto& [name, config, settings] : cases) {
    BenchResult result;
    try {
      result = benchmark.run_deck ? benchmark.run_deck(*config, settings) : benchmark.run(settings);
    } catch (const CollectiveError&) {
      throw;  // all ranks have it already
    } catch (const Error& e) {
      problem = e.what();
    }
    check_all(world, problem.empty(), problem);
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

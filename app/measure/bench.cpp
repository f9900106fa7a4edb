#include "app/measure/bench.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <type_traits>

#include "core/base/decimal.hpp"
#include "core/base/nearest_name.hpp"
#include "core/base/precision.hpp"
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
  const bool written_so = std::is_floating_point_v<T> || is_decimal(text);
  require(error == std::errc{} && end == text.data() + text.size() && written_so,
          "bench setting {}={} is not {}", key, text, what);
  return value;
}
}  // namespace

std::int64_t BenchSettings::integer(const std::string& key, std::int64_t minimum) const {
  const auto value = number<std::int64_t>(key, text(key), "an integer");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require(value >= minimum, "bench setting {}={} must be at least {}", key, value, minimum);
  require(value <= kMost, "bench setting {}={} must be at most {}", key, value, kMost);
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
  return number<std::uint64_t>("seed", text("seed"), "a whole number from 0 on");
}

std::uint64_t BenchSettings::seed(const Communicator& world) const {
  return std::stoull(world.broadcast(fmt::to_string(seed()), 0));
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
  auto gpu = std::make_unique<cuda::CudaDevice>(machine.rank());
#ifdef BALLAST_HAVE_NCCL
  const std::string shared =
      NcclGroup::let_ranks_share_gpus(Communicator::world(), machine, gpu->identity());
  if (!shared.empty() && Communicator::world().rank() == 0) fmt::print("# {}\n", shared);
#endif
  owned_ = std::move(gpu);
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

}  // namespace ballast

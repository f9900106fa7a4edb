#include "app/bench.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>

#include "core/deck.hpp"

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
      wrong += fmt::format("\n  \"{}\" is unknown{}", key, near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
    } else {
      values_[key] = word.substr(equals + 1);
    }
  }
  if (wrong.empty()) return;
  wrong += "\nsettings are:";
  for (const auto& setting : known) wrong += fmt::format("\n  {:<10} {} (default: {})", setting.key, setting.meaning, setting.default_value.empty() ? "none" : setting.default_value);
  throw Error("bench settings:" + wrong);
}

const std::string& BenchSettings::text(const std::string& key) const { return values_.at(key); }

namespace {
template <class T> T number(const std::string& key, const std::string& text, const char* what) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size(), "bench setting {}={} is not {}", key, text, what);
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
  require(value >= minimum && value <= maximum, "bench setting {}={} must lie in [{}, {}]", key, value, minimum, maximum);
  return value;
}

bool BenchSettings::boolean(const std::string& key) const {
  require(text(key) == "true" || text(key) == "false", "bench setting {}={} must be true or false", key, text(key));
  return text(key) == "true";
}

DType BenchSettings::float_type(const std::string& key) const {
  require(text(key) == "f32" || text(key) == "f64", "bench setting {}={} must be f32 or f64", key, text(key));
  return text(key) == "f32" ? DType::f32 : DType::f64;
}

std::uint64_t BenchSettings::seed() const {
  if (text("seed").empty()) return static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  return static_cast<std::uint64_t>(integer("seed", 0));
}

nlohmann::json to_json(const Timing& timing) { return {{"median_s", timing.median_s}, {"min_s", timing.min_s}, {"max_s", timing.max_s}}; }

std::vector<Timing> time_in_turn(std::int64_t repeats, const std::vector<std::function<void()>>& work) {
  for (const auto& piece : work) piece();
  std::vector<std::vector<double>> times(work.size());
  for (std::int64_t i = 0; i < repeats; ++i) {
    for (std::size_t w = 0; w < work.size(); ++w) {
      const auto begin = std::chrono::steady_clock::now();
      work[w]();
      times[w].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  }
  std::vector<Timing> result;
  for (auto& t : times) {
    std::sort(t.begin(), t.end());
    result.push_back({t[t.size() / 2], t.front(), t.back()});
  }
  return result;
}

}  // namespace ballast

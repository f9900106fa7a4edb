// `ballast bench NAME`: timings of one operation, each against a reference in the same run.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/deck.hpp"
#include "core/tensor.hpp"

namespace ballast {

/// Settings of a benchmark: key=value words over defaults.  The default fixes the type of a setting.
class BenchSettings {
 public:
  struct Setting {
    std::string key, default_value, meaning;
  };
  /// Throws Error that lists all unknown keys with the nearest known name.
  BenchSettings(std::vector<Setting> known, const std::vector<std::string>& words);
  const std::string& text(const std::string& key) const;
  std::int64_t integer(const std::string& key, std::int64_t minimum = 1) const;  ///< throws Error when it is no integer or too small
  double real(const std::string& key, double minimum, double maximum) const;
  bool boolean(const std::string& key) const;
  DType float_type(const std::string& key) const;  ///< f32 or f64
  std::uint64_t seed() const;                      ///< setting "seed"; from the clock when it is empty

 private:
  std::map<std::string, std::string> values_;
};

/// What a benchmark found: a table to print, and the same numbers for --json.
struct BenchResult {
  std::string text;
  nlohmann::ordered_json json;
};
struct Benchmark {
  std::string name, meaning;
  std::vector<BenchSettings::Setting> settings;  ///< q_heads, kv_heads and head_dim follow the deck's model when a deck is given
  std::function<BenchResult(const BenchSettings&)> run;
  /// Instead of `run`, for what needs a whole deck (model, mesh, data); collective over all ranks.
  std::function<BenchResult(const Deck&, const BenchSettings&)> run_deck = nullptr;
};
Benchmark attention_benchmark();
Benchmark gemm_benchmark();
Benchmark step_benchmark();

/// Wall times of one piece of work, in seconds.
struct Timing {
  double median_s = 0, min_s = 0, max_s = 0;
};
nlohmann::ordered_json to_json(const Timing& timing);
/// Runs all pieces in turn, `repeats` times after one round that does not count, so that a drifting clock or a busy
/// machine meets all of them alike.
std::vector<Timing> time_in_turn(std::int64_t repeats, const std::vector<std::function<void()>>& work);

/// c = a b by BLAS, f32 or f64: a [m, k], b [k, n], c [m, n].
void matrix_product(const Tensor& a, const Tensor& b, Tensor& c);
/// [rows, columns], uniform in [-0.5, 0.5).
Tensor random_matrix(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed);

}  // namespace ballast

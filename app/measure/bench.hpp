// `ballast bench NAME`: timings of one operation, each against a reference in the same run.
#pragma once
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/config/config.hpp"
#include "core/observe/events.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Settings of a benchmark: key=value words over defaults.  The default fixes the type of a
/// setting.
class BenchSettings {
 public:
  struct Setting {
    std::string key, default_value, meaning;
  };
  /// Throws Error that lists all unknown keys with the nearest known name.
  BenchSettings(std::vector<Setting> known, const std::vector<std::string>& words);
  const std::string& text(const std::string& key) const;
  std::int64_t integer(const std::string& key, std::int64_t minimum = 1)
      const;  ///< throws Error when it is no integer or too small
  double real(const std::string& key, double minimum, double maximum) const;
  bool boolean(const std::string& key) const;
  /// Setting "dtype": f32 (when empty) or f64 on the host, bf16 on a GPU.
  DType float_type(Space space) const;
  std::uint64_t seed() const;  ///< setting "seed"; from the clock when it is empty
  /// The same on all ranks.  Collective.
  std::uint64_t seed(const Communicator& world) const;

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
  std::vector<BenchSettings::Setting>
      settings;  ///< heads, backend and ring follow the deck when one is given
  std::function<BenchResult(const BenchSettings&)> run;
  /// Instead of `run`, for what needs a whole deck (model, mesh, data); collective over all ranks.
  std::function<BenchResult(const Config&, const BenchSettings&)> run_deck = nullptr;
};
Benchmark attention_benchmark();
Benchmark gemm_benchmark();
Benchmark ring_benchmark();
Benchmark step_benchmark();
Benchmark leak_benchmark();
Benchmark heads_benchmark();

/// Wall times of one piece of work, in seconds.
struct Timing {
  double median_s = 0, min_s = 0, max_s = 0;
};
nlohmann::ordered_json to_json(const Timing& timing);

/// Where a benchmark runs, by setting "backend": the host, or the GPU of this rank's local number.
/// Throws Error with the reason where there is none.  Collective over all ranks.
class BenchDevice {
 public:
  explicit BenchDevice(const BenchSettings& settings);
  ~BenchDevice();
  BenchDevice(const BenchDevice&) = delete;
  BenchDevice& operator=(const BenchDevice&) = delete;
  Device& device() const { return *device_; }
  bool cuda() const { return device_->space() == Space::cuda; }
  /// Runs all pieces in turn, `repeats` times after one round that does not count, so that a
  /// drifting clock or a busy machine meets all of them alike.  Times are the GPU's own there.
  std::vector<Timing> time_in_turn(std::int64_t repeats,
                                   const std::vector<std::function<void()>>& work) const;

 private:
  Device* device_;
  std::unique_ptr<Device> owned_;
};

/// c = a b: a [m, k], b [k, n], c [m, n].  By BLAS on the host (f32, f64), by cuBLASLt on the GPU
/// (bf16).
void matrix_product(const Tensor& a, const Tensor& b, Tensor& c);
/// [rows, columns] on `device`, uniform in [-0.5, 0.5), drawn in steps of 2^-8 for bf16.
Tensor random_matrix(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed,
                     Device& device = host_device());

/// The larger of two errors; a NaN wins and stays.
inline double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }
/// Element i of a tensor in host memory as fp64.
inline double element(const Tensor& t, std::int64_t i) {
  switch (t.dtype()) {
    case DType::f32:
      return t.data<float>()[i];
    case DType::f64:
      return t.data<double>()[i];
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(t.data<bf16>()[i].bits) << 16);
    default:
      fail("a benchmark reads floating-point tensors only");
  }
}
/// Writes it, rounded to nearest.
inline void set_element(Tensor& t, std::int64_t i, double value) {
  if (t.dtype() == DType::f64) {
    t.data<double>()[i] = value;
  } else if (t.dtype() == DType::f32) {
    t.data<float>()[i] = static_cast<float>(value);
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    t.data<bf16>()[i].bits = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

}  // namespace ballast

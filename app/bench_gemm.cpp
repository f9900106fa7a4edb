// bench gemm: the BLAS matrix product that every other host figure is compared with.
#include <cblas.h>

#include <algorithm>
#include <cmath>

#include "app/bench.hpp"
#include "core/random.hpp"

// OpenBLAS only; other BLAS libraries do not have it.
extern "C" __attribute__((weak)) void openblas_set_num_threads(int threads);

namespace ballast {

Tensor random_matrix(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed) {
  Tensor t = Tensor::empty({rows, columns}, type);
  dispatch_float(type, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < t.numel(); ++i) t.data<T>()[i] = static_cast<T>(random_uniform(seed, stream_of("bench matrix"), i) - 0.5);
  });
  return t;
}

void matrix_product(const Tensor& a, const Tensor& b, Tensor& c) {
  if (openblas_set_num_threads) openblas_set_num_threads(1);
  const int m = static_cast<int>(a.size(0)), n = static_cast<int>(b.size(1)), k = static_cast<int>(b.size(0));
  if (a.dtype() == DType::f32)
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, 1, a.data<float>(), k, b.data<float>(), n, 0, c.data<float>(), n);
  else
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, 1, a.data<double>(), k, b.data<double>(), n, 0, c.data<double>(), n);
}

namespace {

/// Largest error of 256 sampled elements against fp64 sums, in units of the elements' spread, sqrt(k) / 12.
double sampled_error(const Tensor& a, const Tensor& b, const Tensor& c, std::uint64_t seed) {
  const std::int64_t m = a.size(0), n = b.size(1), k = b.size(0);
  double error = 0;
  dispatch_float(a.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for (std::uint64_t sample = 0; sample < 256; ++sample) {
      const auto i = static_cast<std::int64_t>(random_bits(seed, stream_of("bench row"), sample) % static_cast<std::uint64_t>(m));
      const auto j = static_cast<std::int64_t>(random_bits(seed, stream_of("bench column"), sample) % static_cast<std::uint64_t>(n));
      double sum = 0;
      for (std::int64_t x = 0; x < k; ++x) sum += static_cast<double>(a.data<T>()[i * k + x]) * static_cast<double>(b.data<T>()[x * n + j]);
      error = std::max(error, std::abs(static_cast<double>(c.data<T>()[i * n + j]) - sum));
    }
  });
  return error / (std::sqrt(static_cast<double>(k)) / 12);
}

BenchResult run(const BenchSettings& settings) {
  std::string text;
  const std::int64_t m = settings.integer("m"), n = settings.integer("n"), k = settings.integer("k");
  const DType type = settings.float_type("dtype");
  const std::uint64_t seed = settings.seed();
  const Tensor a = random_matrix(m, k, type, seed), b = random_matrix(k, n, type, seed + 1);
  Tensor c = Tensor::empty({m, n}, type);
  const Timing timing = time_in_turn(settings.integer("repeats"), {[&] { matrix_product(a, b, c); }}).front();
  const double gflops = 2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / timing.median_s,
               error = sampled_error(a, b, c, seed);
  text += fmt::format("gemm {} m={} n={} k={} seed={}\n", name(type), m, n, k, seed);
  text += fmt::format("  {:>10} {:>10} {:>10} {:>9} {:>9}\n", "median_s", "min_s", "max_s", "GFLOP/s", "error");
  text += fmt::format("  {:>10.3e} {:>10.3e} {:>10.3e} {:>9.1f} {:>9.1e}\n", timing.median_s, timing.min_s, timing.max_s, gflops, error);
  text += fmt::format("# GFLOP/s = 2 m n k / median time; error: largest of 256 sampled elements against fp64, in units of their spread\n");
  nlohmann::ordered_json json{{"benchmark", "gemm"}, {"dtype", name(type)}, {"m", m}, {"n", n}, {"k", k}, {"seed", seed}};
  json.update(to_json(timing));
  json["gflops"] = gflops;
  json["error"] = error;
  return {std::move(text), std::move(json)};
}

}  // namespace

Benchmark gemm_benchmark() {
  return {"gemm",
          "BLAS matrix product [m, k] x [k, n] on one thread",
          {{"m", "1024", "rows"},
           {"n", "1024", "columns"},
           {"k", "1024", "inner dimension"},
           {"dtype", "f32", "f32 or f64"},
           {"repeats", "11", "timed runs"},
           {"seed", "", "of the random data; empty: from the clock"}},
          run};
}

}  // namespace ballast

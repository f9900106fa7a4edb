// bench gemm: the matrix product that every other figure is compared with, by BLAS on the host and
// cuBLASLt on the GPU.
#include <cmath>

#include "app/measure/bench.hpp"
#include "core/base/random.hpp"
#include "kernels/ops/blas.hpp"

#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/runtime/device.hpp"
#endif

namespace ballast {

Tensor random_matrix(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed,
                     Device& device) {
  Tensor t = Tensor::empty({rows, columns}, type);
  if (type == DType::bf16) {  // eight values a draw: these are large
    std::uint64_t bits = 0;
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      if (i % 8 == 0) bits = random_bits(seed, stream_of("bench matrix"), i / 8);
      set_element(
          t, i,
          static_cast<double>(static_cast<std::int64_t>(bits >> (i % 8 * 8) & 255) - 128) / 256);
    }
    return t.to(device);
  }
  for (std::int64_t i = 0; i < t.numel(); ++i)
    set_element(t, i, random_uniform(seed, stream_of("bench matrix"), i) - 0.5);
  return t.to(device);
}

void matrix_product(const Tensor& a, const Tensor& b, Tensor& c) {
#ifdef BALLAST_HAVE_CUDA
  if (a.space() == Space::cuda) {
    cuda::Gemm call;
    call.m = a.size(0), call.n = b.size(1), call.k = a.size(1);
    call.a = a.data<bf16>(), call.lda = call.k;
    call.b = b.data<bf16>(), call.ldb = call.n;
    call.c = c.data<bf16>(), call.ldc = call.n;
    return cuda::gemm(call);
  }
#endif
  const std::int64_t m = a.size(0), n = b.size(1), k = b.size(0);
  if (a.dtype() == DType::f32)
    blas::gemm(CblasNoTrans, CblasNoTrans, m, n, k, 1, a.data<float>(), k, b.data<float>(), n, 0,
               c.data<float>(), n);
  else
    blas::gemm(CblasNoTrans, CblasNoTrans, m, n, k, 1, a.data<double>(), k, b.data<double>(), n, 0,
               c.data<double>(), n);
}

namespace {

/// Largest error of 256 sampled elements against fp64 sums, in units of the elements' spread,
/// sqrt(k) / 12.
double sampled_error(const Tensor& a_, const Tensor& b_, const Tensor& c_, std::uint64_t seed) {
  const Tensor a = a_.to(host_device()), b = b_.to(host_device()), c = c_.to(host_device());
  const std::int64_t m = a.size(0), n = b.size(1), k = b.size(0);
  double error = 0;
  for (std::uint64_t sample = 0; sample < 256; ++sample) {
    const auto i = static_cast<std::int64_t>(random_bits(seed, stream_of("bench row"), sample) %
                                             static_cast<std::uint64_t>(m));
    const auto j = static_cast<std::int64_t>(random_bits(seed, stream_of("bench column"), sample) %
                                             static_cast<std::uint64_t>(n));
    double sum = 0;
    for (std::int64_t x = 0; x < k; ++x) sum += element(a, i * k + x) * element(b, x * n + j);
    error = larger(std::abs(element(c, i * n + j) - sum), error);
  }
  return error / (std::sqrt(static_cast<double>(k)) / 12);
}

BenchResult run_gemm(const BenchSettings& settings) {
  const BenchDevice where(settings);
  std::string text;
  const std::int64_t fallback = where.cuda() ? 8192 : 1024;
  const auto size = [&](const char* key) {
    return settings.text(key).empty() ? fallback : settings.integer(key);
  };
  const std::int64_t m = size("m"), n = size("n"), k = size("k");
  const DType type = settings.float_type(where.device().space());
  const std::uint64_t seed = settings.seed();
  const Tensor a = random_matrix(m, k, type, seed, where.device()),
               b = random_matrix(k, n, type, seed + 1, where.device());
  Tensor c = Tensor::empty({m, n}, type, where.device());
  const Timing timing =
      where.time_in_turn(settings.integer("repeats"), {[&] { matrix_product(a, b, c); }}).front();
  const double gflops = 2e-9 * static_cast<double>(m) * static_cast<double>(n) *
                        static_cast<double>(k) / timing.median_s,
               error = sampled_error(a, b, c, seed);
  // bf16 rounds a result of several spreads by 2^-9 of itself; fp32 and fp64 sums differ by their
  // order.
  const double limit = type == DType::bf16 ? 3e-2 : type == DType::f32 ? 1e-3 : 1e-11;
  require(error <= limit,
          "bench gemm: error {:.1e} against fp64 is above {:.0e}: the result is wrong", error,
          limit);
  text += fmt::format("gemm {} m={} n={} k={} seed={} on {}\n", name(type), m, n, k, seed,
                      where.device().description());
  text += fmt::format("  {:>10} {:>10} {:>10} {:>9} {:>9}\n", "median_s", "min_s", "max_s",
                      "GFLOP/s", "error");
  text += fmt::format("  {:>10.3e} {:>10.3e} {:>10.3e} {:>9.1f} {:>9.1e}\n", timing.median_s,
                      timing.min_s, timing.max_s, gflops, error);
  text += fmt::format(
      "# GFLOP/s = 2 m n k / median time; error: largest of 256 sampled elements against fp64, in "
      "units of their spread\n");
  nlohmann::ordered_json json{{"benchmark", "gemm"},
                              {"device", where.device().description()},
                              {"dtype", name(type)},
                              {"m", m},
                              {"n", n},
                              {"k", k},
                              {"seed", seed}};
  json.update(to_json(timing));
  json["gflops"] = gflops;
  json["error"] = error;
  return {std::move(text), std::move(json)};
}

}  // namespace

Benchmark gemm_benchmark() {
  return {"gemm",
          "matrix product [m, k] x [k, n]: BLAS on one thread, or cuBLASLt",
          {{"backend", "host", "host or cuda"},
           {"m", "", "rows (empty: 1024 on the host, 8192 on a GPU)"},
           {"n", "", "columns, likewise"},
           {"k", "", "inner dimension, likewise"},
           {"dtype", "", "host: f32 (when empty) or f64; cuda: bf16"},
           {"repeats", "11", "timed runs"},
           {"seed", "", "of the random data; empty: from the clock"}},
          run_gemm};
}

}  // namespace ballast

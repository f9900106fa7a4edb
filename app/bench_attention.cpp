// bench attention: host attention, forward and backward, against the matrix product's rate in the same run and a
// pair-by-pair fp64 reference on the same random data.
#include <algorithm>
#include <cmath>
#include <limits>

#include "app/bench.hpp"
#include "core/random.hpp"
#include "core/sequence_layout.hpp"
#include "kernels/attention.hpp"

namespace ballast {
namespace {

struct AttentionProblem {
  std::int64_t tokens, segments, q_heads, kv_heads, head_dim;
  DType type;
  double density, scale;
  std::uint64_t seed;
  AttentionIndex index;
  Tensor q, k, v, d_o;

  Tensor random(const char* what, std::int64_t heads) const {
    Tensor t = Tensor::empty({tokens, heads, head_dim}, type);
    dispatch_float(type, [&](auto zero) {
      using T = decltype(zero);
      for (std::int64_t i = 0; i < t.numel(); ++i) t.data<T>()[i] = static_cast<T>(random_normal(seed, stream_of(what), i));
    });
    return t;
  }
  /// Keeps of each query block's causal key blocks a random part `density`, the own one always.
  void thin_out() {
    std::vector<BlockRun> runs;
    for (std::int64_t b = 0; b < index.q_blocks(); ++b) {
      const BlockRun whole = index.runs[index.run_offset[b]];
      index.run_offset[b] = static_cast<std::int64_t>(runs.size());
      for (std::int32_t k = whole.first; k < whole.last; ++k) {
        if (k + 1 < whole.last && random_uniform(seed, stream_of("bench blocks"), b * index.k_blocks() + k) >= density) continue;
        if (static_cast<std::int64_t>(runs.size()) > index.run_offset[b] && runs.back().last == k)
          runs.back().last = k + 1;
        else
          runs.push_back({k, k + 1, -1});
      }
    }
    index.run_offset.back() = static_cast<std::int64_t>(runs.size());
    index.runs = std::move(runs);
  }
  void make() {
    MicroBatch batch;
    for (std::int64_t s = 0; s < segments; ++s) batch.segments.push_back({s, 0, tokens * (s + 1) / segments - tokens * s / segments, 0});
    const auto axis = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, tokens, 1), 0);
    index = dense_index(axis, axis);
    if (density < 1) thin_out();
    scale = 1 / std::sqrt(static_cast<double>(head_dim));
    q = random("bench q", q_heads);
    k = random("bench k", kv_heads);
    v = random("bench v", kv_heads);
    d_o = random("bench d_o", q_heads);
  }
  double pairs() const { return static_cast<double>(q_heads) * index.pairs_per_head(); }
};

/// Largest error over largest reference value, per tensor.
struct Errors {
  double o = 0, lse = 0, dq = 0, dk = 0, dv = 0;
};

/// Compares all results of one key/value head with sums over pairs in fp64.
template <class T>
Errors compare(const AttentionProblem& p, std::int64_t kv_head, const Tensor& o, const Tensor& lse, const Tensor& dq, const Tensor& dk,
               const Tensor& dv) {
  const std::int64_t d = p.head_dim, group = p.q_heads / p.kv_heads, n = p.tokens;
  const auto column = [&](const Tensor& t, std::int64_t head) {  // [tokens, d] of one head in fp64
    std::vector<double> x(n * d);
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t e = 0; e < d; ++e) x[i * d + e] = static_cast<double>(t.data<T>()[(i * t.size(1) + head) * d + e]);
    return x;
  };
  const auto dot = [d](const double* a, const double* b) {
    double sum = 0;
    for (std::int64_t e = 0; e < d; ++e) sum += a[e] * b[e];
    return sum;
  };
  const auto axpy = [d](double a, const double* x, double* y) {
    for (std::int64_t e = 0; e < d; ++e) y[e] += a * x[e];
  };
  const auto relative = [](const std::vector<double>& got, const std::vector<double>& expected) {
    double error = 0, top = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double difference = std::abs(got[i] - expected[i]);
      error = difference <= error ? error : difference;  // a NaN stays
      top = std::max(top, std::abs(expected[i]));
    }
    return error / top;
  };
  Errors errors;
  const auto k = column(p.k, kv_head), v = column(p.v, kv_head);
  std::vector<double> dk_sum(n * d, 0), dv_sum(n * d, 0), score(n), dp(n);
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto q = column(p.q, head), d_o = column(p.d_o, head);
    std::vector<double> o_sum(n * d, 0), dq_sum(n * d, 0), lse_row(n), lse_got(lse.data<T>() + head * n, lse.data<T>() + (head + 1) * n);
    std::vector<std::int64_t> keys;
    for (std::int64_t i = 0; i < n; ++i) {
      keys.clear();
      for (std::int64_t r = p.index.run_offset[i / kBlock]; r < p.index.run_offset[i / kBlock + 1]; ++r)
        for (std::int64_t j = p.index.runs[r].first * kBlock; j < p.index.runs[r].last * kBlock; ++j)
          if (j >= p.index.key_begin[i] && j < p.index.key_end[i]) keys.push_back(j);
      double top = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
      for (auto j : keys) top = std::max(top, score[j] = p.scale * dot(&q[i * d], &k[j * d]));
      for (auto j : keys) sum += std::exp(score[j] - top);
      lse_row[i] = top + std::log(sum);
      for (auto j : keys) {
        score[j] = std::exp(score[j] - lse_row[i]);
        dp[j] = dot(&d_o[i * d], &v[j * d]);
        delta += score[j] * dp[j];
        axpy(score[j], &v[j * d], &o_sum[i * d]);
        axpy(score[j], &d_o[i * d], &dv_sum[j * d]);
      }
      for (auto j : keys) {
        const double ds = score[j] * (dp[j] - delta) * p.scale;
        axpy(ds, &k[j * d], &dq_sum[i * d]);
        axpy(ds, &q[i * d], &dk_sum[j * d]);
      }
    }
    errors.o = std::max(errors.o, relative(column(o, head), o_sum));
    errors.lse = std::max(errors.lse, relative(lse_got, lse_row));
    errors.dq = std::max(errors.dq, relative(column(dq, head), dq_sum));
  }
  errors.dk = relative(column(dk, kv_head), dk_sum);
  errors.dv = relative(column(dv, kv_head), dv_sum);
  return errors;
}

BenchResult run(const BenchSettings& settings) {
  std::string text;
  AttentionProblem p;
  p.tokens = settings.integer("tokens");
  p.segments = settings.integer("segments");
  p.q_heads = settings.integer("q_heads");
  p.kv_heads = settings.integer("kv_heads");
  p.head_dim = settings.integer("head_dim");
  p.type = settings.float_type("dtype");
  p.density = settings.real("density", 0, 1);
  p.seed = settings.seed();
  const std::int64_t repeats = settings.integer("repeats");
  require(p.segments <= p.tokens, "bench attention: {} segments of {} tokens; every segment needs one", p.segments, p.tokens);
  require(p.q_heads % p.kv_heads == 0, "bench attention: q_heads = {} is no multiple of kv_heads = {}", p.q_heads, p.kv_heads);
  require(p.density == 1 || p.segments == 1, "bench attention: density below 1 needs segments=1");
  p.make();

  Tensor o = Tensor::empty(p.q.shape(), p.type), lse = Tensor::empty({p.q_heads, p.tokens}, p.type),
         delta = Tensor::empty(lse.shape(), p.type);
  Tensor dq = Tensor::zeros(p.q.shape(), p.type), dk = Tensor::zeros(p.k.shape(), p.type), dv = Tensor::zeros(p.k.shape(), p.type);
  attention_forward(p.index, p.q, p.k, p.v, p.scale, o, lse);
  attention_delta(o, p.d_o, delta);
  attention_backward(p.index, p.q, p.k, p.v, p.scale, lse, delta, p.d_o, dq, dk, dv);

  nlohmann::ordered_json json{{"benchmark", "attention"}, {"dtype", name(p.type)},  {"tokens", p.tokens},     {"segments", p.segments},
                              {"q_heads", p.q_heads},     {"kv_heads", p.kv_heads}, {"head_dim", p.head_dim}, {"density", p.density},
                              {"seed", p.seed},           {"pairs", p.pairs()}};
  text += fmt::format("attention {} tokens={} segments={} q_heads={} kv_heads={} head_dim={} density={} seed={}\n", name(p.type), p.tokens,
                      p.segments, p.q_heads, p.kv_heads, p.head_dim, p.density, p.seed);
  if (settings.boolean("check")) {
    // Before the timing: a figure for a wrong result is worth nothing.
    const std::int64_t kv_head =
        static_cast<std::int64_t>(random_bits(p.seed, stream_of("bench head"), 0) % static_cast<std::uint64_t>(p.kv_heads));
    const Errors errors = dispatch_float(p.type, [&](auto zero) { return compare<decltype(zero)>(p, kv_head, o, lse, dq, dk, dv); });
    json["error"] = {{"o", errors.o}, {"lse", errors.lse}, {"dq", errors.dq}, {"dk", errors.dk}, {"dv", errors.dv}};
    text += fmt::format("  error against fp64, key/value head {}: o {:.1e}  lse {:.1e}  dq {:.1e}  dk {:.1e}  dv {:.1e}\n", kv_head,
                        errors.o, errors.lse, errors.dq, errors.dk, errors.dv);
    const double limit = p.type == DType::f64 ? 1e-11 : 1e-4;
    for (double error : {errors.o, errors.lse, errors.dq, errors.dk, errors.dv})
      require(error <= limit, "bench attention: error {:.1e} against the fp64 reference is above {:.0e}: the result is wrong", error,
              limit);
  }

  constexpr std::int64_t size = 1024;
  const Tensor a = random_matrix(size, size, p.type, p.seed), b = random_matrix(size, size, p.type, p.seed + 1);
  Tensor c = Tensor::empty({size, size}, p.type);
  const auto timings =
      time_in_turn(repeats, {[&] { attention_forward(p.index, p.q, p.k, p.v, p.scale, o, lse); }, [&] { matrix_product(a, b, c); },
                             [&] { attention_backward(p.index, p.q, p.k, p.v, p.scale, lse, delta, p.d_o, dq, dk, dv); },
                             [&] { matrix_product(a, b, c); }});
  const double product_rate = 2.0 * size * size * size / std::min(timings[1].median_s, timings[3].median_s);
  json["gemm_gflops"] = product_rate * 1e-9;
  text += fmt::format("  {:<9} {:>10} {:>10} {:>10} {:>9} {:>8}\n", "", "median_s", "min_s", "max_s", "GFLOP/s", "of gemm");
  const auto report = [&](const char* direction, const Timing& timing, double flops_per_pair) {
    const double rate = flops_per_pair * static_cast<double>(p.head_dim) * p.pairs() / timing.median_s;
    text += fmt::format("  {:<9} {:>10.3e} {:>10.3e} {:>10.3e} {:>9.1f} {:>8.3f}\n", direction, timing.median_s, timing.min_s, timing.max_s,
                        rate * 1e-9, rate / product_rate);
    json[direction] = to_json(timing);
    json[direction]["gflops"] = rate * 1e-9;
    json[direction]["of_gemm"] = rate / product_rate;
  };
  report("forward", timings[0], 4);
  report("backward", timings[2], 10);
  text += fmt::format("  gemm 1024 {:>42.1f}\n", product_rate * 1e-9);
  text += fmt::format(
      "# GFLOP/s of useful work: 4 (forward) or 10 (backward) x head_dim x computed (query, key) pairs x q_heads / median time\n");
  return {std::move(text), std::move(json)};
}

}  // namespace

Benchmark attention_benchmark() {
  return {"attention",
          "host attention, forward and backward, against the matrix product's rate",
          {{"tokens", "4096", "tokens of the packed axis"},
           {"segments", "1", "equal causal segments they are cut into"},
           {"q_heads", "8", "query heads"},
           {"kv_heads", "2", "key/value heads"},
           {"head_dim", "64", "head dim"},
           {"density", "1", "part of the causal 64 x 64 blocks that is computed, drawn at random"},
           {"dtype", "f32", "f32 or f64"},
           {"repeats", "5", "timed runs"},
           {"check", "true", "compare one key/value head with the fp64 reference first"},
           {"seed", "", "of the random data; empty: from the clock"}},
          run};
}

}  // namespace ballast

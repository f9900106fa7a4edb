// bench attention: forward and backward over dense, packed and block-list indexes, against the
// matrix product's rate in the same run and a sampled fp64 reference on the same random data.
#include <algorithm>
#include <cmath>
#include <fstream>

#include "app/measure/attention_sample.hpp"
#include "app/measure/bench.hpp"
#include "core/base/random.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "kernels/attention/attention.hpp"

namespace ballast {
namespace {

/// Lengths that fill `tokens`: equal ones, or drawn until full (the last is cut) from a file of
/// lengths or, for "random", log-uniformly.
std::vector<std::int64_t> segment_lengths(const BenchSettings& settings, std::int64_t tokens,
                                          std::uint64_t seed) {
  const std::int64_t segments = settings.integer("segments");
  const std::string& source = settings.text("lengths");
  std::vector<std::int64_t> lengths, pool;
  if (source.empty()) {
    require(segments <= tokens,
            "bench attention: {} segments of {} tokens; every segment needs one", segments, tokens);
    for (std::int64_t s = 0; s < segments; ++s)
      lengths.push_back(tokens * (s + 1) / segments - tokens * s / segments);
    return lengths;
  }
  require(segments == 1, "bench attention: segments={} and lengths={} contradict each other",
          segments, source);
  if (source != "random") {
    std::ifstream file(source);
    for (std::int64_t n = 0; file >> n;) pool.push_back(n);
    require(!pool.empty() && *std::min_element(pool.begin(), pool.end()) > 0,
            "bench setting lengths={}: no file of positive lengths, one a line", source);
  }
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const auto draw = [&](const char* what) {
      return random_uniform(seed, stream_of(what), lengths.size());
    };
    const std::int64_t length =
        pool.empty()
            ? static_cast<std::int64_t>(std::exp(
                  std::log(16.0) +
                  draw("bench length") * std::log(std::max(1.0, static_cast<double>(tokens) / 64))))
            : pool[static_cast<std::size_t>(draw("bench length") *
                                            static_cast<double>(pool.size()))];
    lengths.push_back(std::min(left, length));
  }
  return lengths;
}

/// Keeps of each query block's key blocks a random part `density` in runs of `run` blocks, the own
/// block always.
AttentionPattern thin_out(const AttentionPattern& dense, double density, std::int64_t run,
                          std::uint64_t seed) {
  PatternArrays x;
  x.visible = dense.arrays().visible;
  x.k_tokens = dense.k_tokens();
  for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
    const BlockRun whole = *dense.runs(0, b).begin();
    x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    for (std::int32_t k = whole.first; k < whole.last; ++k) {
      const bool kept =
          random_uniform(seed, stream_of("bench blocks"),
                         static_cast<std::uint64_t>(b * x.k_blocks() + k / run)) < density;
      if (!kept && k + 1 < whole.last) continue;
      if (static_cast<std::int64_t>(x.runs.size()) > x.run_offset[b] && x.runs.back().last == k)
        x.runs.back().last = k + 1;
      else
        x.runs.push_back({k, k + 1, -1});
    }
  }
  x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
  return AttentionPattern(std::move(x));
}

AttentionPattern bench_pattern(const MicroBatch& batch, std::int64_t tokens, double density,
                               const BenchSettings& settings, std::uint64_t seed) {
  const AxisRanges axis = local_ranges(batch, SequenceLayout(LayoutKind::contiguous, tokens, 1), 0);
  const AttentionPattern dense = dense_pattern(axis, axis);
  return density < 1 ? thin_out(dense, density, settings.integer("run"), seed) : dense;
}

BenchResult run(const BenchSettings& settings) {
  const BenchDevice where(settings);
  Device& device = where.device();
  const std::int64_t n = settings.integer("tokens"), q_heads = settings.integer("q_heads"),
                     kv_heads = settings.integer("kv_heads"), d = settings.integer("head_dim"),
                     repeats = settings.integer("repeats");
  const DType type = settings.float_type(device.space()),
              sums = type == DType::bf16 ? DType::f32 : type;
  const double density = settings.real("density", 0, 1),
               scale = 1 / std::sqrt(static_cast<double>(d));
  const std::uint64_t seed = settings.seed();
  require(q_heads % kv_heads == 0, "bench attention: q_heads = {} is no multiple of kv_heads = {}",
          q_heads, kv_heads);

  const std::vector<std::int64_t> lengths = segment_lengths(settings, n, seed);
  MicroBatch batch;
  for (std::size_t s = 0; s < lengths.size(); ++s)
    batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
  const AttentionPattern index = bench_pattern(batch, n, density, settings, seed);
  const double pairs = static_cast<double>(q_heads) * index.pairs_per_head(),
               kept = index.pairs_per_head() / index.visible_pairs();

  const auto values = [&](const char* what, std::int64_t heads) {
    return attention_values(seed, what, n, heads, d, type, [](std::int64_t i) { return i; });
  };
  AttentionRun whole{&index,
                     scale,
                     values("bench q", q_heads),
                     values("bench k", kv_heads),
                     values("bench v", kv_heads),
                     values("bench d_o", q_heads),
                     {},
                     {},
                     {},
                     {},
                     {}};
  const Tensor q = whole.q.to(device), k = whole.k.to(device), v = whole.v.to(device),
               d_o = whole.d_o.to(device);
  Tensor o = Tensor::empty(q.shape(), type, device),
         lse = Tensor::empty({q_heads, n}, sums, device),
         delta = Tensor::empty({q_heads, n}, sums, device);
  Tensor dq = Tensor::zeros(q.shape(), sums, device), dk = Tensor::zeros(k.shape(), sums, device),
         dv = Tensor::zeros(k.shape(), sums, device);
  const AttentionWork work = place_pattern(index, q, k);
  const auto forward = [&] { attention_forward(work, q, k, v, scale, o, lse); };
  const auto backward = [&] {
    attention_delta(o, d_o, delta);
    attention_backward(work, q, k, v, scale, lse, delta, d_o, dq, dk, dv);
  };
  std::string text = fmt::format(
      "attention {} tokens={} segments={} q_heads={} kv_heads={} head_dim={} density={} (computes "
      "{:.4f} of the visible pairs) seed={} on "
      "{}\n",
      name(type), n, lengths.size(), q_heads, kv_heads, d, density, kept, seed,
      device.description());
  nlohmann::ordered_json json{{"benchmark", "attention"},
                              {"device", device.description()},
                              {"dtype", name(type)},
                              {"tokens", n},
                              {"segments", lengths.size()},
                              {"q_heads", q_heads},
                              {"kv_heads", kv_heads},
                              {"head_dim", d},
                              {"density", density},
                              {"kept", kept},
                              {"seed", seed},
                              {"pairs", pairs}};
  forward();
  backward();
  if (settings.boolean("check")) {
    // Before the timing: a figure for a wrong result is worth nothing.
    whole.o = o.to(host_device()), whole.lse = lse.to(host_device());
    whole.dq = dq.to(host_device()), whole.dk = dk.to(host_device()),
    whole.dv = dv.to(host_device());
    const AttentionErrors errors = sampled_errors(whole, settings.integer("samples"), seed);
    json["error"] = {{"o", errors.o},
                     {"lse", errors.lse},
                     {"dq", errors.dq},
                     {"dk", errors.dk},
                     {"dv", errors.dv}};
    text += fmt::format("  error against fp64, sampled rows: {}\n", to_string(errors));
    const double limit = type == DType::bf16 ? 2e-2 : type == DType::f32 ? 1e-4 : 1e-11;
    require(errors.worst() <= limit,
            "bench attention: error {:.1e} against the fp64 reference is above {:.0e}: the result "
            "is wrong ({})",
            errors.worst(), limit, to_string(errors));
  }
  whole = {};

  const std::int64_t size = where.cuda() ? 8192 : 1024;
  const Tensor a = random_matrix(size, size, type, seed, device),
               b = random_matrix(size, size, type, seed + 1, device);
  Tensor c = Tensor::empty({size, size}, type, device);
  const auto product = [&] { matrix_product(a, b, c); };
  const auto timings = where.time_in_turn(repeats, {forward, product, backward, product});
  const double product_rate = 2.0 * static_cast<double>(size * size * size) /
                              std::min(timings[1].median_s, timings[3].median_s);
  json["gemm_gflops"] = product_rate * 1e-9;
  text += fmt::format("  {:<9} {:>10} {:>10} {:>10} {:>10} {:>8}\n", "", "median_s", "min_s",
                      "max_s", "GFLOP/s", "of gemm");
  const auto report = [&](const char* direction, const Timing& timing, double flops_per_pair) {
    const double rate = flops_per_pair * static_cast<double>(d) * pairs / timing.median_s;
    text +=
        fmt::format("  {:<9} {:>10.3e} {:>10.3e} {:>10.3e} {:>10.1f} {:>8.3f}\n", direction,
                    timing.median_s, timing.min_s, timing.max_s, rate * 1e-9, rate / product_rate);
    json[direction] = to_json(timing);
    json[direction]["gflops"] = rate * 1e-9;
    json[direction]["of_gemm"] = rate / product_rate;
  };
  report("forward", timings[0], 4);
  report("backward", timings[2], 10);
  text += fmt::format("  gemm {} {:>43.1f}\n", size, product_rate * 1e-9);
  text +=
      "# GFLOP/s of useful work: 4 (forward) or 10 (backward) x head_dim x computed (query, key) "
      "pairs x q_heads / median time\n";
  return {std::move(text), std::move(json)};
}

}  // namespace

Benchmark attention_benchmark() {
  return {"attention",
          "attention, forward and backward, against the matrix product's rate",
          {{"backend", "host", "host or cuda"},
           {"tokens", "4096", "tokens of the packed axis"},
           {"segments", "1", "equal causal segments they are cut into"},
           {"lengths", "", "instead: a file of lengths to draw segments from, or random"},
           {"q_heads", "8", "query heads"},
           {"kv_heads", "2", "key/value heads"},
           {"head_dim", "64", "head dim"},
           {"density", "1", "part of the visible 64 x 64 blocks that is computed, drawn at random"},
           {"run", "1", "adjacent key blocks that are kept or dropped together"},
           {"dtype", "", "host: f32 (when empty) or f64; cuda: bf16"},
           {"repeats", "5", "timed runs"},
           {"check", "true", "compare sampled rows with the fp64 reference first"},
           {"samples", "32", "query rows compared, and a quarter as many keys"},
           {"seed", "", "of the random data; empty: from the clock"}},
          run};
}

}  // namespace ballast

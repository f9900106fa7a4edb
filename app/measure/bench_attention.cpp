// bench attention: forward and backward over dense, packed and block-list indexes, against the
// matrix product's rate in the same run and a sampled fp64 reference on the same random data.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>

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
    require(
        segments < tokens,
        "bench attention: {} segments of {} tokens; one of them needs two, as a token alone has "
        "no gradients of q and k to compare",
        segments, tokens);
    for (std::int64_t s = 0; s < segments; ++s)
      lengths.push_back(tokens * (s + 1) / segments - tokens * s / segments);
    return lengths;
  }
  require(segments == 1, "bench attention: segments={} and lengths={} contradict each other",
          segments, source);
  if (source != "random") {
    std::ifstream file(source);
    for (std::int64_t n = 0; file >> n;) pool.push_back(n);
    require(file.eof() && !pool.empty() && *std::min_element(pool.begin(), pool.end()) > 0,
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

/// The shape that the settings state.
struct AttentionShape {
  std::int64_t tokens, q_heads, kv_heads, head_dim;
  DType type;
  std::uint64_t seed;
  double density;
  std::vector<std::int64_t> lengths;

  AttentionShape(const BenchSettings& settings, const Device& device)
      : tokens(settings.integer("tokens")),
        q_heads(settings.integer("q_heads")),
        kv_heads(settings.integer("kv_heads")),
        head_dim(settings.integer("head_dim")),
        type(settings.float_type(device.space())),
        seed(settings.seed()),
        density(settings.real("density", 0, 1)) {
    require(q_heads % kv_heads == 0,
            "bench attention: q_heads = {} is no multiple of kv_heads = {}", q_heads, kv_heads);
    lengths = segment_lengths(settings, tokens, seed);
  }
  MicroBatch batch() const {
    MicroBatch batch;
    for (std::size_t s = 0; s < lengths.size(); ++s)
      batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
    return batch;
  }
  DType sums() const { return type == DType::bf16 ? DType::f32 : type; }
};

/// One attention on the device: operands, index and results.
class Attention {
 public:
  Attention(const AttentionShape& s, const BenchSettings& settings, Device& device)
      : index(bench_pattern(s.batch(), s.tokens, s.density, settings, s.seed)),
        scale_(1 / std::sqrt(static_cast<double>(s.head_dim))) {
    const auto values = [&](const char* what, std::int64_t heads) {
      return attention_values(s.seed, what, s.tokens, heads, s.head_dim, s.type,
                              [](std::int64_t i) { return i; })
          .to(device);
    };
    q_ = values("bench q", s.q_heads), k_ = values("bench k", s.kv_heads),
    v_ = values("bench v", s.kv_heads), d_o_ = values("bench d_o", s.q_heads);
    o_ = Tensor::empty(q_.shape(), s.type, device);
    lse_ = Tensor::empty({s.q_heads, s.tokens}, s.sums(), device);
    delta_ = Tensor::empty({s.q_heads, s.tokens}, s.sums(), device);
    dq_ = Tensor::zeros(q_.shape(), s.sums(), device);
    dk_ = Tensor::zeros(k_.shape(), s.sums(), device);
    dv_ = Tensor::zeros(k_.shape(), s.sums(), device);
    work_.emplace(place_pattern(index, q_, k_));
  }
  void forward() { attention_forward(*work_, q_, k_, v_, scale_, o_, lse_); }
  void backward() {
    attention_delta(o_, d_o_, delta_);
    attention_backward(*work_, q_, k_, v_, scale_, lse_, delta_, d_o_, dq_, dk_, dv_);
  }
  AttentionRun on_host() const {
    const auto host = [](const Tensor& t) { return t.to(host_device()); };
    return {&index,   scale_,     host(q_),  host(k_),  host(v_), host(d_o_),
            host(o_), host(lse_), host(dq_), host(dk_), host(dv_)};
  }

  const AttentionPattern index;

 private:
  double scale_;
  Tensor q_, k_, v_, d_o_, o_, lse_, delta_, dq_, dk_, dv_;
  std::optional<AttentionWork> work_;
};

BenchResult described(const AttentionShape& s, const Attention& attention, const Device& device) {
  const AttentionPattern& index = attention.index;
  const double pairs = static_cast<double>(s.q_heads) * index.pairs_per_head(),
               kept = index.pairs_per_head() / index.visible_pairs();
  BenchResult result;
  result.text = fmt::format(
      "attention {} tokens={} segments={} q_heads={} kv_heads={} head_dim={} density={} (computes "
      "{:.4f} of the visible pairs) seed={} on "
      "{}\n",
      name(s.type), s.tokens, s.lengths.size(), s.q_heads, s.kv_heads, s.head_dim, s.density, kept,
      s.seed, device.description());
  result.json = {{"benchmark", "attention"},
                 {"device", device.description()},
                 {"dtype", name(s.type)},
                 {"tokens", s.tokens},
                 {"segments", s.lengths.size()},
                 {"q_heads", s.q_heads},
                 {"kv_heads", s.kv_heads},
                 {"head_dim", s.head_dim},
                 {"density", s.density},
                 {"kept", kept},
                 {"seed", s.seed},
                 {"pairs", pairs}};
  return result;
}

/// Compares the results of the last runs with the reference.
void check(const Attention& attention, const AttentionShape& s, std::int64_t samples,
           BenchResult& result) {
  const AttentionErrors errors = sampled_errors(attention.on_host(), samples, s.seed);
  result.json["error"] = to_json(errors);
  result.text += fmt::format("  error against fp64, sampled rows: {}\n", to_string(errors));
  require(errors.worst() <= error_limit(s.type),
          "bench attention: error {:.1e} against the fp64 reference is above {:.0e}: the result "
          "is wrong ({}, seed={})",
          errors.worst(), error_limit(s.type), to_string(errors), s.seed);
}

void time_beside_product(Attention& attention, const AttentionShape& s, const BenchDevice& where,
                         std::int64_t repeats, BenchResult& result) {
  const std::int64_t size = where.cuda() ? 8192 : 1024;
  const Tensor a = random_matrix(size, size, s.type, s.seed, where.device()),
               b = random_matrix(size, size, s.type, s.seed + 1, where.device());
  Tensor c = Tensor::empty({size, size}, s.type, where.device());
  const auto product = [&] { matrix_product(a, b, c); };
  const auto timings = where.time_in_turn(
      repeats, {[&] { attention.forward(); }, product, [&] { attention.backward(); }, product});
  const double product_rate = 2.0 * static_cast<double>(size * size * size) /
                              std::min(timings[1].median_s, timings[3].median_s);
  result.json["gemm_gflops"] = product_rate * 1e-9;
  result.text += fmt::format("  {:<9} {:>10} {:>10} {:>10} {:>10} {:>8}\n", "", "median_s", "min_s",
                             "max_s", "GFLOP/s", "of gemm");
  const double pairs = result.json["pairs"];
  const auto report = [&](const char* direction, const Timing& timing, double flops_per_pair) {
    const double rate = flops_per_pair * static_cast<double>(s.head_dim) * pairs / timing.median_s;
    result.text +=
        fmt::format("  {:<9} {:>10.3e} {:>10.3e} {:>10.3e} {:>10.1f} {:>8.3f}\n", direction,
                    timing.median_s, timing.min_s, timing.max_s, rate * 1e-9, rate / product_rate);
    result.json[direction] = to_json(timing);
    result.json[direction]["gflops"] = rate * 1e-9;
    result.json[direction]["of_gemm"] = rate / product_rate;
  };
  report("forward", timings[0], 4);
  report("backward", timings[2], 10);
  result.text += fmt::format("  gemm {} {:>43.1f}\n", size, product_rate * 1e-9);
}

BenchResult run_attention(const BenchSettings& settings) {
  const BenchDevice where(settings);
  const AttentionShape shape(settings, where.device());
  const std::int64_t repeats = settings.integer("repeats"), samples = settings.integer("samples");
  Attention attention(shape, settings, where.device());
  BenchResult result = described(shape, attention, where.device());
  attention.forward();
  attention.backward();
  // Before the timing: a figure for a wrong result is worth nothing.
  if (settings.boolean("check")) check(attention, shape, samples, result);
  time_beside_product(attention, shape, where, repeats, result);
  result.text +=
      "# GFLOP/s of useful work: 4 (forward) or 10 (backward) x head_dim x computed (query, key) "
      "pairs x q_heads / median time\n";
  return result;
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
          run_attention};
}

}  // namespace ballast

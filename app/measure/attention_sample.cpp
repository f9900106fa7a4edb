#include "app/measure/attention_sample.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "app/measure/bench.hpp"
#include "core/base/random.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

Tensor attention_values(std::uint64_t seed, const char* what, std::int64_t tokens,
                        std::int64_t heads, std::int64_t head_dim, DType type,
                        const std::function<std::int64_t(std::int64_t)>& token) {
  Tensor t = Tensor::empty({tokens, heads, head_dim}, type);
  const std::int64_t width = heads * head_dim,
                     draws = (width + 3) / 4;  // a draw is four values of 16 bits
  const std::uint64_t stream = stream_of(what);
  const double unit = std::sqrt(3.0) / (1 << 15);
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t first = token(i) * draws;
    for (std::int64_t x = 0; x < width; x += 4) {
      const std::uint64_t bits =
          random_bits(seed, stream, static_cast<std::uint64_t>(first + x / 4));
      for (std::int64_t lane = 0; lane < std::min<std::int64_t>(4, width - x); ++lane)
        set_element(t, i * width + x + lane, static_cast<std::int16_t>(bits >> (16 * lane)) * unit);
    }
  }
  return t;
}

namespace {

using Row = std::vector<double>;

/// Row (token, head) of [tokens, heads, D].
void read(const Tensor& t, std::int64_t token, std::int64_t head, Row& row) {
  const std::int64_t d = t.size(2), at = (token * t.size(1) + head) * d;
  row.resize(d);
  for (std::int64_t x = 0; x < d; ++x) row[x] = element(t, at + x);
}
double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t x = 0; x < a.size(); ++x) sum += a[x] * b[x];
  return sum;
}
void axpy(double a, const Row& x, Row& y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] += a * x[i];
}

/// |found - expected| / |expected| over all rows seen; a NaN stays.
class Relative {
 public:
  void add(const Row& found, const Row& expected) {
    for (std::size_t x = 0; x < found.size(); ++x) {
      difference_ += (found[x] - expected[x]) * (found[x] - expected[x]);
      size_ += expected[x] * expected[x];
    }
  }
  double value() const { return std::sqrt(difference_ / std::max(size_, 1e-300)); }

 private:
  double difference_ = 0, size_ = 0;
};

BlockRuns runs_at(const PatternArrays& pattern, std::int64_t head, std::int64_t query) {
  return runs_of(pattern, pattern.index_heads == 1 ? 0 : static_cast<int>(head), query / kBlock);
}

/// The keys that a query computes.
void add_keys(const PatternArrays& pattern, std::int64_t head, std::int64_t query,
              std::vector<std::int64_t>& keys) {
  const KeyInterval seen = pattern.visible.row(query);
  for (const BlockRun& r : runs_at(pattern, head, query))
    for (std::int64_t j = std::max<std::int64_t>(r.first * kBlock, seen.begin);
         j < std::min<std::int64_t>(r.last * kBlock, seen.end); ++j)
      keys.push_back(j);
}

}  // namespace

double AttentionErrors::worst() const {
  double most = 0;
  for (double e : {o, lse, dq, dk, dv}) most = larger(e, most);
  return most;
}

std::string to_string(const AttentionErrors& e) {
  return fmt::format("o {:.1e}  lse {:.1e}  dq {:.1e}  dk {:.1e}  dv {:.1e}", e.o, e.lse, e.dq,
                     e.dk, e.dv);
}

AttentionErrors sampled_errors(const AttentionRun& run, std::int64_t samples, std::uint64_t seed) {
  const PatternArrays& index = run.index->arrays();
  require(index.row_masks.empty() && !index.has_columns(), "the sampled reference knows runs only");
  const std::int64_t n = run.q.size(0), heads = run.q.size(1), group = heads / run.k.size(1);
  const auto draw = [&](const char* what, std::int64_t sample, std::int64_t below) {
    return static_cast<std::int64_t>(
        random_bits(seed, stream_of(what), static_cast<std::uint64_t>(sample)) %
        static_cast<std::uint64_t>(below));
  };
  Relative o, dq, dk, dv;
  AttentionErrors errors;
  Row q, k, v, d_o, found, out, gradient, gradient_v;
  for (std::int64_t s = 0; s < samples; ++s) {
    const std::int64_t i = draw("sample query", s, n), h = draw("sample head", s, heads);
    std::vector<std::int64_t> keys;
    add_keys(index, h, i, keys);
    if (keys.empty()) continue;
    read(run.q, i, h, q);
    read(run.d_o, i, h, d_o);
    Row score(keys.size()), dp(keys.size());
    double top = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
    for (std::size_t x = 0; x < keys.size(); ++x) {
      read(run.k, keys[x], h / group, k);
      top = std::max(top, score[x] = run.scale * dot(q, k));
    }
    for (double x : score) sum += std::exp(x - top);
    const double lse = top + std::log(sum);
    out.assign(q.size(), 0);
    gradient.assign(q.size(), 0);
    for (std::size_t x = 0; x < keys.size(); ++x) {
      const double p = std::exp(score[x] - lse);
      read(run.v, keys[x], h / group, v);
      axpy(p, v, out);
      dp[x] = dot(d_o, v);
      delta += p * dp[x];
    }
    for (std::size_t x = 0; x < keys.size(); ++x) {
      read(run.k, keys[x], h / group, k);
      axpy(std::exp(score[x] - lse) * (dp[x] - delta) * run.scale, k, gradient);
    }
    read(run.o, i, h, found);
    o.add(found, out);
    read(run.dq, i, h, found);
    dq.add(found, gradient);
    const double off = std::abs(element(run.lse, h * n + i) - lse) / std::max(1.0, std::abs(lse));
    errors.lse = larger(off, errors.lse);
  }
  for (std::int64_t s = 0; s < (samples + 3) / 4; ++s) {
    const std::int64_t j = draw("sample key", s, run.k.size(0)),
                       kv = draw("sample key head", s, run.k.size(1));
    read(run.k, j, kv, k);
    read(run.v, j, kv, v);
    gradient.assign(k.size(), 0);
    gradient_v.assign(k.size(), 0);
    for (std::int64_t i = 0; i < n; ++i) {
      const KeyInterval seen = index.visible.row(i);
      if (j < seen.begin || j >= seen.end) continue;
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const BlockRuns runs = runs_at(index, h, i);
        if (std::none_of(runs.begin(), runs.end(), [&](const BlockRun& r) {
              return j / kBlock >= r.first && j / kBlock < r.last;
            }))
          continue;
        read(run.q, i, h, q);
        read(run.d_o, i, h, d_o);
        read(run.o, i, h, out);
        const double p = std::exp(run.scale * dot(q, k) - element(run.lse, h * n + i));
        axpy(p, d_o, gradient_v);
        axpy(p * (dot(d_o, v) - dot(d_o, out)) * run.scale, q, gradient);
      }
    }
    read(run.dk, j, kv, found);
    dk.add(found, gradient);
    read(run.dv, j, kv, found);
    dv.add(found, gradient_v);
  }
  errors.o = o.value(), errors.dq = dq.value(), errors.dk = dk.value(), errors.dv = dv.value();
  return errors;
}

}  // namespace ballast

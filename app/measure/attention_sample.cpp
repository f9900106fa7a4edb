#include "app/measure/attention_sample.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
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

nlohmann::ordered_json to_json(const AttentionErrors& e) {
  return {{"o", e.o}, {"lse", e.lse}, {"dq", e.dq}, {"dk", e.dk}, {"dv", e.dv}};
}

double error_limit(DType type) {
  return type == DType::bf16 ? 2e-2 : type == DType::f32 ? 1e-4 : 1e-11;
}

namespace {

/// The reference's rows, one after another, and how far the run's are from them.
class Reference {
 public:
  explicit Reference(const AttentionRun& run)
      : run_(run), index_(run.index->arrays()), group_(run.q.size(1) / run.k.size(1)) {}

  /// o, lse and dq of a query.
  void query(std::int64_t i, std::int64_t h) {
    std::vector<std::int64_t> keys;
    add_keys(index_, h, i, keys);
    if (keys.empty()) return;
    read(run_.q, i, h, q_);
    read(run_.d_o, i, h, d_o_);
    Row score(keys.size()), dp(keys.size());
    double top = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
    for (std::size_t x = 0; x < keys.size(); ++x) {
      read(run_.k, keys[x], h / group_, k_);
      top = std::max(top, score[x] = run_.scale * dot(q_, k_));
    }
    for (double x : score) sum += std::exp(x - top);
    const double lse = top + std::log(sum);
    out_.assign(q_.size(), 0);
    gradient_.assign(q_.size(), 0);
    for (std::size_t x = 0; x < keys.size(); ++x) {
      const double p = std::exp(score[x] - lse);
      read(run_.v, keys[x], h / group_, v_);
      axpy(p, v_, out_);
      dp[x] = dot(d_o_, v_);
      delta += p * dp[x];
    }
    for (std::size_t x = 0; x < keys.size(); ++x) {
      read(run_.k, keys[x], h / group_, k_);
      axpy(std::exp(score[x] - lse) * (dp[x] - delta) * run_.scale, k_, gradient_);
    }
    judge(run_.o, i, h, out_, o);
    if (keys.size() > 1) judge(run_.dq, i, h, gradient_, dq);  // else zero but for rounding
    const double found = element(run_.lse, h * run_.q.size(0) + i),
                 off = std::abs(found - lse) / std::max(1.0, std::abs(lse));
    lse_error = larger(off, lse_error);
  }

  /// dk and dv of a key, from lse and o of the queries that compute it.
  void key(std::int64_t j, std::int64_t kv) {
    read(run_.k, j, kv, k_);
    read(run_.v, j, kv, v_);
    gradient_.assign(k_.size(), 0);
    gradient_v_.assign(k_.size(), 0);
    bool shared = false;  // with other keys by some query: else dk is zero but for rounding
    for (std::int64_t i = 0; i < run_.q.size(0); ++i) {
      const KeyInterval seen = index_.visible.row(i);
      if (j < seen.begin || j >= seen.end) continue;
      for (std::int64_t h = kv * group_; h < (kv + 1) * group_; ++h)
        if (computes(h, i, j)) {
          add_query(i, h);
          shared = shared || !computes_one(h, i);
        }
    }
    if (shared) judge(run_.dk, j, kv, gradient_, dk);
    judge(run_.dv, j, kv, gradient_v_, dv);
  }

  Relative o, dq, dk, dv;
  double lse_error = 0;

 private:
  bool computes(std::int64_t head, std::int64_t query, std::int64_t key) const {
    const BlockRuns runs = runs_at(index_, head, query);
    return std::any_of(runs.begin(), runs.end(), [&](const BlockRun& r) {
      return key / kBlock >= r.first && key / kBlock < r.last;
    });
  }
  bool computes_one(std::int64_t head, std::int64_t query) const {
    const KeyInterval seen = index_.visible.row(query);
    std::int64_t keys = 0;
    for (const BlockRun& r : runs_at(index_, head, query))
      keys += std::max<std::int64_t>(0, std::min<std::int64_t>(r.last * kBlock, seen.end) -
                                            std::max<std::int64_t>(r.first * kBlock, seen.begin));
    return keys == 1;
  }
  /// A query's part of the gradients of the key whose rows are k_ and v_.
  void add_query(std::int64_t i, std::int64_t h) {
    read(run_.q, i, h, q_);
    read(run_.d_o, i, h, d_o_);
    read(run_.o, i, h, out_);
    const double p = std::exp(run_.scale * dot(q_, k_) - element(run_.lse, h * run_.q.size(0) + i));
    axpy(p, d_o_, gradient_v_);
    axpy(p * (dot(d_o_, v_) - dot(d_o_, out_)) * run_.scale, q_, gradient_);
  }
  void judge(const Tensor& found, std::int64_t token, std::int64_t head, const Row& expected,
             Relative& error) {
    read(found, token, head, found_);
    error.add(found_, expected);
  }

  const AttentionRun& run_;
  const PatternArrays& index_;
  std::int64_t group_;
  Row q_, k_, v_, d_o_, found_, out_, gradient_, gradient_v_;
};

}  // namespace

AttentionErrors sampled_errors(const AttentionRun& run, std::int64_t samples, std::uint64_t seed) {
  const PatternArrays& index = run.index->arrays();
  require(index.row_masks.empty() && !index.has_columns(), "the sampled reference knows runs only");
  const auto draw = [&](const char* what, std::int64_t sample, std::int64_t below) {
    return static_cast<std::int64_t>(
        random_bits(seed, stream_of(what), static_cast<std::uint64_t>(sample)) %
        static_cast<std::uint64_t>(below));
  };
  Reference reference(run);
  for (std::int64_t s = 0; s < samples; ++s)
    reference.query(draw("sample query", s, run.q.size(0)), draw("sample head", s, run.q.size(1)));
  for (std::int64_t s = 0; s < (samples + 3) / 4; ++s)
    reference.key(draw("sample key", s, run.k.size(0)), draw("sample key head", s, run.k.size(1)));
  return {reference.o.value(), reference.lse_error, reference.dq.value(), reference.dk.value(),
          reference.dv.value()};
}

}  // namespace ballast

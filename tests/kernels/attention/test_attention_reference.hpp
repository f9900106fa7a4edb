// Reference attention for the tests of kernels/attention/attention.hpp: pair by pair in fp64, from
// the definition of the index and the (segment, position) of the tokens.  Reads neither the visible
// intervals nor cover words, and uses no BLAS.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"

namespace ballast::test {

/// One attention call on random data.  Operands are kept in fp64, rounded to `type` so that the
/// kernel sees the same.
struct AttentionCase {
  std::vector<AxisToken> queries, keys;
  PatternArrays index;
  int q_heads = 1, kv_heads = 1, head_dim = 16;
  double scale = 0.125;
  DType type = DType::f32;
  std::vector<double> q, k, v, d_o;

  std::int64_t q_size() const {
    return static_cast<std::int64_t>(queries.size()) * q_heads * head_dim;
  }
  std::int64_t k_size() const {
    return static_cast<std::int64_t>(keys.size()) * kv_heads * head_dim;
  }

  void fill(std::mt19937_64& random) {
    std::normal_distribution<double> normal;
    const auto draw = [&](std::vector<double>& x, std::int64_t n) {
      x.resize(n);
      for (double& value : x)
        value = type == DType::f32 ? static_cast<double>(static_cast<float>(normal(random)))
                                   : normal(random);
    };
    scale = 1.0 / std::sqrt(head_dim);
    draw(q, q_size());
    draw(k, k_size());
    draw(v, k_size());
    draw(d_o, q_size());
  }

  bool computed(int head, std::int64_t i, std::int64_t j) const {
    if (queries[i].segment != keys[j].segment || keys[j].position > queries[i].position)
      return false;
    const int index_head = index.index_heads == 1 ? 0 : head;
    const std::int64_t block = i / kBlock;
    bool covered = false;
    for (const BlockRun& run : runs_of(index, index_head, block)) {
      if (j / kBlock < run.first || j / kBlock >= run.last) continue;
      covered = true;
      if (run.row_mask < 0 || (index.row_masks[run.row_mask] >> (i % kBlock) & 1)) return true;
    }
    if (covered || index.column_offset.empty()) return false;
    const std::int64_t columns =
        std::int64_t{index_head} * index.segments + index.block_segment[block];
    return std::binary_search(index.columns.begin() + index.column_offset[columns],
                              index.columns.begin() + index.column_offset[columns + 1],
                              static_cast<std::int32_t>(j));
  }
};

struct AttentionResult {
  std::vector<double> o, lse, dq, dk, dv;
};

inline AttentionResult reference_attention(const AttentionCase& c) {
  const auto tq = static_cast<std::int64_t>(c.queries.size()),
             tk = static_cast<std::int64_t>(c.keys.size());
  const int d = c.head_dim, group = c.q_heads / c.kv_heads;
  AttentionResult r;
  r.o.assign(c.q_size(), 0);
  r.dq = r.o;
  r.lse.assign(tq * c.q_heads, -std::numeric_limits<double>::infinity());
  r.dk.assign(c.k_size(), 0);
  r.dv = r.dk;
  std::vector<double> score(tk), dp(tk);
  std::vector<std::int64_t> pairs;
  for (int h = 0; h < c.q_heads; ++h)
    for (std::int64_t i = 0; i < tq; ++i) {
      const double* q = &c.q[(i * c.q_heads + h) * d];
      const double* d_o = &c.d_o[(i * c.q_heads + h) * d];
      double* o = &r.o[(i * c.q_heads + h) * d];
      double* dq = &r.dq[(i * c.q_heads + h) * d];
      const auto at = [&](std::int64_t j) { return (j * c.kv_heads + h / group) * d; };
      pairs.clear();
      double top = -std::numeric_limits<double>::infinity();
      for (std::int64_t j = 0; j < tk; ++j) {
        if (!c.computed(h, i, j)) continue;
        pairs.push_back(j);
        score[j] = 0;
        for (int x = 0; x < d; ++x) score[j] += c.scale * q[x] * c.k[at(j) + x];
        top = std::max(top, score[j]);
      }
      if (pairs.empty()) continue;
      double sum = 0;
      for (auto j : pairs) sum += std::exp(score[j] - top);
      const double lse = r.lse[h * tq + i] = top + std::log(sum);
      double delta = 0;
      for (auto j : pairs) {
        const double p = std::exp(score[j] - lse);
        dp[j] = 0;
        for (int x = 0; x < d; ++x) {
          o[x] += p * c.v[at(j) + x];
          dp[j] += d_o[x] * c.v[at(j) + x];
          r.dv[at(j) + x] += p * d_o[x];
        }
        delta += p * dp[j];
      }
      for (auto j : pairs) {
        const double ds = std::exp(score[j] - lse) * (dp[j] - delta) * c.scale;
        for (int x = 0; x < d; ++x) {
          dq[x] += ds * c.k[at(j) + x];
          r.dk[at(j) + x] += ds * q[x];
        }
      }
    }
  return r;
}

/// Host tensor [tokens, heads, head_dim] holding `values`; with `slack` > 0 rows lie that many
/// elements further apart.
inline Tensor make_rows(const std::vector<double>& values, std::int64_t tokens, int heads,
                        int head_dim, DType type, int slack_heads = 0) {
  Tensor whole = Tensor::empty({tokens, heads + slack_heads, head_dim}, type);
  Tensor t = whole.narrow(1, slack_heads / 2, slack_heads / 2 + heads);
  dispatch_float(type, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < whole.numel(); ++i)
      whole.data<T>()[i] = std::numeric_limits<T>::quiet_NaN();
    for (std::int64_t i = 0; i < tokens; ++i)
      for (std::int64_t x = 0; x < heads * head_dim; ++x)
        t.data<T>()[i * t.strides()[0] + x] = static_cast<T>(values[i * heads * head_dim + x]);
  });
  return t;
}
/// The values of [tokens, heads, head_dim] or [heads, tokens], row-major.
inline std::vector<double> values_of(const Tensor& t) {
  std::vector<double> values;
  const std::int64_t columns = t.size(0) == 0 ? 0 : t.numel() / t.size(0);
  dispatch_float(t.dtype(), [&](auto zero) {
    for (std::int64_t i = 0; i < t.size(0); ++i)
      for (std::int64_t x = 0; x < columns; ++x)
        values.push_back(static_cast<double>(t.data<decltype(zero)>()[i * t.strides()[0] + x]));
  });
  return values;
}

/// Largest difference over the largest reference value (at least `floor`, where all are small);
/// infinities must be equal.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& expected,
                             double floor = 0.1) {
  if (got.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double error = 0, top = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(expected[i]) || std::isinf(got[i])) {
      if (got[i] != expected[i]) return std::numeric_limits<double>::infinity();
      continue;
    }
    if (std::isnan(got[i])) return std::numeric_limits<double>::infinity();
    error = std::max(error, std::abs(got[i] - expected[i]));
    top = std::max(top, std::abs(expected[i]));
  }
  return error == 0 ? 0 : error / std::max(top, floor);
}

}  // namespace ballast::test

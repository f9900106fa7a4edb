// Attention of a whole micro-batch by its definition, in fp64 with plain loops; shares no code with
// kernels/.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"

namespace ballast::testing {

/// Row-major lists: q, o and their gradients [T, Hq, D]; k, v [T, Hkv, D]; lse [Hq, T].
struct NaiveAttention {
  std::int64_t heads = 1, kv_heads = 1, dim = 1;
  double scale = 1;
  std::vector<AxisToken> tokens;
  std::vector<char> mask;  ///< [Hq, T, T] which pairs are computed; empty: all visible ones
  std::vector<double> q, k, v, d_o;
  std::vector<double> o, lse, dq, dk, dv;

  bool visible(std::size_t head, std::size_t query, std::size_t key) const {
    if (tokens[query].segment < 0 || tokens[query].segment != tokens[key].segment ||
        tokens[key].position > tokens[query].position)
      return false;
    return mask.empty() || mask[(head * tokens.size() + query) * tokens.size() + key] != 0;
  }
  double dot(const std::vector<double>& a, std::size_t row_a, const std::vector<double>& b,
             std::size_t row_b) const {
    double sum = 0;
    for (std::int64_t d = 0; d < dim; ++d) sum += a[row_a * dim + d] * b[row_b * dim + d];
    return sum;
  }

  /// Fills o, lse, dq, dk and dv.
  void run() {
    const std::size_t n = tokens.size();
    o.assign(q.size(), 0);
    dq.assign(q.size(), 0);
    dk.assign(k.size(), 0);
    dv.assign(v.size(), 0);
    lse.assign(heads * n, -std::numeric_limits<double>::infinity());
    std::vector<double> p(n);
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t g = h / (heads / kv_heads);
      const auto q_row = [&](std::size_t i) { return i * heads + h; };
      const auto k_row = [&](std::size_t j) { return j * kv_heads + g; };
      for (std::size_t i = 0; i < n; ++i) {
        double sum = 0, total = 0;
        for (std::size_t j = 0; j < n; ++j)
          sum += p[j] = visible(h, i, j) ? std::exp(scale * dot(q, q_row(i), k, k_row(j))) : 0.0;
        lse[h * n + i] = std::log(sum);
        if (sum == 0) continue;
        for (std::size_t j = 0; j < n; ++j) {
          p[j] /= sum;
          if (p[j] == 0) continue;
          for (std::int64_t d = 0; d < dim; ++d)
            o[q_row(i) * dim + d] += p[j] * v[k_row(j) * dim + d];
          total += p[j] * dot(d_o, q_row(i), v, k_row(j));
        }
        for (std::size_t j = 0; j < n; ++j) {
          if (p[j] == 0) continue;
          const double ds = p[j] * (dot(d_o, q_row(i), v, k_row(j)) - total) * scale;
          for (std::int64_t d = 0; d < dim; ++d) {
            dq[q_row(i) * dim + d] += ds * k[k_row(j) * dim + d];
            dk[k_row(j) * dim + d] += ds * q[q_row(i) * dim + d];
            dv[k_row(j) * dim + d] += p[j] * d_o[q_row(i) * dim + d];
          }
        }
      }
    }
  }
};

}  // namespace ballast::testing

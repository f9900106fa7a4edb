// Attention in double precision, slow and simple: a CTA a row, then a CTA a key.  The benchmark's
// judge.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace bench {
using bf16 = __nv_bfloat16;

struct ReferenceProblem {
  const bf16 *q, *k, *v, *dout;
  std::int64_t q_stride, k_stride, v_stride, dout_stride, q_tokens, k_tokens;
  int q_heads, kv_heads, head_dim, index_heads;
  double scale;
  const std::uint8_t* allowed;  // [index_heads, q_tokens, k_tokens], or null: the interval alone
  const std::int32_t *key_begin, *key_end;
  const std::int64_t* row_ids;  // rows to compute
  std::int64_t rows;
};

__device__ inline double reduce(double x, bool maximum) {
  __shared__ double part[128];
  __syncthreads();
  part[threadIdx.x] = x;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (threadIdx.x < step) {
      const double a = part[threadIdx.x], b = part[threadIdx.x + step];
      part[threadIdx.x] = maximum ? (a > b ? a : b) : a + b;
    }
    __syncthreads();
  }
  return part[0];
}

/// grid (rows, q_heads), 128 threads.  probability, ds: [q_heads, rows, k_tokens]; o, dq: [rows,
/// q_heads, head_dim]; lse: [q_heads, rows].
__global__ void reference_rows(ReferenceProblem p, double* probability, double* ds, double* o,
                               double* lse, double* dq) {
  const std::int64_t row = blockIdx.x, token = p.row_ids[row];
  const int head = blockIdx.y, kv = head / (p.q_heads / p.kv_heads),
            h = p.index_heads == 1 ? 0 : head;
  double* s = probability + (head * p.rows + row) * p.k_tokens;
  double* g = ds + (head * p.rows + row) * p.k_tokens;
  const bf16* q = p.q + token * p.q_stride + head * p.head_dim;
  const bf16* dout = p.dout + token * p.dout_stride + head * p.head_dim;
  double top = -INFINITY;
  for (std::int64_t k = threadIdx.x; k < p.k_tokens; k += 128) {
    const bool on = p.allowed != nullptr ? p.allowed[(h * p.q_tokens + token) * p.k_tokens + k]
                                         : k >= p.key_begin[token] && k < p.key_end[token];
    double dot = 0, dp = 0;
    for (int d = 0; on && d < p.head_dim; ++d) {
      dot += double(float(q[d])) * double(float(p.k[k * p.k_stride + kv * p.head_dim + d]));
      dp += double(float(dout[d])) * double(float(p.v[k * p.v_stride + kv * p.head_dim + d]));
    }
    s[k] = on ? dot * p.scale : -INFINITY;
    g[k] = dp;
    top = fmax(top, s[k]);
  }
  top = reduce(top, true);
  double sum = 0;
  for (std::int64_t k = threadIdx.x; k < p.k_tokens; k += 128)
    sum += s[k] == -INFINITY ? 0 : exp(s[k] - top);
  sum = reduce(sum, false);
  double delta = 0;
  for (std::int64_t k = threadIdx.x; k < p.k_tokens; k += 128) {
    s[k] = s[k] == -INFINITY ? 0 : exp(s[k] - top) / sum;
    delta += s[k] * g[k];
  }
  delta = reduce(delta, false);
  for (std::int64_t k = threadIdx.x; k < p.k_tokens; k += 128) g[k] = s[k] * (g[k] - delta);
  __syncthreads();
  for (int d = threadIdx.x; d < p.head_dim; d += 128) {
    double a = 0, b = 0;
    for (std::int64_t k = 0; k < p.k_tokens; ++k) {
      if (s[k] == 0) continue;
      a += s[k] * double(float(p.v[k * p.v_stride + kv * p.head_dim + d]));
      b += g[k] * double(float(p.k[k * p.k_stride + kv * p.head_dim + d]));
    }
    o[(row * p.q_heads + head) * p.head_dim + d] = a;
    dq[(row * p.q_heads + head) * p.head_dim + d] = b * p.scale;
  }
  if (threadIdx.x == 0) lse[head * p.rows + row] = sum > 0 ? top + log(sum) : -INFINITY;
}

/// grid (k_tokens, kv_heads), 128 threads; rows must be all rows in order.
__global__ void reference_keys(ReferenceProblem p, const double* probability, const double* ds,
                               double* dk, double* dv) {
  const std::int64_t k = blockIdx.x;
  const int kv = blockIdx.y, group = p.q_heads / p.kv_heads;
  for (int d = threadIdx.x; d < p.head_dim; d += 128) {
    double a = 0, b = 0;
    for (int head = kv * group; head < (kv + 1) * group; ++head) {
      for (std::int64_t q = 0; q < p.rows; ++q) {
        const std::int64_t at = (head * p.rows + q) * p.k_tokens + k;
        if (probability[at] == 0) continue;
        a += ds[at] * double(float(p.q[q * p.q_stride + head * p.head_dim + d]));
        b += probability[at] * double(float(p.dout[q * p.dout_stride + head * p.head_dim + d]));
      }
    }
    dk[(k * p.kv_heads + kv) * p.head_dim + d] = a * p.scale;
    dv[(k * p.kv_heads + kv) * p.head_dim + d] = b;
  }
}

}  // namespace bench

// Host attention behind kernels/attention/attention.hpp: the typed kernels and what they share.
//
// Method: query blocks of 64 rows, the query heads of one key/value head stacked into one matrix
// when they share a pattern; keys in tiles of a few hundred columns (attention_host_tiles.hpp);
// BLAS for the five matrix products; the online softmax of Milakov and Gimelshein (2018) forward,
// recomputation of the probabilities from the LSE backward (FlashAttention, Dao et al. 2022).
// Memory beyond the operands does not grow with the length.  One thread per key/value head at most;
// every sum has a fixed order, so results are the same from run to run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/base/tensor.hpp"
#include "core/model/tensor_specs.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/ops/blas.hpp"

namespace ballast::host {

/// A tensor [tokens, heads, head_dim] opened by row: heads and head_dim are dense, tokens may lie
/// apart.
template <class T>
struct HeadRows {
  T* data = nullptr;
  std::int64_t stride = 0, head_dim = 0;
  T* at(std::int64_t token, std::int64_t head) const {
    return data + token * stride + head * head_dim;
  }
};
template <class T>
HeadRows<T> head_rows(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.strides()[0], t.size(2)};
}
/// A tensor [heads, tokens] opened by head.
template <class T>
struct TokenRows {
  T* data = nullptr;
  std::int64_t stride = 0;
  T* at(std::int64_t head) const { return data + head * stride; }
};
template <class T>
TokenRows<T> token_rows(const Tensor& t) {
  return {t.data<std::remove_const_t<T>>(), t.strides()[0]};
}

/// Query heads that are computed as one matrix: all of a key/value head's, or one of them when
/// every query head has its own pattern.
struct HeadGroup {
  int first = 0, heads = 1;
  int index_head = 0;
};
struct HeadGroups {
  int q_heads = 0, kv_heads = 0, index_heads = 1;
  int per_kv_head() const { return index_heads == 1 ? 1 : q_heads / kv_heads; }
  HeadGroup at(int kv_head, int i) const {
    const int group = q_heads / kv_heads;
    if (index_heads == 1) return {kv_head * group, group, 0};
    return {kv_head * group + i, 1, kv_head * group + i};
  }
  int stacked() const { return index_heads == 1 ? q_heads / kv_heads : 1; }
};

/// Columns of a score buffer (core/model/tensor_specs).
inline std::int64_t tile_columns(int stacked_heads, std::size_t element_bytes) {
  return attention_tile_columns(stacked_heads, static_cast<std::int64_t>(element_bytes));
}

using blas::gemm;

template <class T>
void attention_forward(const PatternArrays& index, const Tensor& q, const Tensor& k,
                       const Tensor& v, double scale, Tensor& o, Tensor& lse);
template <class T>
void attention_backward(const PatternArrays& index, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const Tensor& lse, const Tensor& delta,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv);
template <class T>
void attention_merge(Tensor& o, Tensor& lse, const Tensor& o_part, const Tensor& lse_part);
template <class T>
void attention_delta(const Tensor& o, const Tensor& d_o, Tensor& delta);

}  // namespace ballast::host

#include <cmath>
#include <limits>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/attention_host_tasks.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast::host {
namespace {

/// p[j] = e^(p[j] - lse) and ds[j] = p[j] (ds[j] - delta) on [begin, end), 0 elsewhere on [0,
/// keys).
template <class T>
void row_gradient(T* p, T* ds, std::int64_t keys, std::int64_t begin, std::int64_t end, T lse,
                  T delta) {
  if (lse == -std::numeric_limits<T>::infinity()) end = begin;  // an empty row has no gradient
  for (T* x : {p, ds}) {
    std::fill(x, x + begin, T(0));
    std::fill(x + end, x + keys, T(0));
  }
  for (std::int64_t j = begin; j < end; ++j) {
    const T probability = fast_exp(p[j] - lse);
    p[j] = probability;
    ds[j] = probability * (ds[j] - delta);
  }
}

/// Buffers of one thread.
template <class T>
struct Scratch {
  T *q, *d_o, *dq, *p, *ds, *keys, *values, *d_keys;
  static std::int64_t elements(std::int64_t rows, std::int64_t columns, std::int64_t head_dim) {
    return 3 * Arena<T>::padded(rows * head_dim) + 2 * Arena<T>::padded(rows * columns) +
           3 * Arena<T>::padded(columns * head_dim);
  }
  Scratch(T* data, std::int64_t rows, std::int64_t columns, std::int64_t head_dim) {
    Arena<T> arena(data);
    q = arena.take(rows * head_dim);
    d_o = arena.take(rows * head_dim);
    dq = arena.take(rows * head_dim);
    p = arena.take(rows * columns);
    ds = arena.take(rows * columns);
    keys = arena.take(columns * head_dim);
    values = arena.take(columns * head_dim);
    d_keys = arena.take(columns * head_dim);
  }
};

/// to[key] += left^T right over the stacked rows, for the keys of a piece: dV = P^T dO and dK =
/// dS^T Q.
template <class T>
void add_key_gradient(const KeyPiece& piece, std::int64_t rows, const T* left, std::int64_t columns,
                      const T* right, const HeadRows<T>& to, int kv_head, T* buffer) {
  const std::int64_t head_dim = to.head_dim;
  if (!piece.list) {
    gemm(CblasTrans, CblasNoTrans, piece.keys, head_dim, rows, T(1), left, columns, right, head_dim,
         T(1), to.at(piece.first, kv_head), to.stride);
    return;
  }
  gemm(CblasTrans, CblasNoTrans, piece.keys, head_dim, rows, T(1), left, columns, right, head_dim,
       T(0), buffer, head_dim);
  for (std::int64_t j = 0; j < piece.keys; ++j) {
    T* row = to.at(piece.list[j], kv_head);
    for (std::int64_t d = 0; d < head_dim; ++d) row[d] += buffer[j * head_dim + d];
  }
}

/// Adds scale times the stacked rows of `gradient` to the queries that they came from.
template <class T, class Rows>
void add_query_gradient(const StackedRows& stack, T scale, const T* gradient, const Rows& dq) {
  for (std::int64_t r = 0; r < stack.rows(); ++r) {
    T* to = dq.at(stack.token + r % stack.queries, stack.group.first + r / stack.queries);
    for (std::int64_t d = 0; d < dq.head_dim; ++d) to[d] += scale * gradient[r * dq.head_dim + d];
  }
}

}  // namespace

template <class T>
void attention_backward(const PatternArrays& index, const Tensor& q_, const Tensor& k_,
                        const Tensor& v_, double scale, const Tensor& lse_, const Tensor& delta_,
                        const Tensor& d_o_, Tensor& dq_, Tensor& dk_, Tensor& dv_) {
  const auto q = head_rows<const T>(q_), k = head_rows<const T>(k_), v = head_rows<const T>(v_),
             d_o = head_rows<const T>(d_o_);
  const auto lse = token_rows<const T>(lse_), delta = token_rows<const T>(delta_);
  const auto dq = head_rows<T>(dq_), dk = head_rows<T>(dk_), dv = head_rows<T>(dv_);
  const std::int64_t head_dim = q.head_dim;
  const HeadGroups groups{static_cast<int>(q_.size(1)), static_cast<int>(k_.size(1)),
                          index.index_heads};
  const std::int64_t max_rows = groups.stacked() * std::int64_t{kBlock},
                     columns = tile_columns(groups.stacked(), sizeof(T));

  for_each_kv_head<T>(
      groups.kv_heads, Scratch<T>::elements(max_rows, columns, head_dim),
      [&](int kv_head, T* data) {
        Scratch<T> s(data, max_rows, columns, head_dim);
        TileWalker walker(index, columns);
        for (int g = 0; g < groups.per_kv_head(); ++g) {
          const HeadGroup group = groups.at(kv_head, g);
          for (std::int64_t block = 0; block < index.q_blocks(); ++block) {
            const StackedRows stack{
                group, block * kBlock,
                std::min<std::int64_t>(kBlock, index.q_tokens() - block * kBlock)};
            const std::int64_t rows = stack.rows();
            walker.start(group.index_head, block);
            const auto* tile = walker.next();
            if (!tile) continue;
            stack.gather(q, static_cast<T>(scale), s.q);
            stack.gather(d_o, T(1), s.d_o);
            std::fill_n(s.dq, rows * head_dim, T(0));
            for (; tile; tile = walker.next()) {
              for (const auto& piece : *tile) {
                T *p = s.p + piece.column, *ds = s.ds + piece.column;
                const auto keys = piece_matrix(piece, k, kv_head, s.keys),
                           values = piece_matrix(piece, v, kv_head, s.values);
                gemm(CblasNoTrans, CblasTrans, rows, piece.keys, head_dim, T(1), s.q, head_dim,
                     keys.data, keys.stride, T(0), p, columns);
                gemm(CblasNoTrans, CblasTrans, rows, piece.keys, head_dim, T(1), s.d_o, head_dim,
                     values.data, values.stride, T(0), ds, columns);
                for (std::int64_t r = 0; r < rows; ++r) {
                  const std::int64_t i = r % stack.queries, head = group.first + r / stack.queries;
                  row_gradient(p + r * columns, ds + r * columns, piece.keys, piece.begin[i],
                               piece.end[i], lse.at(head)[stack.token + i],
                               delta.at(head)[stack.token + i]);
                }
                gemm(CblasNoTrans, CblasNoTrans, rows, head_dim, piece.keys, T(1), ds, columns,
                     keys.data, keys.stride, T(1), s.dq, head_dim);
                add_key_gradient(piece, rows, p, columns, s.d_o, dv, kv_head, s.d_keys);
                add_key_gradient(piece, rows, ds, columns, s.q, dk, kv_head, s.d_keys);
              }
            }
            add_query_gradient(stack, static_cast<T>(scale), s.dq, dq);
          }
        }
      });
}

template void attention_backward<float>(const PatternArrays&, const Tensor&, const Tensor&,
                                        const Tensor&, double, const Tensor&, const Tensor&,
                                        const Tensor&, Tensor&, Tensor&, Tensor&);
template void attention_backward<double>(const PatternArrays&, const Tensor&, const Tensor&,
                                         const Tensor&, double, const Tensor&, const Tensor&,
                                         const Tensor&, Tensor&, Tensor&, Tensor&);

}  // namespace ballast::host

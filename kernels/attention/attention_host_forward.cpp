#include <cmath>
#include <limits>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/attention_host_tasks.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast::host {
namespace {

constexpr std::int64_t kLanes = kColumnAlign;

/// Largest of s[begin..end) and `m`.
template <class T>
T row_max(const T* s, std::int64_t begin, std::int64_t end, T m) {
  std::int64_t j = begin;
  if (end - begin >= kLanes) {
    T lane[kLanes];
    for (std::int64_t l = 0; l < kLanes; ++l) lane[l] = s[begin + l];
    for (j = begin + kLanes; j + kLanes <= end; j += kLanes)
      for (std::int64_t l = 0; l < kLanes; ++l) lane[l] = s[j + l] > lane[l] ? s[j + l] : lane[l];
    for (std::int64_t l = 0; l < kLanes; ++l) m = std::max(m, lane[l]);
  }
  for (; j < end; ++j) m = std::max(m, s[j]);
  return m;
}

/// s[j] = e^(s[j] - m) on [begin, end), 0 elsewhere on [0, keys); returns the sum.
template <class T>
T row_exp(T* s, std::int64_t keys, std::int64_t begin, std::int64_t end, T m) {
  std::fill(s, s + begin, T(0));
  std::fill(s + end, s + keys, T(0));
  T lane[kLanes] = {};
  std::int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes)
    for (std::int64_t l = 0; l < kLanes; ++l) {
      const T p = fast_exp(s[j + l] - m);
      s[j + l] = p;
      lane[l] += p;
    }
  T sum = 0;
  for (; j < end; ++j) sum += s[j] = fast_exp(s[j] - m);
  for (std::int64_t l = 0; l < kLanes; ++l) sum += lane[l];
  return sum;
}

/// Buffers of one thread.
template <class T>
struct Scratch {
  T *q, *o, *scores, *keys, *values, *max, *sum;
  static std::int64_t elements(std::int64_t rows, std::int64_t columns, std::int64_t head_dim) {
    return 2 * Arena<T>::padded(rows * head_dim) + Arena<T>::padded(rows * columns) +
           2 * Arena<T>::padded(columns * head_dim) + 2 * Arena<T>::padded(rows);
  }
  Scratch(T* data, std::int64_t rows, std::int64_t columns, std::int64_t head_dim) {
    Arena<T> arena(data);
    q = arena.take(rows * head_dim);
    o = arena.take(rows * head_dim);
    scores = arena.take(rows * columns);
    keys = arena.take(columns * head_dim);
    values = arena.take(columns * head_dim);
    max = arena.take(rows);
    sum = arena.take(rows);
  }
};

/// Online softmax of one tile: turns scores into e^(score - max) and rescales what has been summed
/// so far.
template <class T>
void softmax_tile(const std::vector<KeyPiece>& tile, const StackedRows& stack, std::int64_t columns,
                  std::int64_t head_dim, Scratch<T>& s) {
  for (std::int64_t r = 0; r < stack.rows(); ++r) {
    const std::int64_t i = r % stack.queries;
    T* scores = s.scores + r * columns;
    T m = s.max[r];
    for (const auto& piece : tile)
      m = row_max(scores + piece.column, piece.begin[i], piece.end[i], m);
    // A row that has seen nothing yet keeps max = -inf; its scores become zeros without an
    // exponential being taken.
    const T shift = m == -std::numeric_limits<T>::infinity() ? T(0) : m;
    T sum = 0;
    for (const auto& piece : tile)
      sum += row_exp(scores + piece.column, piece.keys, piece.begin[i], piece.end[i], shift);
    if (m != s.max[r]) {
      const T factor = std::exp(s.max[r] - shift);  // 0 at first
      T* o = s.o + r * head_dim;
      for (std::int64_t d = 0; d < head_dim; ++d) o[d] *= factor;
      s.sum[r] *= factor;
      s.max[r] = m;
    }
    s.sum[r] += sum;
  }
}

}  // namespace

template <class T>
void attention_forward(const PatternArrays& index, const Tensor& q_, const Tensor& k_,
                       const Tensor& v_, double scale, Tensor& o_, Tensor& lse_) {
  const auto q = head_rows<const T>(q_), k = head_rows<const T>(k_), v = head_rows<const T>(v_);
  const auto o = head_rows<T>(o_);
  const auto lse = token_rows<T>(lse_);
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
            stack.gather(q, static_cast<T>(scale), s.q);
            std::fill_n(s.o, rows * head_dim, T(0));
            std::fill_n(s.max, rows, -std::numeric_limits<T>::infinity());
            std::fill_n(s.sum, rows, T(0));
            walker.start(group.index_head, block);
            while (const auto* tile = walker.next()) {
              for (const auto& piece : *tile) {
                const auto keys = piece_matrix(piece, k, kv_head, s.keys);
                gemm(CblasNoTrans, CblasTrans, rows, piece.keys, head_dim, T(1), s.q, head_dim,
                     keys.data, keys.stride, T(0), s.scores + piece.column, columns);
              }
              softmax_tile(*tile, stack, columns, head_dim, s);
              for (const auto& piece : *tile) {
                const auto values = piece_matrix(piece, v, kv_head, s.values);
                gemm(CblasNoTrans, CblasNoTrans, rows, head_dim, piece.keys, T(1),
                     s.scores + piece.column, columns, values.data, values.stride, T(1), s.o,
                     head_dim);
              }
            }
            for (std::int64_t r = 0; r < rows; ++r) {
              const std::int64_t token = stack.token + r % stack.queries,
                                 head = group.first + r / stack.queries;
              const bool seen =
                  s.sum[r] != T(0);  // a NaN counts as seen, so that it reaches the loss
              const T factor = seen ? 1 / s.sum[r] : T(0);
              T* to = o.at(token, head);
              for (std::int64_t d = 0; d < head_dim; ++d)
                to[d] = seen ? s.o[r * head_dim + d] * factor : T(0);
              lse.at(head)[token] =
                  seen ? s.max[r] + std::log(s.sum[r]) : -std::numeric_limits<T>::infinity();
            }
          }
        }
      });
}

template void attention_forward<float>(const PatternArrays&, const Tensor&, const Tensor&,
                                       const Tensor&, double, Tensor&, Tensor&);
template void attention_forward<double>(const PatternArrays&, const Tensor&, const Tensor&,
                                        const Tensor&, double, Tensor&, Tensor&);

}  // namespace ballast::host

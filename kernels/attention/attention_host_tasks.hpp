// Work of host attention on one thread: the stacked rows of a query block and the keys of a piece.
#pragma once
#include <Kokkos_Core.hpp>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention_host.hpp"
#include "kernels/attention/attention_host_tiles.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast::host {

/// Rows (query, head) of one query block, stacked head by head: row h * queries + i is query `token
/// + i` of head `group.first + h`.
struct StackedRows {
  HeadGroup group;
  std::int64_t token = 0, queries = 0;
  std::int64_t rows() const { return group.heads * queries; }

  /// Dense copy [rows, head_dim], scaled.
  template <class T>
  void gather(const HeadRows<const T>& from, T factor, T* to) const {
    for (int h = 0; h < group.heads; ++h)
      for (std::int64_t i = 0; i < queries; ++i, to += from.head_dim) {
        const T* row = from.at(token + i, group.first + h);
        for (std::int64_t d = 0; d < from.head_dim; ++d) to[d] = factor * row[d];
      }
  }
};

/// Keys (or values) of a piece as a matrix: in place for a range, gathered into `buffer` for
/// columns.
template <class T>
struct PieceMatrix {
  const T* data;
  std::int64_t stride;
};
template <class T>
PieceMatrix<T> piece_matrix(const KeyPiece& piece, const HeadRows<const T>& from, int kv_head,
                            T* buffer) {
  if (!piece.list) return {from.at(piece.first, kv_head), from.stride};
  for (std::int64_t j = 0; j < piece.keys; ++j)
    std::copy_n(from.at(piece.list[j], kv_head), from.head_dim, buffer + j * from.head_dim);
  return {buffer, from.head_dim};
}

/// Cuts one allocation into buffers that start on cache lines.
template <class T>
class Arena {
 public:
  explicit Arena(T* data) : next_(data) {}
  T* take(std::int64_t elements) {
    T* buffer = next_;
    next_ += padded(elements);
    return buffer;
  }
  static std::int64_t padded(std::int64_t elements) { return (elements + 63) / 64 * 64; }

 private:
  T* next_;
};

/// Calls f(kv_head, scratch) for every key/value head, on as many threads as Kokkos offers.
/// `scratch` holds `elements` values of T and belongs to one thread at a time.
template <class T, class F>
void for_each_kv_head(int kv_heads, std::int64_t elements, const F& f) {
  const std::int64_t workers =
      std::min<std::int64_t>(kv_heads, Kokkos::DefaultHostExecutionSpace().concurrency());
  Tensor scratch = Tensor::empty({workers, Arena<T>::padded(elements)}, dtype_of<T>::value,
                                 host_device(), MemoryCategory::workspace);
  T* data = scratch.data<T>();
  const std::int64_t stride = scratch.size(1);
  parallel_for("attention", workers, [&](std::int64_t worker) {
    for (int head = static_cast<int>(worker); head < kv_heads; head += static_cast<int>(workers))
      f(head, data + worker * stride);
  });
}

}  // namespace ballast::host

// A host Tensor opened as a typed, unmanaged Kokkos::View, and the loops that operations run over
// it.
#pragma once
#include <Kokkos_Core.hpp>
#include <cstdint>
#include <type_traits>

#include "core/base/tensor.hpp"

namespace ballast::host {

using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
template <class T>
using Vector = Kokkos::View<T*, Kokkos::LayoutRight, Kokkos::HostSpace, Unmanaged>;

/// Rows of a tensor whose other dimensions are dense: [rows, columns], columns being the product of
/// the others.  Rows may lie apart (a slice of a joined buffer).  Opened by row, so that inner
/// loops run over plain, dense pointers.
template <class T>
struct Matrix {
  Kokkos::View<T**, Kokkos::LayoutStride, Kokkos::HostSpace, Unmanaged> view;
  std::int64_t rows() const { return static_cast<std::int64_t>(view.extent(0)); }
  std::int64_t columns() const { return static_cast<std::int64_t>(view.extent(1)); }
  std::int64_t row_stride() const { return static_cast<std::int64_t>(view.stride(0)); }
  T* row(std::int64_t i) const { return view.data() + i * row_stride(); }
};

template <class T>
void require_host(const Tensor& t) {
  require(t.space() == Space::host, "a tensor of shape {} lies on a GPU; host code cannot open it",
          to_string(t.shape()));
}

/// T may be const.  Throws Error for another dtype, a device tensor or a tensor that is not dense.
template <class T>
Vector<T> vector(const Tensor& t) {
  require_host<T>(t);
  require(t.contiguous(), "a dense vector was expected, got shape {} with strides",
          to_string(t.shape()));
  return Vector<T>(t.data<std::remove_const_t<T>>(), static_cast<std::size_t>(t.numel()));
}

template <class T>
Matrix<T> matrix(const Tensor& t) {
  require_host<T>(t);
  require(t.rank() >= 1, "a matrix was expected, got a scalar");
  std::int64_t columns = 1;
  for (int d = t.rank() - 1; d >= 1; --d) {
    require(t.shape()[d] == 1 || t.strides()[d] == columns,
            "rows must be dense, got shape {} with gaps inside rows", to_string(t.shape()));
    columns *= t.shape()[d];
  }
  const std::int64_t stride = t.size(0) > 1 ? t.strides()[0] : columns;
  const Kokkos::LayoutStride layout(static_cast<std::size_t>(t.size(0)),
                                    static_cast<std::size_t>(stride),
                                    static_cast<std::size_t>(columns), 1);
  return {decltype(Matrix<T>::view)(t.data<std::remove_const_t<T>>(), layout)};
}

/// f(i) for i in [0, n), in parallel on the host's execution space.  Iterations must be
/// independent.
template <class F>
void parallel_for(const char* label, std::int64_t n, const F& f) {
  using Policy =
      Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  if (n > 0) Kokkos::parallel_for(label, Policy(0, n), f);
}

/// Sum of f(i) over [0, n) in a fixed order that vectorises: 16 interleaved sums in T, joined in
/// double.
template <class T, class F>
double lane_sum(std::int64_t n, const F& f) {
  constexpr int lanes = 16;
  T sum[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) sum[l] += f(i + l);
  double total = 0;
  for (; i < n; ++i) total += static_cast<double>(f(i));
  for (int l = 0; l < lanes; ++l) total += static_cast<double>(sum[l]);
  return total;
}

}  // namespace ballast::host

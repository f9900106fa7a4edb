#include "kernels/ops/elementwise.hpp"

#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {

void add(const Tensor& a_, const Tensor& b_, Tensor& out_) {
  require(a_.shape() == b_.shape() && a_.shape() == out_.shape(), "add: {} + {} does not fit {}",
          to_string(a_.shape()), to_string(b_.shape()), to_string(out_.shape()));
  BALLAST_ON_CUDA(a_, add(a_, b_, out_));
  dispatch_float(a_.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto a = host::matrix<const T>(a_), b = host::matrix<const T>(b_);
    const auto out = host::matrix<T>(out_);
    host::parallel_for("add", out.rows(), [=](std::int64_t i) {
      const T *x = a.row(i), *y = b.row(i);
      T* z = out.row(i);
      const std::int64_t n = out.columns();
#pragma GCC ivdep
      for (std::int64_t j = 0; j < n; ++j) z[j] = x[j] + y[j];
    });
  });
}

void copy_rows(const Tensor& from_, Tensor& to_) {
  require(from_.shape() == to_.shape(), "copy_rows: {} does not fit {}", to_string(from_.shape()),
          to_string(to_.shape()));
  BALLAST_ON_CUDA(from_, copy_rows(from_, to_));
  dispatch_float(from_.dtype(), [&](auto f) {
    dispatch_float(to_.dtype(), [&](auto t) {
      using To = decltype(t);
      const auto from = host::matrix<const decltype(f)>(from_);
      const auto to = host::matrix<To>(to_);
      host::parallel_for("copy rows", to.rows(), [=](std::int64_t i) {
        const auto* x = from.row(i);
        To* y = to.row(i);
        const std::int64_t n = to.columns();
        for (std::int64_t j = 0; j < n; ++j) y[j] = static_cast<To>(x[j]);
      });
    });
  });
}

}  // namespace ballast

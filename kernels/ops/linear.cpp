#include "kernels/ops/linear.hpp"

#include <algorithm>
#include <vector>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/blas.hpp"
#include "kernels/ops/gradient_elements.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace host {
namespace {

using blas::gemm;

template <class T>
void forward(const Tensor& x_, const Tensor& w_, const Tensor& bias_, Tensor& y_,
             const ProductOut& out) {
  const auto x = matrix<const T>(x_), w = matrix<const T>(w_);
  const auto y = matrix<T>(y_);
  if (y.rows() == 0) return;
  if (bias_.defined()) {
    const auto bias = vector<const T>(bias_);
    parallel_for("linear bias", y.rows(),
                 [=](std::int64_t i) { std::copy_n(bias.data(), y.columns(), y.row(i)); });
  }
  gemm(CblasNoTrans, CblasTrans, y.rows(), y.columns(), x.columns(), static_cast<T>(out.scale),
       x.row(0), x.row_stride(), w.row(0), w.row_stride(),
       bias_.defined() || out.accumulate ? T(1) : T(0), y.row(0), y.row_stride());
}

template <class T>
void input_gradient(const Tensor& dy_, const Tensor& w_, Tensor& dx_, const ProductOut& out) {
  const auto dy = matrix<const T>(dy_), w = matrix<const T>(w_);
  const auto dx = matrix<T>(dx_);
  if (dx.rows() == 0) return;
  gemm(CblasNoTrans, CblasNoTrans, dx.rows(), dx.columns(), dy.columns(), static_cast<T>(out.scale),
       dy.row(0), dy.row_stride(), w.row(0), w.row_stride(), out.accumulate ? T(1) : T(0),
       dx.row(0), dx.row_stride());
}

/// A few rows of dW at a time, as sums in T before they are rounded.
template <class T>
void rounded_weight_gradient(const Matrix<const T>& x, const Matrix<const T>& dy,
                             const GradientTarget& dw) {
  constexpr std::int64_t kElements = 1 << 16;
  const std::int64_t rows = dw.tensor.size(0), columns = dw.tensor.size(1),
                     most = std::clamp<std::int64_t>(kElements / columns, 1, rows);
  std::vector<T> sums(static_cast<std::size_t>(most * columns));
  const GradientElements<T> out(dw);
  const T* const from = sums.data();
  for (std::int64_t begin = 0; begin < rows; begin += most) {
    const std::int64_t n = std::min(most, rows - begin);
    gemm(CblasTrans, CblasNoTrans, n, columns, x.rows(), T(1), dy.row(0) + begin, dy.row_stride(),
         x.row(0), x.row_stride(), T(0), sums.data(), columns);
    parallel_for("linear weight gradient", n, [=](std::int64_t i) {
      for (std::int64_t j = 0; j < columns; ++j)
        out.put((begin + i) * columns + j, from[i * columns + j]);
    });
  }
}

template <class T>
void weight_gradient(const Tensor& x_, const Tensor& dy_, const GradientTarget& dw_) {
  const auto x = matrix<const T>(x_), dy = matrix<const T>(dy_);
  if (dw_.tensor.dtype() == DType::bf16) return rounded_weight_gradient(x, dy, dw_);
  const auto dw = matrix<T>(dw_.tensor);
  gemm(CblasTrans, CblasNoTrans, dw.rows(), dw.columns(), x.rows(), T(1), dy.row(0),
       dy.row_stride(), x.row(0), x.row_stride(), dw_.accumulate ? T(1) : T(0), dw.row(0),
       dw.row_stride());
}

template <class T>
void bias_gradient(const Tensor& dy_, const GradientTarget& db_) {
  const auto dy = matrix<const T>(dy_);
  const GradientElements<T> db(db_);
  constexpr std::int64_t width =
      64;  // columns summed together: whole cache lines, accumulators in registers or L1
  const std::int64_t columns = dy.columns();
  parallel_for("linear bias gradient", (columns + width - 1) / width, [=](std::int64_t block) {
    const std::int64_t begin = block * width, n = std::min(width, columns - begin);
    double sum[width] = {};
    for (std::int64_t i = 0; i < dy.rows(); ++i) {
      const T* row = dy.row(i) + begin;
      for (std::int64_t j = 0; j < n; ++j) sum[j] += static_cast<double>(row[j]);
    }
    for (std::int64_t j = 0; j < n; ++j) db.put(begin + j, static_cast<T>(sum[j]));
  });
}

}  // namespace
}  // namespace host

namespace {
std::int64_t columns(const Tensor& t) {
  std::int64_t n = 1;
  for (int d = 1; d < t.rank(); ++d) n *= t.size(d);
  return n;
}
void check(const char* what, const Tensor& x, const Tensor& w, const Tensor& y) {
  require(w.rank() == 2 && x.rank() >= 2 && y.rank() >= 2 && x.size(0) == y.size(0) &&
              columns(x) == w.size(1) && columns(y) == w.size(0),
          "{}: input {}, weight {} [out, in] and output {} do not fit", what, to_string(x.shape()),
          to_string(w.shape()), to_string(y.shape()));
}
}  // namespace

void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& y,
                    const ProductOut& out) {
  check("linear_forward", x, w, y);
  require(!bias.defined() || bias.numel() == w.size(0),
          "linear_forward: bias {} does not fit weight {}", to_string(bias.shape()),
          to_string(w.shape()));
  require(!bias.defined() || (out.scale == 1 && !out.accumulate),
          "linear_forward: a bias, and an output that is scaled or added to");
  BALLAST_ON_CUDA(x, linear_forward(x, w, bias, y, out));
  dispatch_float(x.dtype(), [&](auto t) { host::forward<decltype(t)>(x, w, bias, y, out); });
}

void linear_input_gradient(const Tensor& dy, const Tensor& w, Tensor& dx, const ProductOut& out) {
  check("linear_input_gradient", dx, w, dy);
  BALLAST_ON_CUDA(dy, linear_input_gradient(dy, w, dx, out));
  dispatch_float(dy.dtype(), [&](auto t) { host::input_gradient<decltype(t)>(dy, w, dx, out); });
}

void linear_weight_gradient(const Tensor& x, const Tensor& dy, const GradientTarget& dw) {
  if (!dw.defined()) return;
  check("linear_weight_gradient", x, dw.tensor, dy);
  if (x.size(0) == 0) {
    if (!dw.accumulate) Tensor(dw.tensor).zero();
    return;
  }
  BALLAST_ON_CUDA(x, linear_weight_gradient(x, dy, dw));
  dispatch_float(x.dtype(), [&](auto t) { host::weight_gradient<decltype(t)>(x, dy, dw); });
}

void linear_bias_gradient(const Tensor& dy, const GradientTarget& db) {
  if (!db.defined()) return;
  require(dy.rank() >= 2 && db.tensor.numel() == columns(dy),
          "linear_bias_gradient: gradient {} and bias {} do not fit", to_string(dy.shape()),
          to_string(db.tensor.shape()));
  BALLAST_ON_CUDA(dy, linear_bias_gradient(dy, db));
  dispatch_float(dy.dtype(), [&](auto t) { host::bias_gradient<decltype(t)>(dy, db); });
}

}  // namespace ballast

#include "kernels/ops/rmsnorm.hpp"

#include <algorithm>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/gradient_elements.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/reciprocal_rms.hpp"

namespace ballast {
namespace host {
namespace {

// The one place that computes y: forward and recomputation must agree bit for bit.
template <class T>
void normalise(const T* __restrict x, T rstd, const T* __restrict w, std::int64_t n,
               T* __restrict y) {
  for (std::int64_t j = 0; j < n; ++j) y[j] = (x[j] * rstd) * w[j];
}

template <class T>
void forward(const Tensor& x_, const Tensor* branch_, const Tensor& w_, double eps, Tensor* sum_,
             Tensor& y_, Tensor& rstd_) {
  const auto x = matrix<const T>(x_);
  const auto branch = branch_ ? matrix<const T>(*branch_) : x;
  const auto sum = sum_ ? matrix<T>(*sum_) : Matrix<T>{};
  const auto y = matrix<T>(y_);
  const auto w = vector<const T>(w_);
  const auto rstd = vector<T>(rstd_);
  const bool fused = branch_ != nullptr;
  const std::int64_t n = x.columns();
  parallel_for("rmsnorm", x.rows(), [=](std::int64_t i) {
    const T* row = x.row(i);
    if (fused) {
      const T* add = branch.row(i);
      T* out = sum.row(i);
      for (std::int64_t j = 0; j < n; ++j) out[j] = row[j] + add[j];
      row = out;
    }
    const T r = reciprocal_rms(row, n, eps);
    rstd(static_cast<std::size_t>(i)) = r;
    normalise(row, r, w.data(), n, y.row(i));
  });
}

template <class T>
void recompute(const Tensor& x_, const Tensor& rstd_, const Tensor& w_, Tensor& y_) {
  const auto x = matrix<const T>(x_);
  const auto y = matrix<T>(y_);
  const auto w = vector<const T>(w_), rstd = vector<const T>(rstd_);
  parallel_for("rmsnorm recompute", x.rows(), [=](std::int64_t i) {
    normalise(x.row(i), rstd(static_cast<std::size_t>(i)), w.data(), x.columns(), y.row(i));
  });
}

template <class T>
void input_gradient(const Tensor& dy_, const Tensor& x_, const Tensor& rstd_, const Tensor& w_,
                    bool accumulate, Tensor& dx_) {
  const auto dy = matrix<const T>(dy_), x = matrix<const T>(x_);
  const auto dx = matrix<T>(dx_);
  const auto w = vector<const T>(w_), rstd = vector<const T>(rstd_);
  const std::int64_t n = x.columns();
  parallel_for("rmsnorm input gradient", x.rows(), [=](std::int64_t i) {
    const T* __restrict g = dy.row(i);
    const T* __restrict row = x.row(i);
    const T* __restrict weight = w.data();
    T* __restrict out = dx.row(i);
    const T r = rstd(static_cast<std::size_t>(i));
    const double dot = lane_sum<T>(n, [=](std::int64_t j) { return g[j] * weight[j] * row[j]; });
    const T c = static_cast<T>(dot * static_cast<double>(r) * static_cast<double>(r) /
                               static_cast<double>(n));
    if (accumulate)
      for (std::int64_t j = 0; j < n; ++j) out[j] += r * (g[j] * weight[j] - c * row[j]);
    else
      for (std::int64_t j = 0; j < n; ++j) out[j] = r * (g[j] * weight[j] - c * row[j]);
  });
}

template <class T>
void weight_gradient(const Tensor& dy_, const Tensor& x_, const Tensor& rstd_,
                     const GradientTarget& dw_) {
  const auto dy = matrix<const T>(dy_), x = matrix<const T>(x_);
  const auto rstd = vector<const T>(rstd_);
  const GradientElements<T> dw(dw_);
  constexpr std::int64_t width = 64;
  const std::int64_t columns = x.columns();
  parallel_for("rmsnorm weight gradient", (columns + width - 1) / width, [=](std::int64_t block) {
    const std::int64_t begin = block * width, n = std::min(width, columns - begin);
    double sum[width] = {};
    for (std::int64_t i = 0; i < x.rows(); ++i) {
      const T* g = dy.row(i) + begin;
      const T* row = x.row(i) + begin;
      const T r = rstd(static_cast<std::size_t>(i));
      for (std::int64_t j = 0; j < n; ++j) sum[j] += static_cast<double>(g[j] * (row[j] * r));
    }
    for (std::int64_t j = 0; j < n; ++j) dw.put(begin + j, static_cast<T>(sum[j]));
  });
}

}  // namespace
}  // namespace host

namespace {
void check(const char* what, const Tensor& x, const Tensor& other, const Tensor& w,
           const Tensor& rstd) {
  require(x.rank() == 2 && x.shape() == other.shape() && w.numel() == x.size(1) &&
              rstd.numel() == x.size(0),
          "{}: tokens {} and {}, weight {} and rstd {} do not fit", what, to_string(x.shape()),
          to_string(other.shape()), to_string(w.shape()), to_string(rstd.shape()));
}
}  // namespace

void rmsnorm_forward(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  check("rmsnorm_forward", x, y, w, rstd);
  BALLAST_ON_CUDA(x, rmsnorm_forward(x, w, eps, y, rstd));
  dispatch_float(x.dtype(),
                 [&](auto t) { host::forward<decltype(t)>(x, nullptr, w, eps, nullptr, y, rstd); });
}

void add_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& y, Tensor& rstd) {
  check("add_rmsnorm_forward", x, y, w, rstd);
  check("add_rmsnorm_forward", branch, sum, w, rstd);
  BALLAST_ON_CUDA(x, add_rmsnorm_forward(x, branch, w, eps, sum, y, rstd));
  dispatch_float(x.dtype(),
                 [&](auto t) { host::forward<decltype(t)>(x, &branch, w, eps, &sum, y, rstd); });
}

void rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w, Tensor& y) {
  check("rmsnorm_recompute", x, y, w, rstd);
  BALLAST_ON_CUDA(x, rmsnorm_recompute(x, rstd, w, y));
  dispatch_float(x.dtype(), [&](auto t) { host::recompute<decltype(t)>(x, rstd, w, y); });
}

void rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool accumulate, Tensor& dx, const GradientTarget& dw) {
  check("rmsnorm_backward", dy, x, w, rstd);
  check("rmsnorm_backward", dx, x, w, rstd);
  require(!dw.defined() || dw.tensor.numel() == w.numel(),
          "rmsnorm_backward: weight {} and its gradient {} do not fit", to_string(w.shape()),
          to_string(dw.tensor.shape()));
  BALLAST_ON_CUDA(dy, rmsnorm_backward(dy, x, rstd, w, accumulate, dx, dw));
  dispatch_float(dy.dtype(), [&](auto t) {
    if (dw.defined()) host::weight_gradient<decltype(t)>(dy, x, rstd, dw);
    host::input_gradient<decltype(t)>(dy, x, rstd, w, accumulate, dx);
  });
}

}  // namespace ballast

#include "kernels/ops/qk_norm.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/gradient_elements.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/reciprocal_rms.hpp"
#include "kernels/ops/rope.hpp"

namespace ballast {
namespace host {
namespace {

template <class T>
void forward(const Tensor& x_, std::int64_t query_heads, const QkNormWeights& weights,
             const Tensor& cos_, const Tensor& sin_, Tensor& y_) {
  const auto x = matrix<const T>(x_), cos = matrix<const T>(cos_), sin = matrix<const T>(sin_);
  const auto y = matrix<T>(y_);
  const auto w_q = vector<const T>(weights.q), w_k = vector<const T>(weights.k);
  const std::int64_t heads = y_.size(1), dim = y_.size(2), half = dim / 2;
  const double eps = weights.eps;
  parallel_for("qk norm", y.rows(), [=](std::int64_t i) {
    const T *c = cos.row(i), *s = sin.row(i);
    for (std::int64_t h = 0; h < heads; ++h) {
      const T* from = x.row(i) + h * dim;
      const T* w = h < query_heads ? w_q.data() : w_k.data();
      T* to = y.row(i) + h * dim;
      const T r = reciprocal_rms(from, dim, eps);
      for (std::int64_t j = 0; j < half; ++j) {
        const T a = from[j] * r * w[j], b = from[j + half] * r * w[j + half];
        to[j] = a * c[j] - b * s[j];
        to[j + half] = b * c[j] + a * s[j];
      }
    }
  });
}

/// Tokens whose part of the weights' gradients is summed alone: by their number, never by the
/// threads, so that sums keep their bits.
std::int64_t tokens_a_part(std::int64_t tokens) {
  return std::max<std::int64_t>(256, (tokens + 63) / 64);
}

/// The gradient of one head turned back, `d`, becomes that of the norm's input in place; `sums`
/// gets the weight's.
template <class T>
void norm_gradient(const T* x, const T* w, std::int64_t dim, double eps, T* d, double* sums) {
  const T r = reciprocal_rms(x, dim, eps);
  const double dot = lane_sum<T>(dim, [=](std::int64_t j) { return d[j] * w[j] * x[j]; });
  const T c = static_cast<T>(dot * static_cast<double>(r) * static_cast<double>(r) /
                             static_cast<double>(dim));
  for (std::int64_t j = 0; j < dim; ++j) {
    sums[j] += static_cast<double>(d[j] * (x[j] * r));
    d[j] = r * (d[j] * w[j] - c * x[j]);
  }
}

template <class T>
void backward(const Tensor& x_, std::int64_t query_heads, const QkNormWeights& weights,
              Tensor& d_qkv_, const std::array<GradientTarget, 2>& targets) {
  const auto x = matrix<const T>(x_);
  const auto d_qkv = matrix<T>(d_qkv_);
  const auto w_q = vector<const T>(weights.q), w_k = vector<const T>(weights.k);
  const std::int64_t tokens = x.rows(), heads = x_.size(1), dim = x_.size(2),
                     length = tokens_a_part(tokens), parts = (tokens + length - 1) / length;
  const double eps = weights.eps;
  std::vector<double> partial(static_cast<std::size_t>(2 * parts * dim), 0.0);
  double* const sums = partial.data();
  parallel_for("qk norm gradient", parts, [=](std::int64_t part) {
    for (std::int64_t i = part * length; i < std::min(tokens, (part + 1) * length); ++i)
      for (std::int64_t h = 0; h < heads; ++h) {
        const bool query = h < query_heads;
        norm_gradient(x.row(i) + h * dim, query ? w_q.data() : w_k.data(), dim, eps,
                      d_qkv.row(i) + h * dim, sums + (2 * part + (query ? 0 : 1)) * dim);
      }
  });
  for (std::size_t which = 0; which < 2; ++which) {
    if (!targets[which].defined()) continue;
    const GradientElements<T> out(targets[which]);
    for (std::int64_t j = 0; j < dim; ++j) {
      double total = 0;
      for (std::int64_t part = 0; part < parts; ++part)
        total += sums[(2 * part + static_cast<std::int64_t>(which)) * dim + j];
      out.put(j, static_cast<T>(total));
    }
  }
}

}  // namespace
}  // namespace host

namespace {

void check(const char* what, const Tensor& x, std::int64_t heads, const QkNormWeights& w,
           const Tensor& cos, const Tensor& sin) {
  require(x.rank() == 3 && heads <= x.size(1) && w.q.numel() == x.size(2) &&
              w.k.numel() == x.size(2) && cos.rank() == 2 && cos.shape() == sin.shape() &&
              cos.size(0) == x.size(0) && 2 * cos.size(1) == x.size(2),
          "{}: {} heads of {}, weights {} and {}, cos {} and sin {} do not fit", what, heads,
          to_string(x.shape()), to_string(w.q.shape()), to_string(w.k.shape()),
          to_string(cos.shape()), to_string(sin.shape()));
}

}  // namespace

void qk_norm_rope(const Tensor& x, std::int64_t query_heads, const QkNormWeights& w,
                  const Tensor& cos, const Tensor& sin, Tensor& y) {
  require(y.rank() == 3 && y.size(0) == x.size(0) && query_heads <= y.size(1),
          "qk_norm_rope: {} query heads of y {} do not fit", query_heads, to_string(y.shape()));
  check("qk_norm_rope", x, y.size(1), w, cos, sin);
  BALLAST_ON_CUDA(x, qk_norm_rope(x, query_heads, w, cos, sin, y));
  dispatch_float(x.dtype(),
                 [&](auto t) { host::forward<decltype(t)>(x, query_heads, w, cos, sin, y); });
}

void qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                           const QkNormWeights& w, const Tensor& cos, const Tensor& sin,
                           Tensor& d_qkv, const GradientTarget& d_w_q,
                           const GradientTarget& d_w_k) {
  const std::int64_t heads = dq.size(1) + dk.size(1);
  check("qk_norm_rope_backward", x, heads, w, cos, sin);
  require(x.size(0) == dq.size(0) && x.size(2) == dq.size(2) &&
              (!d_w_q.defined() || d_w_q.tensor.numel() == w.q.numel()) &&
              (!d_w_k.defined() || d_w_k.tensor.numel() == w.k.numel()),
          "qk_norm_rope_backward: dq {}, x {} and the gradients of weights of {} do not fit",
          to_string(dq.shape()), to_string(x.shape()), to_string(w.q.shape()));
  BALLAST_ON_CUDA(dq, qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, d_qkv, d_w_q, d_w_k));
  rope_backward(dq, dk, dv, cos, sin, d_qkv);
  dispatch_float(dq.dtype(), [&](auto t) {
    host::backward<decltype(t)>(x.narrow(1, 0, heads), dq.size(1), w, d_qkv, {d_w_q, d_w_k});
  });
}

}  // namespace ballast

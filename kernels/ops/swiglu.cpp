#include "kernels/ops/swiglu.hpp"

#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast {
namespace host {
namespace {

template <class T>
T swiglu_of(T gate, T up) {
  return gate / (T(1) + fast_exp(-gate)) * up;
}

template <class T>
void forward(const Tensor& gate_up_, Tensor& y_) {
  const auto gate_up = matrix<const T>(gate_up_);
  const auto y = matrix<T>(y_);
  const std::int64_t n = y.columns();
  parallel_for("swiglu", y.rows(), [=](std::int64_t i) {
    const T* __restrict g = gate_up.row(i);
    const T* __restrict u = g + n;
    T* __restrict out = y.row(i);
    for (std::int64_t j = 0; j < n; ++j) out[j] = swiglu_of(g[j], u[j]);
  });
}

template <class T>
void backward(const Tensor& gate_up_, const Tensor& dy_, Tensor& d_gate_up_, const Tensor& y_) {
  const auto gate_up = matrix<const T>(gate_up_), dy = matrix<const T>(dy_);
  const auto d_gate_up = matrix<T>(d_gate_up_);
  const auto y = y_.defined() ? matrix<T>(y_) : d_gate_up;
  const bool wanted = y_.defined();
  const std::int64_t n = dy.columns();
  parallel_for("swiglu backward", dy.rows(), [=](std::int64_t i) {
    const T *g = gate_up.row(i), *u = g + n, *d = dy.row(i);
    T *dg = d_gate_up.row(i), *du = dg + n;
    for (std::int64_t j = 0; wanted && j < n; ++j) y.row(i)[j] = swiglu_of(g[j], u[j]);
#pragma GCC ivdep
    for (std::int64_t j = 0; j < n;
         ++j) {  // d_gate_up may be gate_up itself: element j is read before it is written
      const T gate = g[j], up = u[j], sigmoid = T(1) / (T(1) + fast_exp(-gate));
      dg[j] = d[j] * up * sigmoid * (T(1) + gate * (T(1) - sigmoid));
      du[j] = d[j] * gate * sigmoid;
    }
  });
}

}  // namespace
}  // namespace host

namespace {
void check(const char* what, const Tensor& gate_up, const Tensor& y) {
  require(gate_up.rank() == 2 && y.rank() == 2 && gate_up.size(0) == y.size(0) &&
              gate_up.size(1) == 2 * y.size(1),
          "{}: gate_up {} must have twice the columns of {}", what, to_string(gate_up.shape()),
          to_string(y.shape()));
}
}  // namespace

void swiglu_forward(const Tensor& gate_up, Tensor& y) {
  check("swiglu_forward", gate_up, y);
  BALLAST_ON_CUDA(gate_up, swiglu_forward(gate_up, y));
  dispatch_float(gate_up.dtype(), [&](auto t) { host::forward<decltype(t)>(gate_up, y); });
}

void swiglu_backward(const Tensor& gate_up, const Tensor& dy, Tensor& d_gate_up, const Tensor& y) {
  check("swiglu_backward", gate_up, dy);
  check("swiglu_backward", d_gate_up, dy);
  if (y.defined()) check("swiglu_backward", gate_up, y);
  BALLAST_ON_CUDA(gate_up, swiglu_backward(gate_up, dy, d_gate_up, y));
  dispatch_float(gate_up.dtype(),
                 [&](auto t) { host::backward<decltype(t)>(gate_up, dy, d_gate_up, y); });
}

}  // namespace ballast

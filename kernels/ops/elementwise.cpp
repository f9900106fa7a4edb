#include "kernels/ops/elementwise.hpp"

#include "core/base/number.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace host {
namespace {

template <class A, class B, class Out>
void add(const Tensor& a_, const Tensor& b_, Tensor& out_) {
  const auto a = matrix<const A>(a_);
  const auto b = matrix<const B>(b_);
  const auto out = matrix<Out>(out_);
  parallel_for("add", out.rows(), [=](std::int64_t i) {
    const A* x = a.row(i);
    const B* y = b.row(i);
    Out* z = out.row(i);
    const std::int64_t n = out.columns();
#pragma GCC ivdep
    for (std::int64_t j = 0; j < n; ++j) z[j] = element_of<Out>(number(x[j]) + number(y[j]));
  });
}

}  // namespace
}  // namespace host

void add(const Tensor& a, const Tensor& b, Tensor& out) {
  require(a.shape() == b.shape() && a.shape() == out.shape(), "add: {} + {} does not fit {}",
          to_string(a.shape()), to_string(b.shape()), to_string(out.shape()));
  BALLAST_ON_CUDA(a, add(a, b, out));
  const bool b_bf16 = b.dtype() == DType::bf16, out_bf16 = out.dtype() == DType::bf16;
  if (a.dtype() == DType::bf16) return host::add<bf16, bf16, bf16>(a, b, out);
  dispatch_float(a.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto add = b_bf16     ? host::add<T, bf16, T>
                     : out_bf16 ? host::add<T, T, bf16>
                                : host::add<T, T, T>;
    add(a, b, out);
  });
}

void copy_rows(const Tensor& from_, Tensor& to_) {
  require(from_.shape() == to_.shape(), "copy_rows: {} does not fit {}", to_string(from_.shape()),
          to_string(to_.shape()));
  BALLAST_ON_CUDA(from_, copy_rows(from_, to_));
  dispatch_float(to_.dtype(), [&](auto t) {
    using To = decltype(t);
    const auto to = host::matrix<To>(to_);
    const auto copy = [&](const auto& from) {
      host::parallel_for("copy rows", to.rows(), [=](std::int64_t i) {
        const auto* x = from.row(i);
        To* y = to.row(i);
        const std::int64_t n = to.columns();
        for (std::int64_t j = 0; j < n; ++j) y[j] = static_cast<To>(number(x[j]));
      });
    };
    if (from_.dtype() == DType::bf16) return copy(host::matrix<const bf16>(from_));
    dispatch_float(from_.dtype(), [&](auto f) { copy(host::matrix<const decltype(f)>(from_)); });
  });
}

}  // namespace ballast

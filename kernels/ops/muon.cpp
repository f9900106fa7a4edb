#include "kernels/ops/muon.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/ops/adamw.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/blas.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace host {
namespace {

constexpr std::int64_t kSpan = 4096;  // elements per work item

template <class F>
void spans(const char* label, std::int64_t n, const F& f) {
  parallel_for(label, (n + kSpan - 1) / kSpan, [=](std::int64_t span) {
    const std::int64_t end = std::min((span + 1) * kSpan, n);
    for (std::int64_t i = span * kSpan; i < end; ++i) f(i);
  });
}

template <class T>
void momentum(Tensor& moment_, Tensor& gradient_, double scale_, const MuonOptions& options) {
  T* const moment = moment_.data<T>();
  T* const gradient = gradient_.data<T>();
  const T scale = static_cast<T>(scale_), mu = static_cast<T>(options.momentum),
          ahead = options.nesterov ? mu : T(1), own = options.nesterov ? T(1) : T(0);
  spans("muon momentum", moment_.numel(), [=](std::int64_t i) {
    const T g = scale * gradient[i], m = mu * moment[i] + g;
    moment[i] = m;
    gradient[i] = own * g + ahead * m;
  });
}

template <class T>
void orthogonalise(Tensor& matrix_, int steps, Workspace& workspace) {
  using blas::gemm;
  const std::int64_t m = matrix_.size(0), n = matrix_.size(1), s = std::min(m, n);
  const bool wide = m <= n;  // A = X X^T from the left, else X^T X from the right
  T* x = matrix_.data<T>();
  Tensor next_ = workspace.take("muon next", {m, n}, matrix_.dtype()),
         gram_ = workspace.take("muon gram", {s, s}, matrix_.dtype()),
         polynomial_ = workspace.take("muon polynomial", {s, s}, matrix_.dtype());
  T *next = next_.data<T>(), *gram = gram_.data<T>(), *polynomial = polynomial_.data<T>();
  const T over = static_cast<T>(1 / (std::sqrt(sum_of_squares(matrix_)) + kMuonNormEps));
  spans("muon norm", m * n, [=](std::int64_t i) { x[i] *= over; });
  for (int step = 0; step < steps; ++step) {
    gemm(wide ? CblasNoTrans : CblasTrans, wide ? CblasTrans : CblasNoTrans, s, s, wide ? n : m,
         T(1), x, n, x, n, T(0), gram, s);
    std::copy_n(gram, s * s, polynomial);
    gemm(CblasNoTrans, CblasNoTrans, s, s, s, T(kMuonC), gram, s, gram, s, T(kMuonB), polynomial,
         s);
    std::copy_n(x, m * n, next);
    if (wide)
      gemm(CblasNoTrans, CblasNoTrans, m, n, s, T(1), polynomial, s, x, n, T(kMuonA), next, n);
    else
      gemm(CblasNoTrans, CblasNoTrans, m, n, s, T(1), x, n, polynomial, s, T(kMuonA), next, n);
    std::swap(x, next);
  }
  if (x != matrix_.data<T>()) std::copy_n(x, m * n, matrix_.data<T>());
}

template <class T>
void update(Tensor& master_, const Tensor& direction_, double step_size_, double shrink_,
            Tensor& values_) {
  T *const master = master_.data<T>(), *const values = values_.data<T>();
  const T* const direction = direction_.data<T>();
  const T step_size = static_cast<T>(step_size_), shrink = static_cast<T>(shrink_);
  spans("muon update", values_.numel(), [=](std::int64_t i) {
    const T next = master[i] - shrink * master[i] - step_size * direction[i];
    master[i] = next;
    values[i] = next;
  });
}

}  // namespace
}  // namespace host

double muon_scale(const MuonOptions& options, std::int64_t rows, std::int64_t columns) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
  return options.update_rms > 0 ? options.update_rms * std::sqrt(std::max(m, n))
                                : std::sqrt(std::max(1.0, m / n));
}

void muon_momentum(Tensor& moment, Tensor& gradient, double gradient_scale,
                   const MuonOptions& options) {
  require(moment.numel() == gradient.numel() && moment.contiguous() && gradient.contiguous(),
          "muon_momentum: {} moments and {} gradients do not fit", moment.numel(),
          gradient.numel());
  if (moment.numel() == 0) return;
  BALLAST_ON_CUDA(moment, muon_momentum(moment, gradient, gradient_scale, options));
  dispatch_float(moment.dtype(), [&](auto t) {
    host::momentum<decltype(t)>(moment, gradient, gradient_scale, options);
  });
}

void orthogonalise(Tensor& matrix, int steps, Workspace& workspace) {
  require(matrix.rank() == 2 && matrix.contiguous() && matrix.numel() > 0 && steps >= 1,
          "orthogonalise: a dense matrix is needed, got {}", to_string(matrix.shape()));
  BALLAST_ON_CUDA(matrix, orthogonalise(matrix, steps, workspace));
  dispatch_float(matrix.dtype(),
                 [&](auto t) { host::orthogonalise<decltype(t)>(matrix, steps, workspace); });
}

void muon_update(Tensor& master, const Tensor& direction, double step_size, double shrink,
                 Tensor& values) {
  const std::int64_t n = values.numel();
  require(master.numel() == n && direction.numel() == n,
          "muon_update: {} values, {} master values and {} directions do not fit", n,
          master.numel(), direction.numel());
  if (n == 0) return;
  BALLAST_ON_CUDA(values, muon_update(master, direction, step_size, shrink, values));
  dispatch_float(values.dtype(), [&](auto t) {
    host::update<decltype(t)>(master, direction, step_size, shrink, values);
  });
}

}  // namespace ballast

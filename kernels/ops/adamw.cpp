#include "kernels/ops/adamw.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/base/number.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/stochastic_rounding.hpp"

namespace ballast {
namespace host {
namespace {

constexpr std::int64_t kSpan =
    4096;  // elements per work item: long enough to vectorise, short enough to spread

template <class T>
struct AdamWFactors {
  T scale, beta1, beta2, rest1, rest2, step_size, correction, eps, shrink;
  std::uint32_t key = 0;  // of bf16 moments' rounding
};

/// A moment as it is stored, as a number and back.
template <class T>
struct FullMoments {
  using Stored = T;
  static T value(T stored) { return stored; }
  static std::uint32_t random(std::uint32_t, std::int64_t) { return 0; }
  static T stored(T value, std::uint32_t) { return value; }
};
template <class T>
struct Bf16Moments {
  using Stored = bf16;
  static T value(bf16 stored) { return number(stored); }
  static std::uint32_t random(std::uint32_t key, std::int64_t index) {
    return rounding_bits(key, index);
  }
  static bf16 stored(T value, std::uint32_t random) {
    return {round_by_chance(std::bit_cast<std::uint32_t>(static_cast<float>(value)), random)};
  }
};

// Decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2) with the bias corrections of
// Adam.  A function of its own, with factors by value, so that the loop vectorises (with
// -fno-math-errno); `out` may be `w` itself.
template <class Moments, class T, class M = typename Moments::Stored>
void adamw_span(const T* g, T* w, M* m, M* v, T* out, std::int64_t n, std::int64_t number,
                const AdamWFactors<T> f) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const T x = g[i] * f.scale;
    const T first = f.beta1 * Moments::value(m[i]) + f.rest1 * x,
            second = f.beta2 * Moments::value(v[i]) + f.rest2 * x * x;
    const T kept = w[i] - f.shrink * w[i];
    const T next = kept - f.step_size * first / (std::sqrt(second) * f.correction + f.eps);
    const std::uint32_t random = Moments::random(f.key, number + i);
    m[i] = Moments::stored(first, random);
    v[i] = Moments::stored(second, random >> 16);
    w[i] = next;
    out[i] = next;
  }
}

template <class Moments, class T>
void adamw(AdamWState& state, const Tensor& gradient_, double gradient_scale, double rate,
           std::int64_t step, const AdamWOptions& options, Tensor& values_) {
  using Stored = typename Moments::Stored;
  const bool rounded = gradient_.dtype() == DType::bf16;
  const T* const full = rounded ? nullptr : vector<const T>(gradient_).data();
  const bf16* const half = rounded ? vector<const bf16>(gradient_).data() : nullptr;
  const auto master = vector<T>(state.master), values = vector<T>(values_);
  auto* const moment1 = state.moment1.data<Stored>();
  auto* const moment2 = state.moment2.data<Stored>();
  const std::int64_t number = state.first;
  const std::int64_t* bounds = state.decay.data<std::int64_t>();
  const std::int64_t* last = bounds + state.decay.numel();
  const double correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(step)),
               correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(step));
  const AdamWFactors<T> factors{.scale = static_cast<T>(gradient_scale),
                                .beta1 = static_cast<T>(options.beta1),
                                .beta2 = static_cast<T>(options.beta2),
                                .rest1 = static_cast<T>(1.0 - options.beta1),
                                .rest2 = static_cast<T>(1.0 - options.beta2),
                                .step_size = static_cast<T>(rate / correction1),
                                .correction = static_cast<T>(1.0 / std::sqrt(correction2)),
                                .eps = static_cast<T>(options.eps),
                                .shrink = static_cast<T>(rate * options.weight_decay),
                                .key = rounding_key(step)};
  const std::int64_t n = values_.numel();
  parallel_for("adamw", (n + kSpan - 1) / kSpan, [=](std::int64_t span) {
    const std::int64_t begin = span * kSpan, end = std::min(begin + kSpan, n);
    T widened[kSpan];
    if (half != nullptr)
      for (std::int64_t i = begin; i < end; ++i)
        widened[i - begin] = static_cast<T>(ballast::number(half[i]));
    const T* const gradient = half != nullptr ? widened : full + begin;
    for (std::int64_t at = begin; at < end;) {
      const std::int64_t* next = std::upper_bound(bounds, last, at);
      const std::int64_t stop = next == last ? end : std::min(*next, end);
      AdamWFactors<T> here = factors;
      if ((next - bounds) % 2 == 0) here.shrink = 0;  // between two ranges
      adamw_span<Moments>(gradient + (at - begin), master.data() + at, moment1 + at, moment2 + at,
                          values.data() + at, stop - at, number + at, here);
      at = stop;
    }
  });
}

template <class T>
double squares(const Tensor& x_) {
  const auto x = vector<const T>(x_);
  const T* p = x.data();
  return lane_sum<double>(x_.numel(), [p](std::int64_t i) {
    const double value = number(p[i]);
    return value * value;
  });
}

}  // namespace
}  // namespace host

void adamw_step(AdamWState& state, const Tensor& gradient, double gradient_scale,
                double learning_rate, std::int64_t step, const AdamWOptions& options,
                Tensor& values, [[maybe_unused]] Queue queue) {
  const std::int64_t n = values.numel();
  require(state.master.numel() == n && state.moment1.numel() == n && state.moment2.numel() == n &&
              state.decay.numel() % 2 == 0 && gradient.numel() == n,
          "adamw_step: {} values, {} gradients and {} master values do not fit", n,
          gradient.numel(), state.master.numel());
  require(step >= 1, "adamw_step: steps count from 1, got {}", step);
  require(gradient.dtype() == DType::bf16 || gradient.dtype() == state.master.dtype(),
          "adamw_step: a gradient in {} beside master weights in {}", name(gradient.dtype()),
          name(state.master.dtype()));
  const DType moments = state.moment1.dtype();
  require(moments == state.moment2.dtype() &&
              (moments == DType::bf16 || moments == state.master.dtype()),
          "adamw_step: moments in {} and {} beside master weights in {}", name(moments),
          name(state.moment2.dtype()), name(state.master.dtype()));
  if (n == 0) return;
  BALLAST_ON_CUDA(values, adamw_step(state, gradient, gradient_scale, learning_rate, step, options,
                                     values, queue));
  dispatch_float(values.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto update = moments == DType::bf16 ? host::adamw<host::Bf16Moments<T>, T>
                                               : host::adamw<host::FullMoments<T>, T>;
    update(state, gradient, gradient_scale, learning_rate, step, options, values);
  });
}

double sum_of_squares(const Tensor& x) {
  if (x.numel() == 0) return 0;
  BALLAST_ON_CUDA(x, sum_of_squares(x));
  if (x.dtype() == DType::bf16) return host::squares<bf16>(x);
  return dispatch_float(x.dtype(), [&](auto t) { return host::squares<decltype(t)>(x); });
}

std::vector<double> sums_of_squares(const std::vector<Tensor>& list) {
  if (list.empty()) return {};
  BALLAST_ON_CUDA(list.front(), sums_of_squares(list));
  std::vector<double> sums;
  for (const Tensor& x : list) sums.push_back(sum_of_squares(x));
  return sums;
}

}  // namespace ballast

#include "kernels/ops/cross_entropy.hpp"

#include <cmath>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast {
namespace host {
namespace {

template <class T>
T lane_max(const T* x, std::int64_t n) {
  constexpr int lanes = 16;
  T top[lanes];
  for (T& t : top) t = x[0];
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
  for (; i < n; ++i) top[0] = x[i] > top[0] ? x[i] : top[0];
  for (int l = 1; l < lanes; ++l) top[0] = top[l] > top[0] ? top[l] : top[0];
  return top[0];
}

template <class T>
T log_sum_exp(const T* x, std::int64_t n) {
  constexpr std::int64_t block = 4096;  // fp32 partial sums stay short; blocks are joined in fp64
  const T top = lane_max(x, n);
  double sum = 0;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const T* part = x + begin;
    sum += lane_sum<T>(std::min(block, n - begin),
                       [=](std::int64_t j) { return fast_exp(part[j] - top); });
  }
  return static_cast<T>(static_cast<double>(top) + std::log(sum));
}

template <class T>
void forward(const Tensor& logits_, const Tensor& targets_, Tensor& loss_, Tensor& lse_) {
  const auto logits = matrix<const T>(logits_);
  const auto targets = vector<const std::int32_t>(targets_);
  const auto loss = vector<T>(loss_), lse = vector<T>(lse_);
  const std::int64_t vocabulary = logits.columns();
  for (std::size_t i = 0; i < targets.extent(0); ++i)
    require(targets(i) >= -1 && targets(i) < vocabulary,
            "cross_entropy: target {} lies outside the vocabulary of {}", targets(i), vocabulary);
  parallel_for("cross entropy", logits.rows(), [=](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    const bool counted = targets(i) >= 0;
    lse(i) = counted ? log_sum_exp(logits.row(row), vocabulary) : T(0);
    loss(i) = counted ? lse(i) - logits.row(row)[targets(i)] : T(0);
  });
}

template <class T>
void correct(const Tensor& logits_, const Tensor& targets_, Tensor& correct_) {
  const auto logits = matrix<const T>(logits_);
  const auto targets = vector<const std::int32_t>(targets_);
  const auto correct = vector<std::uint8_t>(correct_);
  const std::int64_t vocabulary = logits.columns();
  for (std::size_t i = 0; i < targets.extent(0); ++i)
    require(targets(i) < vocabulary, "cross_entropy: target {} lies outside the vocabulary of {}",
            targets(i), vocabulary);
  parallel_for("cross entropy correct", logits.rows(), [=](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    const std::int64_t target = targets(i);
    correct(i) = 0;
    if (target < 0) return;
    const T* x = logits.row(row);
    const T own = x[target];
    bool best = own == own;
    for (std::int64_t j = 0; j < target; ++j) best &= x[j] < own;  // false for NaN too
    for (std::int64_t j = target + 1; j < vocabulary; ++j) best &= x[j] <= own;
    correct(i) = best;
  });
}

template <class T>
void backward(const Tensor& targets_, const Tensor& lse_, double scale, const Tensor& weights_,
              Tensor& logits_) {
  const auto logits = matrix<T>(logits_);
  const auto targets = vector<const std::int32_t>(targets_);
  const auto lse = vector<const T>(lse_);
  const auto weights = weights_.defined() ? vector<const T>(weights_) : lse;
  const bool weighted = weights_.defined();
  const std::int64_t vocabulary = logits.columns();
  parallel_for("cross entropy backward", logits.rows(), [=](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    T* __restrict x = logits.row(row);
    if (targets(i) < 0) {
      std::fill_n(x, vocabulary, T(0));
      return;
    }
    const T factor = static_cast<T>(weighted ? scale * static_cast<double>(weights(i)) : scale),
            shift = lse(i);
    for (std::int64_t j = 0; j < vocabulary; ++j) x[j] = factor * fast_exp(x[j] - shift);
    x[targets(i)] -= factor;
  });
}

}  // namespace
}  // namespace host

namespace {
void check(const char* what, const Tensor& logits, const Tensor& targets, const Tensor& token_loss,
           const Tensor& lse) {
  require(logits.rank() == 2 && logits.size(0) == targets.numel() &&
              token_loss.numel() == targets.numel() && lse.numel() == targets.numel(),
          "{}: logits {}, targets {}, losses {} and lse {} do not fit", what,
          to_string(logits.shape()), to_string(targets.shape()), to_string(token_loss.shape()),
          to_string(lse.shape()));
}
}  // namespace

void cross_entropy_forward(const Tensor& logits, const Tensor& targets, Tensor& token_loss,
                           Tensor& lse) {
  check("cross_entropy_forward", logits, targets, token_loss, lse);
  BALLAST_ON_CUDA(logits, cross_entropy_forward(logits, targets, token_loss, lse));
  dispatch_float(logits.dtype(),
                 [&](auto t) { host::forward<decltype(t)>(logits, targets, token_loss, lse); });
}

void cross_entropy_correct(const Tensor& logits, const Tensor& targets, Tensor& correct) {
  require(
      logits.rank() == 2 && logits.size(0) == targets.numel() && correct.numel() == targets.numel(),
      "cross_entropy_correct: logits {}, targets {} and results {} do not fit",
      to_string(logits.shape()), to_string(targets.shape()), to_string(correct.shape()));
  BALLAST_ON_CUDA(logits, cross_entropy_correct(logits, targets, correct));
  dispatch_float(logits.dtype(),
                 [&](auto t) { host::correct<decltype(t)>(logits, targets, correct); });
}

void cross_entropy_with_gradient(const Tensor& targets, double scale, const Tensor& weights,
                                 Tensor& logits, Tensor& token_loss, Tensor& lse) {
  check("cross_entropy_with_gradient", logits, targets, token_loss, lse);
  require(!weights.defined() || weights.numel() == targets.numel(),
          "cross_entropy_with_gradient: targets {} and weights {} do not fit",
          to_string(targets.shape()), to_string(weights.shape()));
  BALLAST_ON_CUDA(logits,
                  cross_entropy_with_gradient(targets, scale, weights, logits, token_loss, lse));
  dispatch_float(logits.dtype(), [&](auto t) {
    host::forward<decltype(t)>(logits, targets, token_loss, lse);
    host::backward<decltype(t)>(targets, lse, scale, weights, logits);
  });
}

double sum_losses(const Tensor& token_loss, const Tensor& weights) {
  if (weights.defined()) {
    // Two short lists, and rare (sample_mean): no kernel of its own.
    const Tensor losses = token_loss.to(host_device()), factors = weights.to(host_device());
    return dispatch_float(losses.dtype(), [&](auto t) {
      const auto loss = host::vector<const decltype(t)>(losses),
                 factor = host::vector<const decltype(t)>(factors);
      double sum = 0;
      for (std::size_t i = 0; i < loss.extent(0); ++i)
        sum += static_cast<double>(loss(i)) * static_cast<double>(factor(i));
      return sum;
    });
  }
  BALLAST_ON_CUDA(token_loss, sum_losses(token_loss));
  return dispatch_float(token_loss.dtype(), [&](auto t) {
    const auto loss = host::vector<const decltype(t)>(token_loss);
    double sum = 0;
    for (std::size_t i = 0; i < loss.extent(0); ++i) sum += static_cast<double>(loss(i));
    return sum;
  });
}

}  // namespace ballast

#include "kernels/ops/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace {

constexpr double kTau = 2.0 * std::numbers::pi;

void scale_yarn(const ModelShape& shape, RopeFrequencies& rope) {
  const double head_dim = static_cast<double>(shape.head_dim),
               context = static_cast<double>(shape.original_context);
  // Index (as a real number) of the frequency that makes `turns` turns over the original context.
  const auto index_of = [&](double turns) {
    return head_dim * std::log(context / (turns * kTau)) / (2.0 * std::log(shape.rope_theta));
  };
  const double low = std::max(std::floor(index_of(32.0)), 0.0);
  double high = std::min(std::ceil(index_of(1.0)), head_dim - 1.0);
  if (high == low) high += 0.001;
  for (std::size_t i = 0; i < rope.frequency.size(); ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    rope.frequency[i] *= (1.0 - interpolated) + interpolated / shape.yarn_factor;
  }
  rope.amplitude = 0.1 * std::log(shape.yarn_factor) + 1.0;
}

void scale_llama3(const ModelShape& shape, RopeFrequencies& rope) {
  const double context = static_cast<double>(shape.original_context);
  for (double& f : rope.frequency) {
    const double turns = context * f / kTau;  // over the original context
    const double kept =
        std::clamp((turns - shape.llama3_low) / (shape.llama3_high - shape.llama3_low), 0.0, 1.0);
    f *= kept + (1.0 - kept) / shape.llama3_factor;
  }
}

}  // namespace

RopeFrequencies rope_frequencies(const ModelShape& shape) {
  RopeFrequencies rope;
  for (std::int64_t i = 0; i < shape.head_dim / 2; ++i)
    rope.frequency.push_back(std::pow(
        shape.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(shape.head_dim)));
  if (shape.yarn_factor > 1) scale_yarn(shape, rope);
  if (shape.llama3_factor > 1) scale_llama3(shape, rope);
  return rope;
}

namespace host {
namespace {

template <class T>
void table(const Tensor& positions_, const RopeFrequencies& rope, Tensor& cos_, Tensor& sin_) {
  const auto positions = vector<const std::int32_t>(positions_);
  const auto cos = matrix<T>(cos_), sin = matrix<T>(sin_);
  const double* frequency = rope.frequency.data();
  const double amplitude = rope.amplitude;
  parallel_for("rope table", cos.rows(), [=](std::int64_t i) {
    const double position = positions(static_cast<std::size_t>(i));
    T *c = cos.row(i), *s = sin.row(i);
    for (std::int64_t j = 0; j < cos.columns(); ++j) {
      const double angle = position * frequency[j];
      c[j] = static_cast<T>(amplitude * std::cos(angle));
      s[j] = static_cast<T>(amplitude * std::sin(angle));
    }
  });
}

template <class T>
void rotate(const T* x, const T* c, const T* s, T sign, std::int64_t half, T* y) {
#pragma GCC ivdep
  for (std::int64_t j = 0; j < half; ++j) {  // y may be x itself, never overlap otherwise
    const T a = x[j], b = x[j + half];
    y[j] = a * c[j] - sign * b * s[j];
    y[j + half] = b * c[j] + sign * a * s[j];
  }
}

template <class T>
void apply(Tensor& x_, std::int64_t turned, const Tensor& bias_, const Tensor& cos_,
           const Tensor& sin_) {
  const auto x = matrix<T>(x_);
  const auto cos = matrix<const T>(cos_), sin = matrix<const T>(sin_);
  const auto bias = bias_.defined() ? vector<const T>(bias_) : Vector<const T>();
  const std::int64_t head_dim = x_.size(2);
  parallel_for("rope", x.rows(), [=](std::int64_t i) {
    T* row = x.row(i);
    for (std::size_t c = 0; c < bias.extent(0); ++c) row[c] += bias(c);
    for (std::int64_t h = 0; h < turned; ++h)
      rotate(row + h * head_dim, cos.row(i), sin.row(i), T(1), head_dim / 2, row + h * head_dim);
  });
}

template <class T>
void backward(const Tensor& dq_, const Tensor& dk_, const Tensor& dv_, const Tensor& cos_,
              const Tensor& sin_, Tensor& d_qkv_) {
  const auto dq = matrix<const T>(dq_), dk = matrix<const T>(dk_), dv = matrix<const T>(dv_),
             cos = matrix<const T>(cos_), sin = matrix<const T>(sin_);
  const auto d_qkv = matrix<T>(d_qkv_);
  const std::int64_t head_dim = dq_.size(2);
  parallel_for("rope gradient", dq.rows(), [=](std::int64_t i) {
    T* to = d_qkv.row(i);
    for (const auto& d : {dq, dk})
      for (std::int64_t c = 0; c < d.columns(); c += head_dim, to += head_dim)
        rotate(d.row(i) + c, cos.row(i), sin.row(i), T(-1), head_dim / 2, to);
    std::copy_n(dv.row(i), dv.columns(), to);
  });
}

}  // namespace
}  // namespace host

void rope_table(const Tensor& positions, const RopeFrequencies& frequencies, Tensor& cos,
                Tensor& sin) {
  const Shape expected = {positions.size(0),
                          static_cast<std::int64_t>(frequencies.frequency.size())};
  require(positions.rank() == 1 && cos.shape() == expected && sin.shape() == expected,
          "rope_table: positions {}, {} frequencies, cos {} and sin {} do not fit",
          to_string(positions.shape()), frequencies.frequency.size(), to_string(cos.shape()),
          to_string(sin.shape()));
  BALLAST_ON_CUDA(positions, rope_table(positions, frequencies, cos, sin));
  dispatch_float(cos.dtype(),
                 [&](auto t) { host::table<decltype(t)>(positions, frequencies, cos, sin); });
}

void rope_apply(Tensor& x, std::int64_t turned, const Tensor& bias, const Tensor& cos,
                const Tensor& sin) {
  require(x.rank() == 3 && turned <= x.size(1) && cos.rank() == 2 && cos.shape() == sin.shape() &&
              cos.size(0) == x.size(0) && 2 * cos.size(1) == x.size(2) &&
              (!bias.defined() || bias.numel() == x.size(1) * x.size(2)),
          "rope_apply: {} heads of {}, bias {}, cos {} and sin {} do not fit", turned,
          to_string(x.shape()), bias.defined() ? to_string(bias.shape()) : "none",
          to_string(cos.shape()), to_string(sin.shape()));
  BALLAST_ON_CUDA(x, rope_apply(x, turned, bias, cos, sin));
  dispatch_float(x.dtype(), [&](auto t) { host::apply<decltype(t)>(x, turned, bias, cos, sin); });
}

void rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                   const Tensor& sin, Tensor& d_qkv) {
  require(dq.rank() == 3 && dk.rank() == 3 && dk.shape() == dv.shape() &&
              dk.size(0) == dq.size(0) && dk.size(2) == dq.size(2) && cos.rank() == 2 &&
              cos.shape() == sin.shape() && cos.size(0) == dq.size(0) &&
              2 * cos.size(1) == dq.size(2) &&
              d_qkv.shape() == Shape{dq.size(0), (dq.size(1) + 2 * dk.size(1)) * dq.size(2)},
          "rope_backward: dq {}, dk {}, dv {}, cos {}, sin {} and d_qkv {} do not fit",
          to_string(dq.shape()), to_string(dk.shape()), to_string(dv.shape()),
          to_string(cos.shape()), to_string(sin.shape()), to_string(d_qkv.shape()));
  BALLAST_ON_CUDA(dq, rope_backward(dq, dk, dv, cos, sin, d_qkv));
  dispatch_float(dq.dtype(),
                 [&](auto t) { host::backward<decltype(t)>(dq, dk, dv, cos, sin, d_qkv); });
}

}  // namespace ballast

// Fresh random data, comparisons and central differences for tests of kernels.
#pragma once
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/base/random.hpp"
#include "core/base/tensor.hpp"
#include "tests/seed.hpp"

namespace ballast::numeric {

/// Random data of one test; trace() goes into SCOPED_TRACE.
class Draw {
 public:
  std::string trace() const { return "repeat with BALLAST_TEST_SEED=" + std::to_string(seed_); }
  double normal() { return random_normal(seed_, 1, counter_++); }
  /// Integer in [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_bits(seed_, 2, counter_++) %
                                           static_cast<std::uint64_t>(high - low + 1));
  }
  void fill(const Tensor& t, double std = 1.0, double mean = 0.0) {
    dispatch_float(t.dtype(), [&](auto x) {
      for (std::int64_t i = 0; i < t.numel(); ++i)
        t.data<decltype(x)>()[i] = static_cast<decltype(x)>(mean + std * normal());
    });
  }
  Tensor tensor(const Shape& shape, DType type, double std = 1.0, double mean = 0.0) {
    Tensor t = Tensor::empty(shape, type);
    fill(t, std, mean);
    return t;
  }
  Tensor integers(const Shape& shape, std::int64_t low, std::int64_t high) {
    Tensor t = Tensor::empty(shape, DType::i32);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<std::int32_t>()[i] = static_cast<std::int32_t>(integer(low, high));
    return t;
  }

 private:
  std::uint64_t seed_ = test_seed(), counter_ = 0;
};

inline Tensor from_list(const std::vector<std::int32_t>& list) {
  Tensor t = Tensor::empty({static_cast<std::int64_t>(list.size())}, DType::i32);
  std::copy(list.begin(), list.end(), t.data<std::int32_t>());
  return t;
}

/// Element at a row-major index of a tensor with any strides, as double.
inline double element(const Tensor& t, std::int64_t index) {
  std::int64_t offset = 0;
  for (int d = t.rank() - 1; d >= 0; --d) {
    offset += index % t.shape()[d] * t.strides()[d];
    index /= t.shape()[d];
  }
  if (t.dtype() == DType::bf16)
    return std::bit_cast<float>(std::uint32_t{t.data<bf16>()[offset].bits} << 16);
  return t.dtype() == DType::i32 ? t.data<std::int32_t>()[offset]
                                 : dispatch_float(t.dtype(), [&](auto x) -> double {
                                     return t.data<decltype(x)>()[offset];
                                   });
}
inline std::vector<double> elements(const Tensor& t) {
  std::vector<double> list(static_cast<std::size_t>(t.numel()));
  for (std::size_t i = 0; i < list.size(); ++i) list[i] = element(t, static_cast<std::int64_t>(i));
  return list;
}
/// Same values in another float type, dense.
inline Tensor converted(const Tensor& t, DType type) {
  Tensor out = Tensor::empty(t.shape(), type);
  dispatch_float(type, [&](auto x) {
    for (std::int64_t i = 0; i < t.numel(); ++i)
      out.data<decltype(x)>()[i] = static_cast<decltype(x)>(element(t, i));
  });
  return out;
}

/// |a - b|_2 / |b|_2; NaN counts as infinite.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  if (std::isnan(difference) || std::isnan(size)) return INFINITY;
  return size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
}
inline double relative_error(const Tensor& a, const std::vector<double>& b) {
  return relative_error(elements(a), b);
}
inline double relative_error(const Tensor& a, const Tensor& b) {
  return relative_error(elements(a), elements(b));
}

/// Root mean square of a - b: for sums that may cancel, of terms of order 1.
inline double rms_error(const Tensor& a, const std::vector<double>& b) {
  double squares = 0;
  for (std::size_t i = 0; i < b.size(); ++i)
    squares += std::pow(element(a, static_cast<std::int64_t>(i)) - b[i], 2) /
               static_cast<double>(b.size());
  return std::isnan(squares) ? INFINITY : std::sqrt(squares);
}

inline bool bit_equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), a.bytes()) == 0);
}

inline double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) sum += element(a, i) * element(b, i);
  return sum;
}

/// f'(0) by central differences of fourth order: error about h^4 f^(5)(0) / 30, and f's rounding
/// over h.  Some draws bend the function so much (a token whose norm is almost zero) that no fixed
/// h serves all: h shrinks while two neighbours still come closer to each other.
inline double derivative(const std::function<double(double)>& f, double h = 3e-4) {
  const auto at = [&](double step) {
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step);
  };
  double best = at(h), gap = INFINITY;
  while (gap > 1e-9 * (1 + std::abs(best))) {
    const double finer = at(h /= 4), difference = std::abs(finer - best);
    if (!(difference < gap)) break;
    best = finer, gap = difference;
  }
  return best;
}

/// Derivative of f() by every element of x (f64, dense).
inline std::vector<double> central_differences(const Tensor& x, const std::function<double()>& f) {
  std::vector<double> gradient(static_cast<std::size_t>(x.numel()));
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    double& value = x.data<double>()[i];
    const double kept = value;
    gradient[i] = derivative([&](double h) { return value = kept + h, f(); });
    value = kept;
  }
  return gradient;
}

inline double tolerance(DType type, double f32, double f64) {
  return type == DType::f64 ? f64 : f32;
}

}  // namespace ballast::numeric

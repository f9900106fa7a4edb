// Host against CUDA: random inputs that bf16 holds exactly, and the error of a CUDA result against
// an fp64 host reference.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "core/base/tensor.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "tests/seed.hpp"

namespace ballast::test {

inline constexpr DType b16 = DType::bf16, f32 = DType::f32, f64 = DType::f64;

/// The process's device, set up once; null where there is none (tests then skip with the reason).
inline Device* device(std::string& why) {
  static std::unique_ptr<cuda::CudaDevice> made;
  if (!made && cuda::device_count(why) > 0) {
    made = std::make_unique<cuda::CudaDevice>(0);
    set_cuda_device(made.get());
  }
  return made.get();
}

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu = device(why);
    if (!gpu) GTEST_SKIP() << "no CUDA device here: " << why;
    seed = test_seed();
    rng.seed(seed);
    RecordProperty("seed", static_cast<int>(seed));
  }
  /// [shape] fp64 on the host, normal values rounded to bf16.
  Tensor random(const Shape& shape, double scale = 1.0) {
    Tensor t = Tensor::empty(shape, DType::f64);
    std::normal_distribution<double> normal(0, scale);
    for (std::int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = rounded(normal(rng));
    return t;
  }
  static double rounded(double x) {
    const float f = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  /// Host fp64 values on the GPU as bf16 or fp32.
  Tensor to_gpu(const Tensor& host, DType type) {
    Tensor staged = Tensor::empty(host.shape(), type);
    for (std::int64_t i = 0; i < host.numel(); ++i) {
      const double x = host.data<double>()[i];
      if (type == DType::f32) {
        staged.data<float>()[i] = static_cast<float>(x);
      } else {
        const float f = static_cast<float>(rounded(x));
        std::uint32_t bits;
        std::memcpy(&bits, &f, 4);
        staged.data<bf16>()[i].bits = static_cast<std::uint16_t>(bits >> 16);
      }
    }
    return staged.to(*gpu);
  }
  /// Poisoned with NaN, so that an element nobody writes shows.
  Tensor unwritten(const Shape& shape, DType type) {
    Tensor host = Tensor::empty(shape, type);
    std::memset(host.raw(), 0xff, host.bytes());
    return host.to(*gpu);
  }
  Tensor integers(const std::vector<std::int32_t>& values) {
    Tensor host = Tensor::empty({static_cast<std::int64_t>(values.size())}, DType::i32);
    std::copy(values.begin(), values.end(), host.data<std::int32_t>());
    return host;
  }
  static Tensor to_host(const Tensor& device_tensor) {
    const Tensor raw = device_tensor.to(host_device());
    Tensor out = Tensor::empty(raw.shape(), DType::f64);
    for (std::int64_t i = 0; i < raw.numel(); ++i) {
      if (raw.dtype() == DType::f32) {
        out.data<double>()[i] = raw.data<float>()[i];
      } else {
        const std::uint32_t bits = static_cast<std::uint32_t>(raw.data<bf16>()[i].bits) << 16;
        float f;
        std::memcpy(&f, &bits, 4);
        out.data<double>()[i] = f;
      }
    }
    return out;
  }
  /// Relative L2 error; NaN when anything is NaN, which no bound accepts.
  static double error(const Tensor& found, const Tensor& expected) {
    const Tensor host = found.space() == Space::cuda ? to_host(found) : found;
    double difference = 0, norm = 0;
    for (std::int64_t i = 0; i < host.numel(); ++i) {
      const double a = host.data<double>()[i], b = expected.data<double>()[i];
      difference += (a - b) * (a - b);
      norm += b * b;
    }
    return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  }

  Device* gpu = nullptr;
  unsigned seed = 0;
  std::mt19937 rng;
};

/// bf16 keeps 8 bits: one rounding of the result costs about 2e-3 in the mean square.
inline constexpr double kBf16 = 6e-3;
inline constexpr double kFp32 = 1e-5;

#define EXPECT_CLOSE(found, expected, bound)                                                \
  do {                                                                                      \
    const double e_ = error(found, expected);                                               \
    EXPECT_TRUE(e_ <= (bound)) << #found << ": relative error " << e_ << ", seed " << seed; \
  } while (false)

}  // namespace ballast::test

// Matrix products of a shape that comes often: whichever algorithm is chosen, bits stay.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/kernel_trace.hpp"
#include "kernels/cuda/runtime/trial_rule.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using Products = CudaTest;

TEST_F(Products, BitsStayWhenAShapeComesOften) {
  constexpr std::int64_t m = 4096, n = 896, k = 1664;  // enough work for other algorithms
  const Tensor a = to_gpu(random({m, k}), DType::bf16), b = to_gpu(random({n, k}), DType::bf16);
  for (const bool is_float : {false, true}) {
    const DType type = is_float ? DType::f32 : DType::bf16;
    Tensor first = unwritten({m, n}, type), c = unwritten({m, n}, type);
    const auto multiply = [&](Tensor& to, float beta) {
      cuda::gemm({.m = m,
                  .n = n,
                  .k = k,
                  .a = a.raw(),
                  .lda = k,
                  .b = b.raw(),
                  .ldb = k,
                  .transpose_b = true,
                  .c = to.raw(),
                  .ldc = n,
                  .c_is_float = is_float,
                  .beta = beta});
    };
    multiply(first, 0);
    const Tensor wanted = first.to(host_device());
    for (int call = 0; call < 300; ++call) {
      multiply(c, 0);
      if (call < 100 && call % 20 != 0) continue;
      const Tensor got = c.to(host_device());
      ASSERT_EQ(std::memcmp(got.raw(), wanted.raw(), wanted.bytes()), 0) << call;
    }
    // What is added to is read before it is overwritten, also where algorithms are tried.
    Tensor sum = Tensor::zeros({m, n}, type, *gpu);
    for (int call = 0; call < 200; ++call) {
      sum.zero();
      multiply(sum, 1);
      multiply(sum, 1);
    }
    Tensor once = Tensor::zeros({m, n}, type, *gpu);
    multiply(once, 1);
    multiply(once, 1);
    const Tensor x = sum.to(host_device()), y = once.to(host_device());
    EXPECT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0);
  }
}

/// What is recorded are the products that were asked for, though trials fall due meanwhile.
TEST_F(Products, NoAlgorithmIsTriedWhileKernelsAreRecorded) {
  constexpr std::int64_t m = 4096, n = 1024, k = 1408;  // a shape of no other test
  const Tensor a = to_gpu(random({m, k}), DType::bf16), b = to_gpu(random({n, k}), DType::bf16);
  Tensor c = unwritten({m, n}, DType::bf16);
  cuda::try_products_after(0);
  cuda::linear_forward(a, b, Tensor(), c, {});  // from here on the shape's trials are due early
  cuda::try_products_after(cuda::TrialRule::kWork);
  gpu->synchronize();
  if (const std::string why = cuda::start_kernel_trace(); !why.empty()) GTEST_SKIP() << why;
  for (int call = 0; call < 300; ++call) cuda::linear_forward(a, b, Tensor(), c, {});
  const cuda::KernelTrace trace = cuda::stop_kernel_trace();
  EXPECT_FALSE(trace.kernels.empty());
  for (const cuda::KernelTime& kernel : trace.kernels) {
    EXPECT_EQ(kernel.launches, 300) << kernel.name;
    EXPECT_EQ(kernel.name.find("sum_of_bits"), std::string::npos);
  }
}

/// Kernels of all lengths that are loaded ahead leave results, memory and errors alone.
TEST_F(Products, LengthsThatAreExpectedChangeNoBit) {
  constexpr std::int64_t n = 640, k = 768, longest = 3000;
  const Tensor a = to_gpu(random({longest, k}), DType::bf16),
               w = to_gpu(random({n, k}), DType::bf16),
               dy = to_gpu(random({longest, n}), DType::bf16);
  const auto results = [&](std::int64_t tokens) {
    Tensor y = unwritten({tokens, n}, DType::bf16), dx = unwritten({tokens, k}, DType::bf16),
           dw = Tensor::zeros({n, k}, DType::f32, *gpu);
    cuda::linear_forward(a.rows(0, tokens), w, Tensor(), y, {});
    cuda::linear_input_gradient(dy.rows(0, tokens), w, dx, {});
    for (const bool accumulate : {false, true})
      cuda::linear_weight_gradient(a.rows(0, tokens), dy.rows(0, tokens), {dw, accumulate});
    return std::array{y.to(host_device()), dx.to(host_device()), dw.to(host_device())};
  };
  const std::array<std::int64_t, 5> lengths = {1, 77, 1000, 2048, longest};
  std::vector<std::array<Tensor, 3>> wanted;
  for (const std::int64_t tokens : lengths) wanted.push_back(results(tokens));
  cuda::expect_lengths(longest);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const auto got = results(lengths[i]);
    for (std::size_t j = 0; j < got.size(); ++j)
      EXPECT_EQ(std::memcmp(got[j].raw(), wanted[i][j].raw(), got[j].bytes()), 0)
          << lengths[i] << " tokens, result " << j;
  }
  cuda::expect_lengths(0);
}

}  // namespace
}  // namespace ballast::test

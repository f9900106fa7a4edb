#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/ops/blas.hpp"
#include "tests/seed.hpp"

namespace ballast::test {
namespace {

template <class T>
double worst_error(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::mt19937_64& rng) {
  const std::int64_t m = 1 + static_cast<std::int64_t>(rng() % 90),
                     n = 1 + static_cast<std::int64_t>(rng() % 90),
                     k = 1 + static_cast<std::int64_t>(rng() % 90);
  const std::int64_t lda = (ta == CblasNoTrans ? k : m) + 3, ldb = (tb == CblasNoTrans ? n : k) + 1,
                     ldc = n + 2;
  std::normal_distribution<T> normal;
  const auto draw = [&](std::int64_t count) {
    std::vector<T> v(static_cast<std::size_t>(count));
    for (T& x : v) x = normal(rng);
    return v;
  };
  const std::vector<T> a = draw((ta == CblasNoTrans ? m : k) * lda),
                       b = draw((tb == CblasNoTrans ? k : n) * ldb), before = draw(m * ldc);
  std::vector<T> c = before;
  blas::gemm(ta, tb, m, n, k, T(0.5), a.data(), lda, b.data(), ldb, T(-2), c.data(), ldc);
  double worst = 0;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < ldc; ++j) {
      double expected = before[i * ldc + j];
      if (j < n) {
        double sum = 0;
        for (std::int64_t l = 0; l < k; ++l)
          sum += static_cast<double>(ta == CblasNoTrans ? a[i * lda + l] : a[l * lda + i]) *
                 (tb == CblasNoTrans ? b[l * ldb + j] : b[j * ldb + l]);
        expected = 0.5 * sum - 2 * expected;
      }
      worst = std::max(worst, std::abs(expected - c[i * ldc + j]));
    }
  return worst;
}

TEST(Blas, ProductsAreThoseOfTheDefinition) {
  std::mt19937_64 rng(test_seed());
  for (int i = 0; i < 20; ++i)
    for (const auto ta : {CblasNoTrans, CblasTrans})
      for (const auto tb : {CblasNoTrans, CblasTrans}) {
        EXPECT_LT(worst_error<float>(ta, tb, rng), 2e-4);
        EXPECT_LT(worst_error<double>(ta, tb, rng), 1e-12);
      }
}

TEST(Blas, KernelsAreNotOlderThanTheProcessor) {
  EXPECT_TRUE(blas::before_avx2("Prescott"));
  EXPECT_FALSE(blas::before_avx2("Haswell"));
  EXPECT_FALSE(blas::before_avx2(""));
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    GTEST_SKIP() << "this processor has no AVX2";
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr) GTEST_SKIP() << "OPENBLAS_CORETYPE chooses";
  EXPECT_FALSE(blas::before_avx2(blas::core_name())) << blas::core_name();
#endif
}

}  // namespace
}  // namespace ballast::test

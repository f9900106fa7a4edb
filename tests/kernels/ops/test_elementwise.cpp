// Element-wise passes against plain fp64 loops.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/ops/elementwise.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class ElementwiseOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, ElementwiseOperation, both_types(), type_name_of);

TEST_P(ElementwiseOperation, AddAndCopyRows) {
  const Tensor a = strided(5, 9), b = strided(5, 9);
  Tensor sum = strided(5, 9), copy = strided(5, 9),
         other = Tensor::empty({5, 9}, type == DType::f64 ? DType::f32 : DType::f64);
  add(a, b, sum);
  copy_rows(a, copy);
  copy_rows(a, other);
  for (std::int64_t i = 0; i < 45; ++i) {
    EXPECT_NEAR(element(sum, i), element(a, i) + element(b, i), 1e-6);
    EXPECT_EQ(element(copy, i), element(a, i));
    EXPECT_NEAR(element(other, i), element(a, i), 1e-6);
  }
}

TEST_P(ElementwiseOperation, SumsAreRoundedToBf16WhereTheyAreAdded) {
  const Tensor a = strided(5, 9), b = strided(5, 9);
  Tensor rounded = Tensor::empty({5, 9}, DType::bf16);
  add(a, b, rounded);
  for (std::int64_t i = 0; i < 45; ++i) {
    const double sum = element(a, i) + element(b, i);
    EXPECT_NEAR(element(rounded, i), sum, std::abs(sum) / 256 + 1e-6);
  }
}

}  // namespace
}  // namespace ballast

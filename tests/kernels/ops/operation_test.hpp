// What the tests of operations share: random tensors of one dtype, compared with plain fp64 loops,
// and gradients compared with central differences.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/ops/numeric.hpp"

namespace ballast::numeric {

constexpr double kGradientTolerance = 1e-8;

class OperationTest : public ::testing::TestWithParam<DType> {
 protected:
  Draw draw;
  ::testing::ScopedTrace trace{__FILE__, __LINE__, draw.trace()};
  DType type = GetParam();
  double tight = tolerance(GetParam(), 3e-6, 1e-13);
  // A tensor whose rows lie apart: columns [3, 3 + n) of a wider one.
  Tensor strided(std::int64_t rows, std::int64_t n) {
    return draw.tensor({rows, n + 7}, type).narrow(1, 3, 3 + n);
  }
};

inline auto both_types() { return ::testing::Values(DType::f32, DType::f64); }
inline std::string type_name_of(const ::testing::TestParamInfo<DType>& info) {
  return name(info.param);
}

}  // namespace ballast::numeric

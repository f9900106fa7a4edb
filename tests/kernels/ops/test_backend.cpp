// What every operation refuses at its entry.
#include <gtest/gtest.h>

#include "core/base/tensor.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"

namespace ballast {
namespace {

TEST(OperationErrors, ShapesThatDoNotFitAreRefused) {
  const auto make = [](Shape shape) { return Tensor::zeros(std::move(shape), DType::f32); };
  Tensor y = make({4, 5}), v = make({4}), w = make({5});
  EXPECT_THROW(linear_forward(make({4, 6}), make({5, 7}), {}, y), Error);
  EXPECT_THROW(linear_forward(make({4, 6}), make({5, 6}), make({4}), y), Error);
  EXPECT_THROW(rmsnorm_forward(make({4, 6}), make({6}), 1e-6, y, v), Error);
  EXPECT_THROW(swiglu_forward(make({4, 9}), y), Error);
  Tensor heads = make({4, 2, 4});
  EXPECT_THROW(rope_apply(heads, 2, {}, make({4, 3}), make({4, 3})), Error);
  EXPECT_THROW(rope_apply(heads, 3, {}, make({4, 2}), make({4, 2})), Error);
  EXPECT_THROW(rope_apply(heads, 2, make({4}), make({4, 2}), make({4, 2})), Error);
  EXPECT_THROW(rope_backward(make({4, 1, 4}), make({4, 2, 4}), make({4, 1, 4}), make({4, 2}),
                             make({4, 2}), y),
               Error);
  EXPECT_THROW(cross_entropy_forward(make({3, 7}), Tensor::zeros({4}, DType::i32), v, v), Error);
  Tensor other = Tensor::zeros({4, 5}, DType::f64);
  EXPECT_THROW(add(y, other, y), Error);  // dtypes differ
  EXPECT_THROW(linear_forward(Tensor::zeros({4, 6}, DType::bf16), make({5, 6}), {}, y), Error);
}

TEST(OperationErrors, DeviceTensorsNeedADeviceBuild) {
#ifndef BALLAST_HAVE_CUDA
  float pretend[4] = {};
  Tensor device = Tensor::wrap(pretend, {2, 2}, DType::f32, Space::cuda);
  try {
    add(device, device, device);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("without CUDA"), std::string::npos);
  }
#endif
}

}  // namespace
}  // namespace ballast

// Matrix products on a GPU (bf16) against the host's in fp64, forward and backward.
#include <tuple>

#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/linear.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using LinearOnGpu = CudaTest;

TEST_F(LinearOnGpu, FollowsTheHostForwardAndBackward) {
  for (const auto& [t, in, out] : {std::tuple{1, 64, 32}, {77, 256, 128}, {513, 896, 1152}}) {
    const Tensor x = random({t, in}), w = random({out, in}, 0.05), bias = random({out}),
                 dy = random({t, out});
    Tensor y = Tensor::empty({t, out}, f64), dx = Tensor::empty({t, in}, f64),
           dw = random({out, in}), db = random({out});
    Tensor y_gpu = unwritten({t, out}, b16), dx_gpu = unwritten({t, in}, b16),
           dw_gpu = to_gpu(dw, f32), db_gpu = to_gpu(db, f32);
    const Tensor x_gpu = to_gpu(x, b16), w_gpu = to_gpu(w, b16), dy_gpu = to_gpu(dy, b16);
    linear_forward(x, w, bias, y);
    linear_forward(x_gpu, w_gpu, to_gpu(bias, b16), y_gpu);
    EXPECT_CLOSE(y_gpu, y, kBf16);
    linear_input_gradient(dy, w, dx);
    linear_input_gradient(dy_gpu, w_gpu, dx_gpu);
    EXPECT_CLOSE(dx_gpu, dx, kBf16);
    linear_weight_gradient(x, dy, dw);
    linear_weight_gradient(x_gpu, dy_gpu, dw_gpu);
    EXPECT_CLOSE(dw_gpu, dw, kFp32);
    linear_bias_gradient(dy, db);
    linear_bias_gradient(dy_gpu, db_gpu);
    EXPECT_CLOSE(db_gpu, db, kFp32);
    linear_weight_gradient(x, dy, {dw, false});
    linear_weight_gradient(x_gpu, dy_gpu, {dw_gpu, false});
    EXPECT_CLOSE(dw_gpu, dw, kFp32);
    linear_bias_gradient(dy, {db, false});
    linear_bias_gradient(dy_gpu, {db_gpu, false});
    EXPECT_CLOSE(db_gpu, db, kFp32);
  }
}

TEST_F(LinearOnGpu, ProductsAreScaledAndAdded) {
  for (const auto& [t, in, out] : {std::tuple{77, 256, 16}, {513, 16, 1152}, {130, 896, 128}}) {
    const Tensor x = random({t, in}), w = random({out, in}, 0.05), dy = random({t, out});
    Tensor y = random({t, out}), dx = random({t, in}), y_gpu = to_gpu(y, b16),
           wide_gpu = to_gpu(random({t, in + 24}), b16), dx_gpu = wide_gpu.narrow(1, 8, 8 + in);
    copy_rows(to_gpu(dx, b16), dx_gpu);
    const Tensor x_gpu = to_gpu(x, b16), w_gpu = to_gpu(w, b16), dy_gpu = to_gpu(dy, b16);
    linear_forward(x, w, {}, y, {.scale = 0.75, .accumulate = true});
    linear_forward(x_gpu, w_gpu, {}, y_gpu, {.scale = 0.75, .accumulate = true});
    EXPECT_CLOSE(y_gpu, y, kBf16);
    linear_input_gradient(dy, w, dx, {.scale = -1.5, .accumulate = true});
    linear_input_gradient(dy_gpu, w_gpu, dx_gpu, {.scale = -1.5, .accumulate = true});
    Tensor dense = unwritten({t, in}, b16);
    copy_rows(dx_gpu, dense);
    EXPECT_CLOSE(dense, dx, kBf16);
    linear_forward(x, w, {}, y, {.scale = 3});
    linear_forward(x_gpu, w_gpu, {}, y_gpu, {.scale = 3});
    EXPECT_CLOSE(y_gpu, y, kBf16);
  }
}

}  // namespace
}  // namespace ballast::test

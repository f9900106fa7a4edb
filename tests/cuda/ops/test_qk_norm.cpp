// QK-norm and rotation on a GPU against the host's in fp64.
#include <array>

#include "kernels/ops/qk_norm.hpp"
#include "kernels/ops/rope.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using QkNorm = CudaTest;

TEST_F(QkNorm, FollowsTheHostsForwardAndBackward) {
  for (const auto& [t, heads, kv, d] :
       {std::array{300, 7, 1, 64}, {1, 1, 1, 128}, {513, 4, 2, 96}, {77, 2, 2, 256}}) {
    const Tensor wide = random({t, heads + 2 * kv, d}, 3.0), w_q = random({d}), w_k = random({d}),
                 dq = random({t, heads, d}), dk = random({t, kv, d}), dv = random({t, kv, d});
    std::vector<std::int32_t> where;
    for (int i = 0; i < t; ++i) where.push_back(i * 997);
    ModelShape shape;
    shape.head_dim = d;
    Tensor cos = Tensor::empty({t, d / 2}, f64), sin = Tensor::empty({t, d / 2}, f64);
    rope_table(integers(where), rope_frequencies(shape), cos, sin);
    const Tensor cos_gpu = to_gpu(cos, f32), sin_gpu = to_gpu(sin, f32), x_gpu = to_gpu(wide, b16);
    const QkNormWeights w{w_q, w_k, 1e-6}, w_gpu{to_gpu(w_q, b16), to_gpu(w_k, b16), 1e-6};
    Tensor y = Tensor::empty({t, heads + kv, d}, f64), y_gpu = unwritten(y.shape(), b16);
    qk_norm_rope(wide, heads, w, cos, sin, y);
    qk_norm_rope(x_gpu, heads, w_gpu, cos_gpu, sin_gpu, y_gpu);
    EXPECT_CLOSE(y_gpu, y, kBf16);
    const Tensor x = wide.narrow(1, 0, heads + kv), x_part = x_gpu.narrow(1, 0, heads + kv);
    for (const bool accumulate : {false, true}) {
      Tensor d_qkv = Tensor::empty({t, (heads + 2 * kv) * d}, f64), d_w_q = random({d}),
             d_w_k = random({d}), d_gpu = unwritten(d_qkv.shape(), b16), q_gpu = to_gpu(d_w_q, f32),
             k_gpu = to_gpu(d_w_k, f32), frozen = unwritten(d_qkv.shape(), b16);
      qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, d_qkv, {d_w_q, accumulate},
                            {d_w_k, accumulate});
      const Tensor dq_gpu = to_gpu(dq, f32), dk_gpu = to_gpu(dk, f32), dv_gpu = to_gpu(dv, f32);
      qk_norm_rope_backward(dq_gpu, dk_gpu, dv_gpu, x_part, w_gpu, cos_gpu, sin_gpu, d_gpu,
                            {q_gpu, accumulate}, {k_gpu, accumulate});
      EXPECT_CLOSE(d_gpu, d_qkv, kBf16);
      EXPECT_CLOSE(q_gpu, d_w_q, kFp32);
      EXPECT_CLOSE(k_gpu, d_w_k, kFp32);
      qk_norm_rope_backward(dq_gpu, dk_gpu, dv_gpu, x_part, w_gpu, cos_gpu, sin_gpu, frozen,
                            Tensor(), Tensor());
      EXPECT_EQ(error(frozen, to_host(d_gpu)), 0) << "with frozen weights";
    }
  }
}

}  // namespace
}  // namespace ballast::test

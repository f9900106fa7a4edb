// Gradients that are kept in bf16, on the GPU: what every operation leaves, and what reads them.
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/ops/adamw.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/fp8_made.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/workspace.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

// The last bit of a sum in another order, here and there; where cuBLASLt adds, it rounds the
// product before, which moves a fourth of the sums by a last bit.
constexpr double kSame = 4e-4, kProduct = 4e-3;

struct Bf16Gradients : CudaTest {
  /// What `run` leaves in bf16 beside what it leaves in fp32, rounded, from one start.
  template <class Run>
  void compare(const char* what, double added, const Shape& shape, const Run& run) {
    for (const bool accumulate : {false, true}) {
      const Tensor before = random(shape);
      const Tensor rounded = to_gpu(before, b16), full = to_gpu(to_host(rounded), f32);
      run(GradientTarget{full, accumulate});
      run(GradientTarget{rounded, accumulate});
      Tensor nearest = unwritten(shape, b16);
      copy_rows(full, nearest);
      EXPECT_LT(error(rounded, to_host(nearest)), accumulate ? added : kSame)
          << what << (accumulate ? ", added" : "") << ", seed " << seed;
    }
  }
};

TEST_F(Bf16Gradients, AreTheSumsRounded) {
  const std::int64_t t = 700, in = 256, out = 384;
  const Tensor x = to_gpu(random({t, in}), b16), dy = to_gpu(random({t, out}), b16),
               w = to_gpu(random({in}), b16), rstd = to_gpu(random({t}), f32),
               dx_of = to_gpu(random({t, in}), b16);
  Tensor ids = Tensor::empty({t}, DType::i32);
  for (std::int64_t i = 0; i < t; ++i)
    ids.data<std::int32_t>()[i] = static_cast<std::int32_t>(rng() % 50);
  const Tensor ids_gpu = ids.to(*gpu);
  compare("weight", kProduct, {out, in},
          [&](const GradientTarget& to) { linear_weight_gradient(x, dy, to); });
  // Few rows and columns of long sums, which are cut along the tokens.
  const Tensor long_x = to_gpu(random({8192, 64}), b16), long_dy = to_gpu(random({8192, 128}), b16);
  compare("weight of long sums", kProduct, {128, 64},
          [&](const GradientTarget& to) { linear_weight_gradient(long_x, long_dy, to); });
  if (cuda::has_fp8()) {
    Workspace workspace(*gpu);
    const Fp8Tokens x8 = fp8_round(x, Fp8Sides::columns, "x", workspace),
                    dy8 = fp8_round(dy, Fp8Sides::columns, "dy", workspace);
    compare("weight in FP8", kProduct, {out, in},
            [&](const GradientTarget& to) { fp8_linear_weight_gradient(x8, dy8, to); });
  }
  compare("bias", kSame, {out}, [&](const GradientTarget& to) { linear_bias_gradient(dy, to); });
  compare("embedding", kSame, {50, in},
          [&](const GradientTarget& to) { embedding_weight_gradient(ids_gpu, x, to); });
  compare("norm", kSame, {in}, [&](const GradientTarget& to) {
    Tensor dx = unwritten({t, in}, b16);
    rmsnorm_backward(dx_of, x, rstd, w, false, dx, to);
  });
  Tensor sum = to_gpu(random({out, in}), f32);
  const Tensor first = sum.clone(), more = to_gpu(random({out, in}), b16);
  add(sum, more, sum);
  Tensor wide = unwritten({out, in}, f32), expected = unwritten({out, in}, f32);
  copy_rows(more, wide);
  add(first, wide, expected);
  EXPECT_EQ(error(sum, to_host(expected)), 0) << "a shard's sum";
}

TEST_F(Bf16Gradients, BesideRotationAreTheSumsRounded) {
  const std::int64_t t = 700, heads = 6, kv = 2, d = 128, turned = heads + kv;
  const Tensor dq = to_gpu(random({t, heads, d}), f32), dk = to_gpu(random({t, kv, d}), f32),
               dv = to_gpu(random({t, kv, d}), f32), x = to_gpu(random({t, turned, d}), b16);
  Tensor cos = unwritten({t, d / 2}, f32), sin = unwritten({t, d / 2}, f32);
  std::vector<std::int32_t> where;
  for (int i = 0; i < t; ++i) where.push_back(i * 997);
  ModelShape model;
  model.head_dim = d;
  rope_table(integers(where).to(*gpu), rope_frequencies(model), cos, sin);
  const QkNormWeights w{to_gpu(random({d}), b16), to_gpu(random({d}), b16), 1e-6};
  Tensor d_qkv = unwritten({t, (heads + 2 * kv) * d}, b16);
  const GradientTarget other{unwritten({d}, f32), false};
  Workspace workspace(*gpu);
  compare("norm of q", kSame, {d}, [&](const GradientTarget& to) {
    qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, d_qkv, to, other);
  });
  compare("norm of k", kSame, {d}, [&](const GradientTarget& to) {
    qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, d_qkv, other, to);
  });
  if (!cuda::has_fp8()) return;
  compare("bias beside FP8", kSame, {(heads + 2 * kv) * d}, [&](const GradientTarget& to) {
    fp8_rope_backward(dq, dk, dv, cos, sin, to, workspace);
  });
  compare("norm of k beside FP8", kSame, {d}, [&](const GradientTarget& to) {
    fp8_qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, other, to, workspace);
  });
}

TEST_F(Bf16Gradients, AreWhatAdamWAndNormTake) {
  const std::int64_t n = 100003;
  const Tensor start = random({n}), rounded = to_gpu(random({n}), b16),
               full = to_gpu(to_host(rounded), f32), none = Tensor::zeros({0}, DType::i64);
  for (const DType moments : {f32, b16})
    for (const Queue queue : {Queue::compute, Queue::update}) {
      const auto run = [&](const Tensor& gradient) {
        AdamWState state{to_gpu(start, f32), Tensor::zeros({n}, moments, *gpu),
                         Tensor::zeros({n}, moments, *gpu), none.to(*gpu)};
        Tensor values = unwritten({n}, b16);
        device_of(Space::cuda).wait(device_of(Space::cuda).fence(Queue::compute), queue);
        adamw_step(state, gradient, 0.5, 1e-2, 1, {}, values, queue);
        device_of(Space::cuda).wait(device_of(Space::cuda).fence(queue), Queue::compute);
        return to_host(state.master);
      };
      EXPECT_EQ(error(to_gpu(run(rounded), f32), run(full)), 0) << name(moments);
    }
  EXPECT_DOUBLE_EQ(sum_of_squares(rounded), sum_of_squares(full));
}

}  // namespace
}  // namespace ballast::test

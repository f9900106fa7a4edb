// Every model operation, CUDA (bf16) against its host twin in fp64 on the same inputs, forward and
// backward.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "core/base/bf16.hpp"
#include "core/base/random.hpp"
#include "core/model/presets.hpp"
#include "kernels/ops/adamw.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/dropout.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/fp8_made.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/muon.hpp"
#include "kernels/ops/random_fill.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using Operations = CudaTest;

/// What bytes and scales stand for, as fp64; `transposed`: rows of the bytes are columns of x.
Tensor values_of(const Tensor& bytes, const Tensor& scales, std::int64_t rows, std::int64_t columns,
                 bool transposed) {
  const Tensor raw = bytes.to(host_device()), scale = scales.to(host_device());
  Tensor out = Tensor::empty({rows, columns}, f64);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t line = transposed ? c : r, along = transposed ? r : c;
      const unsigned code = raw.data<std::uint8_t>()[line * raw.size(1) + along];
      const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
      const double size =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      out.data<double>()[r * columns + c] =
          (code & 128 ? -size : size) * scale.data<float>()[along / 128 * scale.size(1) + line];
    }
  return out;
}

Tensor as_float(const Tensor& x) {
  Tensor out = Tensor::empty(x.shape(), f32);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    out.data<float>()[i] = static_cast<float>(x.data<double>()[i]);
  return out;
}

Tensor as_double(const Tensor& x) {
  Tensor out = Tensor::empty(x.shape(), f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) out.data<double>()[i] = x.data<float>()[i];
  return out;
}

TEST_F(Operations, Fp8Rounding) {
  if (!cuda::has_fp8()) GTEST_SKIP() << "this GPU or cuBLASLt has no FP8 products by blocks";
  Workspace here(host_device()), there(*gpu);
  for (const auto& [t, width] : {std::pair{1, 64}, {130, 896}, {513, 1168}}) {
    Tensor x = random({t, width});
    for (std::int64_t i = 0; i < x.numel(); i += 7)  // magnitudes far apart, zeros
      x.data<double>()[i] = i % 3 == 0 ? 0 : rounded(x.data<double>()[i] * std::exp2(-(i % 40)));
    const Fp8Tokens wanted = fp8_round(as_float(x), Fp8Sides::both, "x", here),
                    got = fp8_round(to_gpu(x, b16), Fp8Sides::both, "x", there);
    const Tensor rows = values_of(got.rows, got.row_scales, t, width, false),
                 columns = values_of(got.columns, got.column_scales, t, width, true);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      ASSERT_EQ(rows.data<double>()[i], wanted.rows.data<float>()[i]) << i;
      ASSERT_EQ(columns.data<double>()[i], wanted.columns.data<float>()[i]) << i;
    }
  }
}

void expect_same_bytes(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) return;
  const Tensor x = a.to(host_device()), y = b.to(host_device());
  ASSERT_EQ(x.shape(), y.shape());
  EXPECT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0);
}
void expect_same(const Fp8Tokens& a, const Fp8Tokens& b) {
  expect_same_bytes(a.rows, b.rows);
  expect_same_bytes(a.row_scales, b.row_scales);
  expect_same_bytes(a.columns, b.columns);
  expect_same_bytes(a.column_scales, b.column_scales);
}

TEST_F(Operations, Fp8Swiglu) {
  if (!cuda::has_fp8()) GTEST_SKIP() << "this GPU or cuBLASLt has no FP8 products by blocks";
  Workspace joined(*gpu), apart(*gpu);
  for (const auto& [t, width] : {std::pair{1, 128}, {130, 384}, {515, 1152}, {131, 144}}) {
    const Tensor gate_up = to_gpu(random({t, 2 * width}), b16),
                 dy = to_gpu(random({t, width}), b16);
    Tensor product = unwritten({t, width}, b16), d = unwritten({t, 2 * width}, b16);
    swiglu_forward(gate_up, product);
    expect_same(fp8_swiglu_forward(gate_up, joined),
                fp8_round(product, Fp8Sides::rows, "x", apart));
    swiglu_backward(gate_up, dy, d);
    const Fp8SwigluGradient made = fp8_swiglu_backward(gate_up, dy, joined);
    expect_same(made.product, fp8_round(product, Fp8Sides::columns, "product", apart));
    expect_same(made.gate_up, fp8_round(d, Fp8Sides::both, "gradient", apart));
  }
}

TEST_F(Operations, Fp8RmsNorm) {
  if (!cuda::has_fp8()) GTEST_SKIP() << "this GPU or cuBLASLt has no FP8 products by blocks";
  Workspace joined(*gpu), apart(*gpu);
  for (const auto& [t, width] : {std::pair{1, 64}, {130, 896}, {515, 2048}, {7, 1168}}) {
    const Tensor x = to_gpu(random({t, width}), b16), branch = to_gpu(random({t, width}), b16),
                 w = to_gpu(random({width}), b16);
    Tensor sum = unwritten({t, width}, b16), y = unwritten({t, width}, b16),
           rstd = unwritten({t}, f32), sum2 = unwritten({t, width}, b16),
           rstd2 = unwritten({t}, f32);
    add_rmsnorm_forward(x, branch, w, 1e-6, sum, y, rstd);
    expect_same(fp8_rmsnorm_forward(x, branch, w, 1e-6, sum2, rstd2, joined),
                fp8_round(y, Fp8Sides::rows, "y", apart));
    expect_same_bytes(sum, sum2);
    expect_same_bytes(rstd, rstd2);
    expect_same(fp8_rmsnorm_recompute(sum, rstd, w, joined),
                fp8_round(y, Fp8Sides::columns, "y", apart));
    rmsnorm_forward(x, w, 1e-6, y, rstd);
    Tensor same = x;
    expect_same(fp8_rmsnorm_forward(x, {}, w, 1e-6, same, rstd2, joined),
                fp8_round(y, Fp8Sides::rows, "y", apart));
    expect_same_bytes(rstd, rstd2);
  }
}

/// Head dim 96 has heads that lie over two blocks: passes of their own.
TEST_F(Operations, Fp8Rope) {
  if (!cuda::has_fp8()) GTEST_SKIP() << "this GPU or cuBLASLt has no FP8 products by blocks";
  Workspace joined(*gpu), apart(*gpu);
  for (const auto& [t, heads, kv, dim] :
       {std::tuple{1, 1, 1, 16}, {300, 14, 2, 64}, {130, 3, 1, 128}, {77, 4, 2, 96}}) {
    const Tensor dq = to_gpu(random({t, heads, dim}), f32), dk = to_gpu(random({t, kv, dim}), f32),
                 dv = to_gpu(random({t, kv, dim}), f32), cos = to_gpu(random({t, dim / 2}), f32),
                 sin = to_gpu(random({t, dim / 2}), f32);
    const std::int64_t width = (heads + 2 * kv) * dim;
    Tensor d = unwritten({t, width}, b16), bias = to_gpu(random({width}), f32);
    Tensor same_bias = bias.clone();
    rope_backward(dq, dk, dv, cos, sin, d);
    linear_bias_gradient(d, bias);
    const Fp8Tokens wanted = fp8_round(d, Fp8Sides::both, "d", apart);
    expect_same(fp8_rope_backward(dq, dk, dv, cos, sin, same_bias, joined), wanted);
    expect_same_bytes(bias, same_bias);
    expect_same(fp8_rope_backward(dq, dk, dv, cos, sin, Tensor(), joined), wanted);
  }
}

TEST_F(Operations, Fp8Linear) {
  if (!cuda::has_fp8()) GTEST_SKIP() << "this GPU or cuBLASLt has no FP8 products by blocks";
  Workspace here(host_device()), there(*gpu);
  for (const auto& [t, in, out] :
       {std::tuple{1, 64, 32}, {77, 272, 144}, {513, 896, 1152}, {1024, 256, 512}}) {
    const Tensor x = random({t, in}), w = random({out, in}, 0.05), bias = random({out}),
                 dy = random({t, out});
    Fp8Weight host_w = fp8_weight_memory(out, in, f32, host_device()),
              gpu_w = fp8_weight_memory(out, in, b16, *gpu);
    fp8_round_weight(as_float(w), host_w);
    fp8_round_weight(to_gpu(w, b16), gpu_w);
    Tensor y = Tensor::empty({t, out}, f32), dx = Tensor::empty({t, in}, f32),
           dw = as_float(random({out, in}));
    Tensor y_gpu = unwritten({t, out}, b16), dx_gpu = unwritten({t, in}, b16), dw_gpu = dw.to(*gpu);
    fp8_linear_forward(fp8_round(as_float(x), Fp8Sides::rows, "x", here), host_w, as_float(bias), y,
                       here);
    fp8_linear_forward(fp8_round(to_gpu(x, b16), Fp8Sides::rows, "x", there), gpu_w,
                       to_gpu(bias, b16), y_gpu, there);
    EXPECT_CLOSE(y_gpu, as_double(y), kBf16);
    const Fp8Tokens d = fp8_round(as_float(dy), Fp8Sides::both, "dy", here),
                    d_gpu = fp8_round(to_gpu(dy, b16), Fp8Sides::both, "dy", there);
    fp8_linear_input_gradient(d, host_w, dx, here);
    fp8_linear_input_gradient(d_gpu, gpu_w, dx_gpu, there);
    EXPECT_CLOSE(dx_gpu, as_double(dx), kBf16);
    const Fp8Tokens c = fp8_round(as_float(x), Fp8Sides::columns, "x", here),
                    c_gpu = fp8_round(to_gpu(x, b16), Fp8Sides::columns, "x", there);
    for (const bool accumulate : {true, false}) {
      fp8_linear_weight_gradient(c, d, {dw, accumulate});
      fp8_linear_weight_gradient(c_gpu, d_gpu, {dw_gpu, accumulate});
      EXPECT_CLOSE(dw_gpu, as_double(dw),
                   4e-4);  // FP8 products are summed with fewer bits than fp32
    }
  }
}

TEST_F(Operations, RmsNorm) {
  for (const auto& [t, h] : {std::pair{1, 64}, {37, 896}, {600, 3584}}) {
    const Tensor x = random({t, h}), branch = random({t, h}), w = random({h}), dy = random({t, h}),
                 before = random({t, h});
    Tensor sum = Tensor::empty({t, h}, f64), y = Tensor::empty({t, h}, f64),
           rstd = Tensor::empty({t}, f64);
    Tensor sum_gpu = unwritten({t, h}, b16), y_gpu = unwritten({t, h}, b16),
           rstd_gpu = unwritten({t}, f32);
    const Tensor x_gpu = to_gpu(x, b16), w_gpu = to_gpu(w, b16), dy_gpu = to_gpu(dy, b16);
    rmsnorm_forward(x, w, 1e-6, y, rstd);
    rmsnorm_forward(x_gpu, w_gpu, 1e-6, y_gpu, rstd_gpu);
    EXPECT_CLOSE(y_gpu, y, kBf16);
    EXPECT_CLOSE(rstd_gpu, rstd, kFp32);
    Tensor again = unwritten({t, h}, b16);
    rmsnorm_recompute(x_gpu, rstd_gpu, w_gpu, again);
    EXPECT_EQ(error(again, to_host(y_gpu)), 0) << "recomputation must agree bit for bit";
    for (bool accumulate : {false, true}) {
      Tensor dx = before.clone(), dx_gpu = to_gpu(before, b16);
      Tensor dw = random({h}), dw_gpu = to_gpu(dw, f32);
      rmsnorm_backward(dy, x, rstd, w, accumulate, dx, {dw, accumulate});
      rmsnorm_backward(dy_gpu, x_gpu, rstd_gpu, w_gpu, accumulate, dx_gpu, {dw_gpu, accumulate});
      EXPECT_CLOSE(dx_gpu, dx, kBf16);
      EXPECT_CLOSE(dw_gpu, dw, kFp32);
      Tensor alone = to_gpu(before, b16);
      rmsnorm_backward(dy_gpu, x_gpu, rstd_gpu, w_gpu, accumulate, alone, Tensor());
      EXPECT_EQ(error(alone, to_host(dx_gpu)), 0) << "with a frozen weight";
    }
    add_rmsnorm_forward(x, branch, w, 1e-6, sum, y, rstd);
    add_rmsnorm_forward(x_gpu, to_gpu(branch, b16), w_gpu, 1e-6, sum_gpu, y_gpu, rstd_gpu);
    EXPECT_CLOSE(sum_gpu, sum, kBf16);
    EXPECT_CLOSE(y_gpu, y, 2 * kBf16);
  }
}

TEST_F(Operations, Rope) {
  const int t = 300, heads = 7, d = 64;
  ModelShape shape = model_preset("qwen2.5-0.5b");
  shape.yarn_factor = 4;
  std::vector<std::int32_t> where;
  for (int i = 0; i < t; ++i) where.push_back(i * 1777);  // up to half a million
  const Tensor positions = integers(where), positions_gpu = positions.to(*gpu);
  const RopeFrequencies frequencies = rope_frequencies(shape);
  Tensor cos = Tensor::empty({t, d / 2}, f64), sin = Tensor::empty({t, d / 2}, f64),
         cos_gpu = unwritten({t, d / 2}, f32), sin_gpu = unwritten({t, d / 2}, f32);
  rope_table(positions, frequencies, cos, sin);
  rope_table(positions_gpu, frequencies, cos_gpu, sin_gpu);
  EXPECT_CLOSE(cos_gpu, cos, kFp32);
  EXPECT_CLOSE(sin_gpu, sin, kFp32);
  const Tensor x = random({t, heads, d}), x_gpu = to_gpu(x, b16);
  Tensor y = Tensor::empty({t, heads, d}, f64), y_gpu = unwritten({t, heads, d}, b16);
  y.copy_from(x);
  copy_rows(x_gpu, y_gpu);
  rope_apply(y, heads, {}, cos, sin);
  rope_apply(y_gpu, heads, {}, cos_gpu, sin_gpu);
  EXPECT_CLOSE(y_gpu, y, kBf16);
  // On heads inside a wider tensor.
  Tensor wide = to_gpu(random({t, heads + 2, d}), b16), inner = wide.narrow(1, 1, 1 + heads);
  copy_rows(x_gpu, inner);
  rope_apply(inner, heads, {}, cos_gpu, sin_gpu);
  Tensor dense = unwritten({t, heads, d}, b16);
  copy_rows(inner, dense);
  EXPECT_EQ(error(dense, to_host(y_gpu)), 0);
  // With a bias, which heads get that are not turned.
  const Tensor bias = random({heads * d});
  Tensor sum = x.clone(), sum_gpu = to_gpu(x, b16);
  rope_apply(sum, heads - 2, bias, cos, sin);
  rope_apply(sum_gpu, heads - 2, to_gpu(bias, b16), cos_gpu, sin_gpu);
  EXPECT_CLOSE(sum_gpu, sum, 2 * kBf16);

  for (const std::int64_t kv : {1, 2, 7}) {
    const Tensor dq = random({t, heads, d}), dk = random({t, kv, d}), dv = random({t, kv, d});
    Tensor d_qkv = Tensor::empty({t, (heads + 2 * kv) * d}, f64),
           d_qkv_gpu = unwritten(d_qkv.shape(), b16);
    rope_backward(dq, dk, dv, cos, sin, d_qkv);
    rope_backward(to_gpu(dq, f32), to_gpu(dk, f32), to_gpu(dv, f32), cos_gpu, sin_gpu, d_qkv_gpu);
    EXPECT_CLOSE(d_qkv_gpu, d_qkv, kBf16);
  }
}

TEST_F(Operations, SwiGlu) {
  const int t = 129, width = 4864;
  const Tensor gate_up = random({t, 2 * width}, 2.0), dy = random({t, width});
  Tensor y = Tensor::empty({t, width}, f64), d = Tensor::empty({t, 2 * width}, f64),
         y_gpu = unwritten({t, width}, b16), d_gpu = to_gpu(gate_up, b16);
  swiglu_forward(gate_up, y);
  swiglu_forward(to_gpu(gate_up, b16), y_gpu);
  EXPECT_CLOSE(y_gpu, y, kBf16);
  swiglu_backward(gate_up, dy, d);
  Tensor again = unwritten({t, width}, b16);
  swiglu_backward(d_gpu, to_gpu(dy, b16), d_gpu, again);  // in place, as the layer may do
  EXPECT_CLOSE(d_gpu, d, kBf16);
  EXPECT_EQ(error(again, to_host(y_gpu)), 0.0);
}

TEST_F(Operations, Embedding) {
  const int t = 999, vocabulary = 50, h = 896;
  std::vector<std::int32_t> ids;
  for (int i = 0; i < t; ++i)
    ids.push_back(i % 3 == 0 ? 7 : static_cast<std::int32_t>(rng() % vocabulary));
  const Tensor tokens = integers(ids), w = random({vocabulary, h}), dy = random({t, h});
  Tensor y = Tensor::empty({t, h}, f64), y_gpu = unwritten({t, h}, b16),
         dw = random({vocabulary, h}), dw_gpu = to_gpu(dw, f32);
  embedding_forward(tokens, w, y);
  embedding_forward(tokens.to(*gpu), to_gpu(w, b16), y_gpu);
  EXPECT_EQ(error(y_gpu, y), 0);
  embedding_weight_gradient(tokens, dy, dw);
  embedding_weight_gradient(tokens.to(*gpu), to_gpu(dy, b16), dw_gpu);
  EXPECT_CLOSE(dw_gpu, dw, kFp32);
}

TEST_F(Operations, CrossEntropy) {
  for (const std::int64_t vocabulary : {257, 32000}) {
    const int t = 130;
    const Tensor logits = random({t, vocabulary}, 3.0);
    std::vector<std::int32_t> where;
    for (int i = 0; i < t; ++i)
      where.push_back(i % 5 == 0 ? -1 : static_cast<std::int32_t>(rng() % vocabulary));
    const Tensor targets = integers(where), targets_gpu = targets.to(*gpu), weights = random({t});
    Tensor loss = Tensor::empty({t}, f64), lse = Tensor::empty({t}, f64),
           loss_gpu = unwritten({t}, f32), lse_gpu = unwritten({t}, f32);
    cross_entropy_forward(logits, targets, loss, lse);
    cross_entropy_forward(to_gpu(logits, b16), targets_gpu, loss_gpu, lse_gpu);
    EXPECT_CLOSE(loss_gpu, loss, 1e-4);
    EXPECT_NEAR(sum_losses(loss_gpu), sum_losses(loss), 1e-4 * std::abs(sum_losses(loss)));
    for (bool weighted : {false, true}) {
      Tensor d = logits.clone(), d_gpu = to_gpu(logits, b16);
      cross_entropy_with_gradient(targets, 0.37, weighted ? weights : Tensor(), d, loss, lse);
      cross_entropy_with_gradient(targets_gpu, 0.37, weighted ? to_gpu(weights, f32) : Tensor(),
                                  d_gpu, loss_gpu, lse_gpu);
      EXPECT_CLOSE(d_gpu, d, kBf16);
      EXPECT_CLOSE(loss_gpu, loss, 1e-4);
      EXPECT_CLOSE(lse_gpu, lse, 1e-4);
    }
  }
}

TEST_F(Operations, NaNAmongLogitsReachesTheLossOfItsRow) {
  for (const std::int64_t vocabulary : {257, 32000, 151936}) {
    const int t = 12;
    Tensor logits = random({t, vocabulary});
    for (int i = 0; i < t; i += 3)
      logits.data<double>()[i * vocabulary + static_cast<std::int64_t>(rng() % vocabulary)] = NAN;
    const Tensor targets = integers(std::vector<std::int32_t>(t, 1)).to(*gpu);
    for (const bool gradient : {false, true}) {
      Tensor loss = unwritten({t}, f32), lse = unwritten({t}, f32), d = to_gpu(logits, b16);
      if (gradient) {
        cross_entropy_with_gradient(targets, 1.0, Tensor(), d, loss, lse);
      } else {
        cross_entropy_forward(d, targets, loss, lse);
      }
      const Tensor found = loss.to(host_device());
      for (int i = 0; i < t; ++i)
        EXPECT_EQ(std::isnan(found.data<float>()[i]), i % 3 == 0)
            << "row " << i << " of vocabulary " << vocabulary << ", seed " << seed;
    }
  }
}

TEST_F(Operations, CrossEntropyCorrect) {
  for (const std::int64_t vocabulary : {2, 8, 257, 32000}) {
    const int t = 400;
    Tensor logits = Tensor::empty({t, vocabulary}, f64);
    for (std::int64_t i = 0; i < logits.numel(); ++i)
      logits.data<double>()[i] = static_cast<double>(rng() % 7);  // ties on most rows
    std::vector<std::int32_t> where;
    for (int i = 0; i < t; ++i) {
      const double* row = logits.data<double>() + i * vocabulary;
      const auto best = static_cast<std::int32_t>(std::max_element(row, row + vocabulary) -
                                                  row);  // the lowest of equals
      where.push_back(i % 5 == 0   ? -1
                      : i % 2 == 0 ? best
                                   : static_cast<std::int32_t>(rng() % vocabulary));
    }
    logits.data<double>()[3 * vocabulary + 1] = NAN;
    const Tensor targets = integers(where);
    Tensor correct = Tensor::empty({t}, DType::u8), correct_gpu = unwritten({t}, DType::u8);
    cross_entropy_correct(logits, targets, correct);
    cross_entropy_correct(to_gpu(logits, b16), targets.to(*gpu), correct_gpu);
    const Tensor found = correct_gpu.to(host_device());
    int right = 0;
    for (int i = 0; i < t; ++i) {
      ASSERT_EQ(found.data<std::uint8_t>()[i], correct.data<std::uint8_t>()[i])
          << "row " << i << ", vocabulary " << vocabulary << ", seed " << seed;
      right += correct.data<std::uint8_t>()[i];
    }
    EXPECT_GE(right, t / 3);
  }
}

TEST_F(Operations, Dropout) {
  const std::int64_t t = 129;
  Tensor keys = Tensor::empty({t}, DType::i64);
  for (std::int64_t i = 0; i < t; ++i)
    keys.data<std::int64_t>()[i] =
        static_cast<std::int64_t>(rng()) * static_cast<std::int64_t>(rng());
  // Columns one by one, or eight at a time, of more rows' pieces than one.
  for (const auto& [width, gap] :
       {std::pair<std::int64_t, std::int64_t>{203, 5}, {204, 8}, {208, 8}, {4104, 8}})
    for (const double rate : {0.1, 0.75}) {
      const Tensor x = random({t, width}), wide_gpu = to_gpu(random({t, width + gap}), b16);
      Tensor y = Tensor::empty({t, width}, f64), y_gpu = wide_gpu.narrow(1, gap, gap + width);
      dropout(x, keys, 1234567, rate, 1.5, y);
      dropout(to_gpu(x, b16), keys.to(*gpu), 1234567, rate, 1.5, y_gpu);
      Tensor dense = unwritten({t, width}, b16);
      copy_rows(y_gpu, dense);
      EXPECT_CLOSE(dense, y, kBf16);
      const Tensor found = to_host(dense);
      for (std::int64_t i = 0; i < found.numel(); ++i)
        ASSERT_EQ(found.data<double>()[i] == 0, y.data<double>()[i] == 0)
            << "element " << i << ", width " << width << ", seed " << seed;
      Tensor sum = random({t, width}), sum_gpu = to_gpu(sum, b16);
      dropout(x, keys, 77, rate, 1.5, sum, true);
      dropout(to_gpu(x, b16), keys.to(*gpu), 77, rate, 1.5, sum_gpu, true);
      EXPECT_CLOSE(sum_gpu, sum, kBf16);
    }
}

TEST_F(Operations, FirstValuesAreTheHosts) {
  const std::int64_t n = (1 << 22) + 7;
  const auto key = static_cast<std::uint64_t>(rng());
  Tensor host = Tensor::empty({n}, f32), drawn = unwritten({n}, b16);
  fill_normal(host, 0.02, key, stream_of("layer"));
  fill_normal(drawn, 0.02, key, stream_of("layer"));
  const Tensor found = drawn.to(host_device());
  for (std::int64_t i = 0; i < n; ++i)
    ASSERT_EQ(found.data<bf16>()[i].bits, to_bf16_bits(host.data<float>()[i]))
        << "element " << i << ", seed " << seed;
}

TEST_F(Operations, AdamWAndNorm) {
  const std::int64_t n = 100003;
  const Tensor start = random({n}), gradient = random({n});
  Tensor decay = Tensor::empty({200}, DType::i64);
  for (std::int64_t i = 0; i < decay.numel(); ++i) decay.data<std::int64_t>()[i] = 499 * i + 3;
  AdamWState state{start.clone(), Tensor::zeros({n}, f64), Tensor::zeros({n}, f64), decay};
  AdamWState state_gpu{to_gpu(start, f32), Tensor::zeros({n}, f32, *gpu),
                       Tensor::zeros({n}, f32, *gpu), decay.to(*gpu)};
  Tensor values = start.clone(), values_gpu = unwritten({n}, b16);
  const Tensor gradient_gpu = to_gpu(gradient, f32);
  for (int step = 1; step <= 3; ++step) {
    adamw_step(state, gradient, 0.5, 1e-2, step, {}, values);
    adamw_step(state_gpu, gradient_gpu, 0.5, 1e-2, step, {}, values_gpu);
  }
  EXPECT_CLOSE(state_gpu.master, state.master, kFp32);
  EXPECT_CLOSE(state_gpu.moment2, state.moment2, kFp32);
  EXPECT_CLOSE(values_gpu, values, kBf16);
  EXPECT_NEAR(sum_of_squares(gradient_gpu), sum_of_squares(gradient),
              1e-9 * sum_of_squares(gradient));
}

TEST_F(Operations, AdamWRoundsBf16MomentsAsTheHostDoes) {
  const std::int64_t n = 100003, number = (std::int64_t{1} << 32) - 50000;
  const Tensor start = random({n}), none = Tensor::zeros({0}, DType::i64);
  AdamWState host{start.clone(), Tensor::zeros({n}, b16), Tensor::zeros({n}, b16), none, number};
  AdamWState device{to_gpu(start, f32), Tensor::zeros({n}, b16, *gpu),
                    Tensor::zeros({n}, b16, *gpu), none.to(*gpu), number};
  Tensor values = start.clone(), values_gpu = unwritten({n}, b16);
  for (int step = 1; step <= 3; ++step) {
    const Tensor gradient = random({n});
    adamw_step(host, gradient, 0.5, 1e-2, step, {}, values);
    adamw_step(device, to_gpu(gradient, f32), 0.5, 1e-2, step, {}, values_gpu);
  }
  EXPECT_CLOSE(device.master, host.master, kFp32);
  for (const auto& [found, expected] :
       {std::pair{to_host(device.moment1), to_host(host.moment1)},
        std::pair{to_host(device.moment2), to_host(host.moment2)}}) {
    std::int64_t unlike = 0;  // where the last bit of a sum in fp32 decides
    for (std::int64_t i = 0; i < n; ++i)
      unlike += found.data<double>()[i] != expected.data<double>()[i];
    EXPECT_LT(unlike, n / 1000);
  }
}

TEST_F(Operations, AdamWBesideComputationHasItsBits) {
  const std::int64_t n = 1000003;  // several sweeps of a third of the multiprocessors
  const Tensor start = random({n}), gradient = to_gpu(random({n}), f32);
  Tensor decay = Tensor::empty({200}, DType::i64);
  for (std::int64_t i = 0; i < decay.numel(); ++i) decay.data<std::int64_t>()[i] = 4999 * i + 3;
  for (const auto& [moments, first] : {std::pair{f32, 0}, {f32, 1}, {b16, 0}, {b16, 1}}) {
    // 1: not aligned for vectors
    const auto run = [&, moments = moments, first = first](Queue queue, bool blocked) {
      AdamWState all{to_gpu(start, f32), Tensor::zeros({n}, moments, *gpu),
                     Tensor::zeros({n}, moments, *gpu), decay.to(*gpu)};
      Tensor values = unwritten({n}, b16), written = values.rows(first, n);
      AdamWState part{all.master.rows(first, n), all.moment1.rows(first, n),
                      all.moment2.rows(first, n), all.decay, first};
      gpu->wait(gpu->fence(Queue::compute), queue);
      if (blocked)
        cudaLaunchHostFunc(
            cuda::stream(queue),
            [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(300)); }, nullptr);
      for (int step = 1; step <= 3; ++step)
        adamw_step(part, gradient.rows(first, n), 0.5, 1e-2, step, {}, written, queue);
      if (blocked) {
        gpu->settle();
        EXPECT_EQ(error(all.master, to_host(to_gpu(start, f32))), 0)
            << "who does not ask does not wait";
      }
      gpu->wait(gpu->fence(queue), Queue::compute);
      return std::vector<Tensor>{to_host(part.master), to_host(part.moment1), to_host(part.moment2),
                                 to_host(written)};
    };
    run(Queue::update, false);  // loads the kernel, for which a launch waits for all queues
    const std::vector<Tensor> alone = run(Queue::compute, false), beside = run(Queue::update, true);
    for (std::size_t i = 0; i < alone.size(); ++i)
      EXPECT_EQ(error(beside[i], alone[i]), 0) << "tensor " << i << " from element " << first;
    EXPECT_GT(error(alone[0], to_host(to_gpu(start, f32).rows(first, n))), 0);
  }
}

TEST_F(Operations, Muon) {
  const std::int64_t n = 100003;
  const Tensor start = random({n}), first = random({n});
  for (const bool nesterov : {true, false}) {
    MuonOptions options;
    options.nesterov = nesterov;
    Tensor moment = start.clone(), gradient = first.clone(), master = start.clone(),
           values = start.clone();
    Tensor moment_gpu = to_gpu(start, f32), gradient_gpu = to_gpu(first, f32),
           master_gpu = to_gpu(start, f32), values_gpu = unwritten({n}, b16);
    muon_momentum(moment, gradient, 0.7, options);
    muon_momentum(moment_gpu, gradient_gpu, 0.7, options);
    EXPECT_CLOSE(moment_gpu, moment, kFp32);
    EXPECT_CLOSE(gradient_gpu, gradient, kFp32);
    muon_update(master, gradient, 0.02, 0.001, values);
    muon_update(master_gpu, gradient_gpu, 0.02, 0.001, values_gpu);
    EXPECT_CLOSE(master_gpu, master, kFp32);
    EXPECT_CLOSE(values_gpu, values, kBf16);
  }
  Workspace host_space(host_device()), gpu_space(*gpu);
  for (const auto& [rows, columns] :
       {std::pair<std::int64_t, std::int64_t>{128, 512}, {512, 128}, {200, 333}, {8, 896}})
    for (const int steps : {1, 5}) {
      Tensor matrix = random({rows, columns}), matrix_gpu = to_gpu(matrix, f32);
      orthogonalise(matrix, steps, host_space);
      orthogonalise(matrix_gpu, steps, gpu_space);
      EXPECT_CLOSE(matrix_gpu, matrix, 3e-2);  // bf16, each step's rounding grown by the next ones
    }
}

TEST_F(Operations, AddAndCopyRows) {
  const Tensor a = random({65, 96}), b = random({65, 96});
  Tensor out = Tensor::empty({65, 96}, f64), out_gpu = unwritten({65, 96}, b16),
         wide_gpu = to_gpu(random({65, 200}), b16);
  add(a, b, out);
  add(to_gpu(a, b16), to_gpu(b, b16), out_gpu);
  EXPECT_CLOSE(out_gpu, out, kBf16);
  Tensor part = wide_gpu.narrow(1, 100, 196);
  copy_rows(to_gpu(a, f32), part);
  Tensor back = unwritten({65, 96}, f32);
  copy_rows(part, back);
  EXPECT_EQ(error(back, a), 0);
}

TEST_F(Operations, SumsAreRoundedWhereTheyAreAdded) {
  for (const std::int64_t width : {96, 97}) {  // four columns a thread, or one
    const Tensor a = to_gpu(random({65, width + 4}), f32).narrow(1, 4, width + 4),
                 b = to_gpu(random({65, width}), f32);
    Tensor sum = unwritten({65, width}, f32), expected = unwritten({65, width}, b16),
           rounded = unwritten({65, width}, b16);
    add(a, b, sum);
    copy_rows(sum, expected);
    add(a, b, rounded);
    EXPECT_EQ(error(rounded, to_host(expected)), 0) << width;
    EXPECT_GT(error(rounded, to_host(sum)), 0) << width;
  }
}

TEST_F(Operations, HeadsNarrowedOutOfATensorAreAddedInPlace) {
  const Tensor sum = random({75, 4, 64}), summand = random({75, 6, 64});
  const Tensor sum_gpu = to_gpu(sum, f32), summand_gpu = to_gpu(summand, f32);
  Tensor part = sum.narrow(1, 2, 3), part_gpu = sum_gpu.narrow(1, 2, 3);
  for (std::int64_t token = 0; token < 75; ++token)
    for (std::int64_t d = 0; d < 64; ++d)
      part.data<double>()[token * 4 * 64 + d] += summand.data<double>()[(token * 6 + 5) * 64 + d];
  add(part_gpu, summand_gpu.narrow(1, 5, 6), part_gpu);
  EXPECT_CLOSE(sum_gpu, sum, kFp32);
  Tensor skewed = to_gpu(random({4, 8, 6}), f32).narrow(2, 0, 3);
  EXPECT_THROW(add(skewed, skewed, skewed), Error);
}

}  // namespace
}  // namespace ballast::test

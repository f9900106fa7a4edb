// Operations between the matrix products on one GPU: checked against fp64 on fresh random data,
// then timed at the shapes of Qwen2.5-0.5B and 3B and Qwen3-4B with 8,192 tokens, as bytes a second
// beside a copy's. Usage: ops_bench check | time [SEED]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/standalone/ops_buffers.cuh"
#include "kernels/cuda/standalone/ops_fp8.cuh"

using namespace ballast::cuda;

namespace {

void check_rmsnorm(std::int64_t rows, int width, bool accumulate) {
  const std::size_t n = static_cast<std::size_t>(rows) * width;
  auto x = random_buffer<Bf16>(n), dy = random_buffer<Bf16>(n),
       w = random_buffer<Bf16>(width, 1, 0.2f), branch = random_buffer<Bf16>(n),
       dx = random_buffer<Bf16>(n);
  auto dw = random_buffer<float>(width);
  auto sum = poisoned<Bf16>(n), y = poisoned<Bf16>(n), again = poisoned<Bf16>(n);
  auto rstd = poisoned<float>(rows), partial = poisoned<float>(rmsnorm_partial_floats(width));
  const auto x0 = doubles(x), b0 = doubles(branch), g0 = doubles(dy), w0 = doubles(w),
             d0 = doubles(dx), dw0 = doubles(dw);
  must(rmsnorm_forward(x.data, branch.data, w.data, 1e-6, sum.data, y.data, rstd.data, rows, width,
                       0),
       "rmsnorm_forward");
  must(rmsnorm_recompute(sum.data, rstd.data, w.data, again.data, rows, width, 0), "recompute");
  must(rmsnorm_backward(sum.data, w.data, rstd.data, dy.data, accumulate, dx.data,
                        {dw.data, true, accumulate}, partial.data, rows, width, 0),
       "rmsnorm_backward");
  must(cudaDeviceSynchronize(), "rmsnorm");
  const auto s0 = doubles(sum);
  std::vector<double> s1(n), y1(n), dx1(n), dw1(width);
  if (accumulate) dw1 = dw0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * width;
    double squares = 0, dot = 0;
    for (int c = 0; c < width; ++c) {
      s1[at + c] = x0[at + c] + b0[at + c];
      squares += s0[at + c] * s0[at + c];
      dot += g0[at + c] * w0[c] * s0[at + c];
    }
    const double scale = 1 / std::sqrt(squares / width + 1e-6);
    for (int c = 0; c < width; ++c) {
      const double x_hat = s0[at + c] * scale;
      y1[at + c] = x_hat * w0[c];
      dw1[c] += g0[at + c] * x_hat;
      dx1[at + c] = scale * (g0[at + c] * w0[c] - x_hat * dot * scale / width) +
                    (accumulate ? d0[at + c] : 0);
    }
  }
  const std::string name = "rmsnorm " + std::to_string(rows) + " x " + std::to_string(width) +
                           (accumulate ? " added " : " written ");
  expect((name + "sum").c_str(), doubles(sum), s1, 4e-3);
  expect((name + "y").c_str(), doubles(y), y1, 4e-3);
  expect((name + "y again").c_str(), doubles(again), doubles(y), 0);
  expect((name + "dx").c_str(), doubles(dx), dx1, 4e-3);
  expect((name + "dw").c_str(), doubles(dw), dw1, 1e-5);
  auto dx2 = random_buffer<Bf16>(n);
  must(rmsnorm_backward(sum.data, w.data, rstd.data, dy.data, false, dx2.data, {}, nullptr, rows,
                        width, 0),
       "rmsnorm_backward of a frozen weight");
  if (!accumulate) expect((name + "dx alone").c_str(), doubles(dx2), doubles(dx), 0);
}

void check_cross_entropy(std::int64_t rows, std::int64_t vocabulary, bool weighted) {
  const std::size_t n = static_cast<std::size_t>(rows * vocabulary);
  auto logits = random_buffer<Bf16>(n, 0, 3);
  const auto x0 = doubles(logits);
  std::vector<std::int32_t> ids(rows);
  for (std::int64_t r = 0; r < rows; ++r)
    ids[r] = r % 5 == 3 ? -1 : static_cast<std::int32_t>(generator() % vocabulary);
  Buffer<std::int32_t> targets(rows);
  targets.send(ids);
  auto weights = random_buffer<float>(rows, 1, 0.3f), loss = poisoned<float>(rows),
       lse = poisoned<float>(rows), loss2 = poisoned<float>(rows), lse2 = poisoned<float>(rows);
  must(cross_entropy_forward(logits.data, targets.data, loss.data, lse.data, rows, vocabulary, 0),
       "cross_entropy_forward");
  const float scale = 0.37f;
  must(cross_entropy_with_gradient(logits.data, targets.data, loss2.data, lse2.data, scale,
                                   weighted ? weights.data : nullptr, rows, vocabulary, 0),
       "cross_entropy_with_gradient");
  must(cudaDeviceSynchronize(), "cross entropy");
  const auto w0 = doubles(weights);
  std::vector<double> loss1(rows), lse1(rows), d1(n);
  for (std::int64_t r = 0; r < rows; ++r) {
    if (ids[r] < 0) continue;
    const double* x = &x0[r * vocabulary];
    double top = -1e300, total = 0;
    for (std::int64_t c = 0; c < vocabulary; ++c) top = std::max(top, x[c]);
    for (std::int64_t c = 0; c < vocabulary; ++c) total += std::exp(x[c] - top);
    lse1[r] = top + std::log(total);
    loss1[r] = lse1[r] - x[ids[r]];
    for (std::int64_t c = 0; c < vocabulary; ++c)
      d1[r * vocabulary + c] =
          scale * (weighted ? w0[r] : 1) * (std::exp(x[c] - lse1[r]) - (c == ids[r] ? 1 : 0));
  }
  const std::string name = "cross entropy " + std::to_string(rows) + " x " +
                           std::to_string(vocabulary) + (weighted ? " weighted " : " ");
  expect((name + "loss").c_str(), doubles(loss), loss1, 1e-6);
  expect((name + "lse").c_str(), doubles(lse), lse1, 1e-6);
  expect((name + "loss with gradient").c_str(), doubles(loss2), loss1, 1e-6);
  expect((name + "lse with gradient").c_str(), doubles(lse2), lse1, 1e-6);
  expect((name + "gradient").c_str(), doubles(logits), d1, 4e-3);
}

/// A NaN anywhere in a row reaches its loss, and no other row's; masked (-inf) logits count
/// nothing.
void check_unusual_logits(std::int64_t vocabulary) {
  const std::int64_t rows = 6;
  auto logits = random_buffer<Bf16>(static_cast<std::size_t>(rows * vocabulary));
  std::vector<Bf16> x = logits.read();
  const std::int64_t at[] = {0, vocabulary / 2 + 3, vocabulary - 1};
  for (int r = 0; r < 3; ++r) x[r * vocabulary + at[r]] = Bf16(NAN);
  for (std::int64_t c = 0; c < vocabulary - 1; ++c) x[4 * vocabulary + c] = Bf16(-INFINITY);
  logits.send(x);
  Buffer<std::int32_t> targets(rows);
  targets.send(std::vector<std::int32_t>(rows, static_cast<std::int32_t>(vocabulary - 1)));
  auto loss = poisoned<float>(rows), lse = poisoned<float>(rows);
  for (const bool gradient : {false, true}) {
    must(gradient ? cross_entropy_with_gradient(logits.data, targets.data, loss.data, lse.data, 1,
                                                nullptr, rows, vocabulary, 0)
                  : cross_entropy_forward(logits.data, targets.data, loss.data, lse.data, rows,
                                          vocabulary, 0),
         "cross entropy of NaN");
    must(cudaDeviceSynchronize(), "cross entropy of NaN");
    const auto found = doubles(loss);
    bool good = std::fabs(found[4]) < 1e-5;
    for (int r = 0; r < rows; ++r) good = good && std::isnan(found[r]) == (r < 3);
    expect(("cross entropy of NaN and -inf, " + std::to_string(vocabulary) +
            (gradient ? ", gradient" : ""))
               .c_str(),
           {good ? 0.0 : 1.0}, {0.0}, 0);
  }
}

template <class Moment>
void check_adamw(std::int64_t n, int offset) {
  const auto total = static_cast<std::size_t>(n + offset);
  auto w = random_buffer<float>(total), g = random_buffer<float>(total);
  auto m = random_buffer<Moment>(total, 0, 0.1f), v = random_buffer<Moment>(total, 1, 0.1f);
  const double moments = sizeof(Moment) == 2 ? 5e-3 : 1e-6;  // tolerance
  auto values = poisoned<Bf16>(total);
  const auto w0 = doubles(w), m0 = doubles(m), v0 = doubles(v), g0 = doubles(g);
  std::vector<std::int64_t> bounds;
  for (std::int64_t at = 3; at < n; at += 1 + static_cast<std::int64_t>(generator() % 1000))
    bounds.push_back(at);
  if (bounds.size() % 2) bounds.push_back(n);
  Buffer<std::int64_t> on_gpu(bounds.size());
  on_gpu.send(bounds);
  const AdamWFactors f{0.7f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-2f, 1.2f, 1e-8f, 1e-2f};
  must(adamw_step(w.data + offset, m.data + offset, v.data + offset, on_gpu.data,
                  static_cast<int>(bounds.size()), g.data + offset, values.data + offset, n, f, 0),
       "adamw_step");
  Buffer<double> partial(sum_partial_doubles()), result(1);
  must(sum_of_squares(g.data + offset, n, partial.data, result.data, 0), "sum_of_squares");
  must(cudaDeviceSynchronize(), "adamw");
  std::vector<double> w1 = w0, m1 = m0, v1 = v0, change(n), change1(n);
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::size_t at = static_cast<std::size_t>(i + offset);
    const auto passed = std::upper_bound(bounds.begin(), bounds.end(), i) - bounds.begin();
    const double x = g0[at] * f.scale;
    squares += g0[at] * g0[at];
    m1[at] = f.beta1 * m0[at] + f.rest1 * x;
    v1[at] = f.beta2 * v0[at] + f.rest2 * x * x;
    w1[at] -= (passed % 2 ? f.shrink * w0[at] : 0.0) +
              f.step_size * m1[at] / (std::sqrt(v1[at]) * f.correction + f.eps);
    change1[i] = w1[at] - w0[at];
  }
  const auto w2 = doubles(w);
  for (std::int64_t i = 0; i < n; ++i) change[i] = w2[i + offset] - w0[i + offset];
  auto rounded = doubles(values);
  rounded.erase(rounded.begin(), rounded.begin() + offset);
  const std::string name = "adamw " + std::to_string(n) + " from element " + std::to_string(offset);
  expect((name + " change").c_str(), change, change1, n < 1000 ? 1e-2 : 1e-4);
  expect((name + " master").c_str(), w2, w1, 1e-6);
  expect((name + " moment 1").c_str(), doubles(m), m1, moments);
  expect((name + " moment 2").c_str(), doubles(v), v1, moments);
  expect((name + " values").c_str(), rounded, {w1.begin() + offset, w1.end()}, 4e-3);
  expect((name + " sum of squares").c_str(), {result.read()[0]}, {squares}, 1e-12);
}

void check_rope(std::int64_t tokens, int q_heads, int kv_heads, int dim) {
  const int heads = q_heads + kv_heads, half = dim / 2, width = (heads + kv_heads) * dim,
            stride = width + 8;
  const auto of = [&](int h) { return static_cast<std::size_t>(tokens) * h * dim; };
  auto x = random_buffer<Bf16>(static_cast<std::size_t>(tokens) * stride);
  auto bias = random_buffer<Bf16>(width);
  auto plain = poisoned<Bf16>(x.n),
       d_qkv = poisoned<Bf16>(static_cast<std::size_t>(tokens) * stride);
  auto dq = random_buffer<float>(of(q_heads)), dk = random_buffer<float>(of(kv_heads)),
       dv = random_buffer<float>(of(kv_heads)), cos = random_buffer<float>(tokens * half),
       sin = random_buffer<float>(tokens * half);
  const auto x0 = doubles(x), c0 = doubles(cos), s0 = doubles(sin), dq0 = doubles(dq),
             dk0 = doubles(dk), dv0 = doubles(dv);
  plain.send(x.read());
  must(rope_apply(plain.data, stride, nullptr, cos.data, sin.data, tokens, heads + kv_heads, heads,
                  dim, 0),
       "rope_apply");
  must(rope_apply(x.data, stride, bias.data, cos.data, sin.data, tokens, heads + kv_heads, heads,
                  dim, 0),
       "rope_apply with a bias");
  must(rope_backward(dq.data, dk.data, dv.data, cos.data, sin.data, d_qkv.data, stride, tokens,
                     q_heads, kv_heads, dim, 0),
       "rope_backward");
  must(cudaDeviceSynchronize(), "rope");
  std::vector<double> y1 = x0, biased = x0, d1(static_cast<std::size_t>(tokens) * width), gradient;
  const auto bias0 = doubles(bias), written = doubles(d_qkv);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int c = 0; c < width; ++c)  // rounded before it is turned
      biased[t * stride + c] =
          __bfloat162float(__float2bfloat16(static_cast<float>(x0[t * stride + c] + bias0[c])));
    gradient.insert(gradient.end(), &written[t * stride], &written[t * stride] + width);
    for (int h = 0; h < heads + kv_heads; ++h)
      for (int j = 0; j < half; ++j) {
        const double c = c0[t * half + j], s = s0[t * half + j];
        for (std::vector<double>* y : {&y1, &biased}) {
          double &low = (*y)[t * stride + h * dim + j], &high = (&low)[half];
          const double a = low, b = high;
          if (h < heads) low = a * c - b * s, high = b * c + a * s;
        }
        const double* d = h < q_heads ? &dq0[(t * q_heads + h) * dim + j]
                          : h < heads ? &dk0[(t * kv_heads + h - q_heads) * dim + j]
                                      : &dv0[(t * kv_heads + h - heads) * dim + j];
        d1[t * width + h * dim + j] = h < heads ? d[0] * c + d[half] * s : d[0];
        d1[t * width + h * dim + j + half] = h < heads ? d[half] * c - d[0] * s : d[half];
      }
  }
  const std::string name = "rope " + std::to_string(tokens) + " x " + std::to_string(q_heads) +
                           "/" + std::to_string(kv_heads) + " x " + std::to_string(dim) + " ";
  expect((name + "forward").c_str(), doubles(plain), y1, 4e-3);
  expect((name + "forward with a bias").c_str(), doubles(x), biased, 4e-3);
  expect((name + "backward").c_str(), gradient, d1, 4e-3);
}

void check_bias(std::int64_t rows, int width) {
  auto dy = random_buffer<Bf16>(static_cast<std::size_t>(rows) * width);
  auto db = random_buffer<float>(width),
       partial = poisoned<float>(bias_partial_floats(rows, width));
  const auto g0 = doubles(dy);
  auto sum = doubles(db);
  for (int added = 1; added >= 0; --added) {
    if (!added) sum.assign(width, 0);
    for (std::int64_t r = 0; r < rows; ++r)
      for (int c = 0; c < width; ++c) sum[c] += g0[r * width + c];
    must(bias_gradient(dy.data, width, {db.data, true, added != 0}, partial.data, rows, width, 0),
         "bias_gradient");
    expect(added ? "bias gradient added" : "bias gradient written", doubles(db), sum, 1e-5);
  }
}

void check_all() {
  for (const auto& [rows, width] : std::vector<std::pair<int, int>>{
           {1, 64}, {3, 1168}, {130, 896}, {300, 144}, {513, 4864}, {1024, 256}, {1, 128}}) {
    check_fp8(rows, width);
    check_fp8_rmsnorm(rows, width);
    if (width % 128 == 0) check_fp8_swiglu(rows, width);
  }
  check_fp8_rope(1001, 14, 2, 64);
  check_fp8_rope(130, 3, 1, 128);
  check_fp8_rope(1, 1, 1, 16);
  for (const auto& [rows, width] : std::vector<std::pair<int, int>>{{1, 8},
                                                                    {3, 64},
                                                                    {517, 896},
                                                                    {2200, 1024},
                                                                    {300, 1536},
                                                                    {515, 2048},
                                                                    {259, 3584},
                                                                    {133, 5120},
                                                                    {67, 16384}})
    for (bool accumulate : {false, true}) check_rmsnorm(rows, width, accumulate);
  check_cross_entropy(7, 151936, false);
  check_cross_entropy(6, 151936, true);
  check_cross_entropy(9, 32000, true);
  check_cross_entropy(11, 1003, true);
  check_cross_entropy(5, 40, false);
  check_cross_entropy(3, 262144, false);
  check_cross_entropy(2, 300000, false);
  for (const std::int64_t vocabulary : {1003, 32000, 151936}) check_unusual_logits(vocabulary);
  for (const int offset : {0, 3}) {
    check_adamw<float>(1'000'003, offset);
    check_adamw<Bf16>(1'000'003, offset);
  }
  check_adamw<float>(2, 0);
  check_rope(1001, 14, 2, 64);
  check_rope(77, 2, 2, 128);
  check_rope(1, 1, 1, 64);
  check_bias(1000, 1152);
}

void time_norm(const Shape& s) {
  const std::size_t n = static_cast<std::size_t>(s.tokens) * s.hidden;
  const double bytes = 2.0 * n;
  auto x = random_buffer<Bf16>(kSets * n), dy = random_buffer<Bf16>(kSets * n),
       dx = random_buffer<Bf16>(kSets * n), sum = random_buffer<Bf16>(kSets * n),
       w = random_buffer<Bf16>(s.hidden, 1, 0.1f);
  auto rstd = random_buffer<float>(s.tokens), dw = random_buffer<float>(s.hidden),
       partial = random_buffer<float>(rmsnorm_partial_floats(s.hidden));
  line("rmsnorm forward with addition",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * n;
                 must(rmsnorm_forward(x.data + at, dy.data + at, w.data, 1e-6, sum.data + at,
                                      dx.data + at, rstd.data, s.tokens, s.hidden, 0),
                      "forward");
               }),
       4 * bytes);
  line("rmsnorm again",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * n;
                 must(rmsnorm_recompute(x.data + at, rstd.data, w.data, sum.data + at, s.tokens,
                                        s.hidden, 0),
                      "recompute");
               }),
       2 * bytes);
  line("rmsnorm backward, dx added, dw",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * n;
                 must(rmsnorm_backward(x.data + at, w.data, rstd.data, dy.data + at, true,
                                       dx.data + at, {dw.data, true, true}, partial.data, s.tokens,
                                       s.hidden, 0),
                      "backward");
               }),
       4 * bytes);
  line("rmsnorm backward, dx added",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * n;
                 must(rmsnorm_backward(x.data + at, w.data, rstd.data, dy.data + at, true,
                                       dx.data + at, {}, nullptr, s.tokens, s.hidden, 0),
                      "backward");
               }),
       4 * bytes);
}

void time_rope(const Shape& s) {
  const int heads = s.q_heads + 2 * s.kv_heads, width = heads * s.dim;
  const std::size_t each = static_cast<std::size_t>(s.tokens) * width,
                    q = static_cast<std::size_t>(s.tokens) * s.q_heads * s.dim,
                    kv = static_cast<std::size_t>(s.tokens) * s.kv_heads * s.dim;
  auto dq = random_buffer<float>(kSets * q), dk = random_buffer<float>(kSets * kv),
       dv = random_buffer<float>(kSets * kv), db = random_buffer<float>(width),
       partial = random_buffer<float>(bias_partial_floats(s.tokens, width));
  auto d = random_buffer<Bf16>(kSets * each);
  auto cos = random_buffer<float>(s.tokens * s.dim / 2, 0, 0.5f),
       sin = random_buffer<float>(s.tokens * s.dim / 2, 0, 0.5f);
  line("rope in place, q and k",
       time_ms(2 * kSets,
               [&](int i) {
                 Bf16* at = d.data + i % kSets * each;
                 must(rope_apply(at, width, nullptr, cos.data, sin.data, s.tokens, heads,
                                 s.q_heads + s.kv_heads, s.dim, 0),
                      "rope");
               }),
       4.0 * s.tokens * (s.q_heads + s.kv_heads) * s.dim);
  auto bias = random_buffer<Bf16>(width);
  line("rope in place with the bias of q, k and v",
       time_ms(2 * kSets,
               [&](int i) {
                 must(rope_apply(d.data + i % kSets * each, width, bias.data, cos.data, sin.data,
                                 s.tokens, heads, s.q_heads + s.kv_heads, s.dim, 0),
                      "rope");
               }),
       4.0 * each);
  line("fp32 dq, dk, dv turned back into bf16",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t set = i % kSets;
                 must(rope_backward(dq.data + set * q, dk.data + set * kv, dv.data + set * kv,
                                    cos.data, sin.data, d.data + set * each, width, s.tokens,
                                    s.q_heads, s.kv_heads, s.dim, 0),
                      "rope gradient");
               }),
       6.0 * each);
  line("bias gradient of qkv",
       time_ms(2 * kSets,
               [&](int i) {
                 must(bias_gradient(d.data + i % kSets * each, width, {db.data, true, true},
                                    partial.data, s.tokens, width, 0),
                      "bias");
               }),
       2.0 * each);
}

void time_qk_norm(const Shape& s) {
  const int heads = s.q_heads + s.kv_heads, width = (heads + s.kv_heads) * s.dim;
  const auto of = [&](int h) { return static_cast<std::size_t>(s.tokens) * h * s.dim; };
  const std::size_t q = of(s.q_heads), kv = of(s.kv_heads), made = of(heads),
                    each = of(heads + s.kv_heads);
  auto dq = random_buffer<float>(kSets * q), dk = random_buffer<float>(kSets * kv),
       dv = random_buffer<float>(kSets * kv), d_w_q = random_buffer<float>(s.dim),
       d_w_k = random_buffer<float>(s.dim),
       partial = random_buffer<float>(qk_norm_partial_floats(s.dim));
  auto x = random_buffer<Bf16>(kSets * each), y = random_buffer<Bf16>(kSets * each),
       w = random_buffer<Bf16>(s.dim, 1, 0.2f);
  auto cos = random_buffer<float>(s.tokens * s.dim / 2, 0, 0.5f),
       sin = random_buffer<float>(s.tokens * s.dim / 2, 0, 0.5f);
  line("QK-norm and rope",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * each;
                 must(qk_norm_rope(x.data + at, width, w.data, w.data, 1e-6, cos.data, sin.data,
                                   y.data + at, s.tokens, s.q_heads, s.kv_heads, s.dim, 0),
                      "QK-norm");
               }),
       4.0 * made);
  line("their gradients, from fp32 dq, dk, dv",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t set = i % kSets;
                 must(qk_norm_rope_backward({dq.data + set * q,
                                             dk.data + set * kv,
                                             dv.data + set * kv,
                                             x.data + set * each,
                                             width,
                                             w.data,
                                             w.data,
                                             1e-6,
                                             cos.data,
                                             sin.data,
                                             y.data + set * each,
                                             width,
                                             {d_w_q.data},
                                             {d_w_k.data},
                                             partial.data,
                                             s.tokens,
                                             s.q_heads,
                                             s.kv_heads,
                                             s.dim},
                                            0),
                      "QK-norm gradient");
               }),
       6.0 * each + 2.0 * made);
}

void time_swiglu(const Shape& s) {
  const std::size_t each = static_cast<std::size_t>(s.tokens) * s.intermediate;
  auto gate_up = random_buffer<Bf16>(4 * each), d = random_buffer<Bf16>(4 * each),
       y = random_buffer<Bf16>(2 * each), product = random_buffer<Bf16>(2 * each);
  line("swiglu forward",
       time_ms(8,
               [&](int i) {
                 must(swiglu_forward(gate_up.data + i % 2 * 2 * each, y.data + i % 2 * each,
                                     s.tokens, s.intermediate, 0),
                      "swiglu");
               }),
       6.0 * each);
  for (const bool again : {false, true})
    line(again ? "swiglu backward, product again" : "swiglu backward",
         time_ms(8,
                 [&](int i) {
                   must(swiglu_backward(gate_up.data + i % 2 * 2 * each, y.data + i % 2 * each,
                                        d.data + i % 2 * 2 * each,
                                        again ? product.data + i % 2 * each : nullptr, s.tokens,
                                        s.intermediate, 0),
                        "swiglu");
                 }),
         (again ? 12.0 : 10.0) * each);
}

void time_cross_entropy(const Shape&) {
  const std::int64_t rows = 1024, vocabulary = 151936;
  auto logits = random_buffer<Bf16>(rows * vocabulary, 0, 3);
  auto loss = random_buffer<float>(rows), lse = random_buffer<float>(rows);
  Buffer<std::int32_t> targets(rows);
  targets.send(std::vector<std::int32_t>(rows, 17));
  line("cross-entropy of 1,024 rows",
       time_ms(4,
               [&](int) {
                 must(cross_entropy_forward(logits.data, targets.data, loss.data, lse.data, rows,
                                            vocabulary, 0),
                      "loss");
               }),
       2.0 * rows * vocabulary);
  line("cross-entropy with its gradient",
       time_ms(4,
               [&](int) {
                 must(cross_entropy_with_gradient(logits.data, targets.data, loss.data, lse.data,
                                                  1e-3f, nullptr, rows, vocabulary, 0),
                      "loss and gradient");
               }),
       4.0 * rows * vocabulary);
}

template <class Moment>
void time_adamw(const Shape& s, const char* name) {
  const auto count = static_cast<std::size_t>(s.parameters);
  auto w = random_buffer<float>(count), g = random_buffer<float>(count);
  auto m = random_buffer<Moment>(count), v = random_buffer<Moment>(count, 1, 0.1f);
  auto values = random_buffer<Bf16>(count);
  std::vector<std::int64_t> bounds;
  for (int i = 0; i < 300; ++i) bounds.push_back(s.parameters / 300 * i);
  Buffer<std::int64_t> on_gpu(bounds.size());
  on_gpu.send(bounds);
  const AdamWFactors f{1, 0.9f, 0.95f, 0.1f, 0.05f, 1e-4f, 1, 1e-8f, 1e-5f};
  line(name,
       time_ms(3,
               [&](int) {
                 must(adamw_step(w.data, m.data, v.data, on_gpu.data, 300, g.data, values.data,
                                 s.parameters, f, 0),
                      "adamw");
               }),
       (14.0 + 4 * sizeof(Moment)) * count);
}
void time_optimizer(const Shape& s) {
  time_adamw<float>(s, "adamw");
  time_adamw<Bf16>(s, "adamw, bf16 moments");
  const auto count = static_cast<std::size_t>(s.parameters);
  auto g = random_buffer<float>(count);
  Buffer<double> partial(sum_partial_doubles()), result(1);
  line("sum of squares",
       time_ms(3,
               [&](int) {
                 must(sum_of_squares(g.data, s.parameters, partial.data, result.data, 0),
                      "squares");
               }),
       4.0 * count);
}

void time_shape(const Shape& s) {
  std::printf("%s, %lld tokens\n", s.name, static_cast<long long>(s.tokens));
  for (const auto part : {time_norm, time_rope, time_qk_norm, time_swiglu, time_fp8, time_fp8_made,
                          time_cross_entropy, time_optimizer})
    part(s);
}

void time_all() {
  {
    const std::size_t n = std::size_t{1} << 30;
    auto a = random_buffer<Bf16>(n), b = random_buffer<Bf16>(n);
    const double ms = time_ms(4, [&](int) {
      must(cudaMemcpyAsync(b.data, a.data, 2 * n, cudaMemcpyDeviceToDevice, 0), "copy");
    });
    copy_rate = 4.0 * n / ms * 1e3;
    line("copy of 2 GiB", ms, 4.0 * n);
  }
  time_shape({"Qwen2.5-0.5B", 8192, 896, 14, 2, 64, 4864, 494'032'768});
  time_shape({"Qwen2.5-3B", 8192, 2048, 16, 2, 128, 11008, 3'085'938'688});
  time_shape({"Qwen3-4B", 8192, 2560, 32, 8, 128, 9728, 4'022'468'096});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const std::uint64_t seed =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  generator.seed(seed);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  if (mode == "check") {
    check_all();
    std::printf(all_good ? "all good\n" : "WRONG\n");
    return all_good ? 0 : 1;
  }
  if (mode == "time") {
    time_all();
    return 0;
  }
  std::printf("usage: ops_bench check | time [SEED]\n");
  return 2;
}

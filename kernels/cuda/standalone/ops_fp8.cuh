// ops_bench's part on rounding to FP8: bytes and scales against their rule, SwiGLU rounded where it
// is made against separate passes.
#pragma once
#include <cuda_fp8.h>

#include "kernels/cuda/standalone/ops_buffers.cuh"

namespace ballast::cuda {

/// Rounded bytes with their scales, both ways.
struct Rounded {
  std::int64_t rows, width, rows_padded, columns_padded;
  Buffer<std::uint8_t> bytes, transposed;
  Buffer<float> scales, transposed_scales;
  Rounded(std::int64_t r, std::int64_t w)
      : rows(r),
        width(w),
        rows_padded((r + 3) / 4 * 4),
        columns_padded((r + 127) / 128 * 128),
        bytes(poisoned<std::uint8_t>(static_cast<std::size_t>(rows_padded * w))),
        transposed(poisoned<std::uint8_t>(static_cast<std::size_t>(w * columns_padded))),
        scales(poisoned<float>(static_cast<std::size_t>((w + 127) / 128 * rows_padded))),
        transposed_scales(poisoned<float>(static_cast<std::size_t>(columns_padded / 128 * w))) {}
  Fp8Target target(bool by_rows, bool by_columns) const {
    return {rows,
            width,
            by_rows ? bytes.data : nullptr,
            scales.data,
            rows_padded,
            by_columns ? transposed.data : nullptr,
            transposed_scales.data,
            columns_padded};
  }
};

inline void expect_same(const char* what, bool same) {
  all_good = all_good && same;
  std::printf("%-58s %s\n", what, same ? "same bits  ok" : "WRONG");
}
template <class T>
bool same_bits(const Buffer<T>& a, const Buffer<T>& b) {
  const std::vector<T> x = a.read(), y = b.read();
  return std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

/// A value under the scale of its block, by the rule of kernels/ops/fp8.hpp.
inline std::uint8_t e4m3(double value, double largest, float scale) {
  if (!std::isfinite(largest)) return 0x7f;
  return __nv_cvt_float_to_fp8(static_cast<float>(value / scale), __NV_SATFINITE, __NV_E4M3);
}
inline float power_of_two(double largest) {
  if (largest == 0 || !std::isfinite(largest)) return 1;
  return static_cast<float>(std::exp2(std::max(-126.0, std::ceil(std::log2(largest / 448)))));
}

inline void check_fp8(std::int64_t rows, std::int64_t width) {
  const auto n = static_cast<std::size_t>(rows * width);
  auto x = random_buffer<Bf16>(n);
  std::vector<Bf16> edited = x.read();
  for (std::size_t i = 0; i < n; i += 5)  // magnitudes far apart, zeros, a few that are not finite
    edited[i] = __float2bfloat16(
        i % 3 == 0 ? 0 : __bfloat162float(edited[i]) * std::exp2(-static_cast<float>(i % 40)));
  for (const auto& [at, value] : {std::pair{n / 3, INFINITY}, {n / 2, NAN}, {n - 1, 1e30f}})
    edited[at] = __float2bfloat16(value);
  x.send(edited);
  const Rounded to(rows, width);
  must(fp8_round(x.data, width, to.target(true, true), 0), "fp8_round");
  const auto bytes = to.bytes.read(), transposed = to.transposed.read();
  const auto scales = to.scales.read(), transposed_scales = to.transposed_scales.read();
  const auto value = [&](std::int64_t r, std::int64_t c) {
    return static_cast<double>(__bfloat162float(edited[static_cast<std::size_t>(r * width + c)]));
  };
  const auto largest = [&](std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1) {
    double most = 0;
    for (std::int64_t r = r0; r < std::min(r1, rows); ++r)
      for (std::int64_t c = c0; c < std::min(c1, width); ++c)
        if (const double v = std::fabs(value(r, c)); !std::isnan(most) && !(v <= most)) most = v;
    return most;
  };
  std::size_t wrong = 0;
  std::vector<double> column_largest(static_cast<std::size_t>(width));
  double row_largest = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      double& down = column_largest[static_cast<std::size_t>(c)];
      if (c % 128 == 0) row_largest = largest(r, r + 1, c, c + 128);
      if (r % 128 == 0) down = largest(r, r + 128, c, c + 1);
      const float by_row = power_of_two(row_largest), by_column = power_of_two(down);
      wrong += scales[static_cast<std::size_t>(c / 128 * to.rows_padded + r)] != by_row;
      wrong += transposed_scales[static_cast<std::size_t>(r / 128 * width + c)] != by_column;
      wrong +=
          bytes[static_cast<std::size_t>(r * width + c)] != e4m3(value(r, c), row_largest, by_row);
      wrong += transposed[static_cast<std::size_t>(c * to.columns_padded + r)] !=
               e4m3(value(r, c), down, by_column);
    }
  expect_same("FP8 rounding", wrong == 0);
}

inline bool alike(const Rounded& a, const Rounded& b) {
  return same_bits(a.bytes, b.bytes) && same_bits(a.scales, b.scales) &&
         same_bits(a.transposed, b.transposed) &&
         same_bits(a.transposed_scales, b.transposed_scales);
}

inline void check_fp8_swiglu(std::int64_t rows, std::int64_t width) {
  const auto n = static_cast<std::size_t>(rows * width);
  auto gate_up = random_buffer<Bf16>(2 * n), d_y = random_buffer<Bf16>(n);
  auto y = poisoned<Bf16>(n), d = poisoned<Bf16>(2 * n);
  const Rounded product(rows, width), gradient(rows, 2 * width), fused(rows, width),
      fused_gradient(rows, 2 * width);
  must(swiglu_forward(gate_up.data, y.data, rows, width, 0), "swiglu");
  must(swiglu_backward(gate_up.data, d_y.data, d.data, nullptr, rows, width, 0), "swiglu backward");
  must(fp8_round(y.data, width, product.target(true, true), 0), "rounding");
  must(fp8_round(d.data, 2 * width, gradient.target(true, true), 0), "rounding");
  must(fp8_swiglu(gate_up.data, fused.target(true, false), 0), "fused");
  must(fp8_swiglu_backward(gate_up.data, d_y.data, fused.target(false, true),
                           fused_gradient.target(true, true), 0),
       "fused backward");
  expect_same("SwiGLU rounded where it is made", alike(product, fused));
  expect_same("its gradient", alike(gradient, fused_gradient));
}

inline void check_fp8_rmsnorm(std::int64_t rows, std::int64_t width) {
  const auto n = static_cast<std::size_t>(rows * width);
  auto x = random_buffer<Bf16>(n), branch = random_buffer<Bf16>(n),
       w = random_buffer<Bf16>(width, 1, 0.2f), y = poisoned<Bf16>(n), sum = poisoned<Bf16>(n),
       fused_sum = poisoned<Bf16>(n);
  auto rstd = poisoned<float>(rows), fused_rstd = poisoned<float>(rows);
  for (const bool adds : {true, false}) {
    const Rounded apart(rows, width), fused(rows, width);
    const Bf16* residual = adds ? branch.data : nullptr;
    must(rmsnorm_forward(x.data, residual, w.data, 1e-6, sum.data, y.data, rstd.data, rows,
                         static_cast<int>(width), 0),
         "rmsnorm");
    must(fp8_round(y.data, width, apart.target(true, true), 0), "rounding");
    must(fp8_rmsnorm(x.data, residual, w.data, 1e-6, fused_sum.data, fused_rstd.data,
                     fused.target(true, false), 0),
         "fused");
    must(fp8_rmsnorm_recompute(adds ? fused_sum.data : x.data, fused_rstd.data, w.data,
                               fused.target(false, true), 0),
         "fused again");
    expect_same(adds ? "RMSNorm of a sum, rounded where it is made" : "RMSNorm rounded",
                same_bits(sum, fused_sum) && same_bits(rstd, fused_rstd) && alike(apart, fused));
  }
}

inline void check_fp8_rope(std::int64_t tokens, int q_heads, int kv_heads, int dim) {
  const std::int64_t width = std::int64_t{dim} * (q_heads + 2 * kv_heads);
  const auto of = [&](std::int64_t columns) { return static_cast<std::size_t>(tokens * columns); };
  auto dq = random_buffer<float>(of(q_heads * dim)), dk = random_buffer<float>(of(kv_heads * dim)),
       dv = random_buffer<float>(of(kv_heads * dim)), cos = random_buffer<float>(of(dim / 2)),
       sin = random_buffer<float>(of(dim / 2)), db = random_buffer<float>(width),
       partial = poisoned<float>(bias_partial_floats(tokens, width));
  auto d = poisoned<Bf16>(of(width));
  Buffer<float> fused_db(width);
  fused_db.send(db.read());
  const Rounded apart(tokens, width), fused(tokens, width), alone(tokens, width);
  must(rope_backward(dq.data, dk.data, dv.data, cos.data, sin.data, d.data, width, tokens, q_heads,
                     kv_heads, dim, 0),
       "rope");
  must(fp8_round(d.data, width, apart.target(true, true), 0), "rounding");
  for (const bool accumulate : {true, false}) {
    must(bias_gradient(d.data, width, {db.data, true, accumulate}, partial.data, tokens, width, 0),
         "bias");
    must(fp8_rope_backward(dq.data, dk.data, dv.data, cos.data, sin.data, q_heads, kv_heads, dim,
                           fused.target(true, true), {fused_db.data, true, accumulate},
                           partial.data, 0),
         "fused");
    expect_same("RoPE's gradient rounded where it is made, its bias",
                alike(apart, fused) && same_bits(db, fused_db));
  }
  must(fp8_rope_backward(dq.data, dk.data, dv.data, cos.data, sin.data, q_heads, kv_heads, dim,
                         alone.target(true, true), {}, nullptr, 0),
       "fused");
  expect_same("the same without a bias", alike(apart, alone));
}

/// The MLP of a layer whose products are FP8: passes of their own, and SwiGLU rounded where it is
/// made.
inline void time_fp8(const Shape& s) {
  const std::size_t each = static_cast<std::size_t>(s.tokens) * s.intermediate;
  auto gate_up = random_buffer<Bf16>(2 * each), d_y = random_buffer<Bf16>(each),
       y = random_buffer<Bf16>(each), d = random_buffer<Bf16>(2 * each);
  const Rounded product(s.tokens, s.intermediate), gradient(s.tokens, 2 * s.intermediate);
  line("FP8 rounding by rows",
       time_ms(8,
               [&](int) {
                 must(fp8_round(y.data, s.intermediate, product.target(true, false), 0), "rows");
               }),
       3.0 * each);
  line("FP8 rounding by columns",
       time_ms(8,
               [&](int) {
                 must(fp8_round(y.data, s.intermediate, product.target(false, true), 0), "columns");
               }),
       3.0 * each);
  line("FP8 rounding by both",
       time_ms(8,
               [&](int) {
                 must(fp8_round(d.data, 2 * s.intermediate, gradient.target(true, true), 0),
                      "both");
               }),
       8.0 * each);
  line(
      "SwiGLU rounded",
      time_ms(
          8, [&](int) { must(fp8_swiglu(gate_up.data, product.target(true, false), 0), "fused"); }),
      5.0 * each);
  line("SwiGLU's gradient rounded, product too",
       time_ms(8,
               [&](int) {
                 must(fp8_swiglu_backward(gate_up.data, d_y.data, product.target(false, true),
                                          gradient.target(true, true), 0),
                      "fused backward");
               }),
       11.0 * each);
}

/// Norms and RoPE's gradient rounded where they are made; weights.
inline void time_fp8_made(const Shape& s) {
  const int width = (s.q_heads + 2 * s.kv_heads) * s.dim;
  const std::size_t n = static_cast<std::size_t>(s.tokens) * s.hidden,
                    q = static_cast<std::size_t>(s.tokens) * s.q_heads * s.dim,
                    kv = static_cast<std::size_t>(s.tokens) * s.kv_heads * s.dim, all = q + 2 * kv;
  auto x = random_buffer<Bf16>(kSets * n), branch = random_buffer<Bf16>(kSets * n),
       w = random_buffer<Bf16>(s.hidden, 1, 0.1f);
  auto rstd = random_buffer<float>(s.tokens), db = random_buffer<float>(width),
       partial = random_buffer<float>(bias_partial_floats(s.tokens, width)),
       cos = random_buffer<float>(s.tokens * s.dim / 2), sin = random_buffer<float>(cos.n),
       dq = random_buffer<float>(kSets * q), dk = random_buffer<float>(kSets * kv),
       dv = random_buffer<float>(kSets * kv);
  const Rounded norm(s.tokens, s.hidden), d_qkv(s.tokens, width);
  line("RMSNorm with addition, rounded by rows",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t at = i % kSets * n;
                 must(fp8_rmsnorm(x.data + at, branch.data + at, w.data, 1e-6, x.data + at,
                                  rstd.data, norm.target(true, false), 0),
                      "norm");
               }),
       7.0 * n);
  line("RMSNorm again, rounded by columns",
       time_ms(2 * kSets,
               [&](int i) {
                 must(fp8_rmsnorm_recompute(x.data + i % kSets * n, rstd.data, w.data,
                                            norm.target(false, true), 0),
                      "norm again");
               }),
       3.0 * n);
  line("FP8 rounding of as much by both",
       time_ms(2 * kSets,
               [&](int i) {
                 must(fp8_round(x.data + i % kSets * n, s.hidden, norm.target(true, true), 0),
                      "both");
               }),
       4.0 * n);
  line("dq, dk, dv turned back, rounded by both, bias",
       time_ms(2 * kSets,
               [&](int i) {
                 const std::size_t set = i % kSets;
                 must(fp8_rope_backward(dq.data + set * q, dk.data + set * kv, dv.data + set * kv,
                                        cos.data, sin.data, s.q_heads, s.kv_heads, s.dim,
                                        d_qkv.target(true, true), {db.data, true, true},
                                        partial.data, 0),
                      "rope gradient");
               }),
       6.0 * all);
}

}  // namespace ballast::cuda

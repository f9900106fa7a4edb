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
inline std::uint8_t e4m3(double value, float scale) {
  const double x = value / scale;
  if (!(std::fabs(x) <= 448)) return 0x7f;
  return __nv_cvt_float_to_fp8(static_cast<float>(x), __NV_SATFINITE, __NV_E4M3);
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
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t r0 = r / 128 * 128, c0 = c / 128 * 128;
      const float by_row = c == c0 ? power_of_two(largest(r, r + 1, c0, c0 + 128))
                                   : scales[static_cast<std::size_t>(c / 128 * to.rows_padded + r)],
                  by_column =
                      r == r0 ? power_of_two(largest(r0, r0 + 128, c, c + 1))
                              : transposed_scales[static_cast<std::size_t>(r / 128 * width + c)];
      wrong += scales[static_cast<std::size_t>(c / 128 * to.rows_padded + r)] != by_row;
      wrong += transposed_scales[static_cast<std::size_t>(r / 128 * width + c)] != by_column;
      wrong += bytes[static_cast<std::size_t>(r * width + c)] != e4m3(value(r, c), by_row);
      wrong += transposed[static_cast<std::size_t>(c * to.columns_padded + r)] !=
               e4m3(value(r, c), by_column);
    }
  expect_same("FP8 rounding", wrong == 0);
}

inline void check_fp8_swiglu(std::int64_t rows, std::int64_t width) {
  const auto n = static_cast<std::size_t>(rows * width);
  auto gate_up = random_buffer<Bf16>(2 * n), d_y = random_buffer<Bf16>(n);
  auto y = poisoned<Bf16>(n), fused_y = poisoned<Bf16>(n), d = poisoned<Bf16>(2 * n);
  const Rounded product(rows, width), gradient(rows, 2 * width), fused(rows, width),
      fused_gradient(rows, 2 * width);
  must(swiglu_forward(gate_up.data, y.data, rows, width, 0), "swiglu");
  must(swiglu_backward(gate_up.data, d_y.data, d.data, rows, width, 0), "swiglu backward");
  must(fp8_round(y.data, width, product.target(true, true), 0), "rounding");
  must(fp8_round(d.data, 2 * width, gradient.target(true, true), 0), "rounding");
  must(fp8_swiglu(gate_up.data, fused_y.data, fused.target(true, false), 0), "fused");
  must(fp8_swiglu_backward(gate_up.data, d_y.data, fused.target(false, true),
                           fused_gradient.target(true, true), 0),
       "fused backward");
  const auto alike = [](const Rounded& a, const Rounded& b) {
    return same_bits(a.bytes, b.bytes) && same_bits(a.scales, b.scales) &&
           same_bits(a.transposed, b.transposed) &&
           same_bits(a.transposed_scales, b.transposed_scales);
  };
  expect_same("SwiGLU rounded where it is made", same_bits(y, fused_y) && alike(product, fused));
  expect_same("its gradient", alike(gradient, fused_gradient));
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
  line("SwiGLU rounded",
       time_ms(8,
               [&](int) {
                 must(fp8_swiglu(gate_up.data, y.data, product.target(true, false), 0), "fused");
               }),
       7.0 * each);
  line("SwiGLU's gradient rounded, product too",
       time_ms(8,
               [&](int) {
                 must(fp8_swiglu_backward(gate_up.data, d_y.data, product.target(false, true),
                                          gradient.target(true, true), 0),
                      "fused backward");
               }),
       11.0 * each);
}

}  // namespace ballast::cuda

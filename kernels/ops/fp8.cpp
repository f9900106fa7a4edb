#include "kernels/ops/fp8.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "core/model/fp8_specs.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/linear.hpp"

namespace ballast {
namespace host {

float nearest_e4m3(float x) {
  const float magnitude = std::fabs(x);
  if (!(magnitude <= 448.0f)) return std::numeric_limits<float>::quiet_NaN();
  // Below 2^-6 values lie 2^-9 apart.
  if (magnitude < 0x1p-6f) return std::nearbyint(x * 512.0f) / 512.0f;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u);
}

float fp8_scale(float amax) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(amax);
  const std::uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
  if (amax == 0 || exponent == 255) return 1;
  // 448 = 1.75 x 2^8; subnormal numbers end at the least scale.
  const int power = static_cast<int>(exponent) - 127 - 8 + (mantissa > 0x600000u ? 1 : 0);
  return std::ldexp(1.0f, std::max(power, -126));
}

namespace {

/// Magnitudes that order by their bits, with NaN above all.
std::uint32_t magnitude_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }

/// Rounds rows [r0, r1) and columns [c0, c1) of x under one scale.
void round_block(const Matrix<const float>& x, const Matrix<float>& y, std::int64_t r0,
                 std::int64_t r1, std::int64_t c0, std::int64_t c1) {
  std::uint32_t largest = 0;
  for (std::int64_t r = r0; r < r1; ++r)
    for (std::int64_t c = c0; c < c1; ++c) largest = std::max(largest, magnitude_bits(x.row(r)[c]));
  const bool finite = std::isfinite(std::bit_cast<float>(largest));
  const float scale = fp8_scale(std::bit_cast<float>(largest)),
              inverse = finite ? 1 / scale : std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t r = r0; r < r1; ++r)
    for (std::int64_t c = c0; c < c1; ++c)
      y.row(r)[c] = nearest_e4m3(x.row(r)[c] * inverse) * scale;
}

/// Blocks of block_rows x block_columns.
void round_blocks(const Tensor& from, std::int64_t block_rows, std::int64_t block_columns,
                  Tensor& to) {
  const auto x = matrix<const float>(from);
  const auto y = matrix<float>(to);
  const std::int64_t across = (x.columns() + block_columns - 1) / block_columns,
                     down = (x.rows() + block_rows - 1) / block_rows;
  parallel_for("fp8 rounding", down * across, [=](std::int64_t block) {
    const std::int64_t r = block / across * block_rows, c = block % across * block_columns;
    round_block(x, y, r, std::min(r + block_rows, x.rows()), c,
                std::min(c + block_columns, x.columns()));
  });
}

}  // namespace
}  // namespace host

Fp8Weight fp8_weight_memory(std::int64_t out, std::int64_t in, DType type, Device& device) {
  require(out % 16 == 0 && in % 16 == 0,
          "run.precision = \"fp8\": a weight of {} x {} has a side that is no multiple of 16", out,
          in);
  const auto memory = [&](Shape shape, DType t) {
    return Tensor::empty(std::move(shape), t, device, MemoryCategory::parameters);
  };
  Fp8Weight w{.out = out, .in = in};
  if (device.space() == Space::host) {
    w.bytes = memory({out, in}, type);
    return w;
  }
  w.bytes = memory({out, in}, DType::u8);
  w.transposed = memory({in, out}, DType::u8);
  w.scales = memory(fp8_weight_scales(out, in), DType::f32);
  w.transposed_scales = memory(fp8_weight_scales(in, out), DType::f32);
  return w;
}

void fp8_round_weight(const Tensor& weight, Fp8Weight& rounded) {
  require(weight.size(0) == rounded.out && weight.size(1) == rounded.in,
          "fp8_round_weight: weight {} does not fit its memory", to_string(weight.shape()));
  BALLAST_ON_CUDA(weight, fp8_round_weight(weight, rounded));
  host::round_blocks(weight, kFp8Block, kFp8Block, rounded.bytes);
}

Fp8Tokens fp8_tokens_memory(std::int64_t tokens, std::int64_t width, const Tensor& like,
                            Fp8Sides sides, const char* name, Workspace& workspace) {
  const bool on_host = like.space() == Space::host;
  Fp8Tokens rounded{.tokens = tokens, .width = width};
  const DType bytes = on_host ? like.dtype() : DType::u8;
  const auto take = [&](Fp8Part part, DType type) {
    return workspace.take(std::string(name) + fp8_part_name(part),
                          fp8_part_shape(part, tokens, width, on_host), type);
  };
  if (sides != Fp8Sides::columns) {
    rounded.rows = take(Fp8Part::rows, bytes);
    if (!on_host) rounded.row_scales = take(Fp8Part::row_scales, DType::f32);
  }
  if (sides != Fp8Sides::rows) {
    rounded.columns = take(Fp8Part::columns, bytes);
    if (!on_host) rounded.column_scales = take(Fp8Part::column_scales, DType::f32);
  }
  return rounded;
}

Fp8Tokens fp8_round(const Tensor& x, Fp8Sides sides, const char* name, Workspace& workspace) {
  require(x.rank() == 2, "fp8_round: rows of tokens expected, got shape {}", to_string(x.shape()));
  Fp8Tokens rounded = fp8_tokens_memory(x.size(0), x.size(1), x, sides, name, workspace);
  if (x.size(0) == 0) return rounded;
#ifdef BALLAST_HAVE_CUDA
  if (x.space() == Space::cuda) {
    cuda::fp8_round(x, rounded);
    return rounded;
  }
#endif
  if (rounded.rows.defined()) host::round_blocks(x, 1, kFp8Block, rounded.rows);
  if (rounded.columns.defined()) host::round_blocks(x, kFp8Block, 1, rounded.columns);
  return rounded;
}

void fp8_linear_forward(const Fp8Tokens& x, const Fp8Weight& w, const Tensor& bias, Tensor& y,
                        Workspace& workspace) {
  require(x.rows.defined() && x.width == w.in && y.size(0) == x.tokens && y.size(1) == w.out,
          "fp8_linear_forward: input [{}, {}], weight [{}, {}] and output {} do not fit", x.tokens,
          x.width, w.out, w.in, to_string(y.shape()));
  BALLAST_ON_CUDA(y, fp8_linear_forward(x, w, bias, y, workspace));
  linear_forward(x.rows, w.bytes, bias, y);
}

void fp8_linear_input_gradient(const Fp8Tokens& dy, const Fp8Weight& w, Tensor& dx,
                               Workspace& workspace) {
  require(dy.rows.defined() && dy.width == w.out && dx.size(0) == dy.tokens && dx.size(1) == w.in,
          "fp8_linear_input_gradient: gradient [{}, {}], weight [{}, {}] and result {} do not fit",
          dy.tokens, dy.width, w.out, w.in, to_string(dx.shape()));
  BALLAST_ON_CUDA(dx, fp8_linear_input_gradient(dy, w, dx, workspace));
  linear_input_gradient(dy.rows, w.bytes, dx);
}

void fp8_linear_weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy, const GradientTarget& dw) {
  if (!dw.defined()) return;
  require(x.columns.defined() && dy.columns.defined() && x.tokens == dy.tokens &&
              dw.tensor.size(0) == dy.width && dw.tensor.size(1) == x.width,
          "fp8_linear_weight_gradient: input [{}, {}], gradient [{}, {}] and result {} do not fit",
          x.tokens, x.width, dy.tokens, dy.width, to_string(dw.tensor.shape()));
  if (x.tokens == 0) {
    if (!dw.accumulate) Tensor(dw.tensor).zero();
    return;
  }
  BALLAST_ON_CUDA(dw.tensor, fp8_linear_weight_gradient(x, dy, dw));
  linear_weight_gradient(x.columns, dy.columns, dw);
}

}  // namespace ballast

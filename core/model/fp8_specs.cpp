#include "core/model/fp8_specs.hpp"

#include <algorithm>
#include <array>

#include "core/base/division.hpp"
#include "core/model/tensor_specs.hpp"

namespace ballast {
namespace {

std::int64_t padded(std::int64_t n, std::int64_t multiple) {
  return divided_up(n, multiple) * multiple;
}
std::int64_t blocks(std::int64_t n) { return divided_up(n, kFp8Block); }
std::int64_t elements(const Shape& shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

struct Sides {
  std::int64_t out, in;
};
/// Of a layer's matrices: q, k and v; output; gate and up; down.
std::array<Sides, 4> matrices(const ModelShape& s) {
  return {{{qkv_width(s), s.hidden},
           {s.hidden, query_width(s)},
           {2 * s.intermediate, s.hidden},
           {s.hidden, s.intermediate}}};
}

}  // namespace

const char* fp8_part_name(Fp8Part part) {
  switch (part) {
    case Fp8Part::rows:
      return " rows";
    case Fp8Part::row_scales:
      return " row scales";
    case Fp8Part::columns:
      return " columns";
    case Fp8Part::column_scales:
      return " column scales";
  }
  return "";
}

Shape fp8_part_shape(Fp8Part part, std::int64_t tokens, std::int64_t width, bool host) {
  switch (part) {
    case Fp8Part::rows:
      return {host ? tokens : padded(tokens, kFp8Rows), width};
    case Fp8Part::row_scales:
      return {blocks(width), padded(tokens, kFp8Rows)};
    case Fp8Part::columns:
      return host ? Shape{tokens, width} : Shape{width, padded(tokens, kFp8Block)};
    case Fp8Part::column_scales:
      return {blocks(tokens), width};
  }
  return {};
}

Shape fp8_weight_scales(std::int64_t out, std::int64_t in) {
  return {blocks(out), padded(blocks(in), 4)};
}

std::int64_t fp8_weight_bytes(const ModelShape& shape, bool host) {
  std::int64_t bytes = 0;
  for (const auto& [out, in] : matrices(shape))
    bytes += host ? 4 * out * in
                  : 2 * out * in + 4 * elements(fp8_weight_scales(out, in)) +
                        4 * elements(fp8_weight_scales(in, out));
  return bytes;
}

std::vector<Fp8Scratch> fp8_scratch(const ModelShape& shape, std::int64_t tokens, bool backward,
                                    bool halves, bool host) {
  std::vector<Fp8Scratch> list;
  const auto add = [&](const char* name, Fp8Part part, std::int64_t width) {
    const bool scales = part == Fp8Part::row_scales || part == Fp8Part::column_scales;
    if (scales && host) return;
    list.push_back(
        {std::string(name) + fp8_part_name(part),
         elements(fp8_part_shape(part, tokens, width, host)) * (scales || host ? 4 : 1)});
  };
  std::int64_t in = 0, out = 0;
  for (const Sides& sides : matrices(shape)) {
    in = std::max(in, sides.in);
    out = std::max(out, sides.out);
  }
  const bool again = fp8_makes_again(shape);
  if (again && host)  // of RMSNorm and SwiGLU; what attention gives is rounded as it lies
    list.push_back({kFp8Made, 4 * tokens * std::max(shape.hidden, shape.intermediate)});
  if (!host && tokens % kFp8Rows != 0)
    list.push_back({kFp8Output, 2 * padded(tokens, kFp8Rows) * (backward ? in : out)});
  if (!backward) {
    add("fp8 input", Fp8Part::rows, in);
    add("fp8 input", Fp8Part::row_scales, in);
    return list;
  }
  // In one pass the gradients of outputs that are hidden wide have a buffer of their own.
  if (again && !halves) out = std::max(qkv_width(shape), 2 * shape.intermediate);
  add("fp8 gradient", Fp8Part::rows, out);
  add("fp8 gradient", Fp8Part::row_scales, out);
  if (shape.lora.enabled()) return list;  // weights are frozen
  if (again && !halves) {
    for (const Fp8Part part :
         {Fp8Part::rows, Fp8Part::row_scales, Fp8Part::columns, Fp8Part::column_scales})
      add("fp8 branch gradient", part, shape.hidden);
    const bool swiglu = host || !fp8_rounds_swiglu(shape.intermediate),
               rope = host || shape.qk_norm || !fp8_rounds_rope(shape.head_dim);
    const std::int64_t element = host ? 4 : 2, width = std::max(swiglu ? 2 * shape.intermediate : 0,
                                                                rope ? qkv_width(shape) : 0);
    if (swiglu && !host) list.push_back({kFp8Made, element * tokens * shape.intermediate});
    if (width > 0) list.push_back({kFp8MadeGradient, element * tokens * width});
  }
  add("fp8 gradient", Fp8Part::columns, out);
  add("fp8 gradient", Fp8Part::column_scales, out);
  add("fp8 input", Fp8Part::columns, in);
  add("fp8 input", Fp8Part::column_scales, in);
  return list;
}

bool fp8_makes_again(const ModelShape& shape) { return !shape.lora.enabled(); }

Keep fp8_keep(Keep keep, const ModelShape& shape) {
  return fp8_makes_again(shape) ? std::min(keep, Keep::selective) : keep;
}

bool fp8_rounds_swiglu(std::int64_t intermediate) { return intermediate % kFp8Block == 0; }
bool fp8_rounds_rope(std::int64_t head_dim) {
  return head_dim % 16 == 0 && kFp8Block % head_dim == 0;
}

std::int64_t fp8_misfit(const ModelShape& shape) {
  for (const auto& [out, in] : matrices(shape))
    for (const std::int64_t side : {out, in})
      if (side % 16 != 0) return side;
  return 0;
}

}  // namespace ballast

// The tensors that FP8 products take beside those of bf16 (run.precision = "fp8"), by name and
// size: the one list that allocators (kernels/ops/fp8) and the memory model read.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/tensor_specs.hpp"

namespace ballast {

/// Tokens, columns and rows of a block that shares a scale.
inline constexpr std::int64_t kFp8Block = 128;
/// Products on a GPU take multiples of so many tokens.
inline constexpr std::int64_t kFp8Rows = 4;

/// Parts of rounded activations or gradients of T tokens (Fp8Tokens).
enum class Fp8Part { rows, row_scales, columns, column_scales };
const char* fp8_part_name(Fp8Part part);
/// `host`: rounded values in the compute type, no scales.
Shape fp8_part_shape(Fp8Part part, std::int64_t tokens, std::int64_t width, bool host);
/// Scales of a GPU's weight [out, in], one a block of 128 x 128, rows padded to 4.
Shape fp8_weight_scales(std::int64_t out, std::int64_t in);

/// Rounded copies of a layer's four matrices.
std::int64_t fp8_weight_bytes(const ModelShape& shape, bool host);

/// Whether a layer makes what its products read of norms, SwiGLU and RoPE rounded, and in backward
/// rounds it again, so that the compute type holds it only between halves of backward: where all
/// weights train; adapters read it.
bool fp8_makes_again(const ModelShape& shape);
/// Whether `spec` is one of those.
inline bool fp8_made_again(const ActivationSpec& spec) {
  return spec.kept_from == Keep::all && spec.weight_input;
}
/// What is kept of such a layer where a layer without FP8 keeps `keep`.
Keep fp8_keep(Keep keep, const ModelShape& shape);

/// Whether a GPU rounds SwiGLU's gradient, of this intermediate size, and RoPE's in the pass that
/// makes it.
bool fp8_rounds_swiglu(std::int64_t intermediate);
bool fp8_rounds_rope(std::int64_t head_dim);
/// Elsewhere, and on the host, results lie here before they are rounded.
inline constexpr const char *kFp8Made = "fp8 made", *kFp8MadeGradient = "fp8 made gradient";
/// A GPU's product of other numbers of tokens than multiples of kFp8Rows, before it is copied.
inline constexpr const char* kFp8Output = "fp8 output";

/// A buffer that a layer's passes share with all layers.
struct Fp8Scratch {
  std::string name;
  std::int64_t bytes;
};
/// Those of a forward pass over `tokens`, or of a backward (`halves`: done in two).
std::vector<Fp8Scratch> fp8_scratch(const ModelShape& shape, std::int64_t tokens, bool backward,
                                    bool halves, bool host);

/// First side of a layer's matrices that is no multiple of 16, as FP8 products need; 0: none.
std::int64_t fp8_misfit(const ModelShape& shape);

}  // namespace ballast

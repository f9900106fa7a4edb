// Published shapes of models by name (model.preset).
#pragma once
#include <string>
#include <vector>

#include "core/model/model_shape.hpp"

namespace ballast {

/// qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, llama3.1-8b, with the published shapes.
/// Throws Error otherwise.
ModelShape model_preset(const std::string& name);
const std::vector<std::string>& model_presets();

}  // namespace ballast

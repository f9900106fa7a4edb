// Published shapes of models by name (model.preset).
#pragma once
#include <string>
#include <vector>

#include "core/model/model_shape.hpp"

namespace ballast {

/// The published shape of a name in model_presets().  Error: another name.
ModelShape model_preset(const std::string& name);
const std::vector<std::string>& model_presets();

}  // namespace ballast

// What a deck states and a run does not do, though nothing is wrong: lines of `check` and `train`.
#pragma once
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/base/tensor.hpp"
#include "core/config/config.hpp"

namespace ballast {

/// Keys that change nothing: overrides of the command line (without_effect), and, wherever they are
/// stated, those that another key takes the place of.
std::vector<Problem> deck_notes(const Config& config);

/// A stated run.precision that is not what is computed in: `computes` is the type of weights and
/// activations.  "" where it is.
std::string precision_note(const Config& config, DType computes);

}  // namespace ballast

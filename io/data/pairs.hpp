// Documents in twos: samples that are pairs of a chosen and a rejected answer to one prompt.
#pragma once
#include <memory>

#include "io/data/dataset.hpp"

namespace ballast {

/// Sample i is document 2 i, the chosen answer with its prompt, and behind it document 2 i + 1, the
/// rejected one with the same.  Errors: an odd number of documents.
std::unique_ptr<Dataset> pair_up(std::unique_ptr<Dataset> documents);

}  // namespace ballast

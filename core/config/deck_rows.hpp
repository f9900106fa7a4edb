// The rows of the deck schema.
#pragma once
#include <vector>

#include "core/config/deck_schema.hpp"

namespace ballast {

/// Every key, block by block, in the order of help.
std::vector<KeySpec> deck_rows();

}  // namespace ballast

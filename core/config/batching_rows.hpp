// The rows of block batching.
#pragma once

#include "core/config/deck_row_builder.hpp"

namespace ballast {

void batching_rows(deck_row::Schema& schema);

}  // namespace ballast

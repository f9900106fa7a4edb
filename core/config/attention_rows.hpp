// The rows of attention: patterns, rings and the sparsity that is tuned at run time.
#pragma once

#include "core/config/deck_row_builder.hpp"

namespace ballast {

void attention_rows(deck_row::Schema& schema);
void ring_rows(deck_row::Schema& schema);
void dst_rows(deck_row::Schema& schema);
void sab_rows(deck_row::Schema& schema);

}  // namespace ballast

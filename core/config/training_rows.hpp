// The rows of training: losses, optimizer, memory, adapters, evaluation.
#pragma once

#include "core/config/deck_row_builder.hpp"

namespace ballast {

void loss_rows(deck_row::Schema& schema);
void dpo_rows(deck_row::Schema& schema);
void curriculum_rows(deck_row::Schema& schema);
void optimizer_rows(deck_row::Schema& schema);
void recompute_rows(deck_row::Schema& schema);
void lora_rows(deck_row::Schema& schema);
void eval_rows(deck_row::Schema& schema);

}  // namespace ballast

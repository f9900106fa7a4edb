#include "app/train/deck_options.hpp"

namespace ballast {

DType planned_type(const Deck& deck) {
  if (deck.text("run.backend") == "cuda") return DType::bf16;
  return deck.text("run.precision") == "fp64" ? DType::f64 : DType::f32;
}

RecomputeOptions recompute_options(const Deck& deck) {
  const std::string& mode = deck.text("recompute.mode");
  return {mode == "none"        ? Recompute::none
          : mode == "selective" ? Recompute::selective
                                : Recompute::full,
          static_cast<int>(deck.integer("recompute.layers"))};
}

Overheads overheads(const Deck& deck) {
  const std::string& method = deck.text("batching.method");
  return {deck.boolean("dst.enabled"), method == "sab" || method == "lbb"};
}

}  // namespace ballast

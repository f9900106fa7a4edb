#include "core/config/deck_effect.hpp"

#include <algorithm>

namespace ballast {

std::vector<std::string> without_effect(const Deck& deck) {
  std::vector<std::string> list;
  for (const Problem& problem : without_effect(deck.config())) list.push_back(problem.message());
  return list;
}

}  // namespace ballast

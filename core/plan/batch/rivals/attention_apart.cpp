#include "core/plan/batch/rivals/attention_apart.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace ballast {
namespace {

/// What a rank holds of the axis.
struct Held {
  double attention_s = 0;
  std::vector<std::pair<double, std::int64_t>> documents;  ///< whole: attention, tokens
};

}  // namespace

AttentionApart attention_apart(const std::vector<SampleLength>& samples,
                               const PlacementOptions& options, const PlacementCosts& costs) {
  AttentionApart result;
  const PlacementSplit& alone = options.splits.front();
  const std::int64_t ranks = options.ranks;
  std::int64_t tokens = 0;
  for (const SampleLength& s : samples) tokens += s.tokens;
  if (tokens == 0) return result;
  const std::int64_t part = (tokens + ranks - 1) / ranks;
  std::vector<Held> held(static_cast<std::size_t>(ranks));
  double attention_s = 0, moved_s = 0;
  std::int64_t at = 0, moved = 0;
  for (const SampleLength& s : samples) {
    // The answers of a pair do not see each other.
    const double whole_s = (costs.attention_s(s.chosen_tokens, 0, alone) +
                            costs.attention_s(s.tokens - s.chosen_tokens, 0, alone)) *
                           alone.ranks;
    attention_s += whole_s;
    Held& first = held[static_cast<std::size_t>(std::min(at / part, ranks - 1))];
    if (s.tokens == 0) continue;
    if ((at + s.tokens - 1) / part == at / part) {
      first.attention_s += whole_s;
      first.documents.emplace_back(whole_s, s.tokens);
    } else {
      moved += s.tokens, moved_s += whole_s;
    }
    at += s.tokens;
  }
  const double mean_s = attention_s / static_cast<double>(ranks);
  for (Held& h : held) {
    std::sort(h.documents.begin(), h.documents.end(), std::greater<>());
    for (const auto& [document_s, n] : h.documents) {
      if (h.attention_s <= mean_s) break;
      const double share = std::min(1.0, (h.attention_s - mean_s) / document_s);
      h.attention_s -= share * document_s, moved_s += share * document_s;
      moved += static_cast<std::int64_t>(share * static_cast<double>(n));
    }
  }
  const std::int64_t pack = std::min(part, options.micro_batch_tokens);
  result.even_s = costs.rest_s(pack, alone) * static_cast<double>(tokens) * alone.ranks /
                      static_cast<double>(pack * ranks) +
                  mean_s;
  // Two ranks that share a micro-batch exchange half of it, and both are busy with that.
  result.transfers_s = 4 * costs.transfer_s(moved, 0, {2, 2, 1}) / static_cast<double>(ranks);
  result.moved_share = attention_s > 0 ? moved_s / attention_s : 0;
  return result;
}

}  // namespace ballast

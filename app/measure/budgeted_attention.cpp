#include "app/measure/budgeted_attention.hpp"

#include <algorithm>

#include "kernels/attention/local_attention.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {
namespace {

/// Choices are kept until a micro-batch's end: a gigabyte each for long segments and large budgets.
constexpr std::int64_t kMostLayers = 8;

}  // namespace

BudgetedAttention::BudgetedAttention(const std::vector<BudgetSegment>& segments,
                                     std::int64_t budget, std::int64_t block_tokens,
                                     const AttentionOptions& options, int heads,
                                     std::int64_t layers, std::uint64_t seed, Space space)
    : routes_(budget > 0 && space == Space::cuda && options.chosen() &&
              options.pattern == PatternKind::moba),
      layers_(static_cast<int>(std::min(layers, kMostLayers))),
      options_(options) {
  if (!routes_) {
    executor_ = std::make_unique<LocalAttention>(
        budgeted_pattern(segments, budget, block_tokens, heads, seed));
    return;
  }
  options_.moba_block = block_tokens;
  options_.moba_top_k = budget;
  options_.recall_every = options_.indexes_every = 0;
  axes_ = budget_axes(segments);
  alone_.plan = plan_ring(0, 1, 1);
  layer_ = layers_;
  next_layer();
}

void BudgetedAttention::next_layer() {
  if (!routes_ || ++layer_ < layers_) return;
  layer_ = 0;
  executor_ = std::make_unique<RingAttention>(
      alone_, pattern_source(Communicator(), axes_, options_, nullptr, nullptr), nullptr);
}

}  // namespace ballast

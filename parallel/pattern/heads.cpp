#include "parallel/pattern/heads.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "kernels/attention/index_scores.hpp"
#include "parallel/pattern/vertical_slash.hpp"

namespace ballast {

std::vector<HeadRule> HeadsSource::rules(int layer, int heads) const {
  std::vector<HeadRule> found;
  if (online()) return found;
  require(options_.heads != nullptr, "attention.pattern = \"by_head\": no table was read");
  for (int h = 0; h < heads; ++h)
    found.push_back(options_.heads->at(layer, sp_.rank() * heads + h));
  return found;
}

SlashSetup HeadsSource::setup() const {
  AttentionOptions options = options_;
  options.selection = IndexSelection::last;
  options.vertical_share = options.slash_share = options.flex_share;
  options.max_columns = options.max_slashes = 0;
  return {&axes(), &axis_, options,
          slash_windows(options, axis_, axes().first_query, carry_ != nullptr), false};
}

void HeadsSource::open(const AttentionInputs& in) {
  if (slashes_) return;
  slashes_ = slash_scores(setup(), in.q);
  blocks_ = block_scores(axes(), axis_, kBlock, in.q);
  queries_ = query_counts();
  query_blocks_ = (axes().q_tokens() + kBlock - 1) / kBlock;
  if (cp_.size() > 1) query_blocks_ = cp_.all_reduce(query_blocks_, Reduction::sum);
}

void HeadsSource::choose_blocks(const AttentionInputs& in, const Tensor& observed,
                                HeadChoices& choices) {
  Tensor sums = blocks_->pool(index_operand(in.k));
  join(sums, Reduction::sum);
  const Tensor means = blocks_->means(sums);
  BlockHeads heads;
  heads.chosen =
      online() ? slashes_->alike(observed, means, in.scale) : slashes_->block_heads(choices.rules);
  for (const HeadRule& rule : choices.rules)
    heads.most.push_back(static_cast<std::int32_t>(rule.blocks));
  choices.words =
      blocks_->choose(blocks_->pooled(index_operand(in.q), means, in.scale), kBlock, kBlock,
                      online() ? options_.flex_share : 1.0, choices.blocks, heads);
  choices.by_blocks = heads.chosen;
}

std::vector<HeadBudget> HeadsSource::budgets(const HeadChoices& choices, const SlashCounts& counts,
                                             int heads) const {
  double all = 0;
  for (const std::int64_t n : queries_) all += static_cast<double>(n);
  Tensor blocks;
  if (choices.blocks.defined()) {
    blocks = choices.blocks;
    join(blocks, Reduction::sum);
    blocks = blocks.to(host_device());
  }
  std::vector<HeadBudget> budgets(static_cast<std::size_t>(heads));
  for (std::size_t h = 0, i = 0; h < budgets.size(); ++h) {
    HeadBudget& head = budgets[h];
    double by_blocks = 0;
    for (std::size_t s = 0; s < queries_.size(); ++s, ++i) {
      const double share = static_cast<double>(queries_[s]) / std::max(1.0, all);
      head.budget += share * (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      if (counts.slashes[i] == 0) by_blocks += share;
    }
    if (blocks.defined())
      head.budget += static_cast<double>(blocks.data<std::int64_t>()[h]) /
                     static_cast<double>(std::max<std::int64_t>(1, query_blocks_));
    head.kind = !choices.rules.empty() ? choices.rules[h].pattern
                : by_blocks > 0.5      ? HeadPattern::block_sparse
                                       : HeadPattern::vertical_slash;
  }
  return budgets;
}

PatternSource::Built HeadsSource::build(const AttentionInputs& in) {
  const int heads = static_cast<int>(in.q.size(1));
  const std::vector<HeadRule> stated = rules(in.layer, heads);
  const auto any = [&](HeadPattern pattern) {
    return online() || std::any_of(stated.begin(), stated.end(),
                                   [&](const HeadRule& rule) { return rule.pattern == pattern; });
  };
  open(in);
  HeadChoices choices;
  choices.rules = stated;
  if (slashes_->observes()) {
    Tensor observed;
    if (any(HeadPattern::vertical_slash)) observed = observe_rows(*slashes_, in, *this);
    if (any(HeadPattern::block_sparse)) choose_blocks(in, observed, choices);
  }
  Built built;
  SlashCounts counts;
  built.shards = slashes_->build(choices, heads, static_cast<int>(in.k.size(1)), counts);
  built.budgets = budgets(choices, counts, heads);
  return built;
}

}  // namespace ballast

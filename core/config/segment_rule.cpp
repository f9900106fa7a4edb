#include "core/config/segment_rule.hpp"

#include <fmt/format.h>

#include <string>

#include "core/base/division.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/plan/attention/segment_limits.hpp"

namespace ballast {
namespace {

/// Blocks of the deck's `key`; "": of 64 keys whatever the deck says.
struct BlocksOfKeys {
  std::string key;
  std::int64_t tokens = kBlock, most = kMostScoredBlocks;
};

bool has_block_heads(const HeadTable& heads) {
  for (int layer = 0; layer < heads.layers(); ++layer)
    for (int head = 0; head < heads.heads(); ++head)
      if (heads.at(layer, head).pattern == HeadPattern::block_sparse) return true;
  return false;
}

/// What is chosen of a segment of `tokens` that is not dense anyway.
std::optional<BlocksOfKeys> chosen_blocks(const Config& config, std::int64_t tokens,
                                          const HeadTable* heads) {
  const AttentionOptions attention = attention_options(config);
  if (!attention.chosen()) return std::nullopt;
  switch (attention.pattern) {
    case PatternKind::moba: {
      const std::int64_t least =
          config.dst.enabled ? dst_options(config).candidates.front() : attention.moba_top_k;
      if (budget_takes_all(least, attention.moba_block, tokens)) return std::nullopt;
      return BlocksOfKeys{"attention.moba_block", attention.moba_block, kMostRoutedBlocks};
    }
    case PatternKind::xattention:
      return BlocksOfKeys{"attention.xattention_block", attention.xattention_block};
    case PatternKind::flexprefill:
      return BlocksOfKeys{};
    case PatternKind::by_head:
      if (heads != nullptr && has_block_heads(*heads)) return BlocksOfKeys{};
      return std::nullopt;
    case PatternKind::dense:
    case PatternKind::vertical_slash:
      break;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Problem> segment_problem(const Config& config, std::int64_t tokens,
                                       const HeadTable* heads) {
  if (config.run.backend != Backend::cuda) return std::nullopt;
  const std::optional<BlocksOfKeys> of = chosen_blocks(config, tokens, heads);
  if (!of || blocks_of_keys(tokens, of->tokens) <= of->most) return std::nullopt;
  const std::int64_t larger =
      divided_up(divided_up(tokens, of->most), std::int64_t{kBlock}) * kBlock;
  const std::string remedy = fmt::format(
      "cut samples at data.max_tokens = {}, or set run.backend = \"host\"", of->most * of->tokens);
  return Problem{
      {of->key.empty() ? "attention.pattern" : of->key, "run.backend", "data.max_tokens"},
      fmt::format("attention.pattern = \"{}\": a sample of {} tokens has {} blocks of {} "
                  "keys; CUDA chooses among {} at most, over all ranks and chunks of it",
                  name(config.attention.pattern), tokens, blocks_of_keys(tokens, of->tokens),
                  of->tokens, of->most),
      of->key.empty() ? remedy : fmt::format("set {} = {}, {}", of->key, larger, remedy)};
}

}  // namespace ballast

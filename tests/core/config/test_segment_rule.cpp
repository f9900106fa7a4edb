// Which segments have a pattern that no GPU can choose: the first length that is refused, pattern
// by pattern, and that what is told to do helps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/config/deck_schema.hpp"
#include "core/config/segment_rule.hpp"
#include "core/plan/attention/segment_limits.hpp"

namespace ballast {
namespace {

Config on_gpu(PatternKind pattern) {
  Config config;
  config.run.backend = Backend::cuda;
  config.attention.pattern = pattern;
  return config;
}

/// Segments of so many tokens are sound, and longer ones refused, by keys that there are.
void expect_most(const Config& config, std::int64_t most, const HeadTable* heads = nullptr) {
  EXPECT_FALSE(segment_problem(config, most, heads)) << most;
  EXPECT_FALSE(segment_problem(config, 0, heads));
  for (const std::int64_t tokens : {most + 1, 4 * most}) {
    const auto problem = segment_problem(config, tokens, heads);
    ASSERT_TRUE(problem) << tokens;
    for (const Key& key : problem->keys) EXPECT_NE(find_key(key.path), nullptr) << key.path;
    EXPECT_NE(problem->message().find(fmt::format("data.max_tokens = {}", most)), std::string::npos)
        << problem->message();
  }
  Config host = config;
  host.run.backend = Backend::host;
  EXPECT_FALSE(segment_problem(host, 4 * most, heads));
}

TEST(SegmentRule, BlocksOfMobaAreRouted) {
  Config config = on_gpu(PatternKind::moba);
  expect_most(config, 3072 * 256);
  config.attention.moba_block = 64;
  expect_most(config, 3072 * 64);
  const auto problem = segment_problem(config, 1 << 20, nullptr);
  ASSERT_TRUE(problem);
  EXPECT_NE(problem->remedy.find("attention.moba_block = 384"), std::string::npos)
      << problem->remedy;
  config.attention.moba_block = 384;
  EXPECT_FALSE(segment_problem(config, 1 << 20, nullptr));
  config.attention.moba_block = 320;
  EXPECT_TRUE(segment_problem(config, 1 << 20, nullptr));
}

TEST(SegmentRule, NothingIsRoutedWhereABudgetTakesAll) {
  Config config = on_gpu(PatternKind::moba);
  config.attention.moba_block = 64, config.attention.moba_top_k = 4000;
  EXPECT_FALSE(segment_problem(config, 4000 * 64, nullptr));
  EXPECT_TRUE(segment_problem(config, 4000 * 64 + 1, nullptr));
  // Tuning looks at every candidate's coverage, and the least takes an eighth.
  config.dst.enabled = true;
  EXPECT_TRUE(segment_problem(config, 4000 * 64, nullptr));
  config.dst.budgets = {4000, 5000};
  EXPECT_FALSE(segment_problem(config, 4000 * 64, nullptr));
}

TEST(SegmentRule, BlocksAreScored) {
  Config config = on_gpu(PatternKind::xattention);
  expect_most(config, 16384 * 128);
  config.attention.xattention_block = 256;
  expect_most(config, 16384 * 256);
  expect_most(on_gpu(PatternKind::flexprefill), 16384 * 64);
}

TEST(SegmentRule, OneHeadOfBlocksIsEnough) {
  const Config config = on_gpu(PatternKind::by_head);
  HeadTable heads(2, 4);
  EXPECT_FALSE(segment_problem(config, 1 << 24, &heads));
  EXPECT_FALSE(segment_problem(config, 1 << 24, nullptr));
  heads.at(1, 3) = {.pattern = HeadPattern::block_sparse, .blocks = 8};
  expect_most(config, 16384 * 64, &heads);
}

TEST(SegmentRule, OtherPatternsHaveNoLongest) {
  for (const PatternKind pattern : {PatternKind::dense, PatternKind::vertical_slash})
    EXPECT_FALSE(segment_problem(on_gpu(pattern), 1 << 30, nullptr));
  Config generated = on_gpu(PatternKind::moba);
  generated.attention.index = IndexOrigin::generated;
  EXPECT_FALSE(segment_problem(generated, 1 << 30, nullptr));
}

}  // namespace
}  // namespace ballast

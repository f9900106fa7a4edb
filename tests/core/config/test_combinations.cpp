// The table of combinations: every Config makes one choice of each dimension, refusals name choices
// that exist, and what is chosen decides.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/config/combinations.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_schema.hpp"

namespace ballast {
namespace {

TEST(Combinations, ADeckChoosesOnceInEveryDimension) {
  std::map<std::string, int> count;
  for (const Choice& choice : choices())
    count[choice.dimension] += choice.chosen(default_config()) ? 1 : 0;
  EXPECT_GT(count.size(), 15u);
  for (const auto& [dimension, times] : count) EXPECT_EQ(times, 1) << dimension;
}

TEST(Combinations, RefusalsNameChoicesThatExist) {
  std::set<std::string> names;
  for (const Choice& choice : choices()) {
    EXPECT_TRUE(names.insert(choice.name()).second) << choice.name();
    EXPECT_NE(find_key(choice.key.path), nullptr) << choice.key.path;
  }
  std::set<std::vector<std::string>> refused;
  for (const Refusal& refusal : refusals()) {
    EXPECT_TRUE(refused.insert(refusal.choices).second) << refusal.because;
    EXPECT_FALSE(refusal.choices.empty()) << refusal.because;
    EXPECT_EQ(refusal.keys().size(), refusal.choices.size()) << refusal.because;
    for (const std::string& name : refusal.choices) EXPECT_TRUE(names.count(name)) << name;
    EXPECT_FALSE(refusal.because.empty());
  }
}

TEST(Combinations, WhatIsChosenDecides) {
  Config config;
  EXPECT_TRUE(refused_combinations(config, true).empty());
  config.dst.enabled = true;
  const auto found = refused_combinations(config, true);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].keys, (std::vector<Key>{"dst.enabled", "attention.pattern"}));
  EXPECT_NE(found[0].text.find("\"dense\" has none"), std::string::npos) << found[0].text;
  config.attention.pattern = PatternKind::moba;
  EXPECT_TRUE(refused_combinations(config, true).empty());
  config.batching.method = Batching::hbp;
  config.batching.groups = {64, 256};
  EXPECT_TRUE(refused_combinations(config, true).empty());
  config.batching.group_ranks = {1, 2};
  EXPECT_EQ(refused_combinations(config, true).size(), 1u);
  config.batching.groups_from = GroupSource::profile;  // the stated ones are for other cases
  EXPECT_TRUE(refused_combinations(config, true).empty());
}

TEST(Combinations, ThreeChoicesMayBeNeededForARefusal) {
  Config config;
  config.attention.selection = IndexSelection::causal;
  config.run.backend = Backend::cuda;
  config.attention.pattern = PatternKind::moba;
  EXPECT_TRUE(refused_combinations(config, true).empty());
  config.attention.pattern = PatternKind::vertical_slash;
  const auto found = refused_combinations(config, true);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].keys,
            (std::vector<Key>{"attention.selection", "attention.pattern", "run.backend"}));
  config.run.backend = Backend::host;
  EXPECT_TRUE(refused_combinations(config, true).empty());
}

TEST(Combinations, RanksShareMicroBatchesUnderEverySchedule) {
  for (const ScheduleKind schedule : values_of<ScheduleKind>()) {
    Config config;
    config.mesh.pp = 4, config.mesh.dp = 2;
    config.pipeline.schedule = schedule;
    config.batching.method = Batching::hbp;
    config.batching.groups = {64, 256};
    config.batching.group_ranks = {1, 2};
    EXPECT_TRUE(refused_combinations(config, true).empty()) << schedule;
    config.batching.method = Batching::balanced;
    config.batching.select_ranks = {1, 2};
    EXPECT_TRUE(refused_combinations(config, true).empty()) << schedule;
  }
}

TEST(Combinations, PlansAreMadeOfWhatOnlyExecutorsRefuse) {
  Config config;
  config.mesh.tp = 2;  // nothing times it
  for (const bool executes : {false, true})
    EXPECT_EQ(refused_combinations(config, executes).size(), 1u);
  config.batching.method = Batching::packed;
  config.batching.scope = BatchScope::epoch;
  EXPECT_EQ(refused_combinations(config, true).size(), 2u);
  config.mesh.tp = 1;
  EXPECT_EQ(refused_combinations(config, true).size(), 1u);
  EXPECT_TRUE(refused_combinations(config, false).empty());
  config.batching.method = Batching::chunkflow;  // cuts the samples of a step
  EXPECT_EQ(refused_combinations(config, false).size(), 1u);
}

}  // namespace
}  // namespace ballast

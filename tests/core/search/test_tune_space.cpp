// What `ballast tune` tries.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "core/config/run_options.hpp"
#include "core/search/tune_space.hpp"
#include "tests/core/search/tune_decks.hpp"

namespace ballast {
namespace {

std::vector<Candidate> space(const Config& base, std::int64_t longest) {
  return tune_space(base, base.mesh.size(), longest, {0}).candidates;
}

/// Decks whose values are none that a search would think of.
std::map<std::string, Config> odd_decks() {
  std::map<std::string, Config> decks;
  Config c = deck();
  c.mesh.cp_outer = 4, c.mesh.cp_inner = 16;
  decks["a finer ring"] = c;
  c.ring.layout = LayoutKind::contiguous, c.mesh.cp_outer = 1;
  decks["a layout"] = c;
  c = deck();
  c.batching.method = Batching::chunkflow, c.chunk.tokens = 384, c.chunk.k = 3;
  c.chunk.search_tokens = {256, 512}, c.chunk.search_k = {1, 2};
  decks["chunks"] = c;
  c.mesh.pp = 2, c.pipeline.schedule = ScheduleKind::gpipe;
  decks["chunks that are all kept"] = c;
  c.mesh.pp = 1;
  decks["a schedule without stages"] = c;
  c = deck();
  c.mesh.pp = 2;
  decks["a schedule by itself"] = c;
  c.batching.method = Batching::balanced;
  decks["a schedule of what is cut"] = c;
  c = deck();
  c.mesh.dp = 2, c.batching.method = Batching::hbp;
  c.batching.groups = {300, 2100}, c.batching.group_ranks = {2, 1};
  c.batching.group_recompute = {2, -1};
  decks["groups"] = c;
  return decks;
}

TEST(TuneSpace, HoldsTheDeck) {
  for (const auto& [what, base] : odd_decks()) {
    const Candidate own = deck_plan(base);
    const std::vector<Candidate> all = space(base, 2048);
    EXPECT_EQ(std::count_if(all.begin(), all.end(),
                            [&](const Candidate& c) { return same_choices(c, own); }),
              1)
        << what << ": " << describe(own);
    for (const std::string& changed : overrides(base, with(base, own)))
      EXPECT_EQ(changed.substr(0, 17), "pipeline.schedule") << what << ": " << changed;
  }
}

TEST(TuneSpace, NamesNothingTwice) {
  std::map<std::string, Config> decks = odd_decks();
  decks["one group"] = deck();
  decks["one group"].batching.micro_batch_tokens = 4096;
  Config stated = deck();
  stated.batching.method = Batching::hbp, stated.batching.groups = {512, 2048};
  decks["groups that the search finds too"] = stated;
  for (const auto& [what, base] : decks) {
    std::set<std::string> seen;
    for (const Candidate& c : space(base, 2048))
      EXPECT_TRUE(seen.insert(describe(c)).second) << what << ": " << describe(c);
  }
}

/// Ways of hbp to pack, of all meshes.
std::set<std::string> ways(const Config& base, int ranks) {
  std::set<std::string> list;
  for (const Candidate& c : tune_space(base, ranks, 2048, {0}).candidates) {
    if (c.method != Batching::hbp) continue;
    std::string text;
    for (const PackGroup& g : c.groups)
      text += fmt::format("{}/{}/{} ", g.tokens, g.ranks, g.recompute_layers);
    list.insert(text);
    const Config changed = with(base, c);
    EXPECT_EQ(pack_groups(changed), c.groups);
    for (const char* key : {"batching.group_ranks", "batching.group_recompute"})
      if (base.from.of(key).origin == Origin::command_line) {
        EXPECT_EQ(changed.from.of(key).origin, Origin::command_line) << key;
      }
  }
  return list;
}

TEST(TuneSpace, RanksAndLayersOfGroupsAreHeld) {
  Config base = deck();
  hold(base, {"batching.group_ranks"});
  EXPECT_EQ(ways(base, 4), (std::set<std::string>{"512/1/-1 2048/1/-1 ", "1024/1/-1 2048/1/-1 "}));
  base.batching.group_ranks = {2, 4};
  EXPECT_EQ(ways(base, 4), (std::set<std::string>{"512/2/-1 2048/4/-1 ", "1024/2/-1 2048/4/-1 "}));
  base.batching.group_ranks = {2};
  EXPECT_EQ(ways(base, 4), (std::set<std::string>{"2048/2/-1 "}));
  base.batching.group_ranks.clear();
  base.from.settings.erase("batching.group_ranks");
  base.batching.group_recompute = {3, 1};
  hold(base, {"batching.group_recompute"});
  EXPECT_EQ(ways(base, 2), (std::set<std::string>{"512/1/3 2048/1/1 ", "1024/1/3 2048/1/1 ",
                                                  "512/1/3 2048/2/1 ", "1024/1/3 2048/2/1 "}));
}

TEST(TuneSpace, DegreesOfTheCommandLineMayBeFine) {
  Config base = deck();
  base.mesh.cp_inner = 64;
  hold(base, {"mesh.cp_inner", "mesh.cp_outer", "mesh.sp"});
  const TuneSpace found = tune_space(base, 128, 2048, {0});
  ASSERT_FALSE(found.candidates.empty());
  for (const Candidate& c : found.candidates) EXPECT_EQ(c.mesh.cp_inner, 64);
}

TEST(TuneSpace, KIsToldWhereItCounts) {
  Candidate c;
  c.method = Batching::chunkflow, c.capacity = 512, c.chunk_k = 4, c.mesh.pp = 2;
  for (const ScheduleKind schedule : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                      ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble}) {
    c.schedule = schedule;
    const auto list = facets(c);
    const bool told =
        std::any_of(list.begin(), list.end(), [](const auto& facet) { return facet.first == "k"; });
    EXPECT_EQ(told, state_aware(schedule)) << name(schedule);
    EXPECT_EQ(describe(c).find("K 4") != std::string::npos, told) << describe(c);
  }
}

}  // namespace
}  // namespace ballast

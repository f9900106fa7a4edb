// Differences of two decks by value, whatever their comments and order.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_schema.hpp"
#include "io/deck/deck_difference.hpp"

namespace ballast {
namespace {

TEST(DeckDifference, NamesWhatHasAnotherValue) {
  const auto list = deck_differences(
      "[model]\nheads = 4  # default\nrope = 1e6\n[run]\nsteps = 3\nlist = [1, 2]\n",
      "[run]\nlist = [1, 3]\nsteps = 3 # other comment\n[model]\nrope = 1000000.0\nheads = 2\n"
      "new = true\n",
      "x.h5");
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].key, "model.heads");
  EXPECT_EQ(list[0].before, "4");
  EXPECT_EQ(list[0].now, "2");
  EXPECT_EQ(list[1].key, "model.new");
  EXPECT_EQ(list[1].before, "");
  EXPECT_EQ(list[2].key, "run.list");
  EXPECT_TRUE(deck_differences("[a]\nb = 1\n", "[a]\nb=1", "").empty());
}

// Effective decks hold costs as comments where nothing stated them; older ones held them all.
TEST(DeckDifference, CostsThatAreNotStatedHaveTheirDefaults) {
  const double token_s = default_config().costs.forward_token_s;
  const std::string run = "[run]\nsteps = 3\n", costs = run + "[costs]\nforward_token_s = ";
  EXPECT_TRUE(deck_differences(costs + to_text(DeckValue(token_s)) + "\n", run, "").empty());
  const auto list = deck_differences(run, costs + to_text(DeckValue(2 * token_s)) + "\n", "");
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].key, "costs.forward_token_s");
  EXPECT_NE(list[0].before, "");
  EXPECT_NE(list[0].before, list[0].now);
}

TEST(DeckDifference, ADamagedDeckIsNamed) {
  try {
    deck_differences("[run\n", "", "x.h5");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("x.h5"), std::string::npos);
  }
}

}  // namespace
}  // namespace ballast

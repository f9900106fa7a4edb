// Differences of two decks by value, whatever their comments and order.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
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

// A wait counts the time in which its process ran.
#include <gtest/gtest.h>

#include "core/base/wait_clock.hpp"

namespace ballast {
namespace {

TEST(WaitClock, CountsFromItsBeginning) {
  WaitClock wait(100);
  EXPECT_EQ(wait.waited_s(100.5), 0.5);
  EXPECT_EQ(wait.waited_s(101.25), 1.25);
  wait.restart(102);
  EXPECT_EQ(wait.waited_s(102.5), 0.5);
}

TEST(WaitClock, ASuspensionDoesNotCount) {
  WaitClock wait(100);
  EXPECT_EQ(wait.waited_s(100.5), 0.5);
  EXPECT_EQ(wait.waited_s(4000), 0.5) << "suspended for an hour";
  EXPECT_EQ(wait.waited_s(4000.25), 0.75);
  EXPECT_EQ(wait.waited_s(9000.25), 0.75) << "and once more";
  EXPECT_EQ(wait.waited_s(9001), 1.5);
}

// Whoever sleeps below the gap between two readings still loses patience.
TEST(WaitClock, SleepsBetweenReadingsCount) {
  WaitClock wait(0);
  double waited_s = 0;
  for (int i = 1; i <= 100; ++i) waited_s = wait.waited_s(WaitClock::kMostGapS * i);
  EXPECT_EQ(waited_s, 100 * WaitClock::kMostGapS);
}

}  // namespace
}  // namespace ballast

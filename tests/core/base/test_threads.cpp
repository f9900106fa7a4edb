#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "core/base/threads.hpp"

namespace ballast {
namespace {

TEST(Threads, EveryPartRunsOnce) {
  for (const std::size_t parts : {0, 1, 2, 17}) {
    std::vector<std::atomic<int>> calls(parts);
    in_threads(parts, [&](std::size_t p) { ++calls[p]; });
    for (const auto& n : calls) EXPECT_EQ(n, 1);
  }
}

TEST(Threads, AllEndBeforeTheFirstErrorGoesOn) {
  std::atomic<int> calls = 0;
  try {
    in_threads(5, [&](std::size_t p) {
      ++calls;
      if (p == 1 || p == 4) throw std::runtime_error("part " + std::to_string(p));
    });
    FAIL() << "no error";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "part 1");
  }
  EXPECT_EQ(calls, 5);
}

}  // namespace
}  // namespace ballast

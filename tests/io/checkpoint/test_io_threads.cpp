// Parts of work on a few threads: each once, and the first error ends all.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "io/checkpoint/io_threads.hpp"

namespace ballast {
namespace {

TEST(IoThreads, EveryPartRunsOnceOnAThreadOfTheNumberGiven) {
  for (const std::size_t parts : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> runs(parts);
    std::atomic<bool> known{true};
    in_io_threads(parts, [&](std::size_t part, std::size_t thread) {
      ++runs[part];
      if (thread >= io_threads()) known = false;
    });
    EXPECT_TRUE(known);
    for (std::size_t p = 0; p < parts; ++p) EXPECT_EQ(runs[p], 1) << p << " of " << parts;
  }
}

TEST(IoThreads, AnErrorEndsTheRestAndIsThrown) {
  std::atomic<int> runs{0};
  try {
    in_io_threads(1000000, [&](std::size_t part, std::size_t) {
      ++runs;
      if (part == 5) fail("part five");
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "part five");
  }
  EXPECT_LT(runs, 1000000);
}

}  // namespace
}  // namespace ballast

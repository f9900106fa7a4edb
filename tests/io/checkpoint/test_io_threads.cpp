// Parts of work on a few threads: each once, and the first error ends all.
#include <gtest/gtest.h>
#include <pthread.h>

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

TEST(IoThreads, WithoutMoreThreadsTheCallerDoesAll) {
  pthread_attr_t before, endless;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_getattr_default_np(&endless), 0);
  // No machine has room for such a stack.
  ASSERT_EQ(pthread_attr_setstacksize(&endless, std::size_t{1} << 46), 0);
  ASSERT_EQ(pthread_setattr_default_np(&endless), 0);
  std::atomic<int> runs{0};
  const auto work = [&](std::size_t, std::size_t thread) {
    EXPECT_EQ(thread, 0u);
    ++runs;
  };
  EXPECT_NO_THROW(in_io_threads(100, work));
  pthread_setattr_default_np(&before);
  pthread_attr_destroy(&before);
  pthread_attr_destroy(&endless);
  EXPECT_EQ(runs, 100);
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

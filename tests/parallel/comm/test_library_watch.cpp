// A watched call that stands still ends its process with a message and the status that it had.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "parallel/comm/comm.hpp"
#include "parallel/comm/library_watch.hpp"

namespace ballast {
namespace {

class LibraryWatchOfOneProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Communicator::world().size() > 1) GTEST_SKIP() << "runs on one rank";
  }
};
using LibraryWatchDeathTest = LibraryWatchOfOneProcess;

TEST_F(LibraryWatchDeathTest, EndsTheProcessWithItsStatus) {
  EXPECT_EXIT(
      {
        const LibraryWatch watch(0.2, "stood still\n", 75);
        for (;;) ::pause();
      },
      ::testing::ExitedWithCode(75), "stood still");
}

// Stopped for longer than the limit, but less than it while it runs.
TEST_F(LibraryWatchDeathTest, TimeOfASuspensionDoesNotCount) {
  EXPECT_EXIT(
      {
        const LibraryWatch watch(2, "stood still\n", 75);
        const pid_t scheduler = ::fork();
        if (scheduler == 0) {
          ::kill(::getppid(), SIGSTOP);
          ::sleep(3);
          ::kill(::getppid(), SIGCONT);
          ::usleep(300000);  // in which the watch looks at its clock
          ::_exit(0);
        }
        ::waitpid(scheduler, nullptr, 0);
        ::_exit(3);
      },
      ::testing::ExitedWithCode(3), "^$");
}

// std::exit runs handlers until one of them stands still; the watch outlives static objects.
TEST_F(LibraryWatchDeathTest, ExitHandlerThatStandsStillIsLeft) {
  EXPECT_EXIT(
      {
        std::atexit([] {
          for (;;) ::pause();
        });
        watch_exit(3, 0.2);
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "a library's exit handler stands still");
}

TEST_F(LibraryWatchDeathTest, ExitThatEndsIsLeftAlone) {
  EXPECT_EXIT(
      {
        watch_exit(3, 30);
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "^$");
}

TEST_F(LibraryWatchOfOneProcess, CallThatReturnsIsLeftAlone) {
  const auto begin = std::chrono::steady_clock::now();
  { const LibraryWatch watch(0.1, "never printed\n", 75); }
  // Behind the limit: had the thread lived on, this process would have ended.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
}

}  // namespace
}  // namespace ballast

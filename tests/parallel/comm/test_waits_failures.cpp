// What one rank's failure does to the others.  The outer tests run on one rank and start this
// program again on four, where the inner test fails as told; every process must be gone soon, and
// mpiexec must not return 0.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "parallel/comm/waits.hpp"
#include "parallel/context/ring_attention.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

namespace fs = std::filesystem;
constexpr int kRanks = 4, kVictim = 2;

const char* how() { return std::getenv("BALLAST_TEST_FAILURE"); }

/// Endless work with transfers in flight, as a ring has them, until the victim fails.
void work_until_failure(const std::string& mode) {
  const Communicator world = Communicator::world();
  Recorder recorder;
  set_wait_limit(3, &recorder);
  const int next = (world.rank() + 1) % world.size(),
            previous = (world.rank() + world.size() - 1) % world.size();
  Tensor sent = Tensor::zeros({100000}, DType::f32), received = Tensor::zeros({100000}, DType::f32);
  for (int turn = 0;; ++turn) {
    recorder.context.step = turn;
    Scope scope(&recorder, EventKind::ring_wait);
    const Transfer ring[] = {{received, previous, false}, {sent, next, true}};
    Pending pending = world.exchange(ring);
    if (turn == 50 && world.rank() == kVictim) {
      if (mode == "kill") raise(SIGKILL);
      if (mode == "hang") pause();
      if (mode == "leave") _exit(3);
      if (mode == "throw") fail("a problem of one rank");
    }
    pending.complete();
    if (mode == "agree" && turn == 50)
      check_all(world, world.rank() != kVictim, "a problem that all agree on");
    world.all_reduce(1.0);
  }
}

/// All ranks are stopped for longer than they may wait, while three of them wait for the victim.
void wait_through_a_suspension() {
  const Communicator world = Communicator::world();
  set_wait_limit(3);
  std::vector<pid_t> all;
  for (const std::string& pid : world.all_gather(std::to_string(getpid())))
    all.push_back(std::stoi(pid));
  if (world.rank() == kVictim) {
    usleep(500000);  // until the others wait
    const pid_t scheduler = fork();
    ASSERT_GE(scheduler, 0);
    if (scheduler == 0) {
      for (const pid_t pid : all) ::kill(pid, SIGSTOP);
      ::sleep(5);
      for (const pid_t pid : all) ::kill(pid, SIGCONT);
      usleep(500000);  // in which the others look at their clocks
      _exit(0);
    }
    ASSERT_EQ(waitpid(scheduler, nullptr, 0), scheduler);
  }
  world.barrier();
}

TEST(FailureOnFourRanks, AsTold) {
  if (!how()) GTEST_SKIP() << "started by Failures";
  std::ofstream(fs::path(std::getenv("BALLAST_TEST_PIDS")) / std::to_string(getpid())) << "";
  if (how() == std::string("test")) {
    ASSERT_NE(Communicator::world().rank(), kVictim) << "a check that one rank fails";
    return;
  }
  if (how() == std::string("suspend")) return wait_through_a_suspension();
  // As main() does it.
  try {
    work_until_failure(how());
  } catch (const CollectiveError& e) {
    if (Communicator::world().rank() == 0) std::fprintf(stderr, "all ranks: %s\n", e.what());
    FAIL();
  } catch (const std::exception& e) {
    set_wait_limit(3);
    fail_here(e.what());
  }
}

TEST(FailureOnFourRanks, ThenAnother) {
  if (!how()) GTEST_SKIP() << "started by Failures";
  Communicator::world().barrier();
}

struct Outcome {
  int status = 0;
  double seconds = 0;
  std::string output;
  int survivors = 0;
};

/// `flags` are the launcher's, `options` the program's.
Outcome run_four(const std::string& mode, const std::string& flags,
                 const std::string& options = "") {
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("ballast_failure_{}_{}", getpid(), mode);
  fs::create_directories(folder / "pids");
  const std::string self = fs::read_symlink("/proc/self/exe").string();
  const char* mpiexec = std::getenv("BALLAST_MPIEXEC");
  const char* path = std::getenv("PATH");
  // A clean environment: this process may itself have been started by mpiexec.
  const std::string command = fmt::format(
      "env -i PATH='{}' HOME=/tmp OPENBLAS_NUM_THREADS=1 BALLAST_TEST_FAILURE={} "
      "BALLAST_TEST_PIDS='{}' timeout -k 1 40 '{}' {} -n {} '{}' "
      "--gtest_filter='FailureOnFourRanks.*' {} > '{}' 2>&1 < /dev/null",
      path ? path : "/usr/bin:/bin", mode, (folder / "pids").string(),
      mpiexec ? mpiexec : "mpiexec", flags, kRanks, self, options, (folder / "output").string());
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  outcome.status = std::system(command.c_str());
  const auto started = [&] {
    return std::distance(fs::directory_iterator(folder / "pids"), fs::directory_iterator());
  };
  EXPECT_EQ(started(), kRanks);
  // Processes may take a moment to go after mpiexec has returned.
  for (int wait = 0; wait < 100; ++wait) {
    outcome.survivors = 0;
    for (const auto& entry : fs::directory_iterator(folder / "pids"))
      outcome.survivors += ::kill(std::stoi(entry.path().filename()), 0) == 0;
    if (outcome.survivors == 0) break;
    usleep(50000);
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::stringstream text;
  text << std::ifstream(folder / "output").rdbuf();
  outcome.output = text.str();
  fs::remove_all(folder);
  return outcome;
}

class Failures : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Communicator::world().size() > 1 || how()) GTEST_SKIP() << "runs on one rank";
  }
  static void expect_end(const Outcome& outcome, const std::string& message) {
    EXPECT_NE(outcome.status, 0) << outcome.output;
    EXPECT_EQ(outcome.survivors, 0) << outcome.output;
    EXPECT_LT(outcome.seconds, 30) << outcome.output;
    EXPECT_NE(outcome.output.find(message), std::string::npos) << outcome.output;
  }
};

TEST_F(Failures, KilledRankEndsAll) { expect_end(run_four("kill", ""), ""); }

// The transport may notice the dead peer first; otherwise the wait limit does.
TEST_F(Failures, KilledRankEndsAllWithoutTheLaunchersHelp) {
  expect_end(run_four("kill", "-disable-auto-cleanup"), "");
}

TEST_F(Failures, HungRankIsReportedWithLastEvents) {
  const Outcome outcome = run_four("hang", "");
  expect_end(outcome, "without progress");
  EXPECT_NE(outcome.output.find("last event: in ring_wait step="), std::string::npos)
      << outcome.output;
}

TEST_F(Failures, AJobThatIsSuspendedAsAWholeGoesOn) {
  const Outcome outcome = run_four("suspend", "");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_GT(outcome.seconds, 5) << "it was not suspended: " << outcome.output;
  EXPECT_NE(outcome.output.find("OK ] FailureOnFourRanks.AsTold"), std::string::npos)
      << outcome.output;
}

TEST_F(Failures, RankThatLeavesEndsAll) { expect_end(run_four("leave", ""), ""); }

TEST_F(Failures, ErrorOfOneRankEndsAllAndNamesIt) {
  const Outcome outcome = run_four("throw", "");
  expect_end(outcome, "a problem of one rank");
  EXPECT_NE(outcome.output.find(fmt::format("rank {} on ", kVictim)), std::string::npos)
      << outcome.output;
}

TEST_F(Failures, AgreedErrorIsPrintedOnce) {
  const Outcome outcome = run_four("agree", "");
  expect_end(outcome, "all ranks: a problem that all agree on");
  EXPECT_EQ(outcome.output.find("a problem that", outcome.output.find("a problem that") + 1),
            std::string::npos)
      << outcome.output;
}

TEST_F(Failures, TestThatFailsOnOneRankFailsOnAll) {
  const Outcome outcome = run_four("test", "");
  expect_end(outcome, "FailureOnFourRanks.AsTold failed on 1 other rank(s)");
  EXPECT_NE(outcome.output.find("OK ] FailureOnFourRanks.ThenAnother"), std::string::npos)
      << outcome.output;
}

TEST_F(Failures, FirstFailureEndsAllWithFailFast) {
  const Outcome outcome = run_four("test", "", "--gtest_fail_fast");
  expect_end(outcome, "SKIPPED ] FailureOnFourRanks.ThenAnother");
}

}  // namespace
}  // namespace ballast

// Test main: MPI and Kokkos around GoogleTest.  Rank 0 prints; the ranks agree on every test's
// result, so that all leave with the same status, and a rank that failed alone does not leave the
// others waiting for it inside a collective call.
#include <gtest/gtest.h>
#include <mpi.h>
#include <sched.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>

#include "tests/seed.hpp"

namespace {

std::uint64_t g_seed = 20260101;

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

/// Seconds that a failed rank waits for the others to finish the same test (BALLAST_TEST_HANG_S,
/// default 30).
double hang_seconds() {
  const char* text = std::getenv("BALLAST_TEST_HANG_S");
  return text ? std::atof(text) : 30.0;
}

/// Prints a rank's failures at once, and joins all ranks at the end of each test.
class RankListener : public ::testing::EmptyTestEventListener {
 public:
  explicit RankListener(MPI_Comm comm) : comm_(comm), rank_(rank_in(comm)) {}

  void OnTestStart(const ::testing::TestInfo&) override { failed_ = false; }

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    failed_ = true;
    if (rank_ != 0) {
      std::fprintf(stderr, "[rank %d] %s:%d: %s\n", rank_,
                   result.file_name() ? result.file_name() : "?", result.line_number(),
                   result.message());
    }
  }

  void OnTestEnd(const ::testing::TestInfo& info) override {
    // A rank-local failure may have left the others inside a call that this rank will never join.
    // Only a failed rank loses patience: a passing one may wait for a neighbour's slow reference.
    int mine = failed_ ? 1 : 0, failures = 0, done = 0;
    MPI_Request request;
    MPI_Iallreduce(&mine, &failures, 1, MPI_INT, MPI_SUM, comm_, &request);
    const double deadline = MPI_Wtime() + hang_seconds();
    while (!done) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) break;
      if (failed_ && MPI_Wtime() > deadline) {
        std::fprintf(
            stderr,
            "[rank %d] %s.%s failed here while other ranks are still in it; aborting all ranks\n",
            rank_, info.test_suite_name(), info.name());
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
      sched_yield();
    }
    // The test counts as failed on every rank: with --gtest_fail_fast all then skip the same tests.
    if (failures > 0 && !failed_)
      ADD_FAILURE() << info.test_suite_name() << "." << info.name() << " failed on " << failures
                    << " other rank(s)";
  }

 private:
  MPI_Comm comm_;
  int rank_;
  bool failed_ = false;
};

/// Reads BALLAST_TEST_SEED on rank 0 for all.
void choose_seed() {
  if (const char* text = std::getenv("BALLAST_TEST_SEED"))
    g_seed =
        text == std::string("random") ? std::random_device{}() : std::strtoull(text, nullptr, 10);
  MPI_Bcast(&g_seed, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  if (rank_in(MPI_COMM_WORLD) == 0)
    std::printf("random data: BALLAST_TEST_SEED=%llu\n", static_cast<unsigned long long>(g_seed));
}

}  // namespace

std::uint64_t ballast::test_seed() { return g_seed; }

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 1;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    choose_seed();
    // Ranks must run the same tests in the same order.
    int seed = GTEST_FLAG_GET(random_seed);
    if (seed == 0) seed = 1 + static_cast<int>(std::time(nullptr) % 99999);
    MPI_Bcast(&seed, 1, MPI_INT, 0, MPI_COMM_WORLD);
    GTEST_FLAG_SET(random_seed, seed);
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    if (rank_in(comm) != 0) {
      delete listeners.Release(listeners.default_result_printer());
      delete listeners.Release(listeners.default_xml_generator());
    }
    listeners.Append(new RankListener(comm));
    const int mine = RUN_ALL_TESTS() != 0 ? 1 : 0;
    MPI_Allreduce(&mine, &status, 1, MPI_INT, MPI_MAX, comm);
    MPI_Comm_free(&comm);
  }
  MPI_Finalize();
  return status;
}

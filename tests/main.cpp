// Test main: MPI and Kokkos around GoogleTest; only rank 0 prints passes, and every rank leaves with the same status.
#include <gtest/gtest.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 1;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    if (rank != 0) {
      // Other ranks print failures only.
      struct FailurePrinter : ::testing::EmptyTestEventListener {
        void OnTestPartResult(const ::testing::TestPartResult& result) override {
          if (!result.failed()) return;
          int r = 0;
          MPI_Comm_rank(MPI_COMM_WORLD, &r);
          std::fprintf(stderr, "[rank %d] %s:%d: %s\n", r, result.file_name() ? result.file_name() : "?", result.line_number(), result.message());
        }
      };
      delete listeners.Release(listeners.default_result_printer());
      listeners.Append(new FailurePrinter);
    }
    int mine = RUN_ALL_TESTS();
    MPI_Allreduce(&mine, &status, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  }
  MPI_Finalize();
  return status;
}

// Files of small datasets on a disk that fills up: what is there is whole, or its writer threw.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "io/hdf5/hdf5_support.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

constexpr int kThrew = 1, kWritten = 0;

void write_small_datasets(const std::string& path, std::span<const double> values) {
  hdf5::Handle file = hdf5::create_file(path);
  hdf5::write_text(file, "text", std::string(3000, 't'));
  hdf5::write_vector<double>(file, "values", values);
  hdf5::write_vector<double>(file, "more", values);
  file.close(path);
}

/// kWritten or kThrew, of a process of its own whose files end at `limit` bytes, as on a full disk.
int outcome(const std::string& path, std::span<const double> values, std::uintmax_t limit) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit tight{limit, limit};
    ::setrlimit(RLIMIT_FSIZE, &tight);
    try {
      write_small_datasets(path, values);
    } catch (const Error&) {
      ::_exit(kThrew);
    }
    ::_exit(kWritten);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

using Hdf5Support = TemporaryFolder;

TEST_F(Hdf5Support, ASmallDatasetThatDoesNotFitIsAnError) {
  const std::string path = dir + "/file.h5";
  std::vector<double> values(500);
  std::iota(values.begin(), values.end(), 1.0);
  write_small_datasets(path, values);
  const std::uintmax_t whole = std::filesystem::file_size(path);
  ASSERT_GT(whole, 10000u);
  for (std::uintmax_t limit = 512; limit < whole; limit += 512) {
    if (outcome(path, values, limit) == kThrew) continue;
    ADD_FAILURE() << limit << " of " << whole << " bytes were called written";
  }
  ASSERT_EQ(outcome(path, values, whole), kWritten);
  const hdf5::Handle file = hdf5::open_file(path);
  EXPECT_EQ(hdf5::read_vector<double>(file, "more"), values);
  EXPECT_EQ(hdf5::read_text(file, "text"), std::string(3000, 't'));
}

}  // namespace
}  // namespace ballast

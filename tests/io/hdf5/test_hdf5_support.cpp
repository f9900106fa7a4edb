// HDF5 files that Ballast writes tell of a full disk.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "io/hdf5/hdf5_support.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

using Hdf5Support = TemporaryFolder;

/// Else its buffer is written as the dataset closes, where a full disk is lost, and the file closes
/// well: its small datasets are zeros then.
TEST_F(Hdf5Support, ASmallDatasetIsOnTheDiskOnceItsWriteReturns) {
  const std::string path = dir + "/file.h5";
  std::vector<double> values(500);
  std::iota(values.begin(), values.end(), 1.0);
  std::string bytes(values.size() * sizeof(double), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  for (const bool own_access : {false, true}) {
    const hdf5::Handle access = hdf5::property_list(H5P_FILE_ACCESS);
    const hdf5::Handle file =
        hdf5::create_file(path, H5P_DEFAULT, own_access ? hid_t{access} : H5P_DEFAULT);
    const hdf5::Handle dataset =
        hdf5::create_dataset(file, "values", H5T_NATIVE_DOUBLE, {values.size()});
    hdf5::check(H5Dwrite(dataset, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
                "writing");
    EXPECT_NE(read(path).find(bytes), std::string::npos) << "own access " << own_access;
  }
}

}  // namespace
}  // namespace ballast

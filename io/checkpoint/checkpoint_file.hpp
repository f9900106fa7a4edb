// The HDF5 part of a checkpoint: /parameters/NAME/{master, moment1, ...} under full shapes,
// /checksums, /state and the root's attributes.  HDF5 lays it out and finds it again, by one
// process at a time; elements are read and written at their places in the file without it.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint/checkpoint_envelope.hpp"
#include "io/checkpoint/checkpoint_layout.hpp"
#include "io/files/raw_file.hpp"
#include "io/hdf5/hdf5_support.hpp"

namespace ballast {

/// Where the parts of a new file lie.
struct CheckpointPlaces {
  std::uint64_t block_bytes = 0;  ///< of the user block
  std::uint64_t checksums = 0;    ///< offset of /checksums
};

/// Creates a file with every dataset allocated, state written and elements still unset, and closes
/// it; fills in the offsets of `datasets`, all multiples of kCheckpointPage.  One rank.
CheckpointPlaces create_checkpoint_file(const std::string& path,
                                        std::vector<CheckpointDataset>& datasets,
                                        const CheckpointState& state);

/// A checkpoint whose envelope was checked, open for reading.
class CheckpointFile {
 public:
  /// Errors, naming the file: datasets that are not contiguous, lie outside the file or in others,
  /// or of an unexpected type or number; a state that no run can have.
  explicit CheckpointFile(const std::string& path);

  std::uint64_t version() const { return version_; }
  const std::vector<CheckpointDataset>& datasets() const { return datasets_; }
  const CheckpointState& state() const { return state_; }
  /// One a range of checksum_ranges(datasets()).
  const std::vector<std::uint64_t>& checksums() const { return checksums_; }
  /// `count` elements from flat element `first` on, in the dataset's dtype.  Any thread.
  void read(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
            void* to) const;
  /// Reads ranges [first, last) from the storage and compares their checksums.  Any thread.  Errors
  /// name dataset and range.
  void verify(std::size_t first, std::size_t last,
              std::atomic<std::int64_t>* progress = nullptr) const;

 private:
  void find_datasets(hid_t file);
  RawFile file_;
  std::uint64_t version_ = 0;
  std::vector<CheckpointDataset> datasets_;
  CheckpointState state_;
  std::vector<std::uint64_t> checksums_;
};

/// Throws Error "DATASET of FILE is damaged ...".
[[noreturn]] void fail_damaged(const std::string& path, const CheckpointDataset& dataset,
                               std::int64_t begin, std::int64_t end);

}  // namespace ballast

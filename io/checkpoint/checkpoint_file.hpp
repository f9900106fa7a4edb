// The HDF5 part of a checkpoint: /parameters/NAME/{master, moment1, ...} under full shapes,
// /checksums, /state and the root's attributes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint/checkpoint_envelope.hpp"
#include "io/checkpoint/checkpoint_layout.hpp"
#include "io/hdf5/hdf5_support.hpp"

namespace ballast {

/// Creates a file with every dataset allocated, state written and elements still unset.  One rank,
/// POSIX.  Returns the size of the user block.
std::uint64_t create_checkpoint_file(const std::string& path,
                                     const std::vector<CheckpointDataset>& datasets,
                                     const CheckpointState& state);

/// An open file.  One process reads or writes it by POSIX; with a communicator all its ranks write
/// it through MPI-IO.
class CheckpointFile {
 public:
  /// Alone.
  CheckpointFile(const std::string& path, bool writable);
  /// For writing, collective.  Only constructor and close() are collective: elements are
  /// transferred independently, since every rank has one contiguous piece of nearly every dataset
  /// that it touches, and nothing is left for collective buffering to gather.
  CheckpointFile(const std::string& path, const Communicator& world);

  std::vector<CheckpointDataset> datasets() const;
  std::vector<DataExtent> extents(const std::vector<CheckpointDataset>& datasets) const;
  /// `count` elements from flat element `first` on, in memory in the dataset's dtype.
  void write(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
             const void* from);
  void read(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count, void* to);
  CheckpointState state() const;
  std::vector<std::uint64_t> checksums() const;
  void write_checksums(const std::vector<std::uint64_t>& sums);
  /// Flushes to the disk and closes.  Errors name the file.
  void close();

 private:
  enum class Direction { read, write };
  void transfer(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                void* memory, Direction direction);
  /// Runs `work` and puts the file's name before any error.
  template <class F>
  auto named(F&& work) const;

  std::string path_;
  hdf5::Handle file_, open_dataset_;
  std::string open_name_;  ///< dataset behind open_dataset_: transfers come in runs
};

}  // namespace ballast

// Pages of a checkpoint file in which the shards of several ranks meet.  Nodes that write parts of
// one page through their own caches overwrite each other on some file systems, so one rank writes
// the whole of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "io/checkpoint/checkpoint_layout.hpp"
#include "io/files/raw_file.hpp"

namespace ballast {

class SharedPages {
 public:
  /// The part of bytes [begin, end) of this rank's elements that it writes itself and outside the
  /// shared pages: a range, empty when begin >= end.
  std::pair<std::uint64_t, std::uint64_t> own_part(std::uint64_t begin, std::uint64_t end) const;
  /// Writes the shared pages that this rank is to write.
  void write(const RawFile& file) const;

 private:
  friend SharedPages share_pages(const Communicator&, const std::vector<CheckpointDataset>&,
                                 const CheckpointShard&);
  struct Run {
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
    std::uint64_t end() const { return offset + bytes.size(); }
  };
  std::vector<Run> pages_;  ///< whole, begun by this rank's elements
  std::vector<Run> heads_;  ///< this rank's elements in pages that another rank writes
};

/// Exchanges the elements of shared pages: the rank that holds a page's first element writes it.
/// Datasets begin at whole pages.  Collective.
SharedPages share_pages(const Communicator& world, const std::vector<CheckpointDataset>& datasets,
                        const CheckpointShard& shard);

}  // namespace ballast

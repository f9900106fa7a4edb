// Envelope of a checkpoint: a checksummed block before the HDF5 part that guards everything the
// dataset checksums do not, so that HDF5 is never handed an altered file, and a truncated one is
// told from its size.
//
// It lies in the HDF5 user block, which other HDF5 programs skip.  Little endian: magic (16 bytes),
// format version, bytes of the file, xxHash64 of every byte after the user block and outside the
// data extents, bytes of the user block, number of extents, xxHash64 of the user block with this
// word 0; then (offset, bytes) of each extent, ascending.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "io/files/raw_file.hpp"

namespace ballast {

/// A file was read, and what it holds is not what was written; other errors leave that open.
class DamagedFile : public Error {
 public:
  using Error::Error;
};

/// Throws DamagedFile with a formatted message unless `condition`.
template <class... Args>
void require_sound(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw DamagedFile(fmt::format(format, std::forward<Args>(args)...));
}

/// Version 2: datasets begin at multiples of a page, checksums are sums (element_sum.hpp).  Version
/// 1 had xxHash64 of the same ranges, and is still read.
inline constexpr std::uint64_t kCheckpointVersion = 2;
/// No program counts this far: a version from here on is damage.
inline constexpr std::uint64_t kNoVersion = std::uint64_t{1} << 16;
inline constexpr std::uint64_t kCheckpointPage = 4096;

/// Bytes of the file that hold the elements of datasets.
struct DataExtent {
  std::uint64_t offset = 0, bytes = 0;
};

/// Size of a user block with room for `extents` extents: a power of two, as HDF5 wants it, and
/// whole pages.
std::uint64_t envelope_bytes(std::size_t extents);
/// Writes the envelope into a file whose HDF5 part is complete, and syncs it.  Errors name the
/// file.
void seal(const RawFile& file, std::uint64_t block_bytes, std::vector<DataExtent> extents);
/// xxHash64 of what the storage gives back of every byte from `begin` on outside the extents.
std::uint64_t structure_hash(const std::string& path, std::uint64_t begin,
                             std::vector<DataExtent> extents);
/// Returns the format version.  Errors name the file: it cannot be read, or is of a later format
/// version; DamagedFile: no checkpoint, truncated, an altered byte outside the extents.
std::uint64_t check_seal(const std::string& path);

}  // namespace ballast

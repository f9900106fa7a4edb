#include "io/checkpoint/checkpoint_envelope.hpp"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

namespace ballast {

namespace {

struct Header {
  char magic[16] = {'B', 'a', 'l', 'l', 'a', 's', 't', ' ',
                    'c', 'h', 'e', 'c', 'k', 'p', 't', '\n'};
  std::uint64_t version = kCheckpointVersion;
  std::uint64_t file_bytes = 0, metadata_hash = 0, block_bytes = 0, extents = 0, block_hash = 0;
};
constexpr std::uint64_t kLargestBlock = std::uint64_t{1} << 28;

/// xxHash64 of all bytes from `begin` to the end of the file, without the extents.
std::uint64_t hash_outside(const RawFile& file, std::uint64_t begin, std::uint64_t file_bytes,
                           const std::vector<DataExtent>& extents) {
  const std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> state(XXH64_createState(),
                                                                         XXH64_freeState);
  XXH64_reset(state.get(), 0);
  std::vector<char> buffer(1 << 20);
  const auto add = [&](std::uint64_t from, std::uint64_t to) {
    while (from < to) {
      const auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), to - from));
      file.read(from, buffer.data(), count);
      XXH64_update(state.get(), buffer.data(), count);
      from += count;
    }
  };
  for (const DataExtent& extent : extents) {
    add(begin, extent.offset);
    begin = extent.offset + extent.bytes;
  }
  add(begin, file_bytes);
  return XXH64_digest(state.get());
}

void sort(std::vector<DataExtent>& extents) {
  std::sort(extents.begin(), extents.end(),
            [](const DataExtent& a, const DataExtent& b) { return a.offset < b.offset; });
}

std::vector<char> block_of(Header header, const std::vector<DataExtent>& extents) {
  std::vector<char> block(header.block_bytes, 0);
  header.block_hash = 0;
  std::memcpy(block.data(), &header, sizeof header);
  std::memcpy(block.data() + sizeof header, extents.data(), extents.size() * sizeof(DataExtent));
  return block;
}

}  // namespace

std::uint64_t envelope_bytes(std::size_t extents) {
  return std::max(kCheckpointPage, std::bit_ceil(sizeof(Header) + extents * sizeof(DataExtent)));
}

std::uint64_t structure_hash(const std::string& path, std::uint64_t begin,
                             std::vector<DataExtent> extents) {
  sort(extents);
  const RawFile file(path, false);
  file.drop_cache();
  return hash_outside(file, begin, file.bytes(), extents);
}

void seal(const RawFile& file, std::uint64_t block_bytes, std::vector<DataExtent> extents) {
  sort(extents);
  Header header;
  header.file_bytes = file.bytes();
  header.block_bytes = block_bytes;
  header.extents = extents.size();
  header.metadata_hash = hash_outside(file, block_bytes, header.file_bytes, extents);
  std::vector<char> block = block_of(header, extents);
  header.block_hash = XXH64(block.data(), block.size(), 0);
  std::memcpy(block.data(), &header, sizeof header);
  file.write(0, block.data(), block.size());
  file.sync();
}

std::uint64_t check_seal(const std::string& path) {
  const RawFile file(path, false);
  const std::uint64_t bytes = file.bytes();
  Header header, fresh;
  require_sound(bytes >= sizeof header, "{}: {} bytes are no checkpoint", path, bytes);
  file.read(0, &header, sizeof header);
  require_sound(std::memcmp(header.magic, fresh.magic, sizeof fresh.magic) == 0,
                "{}: not a Ballast checkpoint, or its first bytes are altered", path);
  require_sound(header.version >= 1 && header.version < kNoVersion,
                "{}: the header is altered (format version {})", path, header.version);
  require(header.version <= kCheckpointVersion,
          "{}: checkpoint format version {}; this program reads versions 1 to {}", path,
          header.version, kCheckpointVersion);
  require_sound(header.block_bytes <= kLargestBlock && header.block_bytes <= bytes &&
                    header.extents <= header.block_bytes / sizeof(DataExtent) &&
                    sizeof header + header.extents * sizeof(DataExtent) <= header.block_bytes,
                "{}: the header is altered or the file is truncated to {} bytes", path, bytes);
  std::vector<char> block(header.block_bytes);
  file.read(0, block.data(), block.size());
  const std::uint64_t stated = header.block_hash, zero = 0;
  std::memcpy(block.data() + offsetof(Header, block_hash), &zero, sizeof zero);
  require_sound(XXH64(block.data(), block.size(), 0) == stated,
                "{}: the header is altered (checksum of bytes [0, {}))", path, block.size());
  require_sound(header.file_bytes == bytes,
                "{}: {} bytes, written with {}; the file is truncated or extended", path, bytes,
                header.file_bytes);
  std::vector<DataExtent> extents(header.extents);
  std::memcpy(extents.data(), block.data() + sizeof header, extents.size() * sizeof(DataExtent));
  require_sound(
      hash_outside(file, header.block_bytes, bytes, extents) == header.metadata_hash,
      "{}: the file's structure is altered (checksum of all bytes outside the parameters)", path);
  return header.version;
}

}  // namespace ballast

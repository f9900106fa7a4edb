// The device twin of routed_lists() (core/plan/attention/routed_lists.hpp): of every pattern block
// the query rows that routing sent to it, and the units of work over them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/plan/attention/routed_lists.hpp"
#include "kernels/cuda/index/block_launch.hpp"

namespace ballast::cuda {

/// Some rows of one list.  rows = 0: no more work.
struct RoutedUnit {
  std::int32_t kv_head, key;  ///< key head, first key of the pattern block
  std::int32_t begin, rows;   ///< entries [begin, begin + rows)
};

/// All arrays on the device.
struct RoutedIndex {
  std::int64_t q_tokens = 0;
  int q_heads = 0, kv_heads = 0;
  int blocks = 0, width = 0, slots = 0;  ///< as RoutedAxis
  int block_tokens = 0;                  ///< keys of a pattern block
  BlockRows queries;
  const std::int32_t* block_key = nullptr;  ///< [blocks] first key of a pattern block
  std::int64_t* offset = nullptr;           ///< [lists() + 1]
  std::int64_t* unit_offset = nullptr;      ///< [lists() + 1]
  RoutedUnit* units = nullptr;              ///< [unit_capacity()]
  std::uint32_t* entries = nullptr;
  std::int32_t* places = nullptr;  ///< [q_heads, 64 query blocks, slots]

  BALLAST_HOST_DEVICE int chunks() const {
    return (queries.blocks + kRoutedChunk - 1) / kRoutedChunk;
  }
  BALLAST_HOST_DEVICE int lists() const { return chunks() * kv_heads * blocks; }
  /// RoutedAxis::listed().
  BALLAST_HOST_DEVICE int listed(int b) const {
    return listed_blocks(queries.own[b] - queries.first[b], slots);
  }
};

/// The index and what the host knows of it without looking: how many blocks a row chooses does not
/// depend on which.
struct RoutedWork {
  RoutedIndex index;
  std::vector<std::int64_t> chunk_begin;  ///< [chunks + 1] first entry of a chunk
  std::int64_t entries() const { return chunk_begin.back(); }
};

/// Whether routed_kernels() has them, and the current device runs those.
bool routed_fits(std::int64_t head_dim, std::int64_t block_tokens);
/// [chunks + 1] first entries.
/// rows [query blocks]: rows of a block that are tokens.
std::vector<std::int64_t> routed_chunks(const RoutedAxis& axis,
                                        const std::vector<std::int32_t>& rows);
/// Bytes of the arrays from `offset` on, and the pointers laid out in a buffer (256-byte aligned).
std::size_t routed_bytes(const RoutedWork& work);
void bind_routed(RoutedWork& work, void* buffer);
/// Fills them from the words of route_queries().  base: scratch, as many 32-bit values as words.
cudaError_t build_routed(const RoutedWork& work, const std::uint64_t* words, std::uint32_t* base,
                         cudaStream_t stream);

}  // namespace ballast::cuda

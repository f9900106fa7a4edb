// Where routing sends queries (MoBA), turned round: of every key head and pattern block the list of
// the query rows that chose it, so that attention can gather them into full tiles.
//
// A row's own pattern block is not in the lists: all its queries use it, causally.  Nor are rows
// that choose every block before their own (listed_blocks()): dense attention computes all of
// theirs, at a better rate.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/block_budget.hpp"

namespace ballast {

/// Query blocks of 64 whose rows stand together in the lists: partial outputs of so many rows lie
/// in memory at a time, and their queries in the cache.
inline constexpr int kRoutedChunk = 64;
/// Partial outputs that lie in memory at a time, in bytes, unless one chunk has more.
inline constexpr std::int64_t kRoutedPartialBytes = std::int64_t{2} << 30;
/// Rows of a unit of work, at most: their keys and values are loaded once.
inline constexpr int kRoutedUnit = 4096;

/// The head dims and pattern blocks that kernels for routed lists are written for (Hopper).
constexpr bool routed_kernels(std::int64_t head_dim, std::int64_t block_tokens) {
  return (head_dim == 64 || head_dim == 128) && (block_tokens == 128 || block_tokens == 256);
}

/// A query row of one key head: its token and its head in the group (at most 16).
constexpr std::uint32_t routed_entry(std::int64_t token, int head_in_group) {
  return static_cast<std::uint32_t>(token) << 4 | static_cast<std::uint32_t>(head_in_group);
}

struct RoutedAxis {
  int q_heads = 0, kv_heads = 0;
  int blocks = 0;  ///< pattern blocks, of all segments
  int width = 0;   ///< of the longest segment
  int slots = 0;   ///< blocks that a row chooses besides its own, at most
  std::span<const std::int32_t> first,
      own;  ///< [query blocks] first pattern block of the segment, and the own one
  int query_blocks() const { return static_cast<int>(own.size()); }
  /// Blocks that each row of query block b lists.
  int listed(int b) const { return listed_blocks(own[b] - first[b], slots); }
  int chunks() const { return (query_blocks() + kRoutedChunk - 1) / kRoutedChunk; }
  int lists() const { return chunks() * kv_heads * blocks; }
};

struct RoutedLists {
  /// [lists + 1] of (chunk, key head, pattern block).
  std::vector<std::int64_t> offset;
  /// routed_entry()s, of each list in the order (query block, head, row).
  std::vector<std::uint32_t> entries;
  /// [q_heads, 64 query blocks, slots] where a row's entries stand, by ascending pattern block; -1
  /// past the last.
  std::vector<std::int32_t> places;
};

/// words [q_heads, query blocks, width]: bit i of word (h, b, j) set when row i of query block b
/// uses pattern block first[b] + j.
RoutedLists routed_lists(const RoutedAxis& axis, std::span<const std::uint64_t> words);

}  // namespace ballast

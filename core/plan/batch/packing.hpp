// Bin packing of lengths: the baselines that Hierarchical Balance Packing is compared with, on
// plain numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"

namespace ballast {

/// Packs over items 0 .. n-1, n below 2^32.
struct Packing {
  std::vector<std::uint32_t> items;   ///< pack after pack
  std::vector<std::size_t> first{0};  ///< pack p holds items[first[p]] .. items[first[p + 1] - 1]
  std::size_t size() const { return first.size() - 1; }
  std::span<const std::uint32_t> operator[](std::size_t pack) const {
    return {items.data() + first[pack], first[pack + 1] - first[pack]};
  }
  /// Ends the pack that the items pushed since the last call make up.
  void close() { first.push_back(items.size()); }
};

/// How pack_lengths packs.
enum class PackMethod { random, sorted, isf, ffs, ffd, bfs, bfd, spfhp };
template <>
struct EnumNames<PackMethod> {
  static constexpr EnumTable<PackMethod, 8> table{{{PackMethod::random, "random"},
                                                   {PackMethod::sorted, "sorted"},
                                                   {PackMethod::isf, "isf"},
                                                   {PackMethod::ffs, "ffs"},
                                                   {PackMethod::ffd, "ffd"},
                                                   {PackMethod::bfs, "bfs"},
                                                   {PackMethod::bfd, "bfd"},
                                                   {PackMethod::spfhp, "spfhp"}}};
};

/// Packs of at most `capacity` tokens; an item longer than that has a pack of its own, and every
/// item is in exactly one pack.
///   random  next fit over a random order: O(n)
///   sorted  neighbours by length that fit when padded to their longest (sorted batching,
///   LongAlign): O(n) isf     iterative sampling and filling (OmniBal): next fit over a random
///   order keeps its fullest packs and draws the rest again: O(n) ffs ffd first fit over a random
///   order or over decreasing lengths: O(n log n) bfs bfd best fit (the fullest pack that still
///   holds the item), likewise: O(n log n) spfhp   shortest pack first over the histogram of
///   lengths, longest first (Krell et al. 2021): O(n log n)
/// The result depends on the arguments alone.  Error: capacity < 1.
Packing pack_lengths(PackMethod method, std::span<const std::int64_t> lengths,
                     std::int64_t capacity, std::uint64_t seed = 0);

/// Items by length, longest first; equal lengths keep their order.  O(n).
std::vector<std::uint32_t> longest_first(std::span<const std::int64_t> lengths);

/// A random order of n items, a function of seed and stream.
std::vector<std::uint32_t> shuffled(std::size_t n, std::uint64_t seed, std::uint64_t stream);

/// The fullest open pack that still holds an item, in O(log n).
class BestFit {
 public:
  explicit BestFit(std::int64_t capacity) : capacity_(capacity) {}
  /// Pack of the next item: an open one, or a new one under the next number.  An item above the
  /// capacity gets a pack of its own.
  std::uint32_t place(std::int64_t tokens);
  std::uint32_t packs() const { return packs_; }

 private:
  std::int64_t capacity_;
  std::uint32_t packs_ = 0;
  std::multimap<std::int64_t, std::uint32_t> open_;  ///< room left -> pack
};

/// Packing of `order`, whose item order[i] is in pack pack_of[i] < packs; packs keep the order of
/// their items.
Packing gather(std::span<const std::uint32_t> order, std::span<const std::uint32_t> pack_of,
               std::uint32_t packs);

}  // namespace ballast

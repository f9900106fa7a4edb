// Balanced partition: weights into a fixed number of bins so that the heaviest bin is light.  Plain
// numbers.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace ballast {

/// Indices of each bin, ascending; bins in the order of their first index, empty ones last.
using Partition = std::vector<std::vector<std::uint32_t>>;

/// Heaviest first, each to the lightest bin (Graham 1969).
Partition longest_first_partition(std::span<const double> weights, int bins);

/// The lighter, by its heaviest bin, of longest first and largest differencing (Karmarkar and Karp
/// 1982, for several bins Michiels, Korst and Aarts 2003), improved by moves and swaps out of the
/// heaviest bin and, for at most 24 weights, by a branch-and-bound search of bounded size.  Never
/// worse than longest_first_partition; O(n log n + n bins log bins) beside the bounded searches; a
/// function of the arguments alone.  Errors: bins < 1, a weight that is negative or not finite.
Partition balanced_partition(std::span<const double> weights, int bins);

/// Weight of the heaviest bin.
double heaviest(const Partition& partition, std::span<const double> weights);

}  // namespace ballast

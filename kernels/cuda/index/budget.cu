// What the budgets of a policy buy of every head and segment (attention_pattern.hpp): slashes and
// columns sorted by mass, all lists in one sort, then for each budget the split between the two
// sorted lists, and the share of the mass that it reaches.
#include <algorithm>
#include <climits>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
using Key = unsigned long long;

/// Scratch: keys before and after the sort [65 heads slots], then what the budgets are priced by,
/// [2, heads slots], then the sort's own.
struct Layout {
  std::int64_t slashes = 0, items = 0;  ///< heads slots; 65 times that
  std::size_t sums_at = 0, sort_at = 0;
  Layout(int heads, const PatternAxes& axes)
      : slashes(std::int64_t{heads} * axes.slots), items((1 + kBlock) * slashes) {
    sums_at = 2 * static_cast<std::size_t>(items) * sizeof(Key);
    sort_at = sums_at + 2 * static_cast<std::size_t>(slashes) * sizeof(Key);
  }
};

/// Bits of a key: the list above, what its mass lacks to the highest below, so that sorting ascends
/// in lists and falls in mass.
int key_bits(int heads, const PatternAxes& axes, const BudgetPrices& x) {
  int bits = x.mass_bits;
  while ((std::int64_t{1} << (bits - x.mass_bits)) < 2ll * heads * axes.segments) ++bits;
  return bits;
}

__global__ void key_kernel(const std::int64_t* mass, std::int64_t slashes, std::int64_t items,
                           int lists, const PatternAxes axes, int mass_bits, Key* keys) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= items) return;
  const bool slash = i < slashes;
  const std::int64_t at = slash ? i : (i - slashes) / kBlock;  // [heads, slots]
  const Key highest = (Key{1} << mass_bits) - 1;
  const Key list =
      (slash ? 0 : lists) + at / axes.slots * axes.segments + axes.slot_segment[at % axes.slots];
  keys[i] = list << mass_bits | (highest - min(static_cast<Key>(mass[i]), highest));
}

/// One CTA a list: sums of the sorted slashes and of groups of 64 sorted columns, then every
/// budget.
__global__ __launch_bounds__(kThreads) void price_kernel(const Key* keys, std::int64_t slashes,
                                                         const PatternAxes axes,
                                                         const BudgetPrices x, Key* sums) {
  using Scan = cub::BlockScan<Key, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int positive;
  const int lists = gridDim.x, list = blockIdx.x, h = list / axes.segments,
            s = list % axes.segments;
  const int n = axes.segment_slot[s + 1] - axes.segment_slot[s];
  const std::int64_t base = static_cast<std::int64_t>(h) * axes.slots + axes.segment_slot[s];
  const Key highest = (Key{1} << x.mass_bits) - 1;
  const auto mass_of = [&](std::int64_t i) { return highest - (keys[i] & highest); };
  const auto coverage = [&](int i, double share) {
    atomicAdd(
        reinterpret_cast<Key*>(x.coverage) + i,
        static_cast<Key>(x.queries[s]) * static_cast<Key>(__double2ll_rn(share * kCoverageUnit)));
  };
  if (n == 0 || axes.whole[s] != 0) {
    for (int i = threadIdx.x; i < x.budgets; i += kThreads) {
      x.most[(2ll * i) * lists + list] = x.most[(2ll * i + 1) * lists + list] = 0;
      coverage(i, 1.0);
    }
    return;
  }
  // Mass of the first i + 1 slashes and groups: [0, n) of either part.
  Key* const of_slashes = sums + base;
  Key* const of_groups = sums + slashes + base;
  if (threadIdx.x == 0) positive = 0;
  __syncthreads();
  Key slashes_before = 0, groups_before = 0;
  for (int first = 0; first < n; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    Key slash = i < n ? mass_of(base + i) : 0, group = 0, all = 0;
    int columns = 0;
    for (int c = 0; i < n && c < kBlock && kBlock * i + c < x.most_columns; ++c) {
      const Key mass = mass_of(slashes + kBlock * (base + i) + c);
      if (mass == 0) break;
      group += mass;
      ++columns;
    }
    if (columns > 0) atomicAdd(&positive, columns);
    Scan(scan).InclusiveSum(slash, slash, all);
    __syncthreads();
    slash += slashes_before;
    slashes_before += all;
    Scan(scan).InclusiveSum(group, group, all);
    __syncthreads();
    group += groups_before;
    groups_before += all;
    if (i < n) of_slashes[i] = slash, of_groups[i] = group;
  }
  __syncthreads();
  const int columns = positive, groups = (columns + kBlock - 1) / kBlock;
  const auto group_mass = [&](int g) { return of_groups[g] - (g > 0 ? of_groups[g - 1] : 0); };
  for (int i = threadIdx.x; i < x.budgets; i += kThreads) {
    const int budget = static_cast<int>(
        max(std::int64_t{0}, min(x.budget[i], static_cast<std::int64_t>(n) + groups)));
    int low = max(0, budget - groups),
        high = min(budget, n);  // slashes among the heaviest `budget` units
    while (low < high) {
      const int middle = (low + high) / 2;
      if (mass_of(base + middle) >= group_mass(budget - 1 - middle)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int taken = budget - low;
    const Key reached =
                  (low > 0 ? of_slashes[low - 1] : 0) + (taken > 0 ? of_groups[taken - 1] : 0),
              total = of_slashes[n - 1];
    x.most[(2ll * i) * lists + list] = low;
    x.most[(2ll * i + 1) * lists + list] = min(kBlock * taken, columns);
    coverage(i,
             total > 0 ? min(1.0, static_cast<double>(reached) / static_cast<double>(total)) : 1.0);
  }
}

}  // namespace

cudaError_t budget_scratch_bytes(int heads, const PatternAxes& axes, const BudgetPrices& x,
                                 std::size_t& bytes) {
  const Layout layout(heads, axes);
  const int bits = key_bits(heads, axes, x);
  if (bits > 64 || layout.items > INT_MAX) return cudaErrorInvalidValue;
  std::size_t sort = 0;
  const cudaError_t e = cub::DeviceRadixSort::SortKeys(
      nullptr, sort, static_cast<const Key*>(nullptr), static_cast<Key*>(nullptr),
      static_cast<int>(layout.items), 0, bits);
  bytes = layout.sort_at + sort;
  return e;
}

cudaError_t price_budgets(const std::int64_t* mass, int heads, const PatternAxes& axes,
                          const BudgetPrices& x, void* scratch, std::size_t bytes,
                          cudaStream_t stream) {
  const Layout layout(heads, axes);
  const int lists = heads * axes.segments, bits = key_bits(heads, axes, x);
  if (x.budgets < 1 || bits > 64 || bytes < layout.sort_at) return cudaErrorInvalidValue;
  if (layout.items == 0) return cudaSuccess;
  Key* const keys = static_cast<Key*>(scratch);
  auto* const base = static_cast<char*>(scratch);
  key_kernel<<<static_cast<unsigned>((layout.items + kThreads - 1) / kThreads), kThreads, 0,
               stream>>>(mass, layout.slashes, layout.items, lists, axes, x.mass_bits, keys);
  std::size_t sort = bytes - layout.sort_at;
  const cudaError_t e = cub::DeviceRadixSort::SortKeys(
      base + layout.sort_at, sort, static_cast<const Key*>(keys), keys + layout.items,
      static_cast<int>(layout.items), 0, bits, stream);
  if (e != cudaSuccess) return e;
  price_kernel<<<lists, kThreads, 0, stream>>>(keys + layout.items, layout.slashes, axes, x,
                                               reinterpret_cast<Key*>(base + layout.sums_at));
  return cudaGetLastError();
}

}  // namespace ballast::cuda

// What the budgets of a policy buy of every head and segment: the device twin of SlashPurchases
// (core/plan/attention/slash_purchases.hpp), one CTA a list.  All sums are integers, so that it
// buys what the host buys.
#include <climits>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/heaviest.cuh"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
using Mass = unsigned long long;
constexpr std::int64_t kFirst = 1ll << 40;  // order of the first purchase; later ones are lower

struct PriceParams {
  const std::int64_t* mass;
  int heads;
  PatternAxes axes;
  BudgetPrices x;
  std::int64_t* open;  ///< as BudgetPrices::order: mass that is not computed yet
};

/// One head and segment.
struct List {
  int blocks, windows;
  std::int64_t slashes, base;  ///< of all lists; first of this one
  const std::int64_t* mass;
  std::int64_t *slash_order, *column_order, *open_slash, *open_column;
  __device__ List(const PriceParams& p, int h, int s)
      : blocks(p.axes.segment_slot[s + 1] - p.axes.segment_slot[s]),
        windows(p.x.window_blocks[s]),
        slashes(static_cast<std::int64_t>(p.heads) * p.axes.slots),
        base(static_cast<std::int64_t>(h) * p.axes.slots + p.axes.segment_slot[s]),
        mass(p.mass),
        slash_order(p.x.order + base),
        column_order(p.x.order + slashes + kBlock * base),
        open_slash(p.open + base),
        open_column(p.open + slashes + kBlock * base) {}
  __device__ int columns() const { return kBlock * blocks; }
  __device__ int query_block(int w) const { return blocks - windows + w; }
  /// Mass of a column under the observed queries w.
  __device__ std::int64_t part(int w, int column) const {
    return mass[slashes + kBlock * (w * slashes + base) + column];
  }
};

/// All but sink and diagonal is open; returns what these hold.
__device__ Mass open_list(const List& x) {
  __shared__ Mass held;
  if (threadIdx.x == 0) held = static_cast<Mass>(x.mass[x.base]);
  for (int d = threadIdx.x; d < x.blocks; d += kThreads) {
    x.slash_order[d] = d == 0 ? kFirst : 0;
    x.open_slash[d] = x.mass[x.base + d];
  }
  for (int j = threadIdx.x; j < x.columns(); j += kThreads) {
    std::int64_t sum = 0;
    for (int w = 0; w < x.windows; ++w)
      if (j >= kBlock && j / kBlock != x.query_block(w)) sum += x.part(w, j);
    x.column_order[j] = 0;
    x.open_column[j] = sum;
  }
  __syncthreads();
  for (int w = threadIdx.x; w < x.windows; w += kThreads) {
    if (x.query_block(w) == 0) continue;
    std::int64_t sink = 0;
    for (int j = 0; j < kBlock; ++j) sink += x.part(w, j);
    x.open_slash[x.query_block(w)] -= sink;
    atomicAdd(&held, static_cast<Mass>(sink));
  }
  __syncthreads();
  return held;
}

/// The slash that holds most; index -1 where all are taken.
struct BestSlash {
  std::int64_t mass;
  int index;
  __device__ void take(std::int64_t other_mass, int other) {
    if (other >= 0 && (index < 0 || other_mass > mass || (other_mass == mass && other < index))) {
      mass = other_mass;
      index = other;
    }
  }
};
__device__ BestSlash best_slash(const List& x) {
  __shared__ BestSlash of_warp[kWarps];
  BestSlash best{0, -1};
  for (int d = threadIdx.x; d < x.blocks; d += kThreads)
    if (x.slash_order[d] == 0) best.take(x.open_slash[d], d);
  for (int step = 16; step > 0; step /= 2) {
    const long long mass = __shfl_xor_sync(~0u, static_cast<long long>(best.mass), step);
    best.take(mass, __shfl_xor_sync(~0u, best.index, step));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best.take(of_warp[w].mass, of_warp[w].index);
  return best;
}

/// The heaviest columns, and their mass.
struct Group {
  Found found;
  Mass mass;
  __device__ unsigned columns() const { return found.above + found.ties; }
};
__device__ Group best_columns(const List& x, unsigned most, int bits, Tally* shared) {
  Group group{{0, 0, 0}, 0};
  if (most == 0) return group;
  group.found = find<kThreads>(x.open_column, x.columns(), true, ULLONG_MAX, most, bits, shared);
  if (group.found.threshold == 0) group.found.ties = 0;  // columns without mass
  Tally above[1] = {};
  for (int j = threadIdx.x; j < x.columns(); j += kThreads) {
    const Mass mass = static_cast<Mass>(x.open_column[j]);
    if (mass > group.found.threshold) above[0].sum += mass;
  }
  add_up(above, shared);
  group.mass = above[0].sum + group.found.ties * group.found.threshold;
  return group;
}

/// Whether the mass of a column changed.
__device__ bool take_slash(const List& x, int d, std::int64_t order) {
  bool changed = false;
  for (int i = threadIdx.x; i < kBlock * x.windows; i += kThreads) {
    const int block = x.query_block(i / kBlock) - d, j = kBlock * block + i % kBlock;
    if (block < 1 || x.column_order[j] != 0) continue;
    const std::int64_t mass = x.part(i / kBlock, j);
    x.open_column[j] -= mass;  // no two queries have this slash on one block
    changed |= mass > 0;
  }
  if (threadIdx.x == 0) x.slash_order[d] = order;
  return __syncthreads_or(changed) != 0;
}

__device__ void take_columns(const List& x, const Found& found, std::int64_t order) {
  __shared__ unsigned warp_equal[kWarps];
  const int n = x.columns(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int range = (n + kThreads - 1) / kThreads * 32, begin = min(n, warp * range),
            end = min(n, begin + range);
  unsigned equal = 0;
  for (int j = begin + lane; j < end; j += 32)
    equal += static_cast<Mass>(x.open_column[j]) == found.threshold;
  for (int step = 16; step > 0; step /= 2) equal += __shfl_xor_sync(~0u, equal, step);
  __syncthreads();
  if (lane == 0) warp_equal[warp] = equal;
  __syncthreads();
  unsigned before = 0;
  for (int w = 0; w < warp; ++w) before += warp_equal[w];
  for (int first = begin; first < end; first += 32) {
    const int j = first + lane;
    const Mass mass = j < end ? static_cast<Mass>(x.open_column[j]) : 0;
    const unsigned equals = __ballot_sync(~0u, j < end && mass == found.threshold);
    const unsigned rank = before + __popc(equals & ((1u << lane) - 1));
    before += __popc(equals);
    if (j >= end || mass < found.threshold || (mass == found.threshold && rank >= found.ties))
      continue;
    x.column_order[j] = order;
    x.open_column[j] = 0;
    for (int w = 0; w < x.windows; ++w) {
      const int d = x.query_block(w) - j / kBlock;
      if (d >= 1 && x.slash_order[d] == 0)
        atomicAdd(reinterpret_cast<Mass*>(x.open_slash + d), static_cast<Mass>(-x.part(w, j)));
    }
  }
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void price_kernel(const PriceParams p) {
  __shared__ Tally shared[kSteps];
  const BudgetPrices& prices = p.x;
  const int lists = gridDim.x, list = blockIdx.x, h = list / p.axes.segments,
            s = list % p.axes.segments;
  const List x(p, h, s);
  const auto record = [&](int i, unsigned slashes, unsigned columns, double share) {
    prices.most[(2ll * i) * lists + list] = static_cast<std::int32_t>(slashes);
    prices.most[(2ll * i + 1) * lists + list] = static_cast<std::int32_t>(columns);
    atomicAdd(reinterpret_cast<Mass*>(prices.coverage) + i,
              static_cast<Mass>(prices.queries[s]) *
                  static_cast<Mass>(__double2ll_rn(share * kCoverageUnit)));
  };
  if (x.blocks == 0 || p.axes.whole[s] != 0) {
    for (int i = threadIdx.x; i < prices.budgets; i += kThreads) record(i, 0, 0, 1.0);
    for (int j = threadIdx.x; j < x.columns(); j += kThreads) x.column_order[j] = 0;
    for (int d = threadIdx.x; d < x.blocks; d += kThreads) x.slash_order[d] = 0;
    return;
  }
  Mass held = open_list(x);
  const Mass total = add_list<kThreads>(x.mass + x.base, x.blocks, shared).sum;
  const int bits = add_list<kThreads>(x.open_column, x.columns(), shared).bits;
  unsigned slashes = 1, columns = 0;
  Group group{};
  bool stale = true;
  for (int units = 2, next = 0;; ++units) {
    const BestSlash slash = best_slash(x);
    if (stale)
      group = best_columns(
          x,
          min(static_cast<unsigned>(kBlock), static_cast<unsigned>(prices.most_columns) - columns),
          bits, shared);
    const bool all = slash.index < 0 && group.columns() == 0;
    for (; next < prices.budgets && (all || prices.budget[next] <= units); ++next)
      if (threadIdx.x == 0)
        record(next, slashes, columns,
               total > 0 ? static_cast<double>(held) / static_cast<double>(total) : 1.0);
    if (next == prices.budgets) return;
    if (slash.index >= 0 && static_cast<Mass>(slash.mass) >= group.mass) {
      stale = take_slash(x, slash.index, kFirst - units);
      held += static_cast<Mass>(slash.mass);
      ++slashes;
    } else {
      take_columns(x, group.found, kFirst - units);
      stale = true;
      held += group.mass;
      columns += group.columns();
    }
  }
}

}  // namespace

std::size_t budget_scratch_bytes(int heads, const PatternAxes& axes) {
  return static_cast<std::size_t>(heads) * axes.slots * (1 + kBlock) * sizeof(std::int64_t);
}

cudaError_t price_budgets(const std::int64_t* mass, int heads, const PatternAxes& axes,
                          const BudgetPrices& x, void* scratch, cudaStream_t stream) {
  if (x.budgets < 1) return cudaErrorInvalidValue;
  if (heads * axes.segments == 0) return cudaSuccess;
  price_kernel<<<heads * axes.segments, kThreads, 0, stream>>>(
      {mass, heads, axes, x, static_cast<std::int64_t*>(scratch)});
  return cudaGetLastError();
}

}  // namespace ballast::cuda

// In which order the persistent attention kernels take their work: costs of the units of an index,
// and the sort of the units, or of the pieces that long ones are cut into.
#include <algorithm>
#include <climits>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/lists.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;

int grid(std::int64_t threads) {
  return static_cast<int>(std::max<std::int64_t>(1, (threads + kThreads - 1) / kThreads));
}

__device__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ int count_blocks(const DeviceIndex& x, std::int64_t list) {
  const BlockBounds b = x.bounds[list % x.shape.q_blocks()];
  const int low = b.begin_first / kBlock, high = (b.end_last + kBlock - 1) / kBlock;
  if (x.shape.dense) return max(0, high - low);
  int n = 0;
  for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
    n += max(0, min(x.runs[r].last, high) - max(x.runs[r].first, low));
  }
  return n;
}

__device__ int column_groups(const DeviceIndex& x, int h, int qb) {
  if (!x.has_columns()) return 0;
  const std::int64_t last = min(static_cast<std::int64_t>(qb + 1) * kBlock, x.shape.q_tokens) - 1;
  return (x.column_bounds[h * x.shape.q_blocks() * kBlock + last].end + kBlock - 1) / kBlock;
}

__global__ void forward_cost_kernel(DeviceIndex x, int units) {
  const int unit = static_cast<int>(thread_index());
  if (unit >= units) return;
  const int blocks = static_cast<int>(x.shape.q_blocks());
  const int per_head = x.pairs_heads() ? blocks : (blocks + 1) / 2;
  const int h = unit / per_head;
  int cost = 0;
  for (int i = 0; i < (x.pairs_heads() ? 1 : 2); ++i) {
    const int qb = x.pairs_heads() ? unit : 2 * (unit % per_head) + i;
    if (qb < blocks)
      cost = max(cost, count_blocks(x, static_cast<std::int64_t>(h) * blocks + qb) +
                           column_groups(x, h, qb));
  }
  x.forward_cost[unit] = cost;
}

__global__ void triple_cost_kernel(DeviceIndex x) {
  const int unit = static_cast<int>(thread_index());
  if (unit >= x.triple_units()) return;
  const int blocks = static_cast<int>(x.shape.q_blocks()),
            group = x.shape.q_heads / x.shape.kv_heads;
  int cost = 0;
  for (int qb = 3 * unit / group; qb <= min((3 * unit + 2) / group, blocks - 1); ++qb)
    cost = max(cost, count_blocks(x, qb));
  x.triple_cost[unit] = cost;
}

__global__ void backward_cost_kernel(DeviceIndex x, int tiles) {
  const int i = static_cast<int>(thread_index());
  const int kv_heads = x.shape.kv_heads, group = x.shape.q_heads / kv_heads;
  const int block_units = tiles * kv_heads;
  const int column_tiles =
      x.has_columns() ? x.column_row_offset[x.shape.index_heads * x.shape.segments] / kColumnTile
                      : 0;
  const int units = block_units + column_tiles * x.column_heads();
  if (i == 0) *x.backward_units = units;
  if (i >= units) return;
  int cost = 0;
  if (i >= block_units) {
    const Interval range = x.column_tile_queries[(i - block_units) / x.column_heads()];
    cost = (range.end - range.begin) * (x.shape.index_heads == 1 ? group : 1);
  } else {
    const int tile = i / kv_heads;
    const int heads = x.shape.index_heads == 1 ? 1 : group;
    for (int g = 0; g < heads; ++g) {
      int longest = 0;
      for (int kb = 2 * tile; kb < 2 * tile + 2 && kb < x.shape.k_blocks(); ++kb) {
        if (x.shape.dense) {
          longest = max(longest, x.query_range[kb].end - x.query_range[kb].begin);
        } else {
          const int h = x.shape.index_heads == 1 ? 0 : i % kv_heads * group + g;
          const std::int64_t list = h * x.shape.k_blocks() + kb;
          longest = max(longest, x.transposed_offset[list + 1] - x.transposed_offset[list]);
        }
      }
      cost += longest * (group / heads);
    }
  }
  x.backward_cost[i] = cost;
}

struct Ordering {
  const DeviceIndex index;
  const std::int32_t* cost;
  const std::int32_t* count;  ///< how many units; null: n
  int n;
  int block_units;  ///< units of keys; the others are tiles of columns, and are marked
  int turns;  ///< > 1: units i of keys with the same i % turns (key head) come together, head after
              ///< head, and the columns first
  int group;  ///< > 1: units of keys that are long are cut into up to `group` pieces
  bool by_segment;  ///< dense index of several segments: segment by segment
  int processors;
  std::int32_t* order;
  std::int32_t* pieces;  ///< how many pieces there are; may be null
};

/// Key tiles [begin, end) with the same last query block as `tile`: those of one segment.  A tile
/// over a border counts to the later one.
__device__ Interval segment_tiles(const DeviceIndex& x, int tile) {
  const int blocks = static_cast<int>(x.shape.k_blocks()), tiles = (blocks + 1) / 2;
  const auto query_end = [&](int t) { return x.query_range[min(2 * t + 1, blocks - 1)].end; };
  const int end = query_end(tile);
  return {first_true(tiles, [&](int t) { return query_end(t) >= end; }),
          first_true(tiles, [&](int t) { return query_end(t) > end; })};
}

/// Replaces every number of `x` by the sum of those before it and returns the sum of all.  All
/// threads of a CTA of 1,024, with `sums` of theirs; waits for them before and after.
__device__ int sum_before(std::int32_t* x, int n, int* sums) {
  const int each = (n + 1023) / 1024, first = min(n, static_cast<int>(threadIdx.x) * each),
            last = min(n, first + each);
  __syncthreads();
  int own = 0;
  for (int i = first; i < last; ++i) own += x[i];
  int running = sum_of_earlier(own, sums);
  for (int i = first; i < last; ++i) {
    const int size = x[i];
    x[i] = running;
    running += size;
  }
  __syncthreads();
  return sums[1023];
}

/// Counting sort by cost, longest first.  One CTA of 1,024 threads.
///
/// by_segment: pieces stand in the order (segment, key head, key tile, query head), so that those
/// which run at the same time share Q, dO and dQ in L2.  Longest first over all segments would have
/// all of them in flight at once, and each tile would come from DRAM.  Pieces of at most half the
/// limit below, and a quarter of the longest unit, stay for the end, longest first, to fill up the
/// processors.
__global__ void order_kernel(const Ordering o) {
  __shared__ int top, sums[1024];
  __shared__ unsigned long long total;
  const DeviceIndex& x = o.index;
  const int n = o.count != nullptr ? *o.count : o.n;
  const int tiles = static_cast<int>((x.shape.k_blocks() + 1) / 2);
  const bool by_segment = o.by_segment && segment_tiles(x, 0).end < tiles;
  const int places = by_segment ? tiles * x.shape.q_heads
                                : 0;  // buckets of one piece each, before those of a cost each
  const int buckets = places + 1024;
  if (threadIdx.x == 0) {
    top = 1;
    total = 0;
  }
  for (int i = threadIdx.x; i < buckets; i += 1024) x.order_buckets[i] = 0;
  __syncthreads();
  unsigned long long sum = 0;
  int mine = 1;
  for (int i = threadIdx.x; i < n; i += 1024) {
    mine = max(mine, o.cost[i]);
    if (i < o.block_units) sum += o.cost[i];
  }
  atomicMax(&top, mine);
  atomicAdd(&total, sum);
  __syncthreads();
  // Units of keys are cut alike into six pieces a processor for balance, and more while a piece
  // stays long (400 tiles) beside its own prologue and epilogue: the last pieces to finish decide
  // the tail.  A unit that alone would take over a sixth of a processor's share (the first block,
  // which every query uses) is cut further.  Segment by segment all are cut by such a limit alone,
  // so that pieces which run together are of one size and short units stay whole.
  constexpr int kPieces = 6, kSegmentPieces = 13;  // a processor
  const int long_units = min(n, o.block_units),
            wanted = by_segment ? o.processors : kPieces * o.processors;
  int alike = 1;
  for (int d = 2; d <= o.group; ++d) {
    if (o.group % d == 0 && (long_units * alike < wanted || total / max(long_units, 1) / d >= 400))
      alike = d;
  }
  const long long limit = static_cast<long long>(
      total /
      (static_cast<unsigned long long>(by_segment ? kSegmentPieces : kPieces) * o.processors));
  const auto parts = [&](int i) {
    if (i >= o.block_units) return 1;
    int d = alike;
    while (d < o.group && o.cost[i] > limit * d) ++d;
    return d;
  };
  const auto placed = [&](int i, int parts) {
    return by_segment && i < o.block_units &&
           4ll * o.cost[i] > min(2 * limit, static_cast<long long>(top)) * parts;
  };
  const auto place = [&](int i, int part, int parts) {
    const int tile = i / x.shape.kv_heads, group = x.shape.q_heads / x.shape.kv_heads;
    const Interval segment = segment_tiles(x, tile);
    const int before = i % x.shape.kv_heads * (segment.end - segment.begin) + tile - segment.begin;
    return segment.begin * x.shape.q_heads + before * group + first_share(group, part, parts);
  };
  const int turns = by_segment ? 1 : o.turns, width = 1024 / turns;
  const auto slot = [&](int i, int parts) {
    const int cost = by_segment ? o.cost[i] / parts : o.cost[i];
    const int by_cost =
        width - 1 - static_cast<int>(static_cast<std::int64_t>(cost) * (width - 1) / top);
    return places + (i < o.block_units ? i % turns * width + by_cost : by_cost);
  };
  for (int i = threadIdx.x; i < n; i += 1024) {
    const int p = parts(i);
    if (placed(i, p)) {
      for (int part = 0; part < p; ++part) x.order_buckets[place(i, part, p)] = 1;
    } else {
      atomicAdd(&x.order_buckets[slot(i, p)], p);
    }
  }
  const int pieces = sum_before(x.order_buckets, buckets, sums);
  if (threadIdx.x == 0 && o.pieces != nullptr) *o.pieces = pieces;
  for (int i = threadIdx.x; i < n; i += 1024) {
    const int p = parts(i), unit = i < o.block_units ? i : kColumnUnit | (i - o.block_units);
    const bool has_place = placed(i, p);
    const int at = has_place ? 0 : atomicAdd(&x.order_buckets[slot(i, p)], p);
    for (int part = 0; part < p; ++part) {
      o.order[has_place ? x.order_buckets[place(i, part, p)] : at + part] =
          backward_piece(unit, part, p);
    }
  }
}

/// Rounds in which pieces stand in the order of QueryGradient::turns: the key heads of one, and of
/// each its parts; every round begins `step` places behind the one before.
struct Rounds {
  int heads, parts, step;
};

/// Where the piece (key tile, key head, part) stands in that order.  Part j of a round's key tile t
/// has place t + j, its heads one after another; of several rounds the earlier one goes first.
__device__ int turn_place(int tile, int head, int part, int tiles, int heads, int parts,
                          Rounds by) {
  const int head_rounds = (heads + by.heads - 1) / by.heads,
            part_rounds = (parts + by.parts - 1) / by.parts,
            own = head / by.heads * part_rounds + part / by.parts, own_part = part % by.parts,
            at = own * by.step + tile + own_part;
  int before = 0;
  for (int r = 0; r < head_rounds * part_rounds; ++r) {
    const int round_heads = min(by.heads, heads - r / part_rounds * by.heads),
              round_parts = min(by.parts, parts - r % part_rounds * by.parts);
    for (int j = 0; j < round_parts; ++j) {
      const bool goes_first = r < own || (r == own && j < own_part);
      before += round_heads * min(max(at - r * by.step - j + goes_first, 0), tiles);
    }
  }
  return before + head % by.heads;
}

/// How the tiles of a dense index, of `mean_blocks` query blocks each on average, come in turns: a
/// head's tiles share Q, dO and dQ where those that run together lie in L2.
///
/// Rounds overlap by half where two of two heads fit in, so that the short last tiles of one, which
/// wait for one another more than they compute, run beside the long first tiles of the next.
/// Longer units come four heads at a time, in step.
__device__ Rounds rounds_of(const DeviceIndex& x, int tiles, int parts, long long mean_blocks) {
  constexpr long long kFitInL2 = 36 << 20;  // bytes, of 50 MB
  constexpr int kHeads = 4;
  // Fewer query blocks are shared as they are; units of 64 keys are twice as many that wait.
  const int many_blocks = backward_unit_blocks(x.shape.head_dim) == 1 ? 28 : 40;
  if (mean_blocks < many_blocks) return {x.shape.kv_heads, parts, tiles};
  const long long bytes = mean_blocks * kBlock * x.shape.head_dim * (2 + 2 + 4),  // of a head
      fit = kFitInL2 / bytes;
  const bool overlap = fit >= kHeads;
  const int together =
                overlap ? static_cast<int>(min(fit / 2, static_cast<long long>(kHeads))) : kHeads,
            heads = min(x.shape.kv_heads, together);
  return {heads, min(parts, together / heads), overlap ? (tiles + 1) / 2 : 2 * tiles};
}

/// The order of QueryGradient::turns for a dense index.  Whatever a unit waits for stands before
/// it.
///
/// Units are cut into parts of a query head each; part j of key tile t stands at t + j.  So the
/// parts of a tile, which add to the same dK and dV, do not end at the same time, and a head's
/// tiles come in the order of the keys, a few query heads at a time (rounds_of()).
///
/// Short units (of short segments) would spend themselves on adding to dK and dV: they are cut as
/// little as fills the processors, into parts that need not be equal, of three heads or so where
/// processors are busy (a part waits for its neighbours when it begins, not again for its next
/// head), and the order is reversed: last segments first, of each one key head after another, and
/// of that the last tiles first, which have the fewest queries and so are the first to be ready for
/// their next head.
///
/// Where the units of one segment stream twice as much as L2 holds, those that add dQ at once come
/// in such an order too, in place of the longest first (backward_pieces): one query head at a time,
/// so that all processors share its Q, dO and dQ.  One CTA of 1,024 threads.
__global__ void turn_order_kernel(DeviceIndex x, int tiles, int processors) {
  constexpr int kLongBlocks = 96;   // fewer leave an order of the longest first as quick
  constexpr int kShortBlocks = 28;  // more leave ascending tiles as quick
  __shared__ unsigned long long total, squares;
  const int kv_heads = x.shape.kv_heads, group = x.shape.q_heads / kv_heads,
            units = tiles * kv_heads;
  if (threadIdx.x == 0) total = squares = 0;
  __syncthreads();
  unsigned long long sum = 0, sum_squares = 0;
  for (int i = threadIdx.x; i < tiles; i += 1024) {
    const unsigned long long blocks = x.backward_cost[i * kv_heads] / group;
    sum += blocks;
    sum_squares += blocks * blocks;
  }
  atomicAdd(&total, sum);
  atomicAdd(&squares, sum_squares);
  __syncthreads();
  // The mean over units, and over the work: of segments that differ the long ones decide.
  const unsigned long long mean_blocks = total / tiles, work_blocks = squares / max(total, 1ull);
  const bool reversed = work_blocks < kShortBlocks,
             every_mode = mean_blocks >= kLongBlocks && segment_tiles(x, 0).end >= tiles;
  int parts = 1;
  for (int d = 2; d <= group; ++d) {
    const int pieces = 3 * d <= group + 2 ? 16 : 1;  // wanted a processor
    if (reversed ? units * parts < pieces * processors : group % d == 0) parts = d;
  }
  const Rounds rounds = rounds_of(x, tiles, parts, static_cast<long long>(mean_blocks));
  for (int i = threadIdx.x; i < units * parts; i += 1024) {
    const int part = i % parts, unit = i / parts, tile = unit / kv_heads, head = unit % kv_heads;
    int at;
    if (reversed) {
      const Interval s = segment_tiles(x, tile);
      at =
          ((tiles - s.end) * kv_heads + head * (s.end - s.begin) + s.end - 1 - tile) * parts + part;
    } else {
      at = turn_place(tile, head, part, tiles, kv_heads, parts, rounds);
    }
    const std::int32_t piece = x.turn_pieces[at] = backward_piece(unit, part, parts);
    if (every_mode)
      x.backward_pieces[turn_place(tile, head, part, tiles, kv_heads, parts, {1, 1, tiles})] =
          piece;
  }
  if (threadIdx.x == 0) {
    if (every_mode) x.backward_units[1] = units * parts;
    x.backward_units[2] = units * parts;
    x.backward_units[3] = reversed;
  }
}

}  // namespace

cudaError_t order_work(const DeviceIndex& x, cudaStream_t stream) {
  const IndexShape& s = x.shape;
  const int units = static_cast<int>(x.forward_units()),
            tiles = static_cast<int>((s.k_blocks() + 1) / 2);
  forward_cost_kernel<<<grid(units), kThreads, 0, stream>>>(x, units);
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return e;
  order_kernel<<<1, 1024, 0, stream>>>({x, x.forward_cost, nullptr, units, INT_MAX, 1, 1, false,
                                        processors, x.forward_order, nullptr});
  const int triples = static_cast<int>(x.triple_units());
  if (triples > 0) {
    triple_cost_kernel<<<grid(triples), kThreads, 0, stream>>>(x);
    order_kernel<<<1, 1024, 0, stream>>>({x, x.triple_cost, nullptr, triples, INT_MAX, 1, 1, false,
                                          processors, x.triple_order, nullptr});
  }
  backward_cost_kernel<<<grid(x.backward_unit_capacity()), kThreads, 0, stream>>>(x, tiles);
  Ordering whole{x,
                 x.backward_cost,
                 x.backward_units,
                 0,
                 tiles * s.kv_heads,
                 x.key_heads_in_turn() ? s.kv_heads : 1,
                 1,
                 false,
                 processors,
                 x.backward_order,
                 nullptr};
  Ordering cut = whole;
  cut.group = s.q_heads / s.kv_heads;
  cut.by_segment = s.dense;
  cut.order = x.backward_pieces;
  cut.pieces = x.backward_units + 1;
  order_kernel<<<1, 1024, 0, stream>>>(whole);
  order_kernel<<<1, 1024, 0, stream>>>(cut);
  if (s.dense) turn_order_kernel<<<1, 1024, 0, stream>>>(x, tiles, processors);
  return cudaGetLastError();
}

}  // namespace ballast::cuda

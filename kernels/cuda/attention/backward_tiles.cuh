// What the sm_90 backward kernels of all head dims share: parameters, the layout of shared memory,
// and the producer thread that turns work units into a stream of (query head, query block) tiles.
//
// A work unit is 128 keys of one key head (64 at head dim 256), or as many gathered columns.
#pragma once
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
using namespace hopper;

inline constexpr int kBackwardThreads = 384;  // producer warpgroup, two consumer warpgroups
inline constexpr int kBackwardArrivals = 8 * kWarpArrivals;  // of the consumers' 8 warps
inline constexpr int kQueryStages = 2;

struct BackwardParams {
  DeviceIndex index;
  int group;                   // query heads per key head
  const std::int32_t* pieces;  // order of work
  const std::int32_t* piece_count;
  const std::int32_t* reversed;  // DeviceIndex::backward_units[3]
  float scale, scale_log2;
  const float* statistics;  // [q_heads, q_blocks, {lse2, delta}, 64]
  float* dk;
  float* dv;
  std::int64_t dk_stride, dv_stride;
  float* column_dk;
  float* column_dv;
  bool add;  // dk, dv += instead of =
  int* counter;
  int* places;  // of each head modulo kPlaces, the query block that a unit was last at: a hint
  int* turns;   // AttentionScratch::turns and part_turns; only of dense indexes
  int* part_turns;
  float* dq;  // only of QueryGradient::rows
  std::int64_t dq_stride;
};

struct BackwardMaps {
  CUtensorMap q, dout, k, v, column_k, column_v, dq;
};

struct WorkUnit {
  int done;        // no more work
  int columns;     // keys are gathered columns
  int first_row;   // first key, or first gathered row
  int first_key;   // the same as the masks count: key, or column of the list
  int kv_head;     // head of dk, dv or of the gathered buffer
  int first_head;  // query heads of this unit
  int heads;
  int part, parts;  // of the units that add to the same keys
  int turn;         // of its additions to dQ
};

/// 64 queries of one head, of which a tile has kTileBlocks.
struct QueryTile {
  int end;
  int query_block, head;  // head < 0: none, where the number of blocks is odd
  std::int8_t state[2];   // HalfState of either 64 keys
  std::uint64_t word[2];  // row mask, or cover word for columns
};

/// A tile's dQ, or one of its backward_slices(), on its way to global memory; head < 0: no more.
struct QueryGradientJob {
  int head, query_block, slice, turn;
};

/// kRows: tiles of gathered rows, which threads copy and whose dQ leaves row by row.
template <int D, bool kRows = false>
struct BackwardShared {
  static constexpr int kBoxes = (D + 63) / 64;  // 128-byte columns of a row; the last may be padded
  static constexpr int kTileBlocks = D > 64 || kRows ? 1 : 2;
  static constexpr int kBlockBytes = kBlock * kBoxes * 128;
  static constexpr int kUnitBlocks = D > 128 ? 1 : 2;  // of 64 keys
  static constexpr int kUnitKeys = kUnitBlocks * kBlock;
  static constexpr int kKeyBoxStride = kUnitKeys * 128;
  static constexpr int kGradientStages = D > 128 ? 1 : kQueryStages;  // of dO
  // Columns of dQ that a consumer sends at a time: its share of a block's, or all of its own
  // block's.
  static constexpr int kSliceColumns = D > 64 || kTileBlocks > 1 ? 64 : 32;
  static constexpr int kScoreBuffers =
      D > 128 ? 4 : 2;  // of [block][unit's keys][64 queries]: dS; P
  alignas(1024) unsigned char k[kUnitBlocks * kBlockBytes];
  alignas(1024) unsigned char v[kUnitBlocks * kBlockBytes];
  alignas(1024) unsigned char q[kQueryStages][kTileBlocks * kBlockBytes];
  alignas(1024) unsigned char dout[kGradientStages][kTileBlocks * kBlockBytes];
  alignas(1024) unsigned char ds[kScoreBuffers][kTileBlocks * kUnitKeys * 128];
  // fp32, [consumer][32-column box][query]; of gathered rows dQ leaves from registers.
  alignas(1024) unsigned char dq[2][kRows ? 16 : kBlock * kSliceColumns * 4];
  alignas(128) float statistics[kQueryStages][kTileBlocks][2][kBlock];  // lse2, delta
  alignas(128) Interval key_queries[kUnitKeys];  // query rows that see each of the unit's keys
  std::uint64_t q_full[kQueryStages], empty[kQueryStages];
  std::uint64_t dout_full[kGradientStages], dout_empty;  // dout_empty: only of a single stage
  std::uint64_t kv_full, kv_empty;
  std::uint64_t job_full[2], job_free[2];  // only of kVisibleJobs
  QueryTile tile[kQueryStages][kTileBlocks];
  // Entries of gathered rows: dQ of a tile leaves after its stage has been given back, but before
  // the next but one is.
  static constexpr int kRowSlots = kRows ? 2 * kQueryStages : 1;
  std::uint32_t rows[kRowSlots][kBlock];
  WorkUnit unit;
  QueryGradientJob job[2];
  // The producer's own, kept out of its few registers:
  RunCursor cursor[2];
  Interval queries;
  int reversed;

  __device__ void init() {
    constexpr int kProducers = kRows ? 128 : 1;
    for (int s = 0; s < kQueryStages; ++s) {
      barrier_init(&q_full[s], kProducers);
      barrier_init(&empty[s], kBackwardArrivals);
    }
    for (int s = 0; s < kGradientStages; ++s) barrier_init(&dout_full[s], kProducers);
    barrier_init(&dout_empty, kBackwardArrivals);
    barrier_init(&kv_full, 1);
    barrier_init(&kv_empty, kBackwardArrivals);
    for (int s = 0; s < 2; ++s) {
      barrier_init(&job_full[s], 1);
      barrier_init(&job_free[s], kWarpArrivals);
    }
    barrier_init_fence();
  }
};

// --- producer
// -------------------------------------------------------------------------------------------------
template <int D, QueryGradient kDq>
struct BackwardProducer {
  using Shared = BackwardShared<D>;
  static constexpr int kSplit = 2 / Shared::kUnitBlocks;  // units of a unit of the index
  static constexpr int kManyBlocks = 64;  // of queries: fewer lie in L2 wherever a unit begins
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  RingPosition<kQueryStages> ring;
  int dout_parity = 1;
  int blocks = 0;  // of the tile that is being filled

  __device__ BackwardProducer(Shared& s, const BackwardMaps& m, const BackwardParams& params)
      : sh(s), maps(m), p(params) {}

  __device__ int index_head(int head) const { return p.index.shape.index_heads == 1 ? 0 : head; }

  __device__ void load_gradient(int head, int qb) {
    const int s = Shared::kGradientStages == 1 ? 0 : ring.stage;
    if constexpr (Shared::kGradientStages == 1) {
      barrier_wait(&sh.dout_empty, dout_parity);
      dout_parity ^= 1;
    }
    barrier_expect(&sh.dout_full[s], Shared::kBlockBytes);
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.dout[s] + (blocks * Shared::kBoxes + c) * kBlock * 128, &maps.dout,
               &sh.dout_full[s], c * 64, head, qb * kBlock);
    }
    if (blocks + 1 == Shared::kTileBlocks) barrier_arrive(&sh.dout_full[s]);
  }
  __device__ void load_queries(int head, int qb) {
    const int s = ring.stage;
    barrier_expect(&sh.q_full[s], Shared::kBlockBytes + sizeof(sh.statistics[0][0]));
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.q[s] + (blocks * Shared::kBoxes + c) * kBlock * 128, &maps.q, &sh.q_full[s],
               c * 64, head, qb * kBlock);
    }
    bulk_load(sh.statistics[s][blocks],
              p.statistics + (head * p.index.shape.q_blocks() + qb) * 2 * kBlock,
              sizeof(sh.statistics[0][0]), &sh.q_full[s]);
    if (blocks + 1 == Shared::kTileBlocks) barrier_arrive(&sh.q_full[s]);
    load_gradient(head, qb);
    if (++blocks < Shared::kTileBlocks) return;
    blocks = 0;
    ring.advance();
  }
  /// A block of the next tile.  mask0, mask1: row masks of the two key blocks; for columns the
  /// cover words are looked up instead.
  __device__ void tile(int head, int qb, HalfState s0, HalfState s1, int mask0, int mask1) {
    const int s = ring.stage;
    if (blocks == 0) barrier_wait(&sh.empty[s], ring.parity ^ 1);
    QueryTile& t = sh.tile[s][blocks];
    const bool columns = sh.unit.columns;
    t.end = 0;
    t.query_block = qb;
    t.head = head;
    t.state[0] = s0;
    t.state[1] = s1;
    if (columns) {
      const int group = sh.unit.first_key / kBlock;
      if (s0 != kSkip) t.word[0] = cover_word(p.index, index_head(head), qb, group);
      if (s1 != kSkip) t.word[1] = cover_word(p.index, index_head(head), qb, group + 1);
    } else {
      t.word[0] = mask0 >= 0 ? p.index.row_masks[mask0] : kAllRows;
      t.word[1] = mask1 >= 0 ? p.index.row_masks[mask1] : kAllRows;
    }
    load_queries(head, qb);
  }
  /// Fills an open tile with its first block once more, which no key sees: zeros would need a pass
  /// over shared memory.
  __device__ void close() {
    if (blocks == 0) return;
    const QueryTile& first = sh.tile[ring.stage][0];
    QueryTile& none = sh.tile[ring.stage][Shared::kTileBlocks - 1];
    none.head = -1;
    none.state[0] = none.state[1] = kSkip;
    load_queries(first.head, first.query_block);
  }
  __device__ void end() {
    if constexpr (Shared::kTileBlocks > 1) close();
    barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1);
    sh.tile[ring.stage][0].end = 1;
    barrier_arrive(&sh.q_full[ring.stage]);
    if constexpr (Shared::kGradientStages > 1) barrier_arrive(&sh.dout_full[ring.stage]);
    ring.advance();
  }

  __device__ HalfState state(int qb, int mask, int key) {
    if (mask == kAbsent || key >= p.index.shape.k_tokens) return kSkip;
    const HalfState s = visible_state(p.index.bounds[qb], key);
    return s != kSkip && mask >= 0 ? kMasked : s;
  }
  /// Query blocks of one head that use either of the unit's key blocks.
  __device__ void key_blocks(int head) {
    RunCursor& a = sh.cursor[0];
    RunCursor& b = sh.cursor[1];
    const int kb = sh.unit.first_key / kBlock;
    open_key_block(a, p.index, index_head(head), kb);
    if constexpr (Shared::kUnitBlocks == 2) {
      open_key_block(b, p.index, index_head(head), kb + 1);
    } else {
      b.open_empty();
    }
    while (true) {
      const int qb = min(a.block, b.block);
      if (qb == INT_MAX) break;
      int mask0 = kAbsent, mask1 = kAbsent;
      if (a.block == qb) {
        mask0 = a.mask;
        a.pop();
      }
      if (b.block == qb) {
        mask1 = b.mask;
        b.pop();
      }
      const HalfState s0 = state(qb, mask0, sh.unit.first_key),
                      s1 = state(qb, mask1, sh.unit.first_key + kBlock);
      if (s0 != kSkip || s1 != kSkip) tile(head, qb, s0, s1, mask0, mask1);
    }
  }
  /// Of a dense index: the query blocks that see some of the unit's keys, and a tile of one.
  __device__ __forceinline__ void find_queries() {
    const int kb = sh.unit.first_key / kBlock, blocks = static_cast<int>(p.index.shape.k_blocks());
    // Ranges of neighbouring blocks begin and end in their order.
    sh.queries.begin = p.index.query_range[kb].begin;
    sh.queries.end = p.index.query_range[min(kb + Shared::kUnitBlocks, blocks) - 1].end;
  }
  __device__ __forceinline__ void dense_tile(int head, int qb) {
    const HalfState s0 = state(qb, kNoMask, sh.unit.first_key),
                    s1 = Shared::kUnitBlocks == 2 ? state(qb, kNoMask, sh.unit.first_key + kBlock)
                                                  : kSkip;
    if (s0 != kSkip || s1 != kSkip) tile(head, qb, s0, s1, kNoMask, kNoMask);
  }
  /// Of a dense index whose additions to dQ have an order, all query heads of the unit: from the
  /// last query block down, so that units that run at the same time come to a query block one after
  /// another in the order of their turns.  Where turns are reversed, they do so from the first
  /// block up; and those of the unit's own keys come first, of all heads, since the last unit of a
  /// segment shares them with the segment before, whose units would wait for it at every head.
  __device__ void query_blocks_in_turn(const WorkUnit& u) {
    find_queries();
    const int n = sh.queries.end - sh.queries.begin,
              own = sh.reversed ? min(n, Shared::kUnitBlocks) : 0;
    for (int i = 0; i < u.heads * own; ++i)
      dense_tile(u.first_head + i / own, sh.queries.begin + i % own);
    for (int head = u.first_head; head < u.first_head + u.heads; ++head) {
      for (int i = own; i < n; ++i)
        dense_tile(head, sh.reversed ? sh.queries.begin + i : sh.queries.end - 1 - i);
    }
  }
  /// The same of a dense index whose additions to dQ have no order.  A unit of many query blocks
  /// begins where the one before it in this head is now, and comes round to the blocks before: so
  /// all that run at the same time share Q, dO and dQ in L2, which the whole range of a few heads
  /// would not fit.
  __device__ void key_blocks_round(int head) {
    find_queries();
    volatile int* place = p.places + head % kPlaces;
    const bool many = sh.queries.end - sh.queries.begin >= kManyBlocks;
    int qb = sh.queries.begin;
    if (many) {
      const int now = *place;
      if (sh.queries.begin <= now && now < sh.queries.end) qb = now;
    }
    for (int left = sh.queries.end - sh.queries.begin; left > 0; --left) {
      dense_tile(head, qb);
      if (many) *place = qb;
      if (++qb == sh.queries.end) qb = sh.queries.begin;
    }
  }
  __device__ HalfState column_state(const BlockBounds& bounds, int head, int qb, int first_column) {
    const HalfState s = visible_state(bounds, first_column);
    if (s == kSkip) return s;
    const std::uint64_t word = cover_word(p.index, index_head(head), qb, first_column / kBlock);
    return word == ~0ull ? kSkip : word != 0 ? kMasked : s;
  }
  __device__ void column_blocks(int head) {
    sh.queries = p.index.column_tile_queries[sh.unit.first_row / kColumnTile];
    for (int qb = sh.queries.begin; qb < sh.queries.end; ++qb) {
      const BlockBounds bounds = column_block_bounds(p.index, index_head(head), qb);
      const HalfState s0 = column_state(bounds, head, qb, sh.unit.first_key),
                      s1 = Shared::kUnitBlocks == 2
                               ? column_state(bounds, head, qb, sh.unit.first_key + kBlock)
                               : kSkip;
      if (s0 != kSkip || s1 != kSkip) tile(head, qb, s0, s1, kNoMask, kNoMask);
    }
  }

  __device__ void load_keys(const WorkUnit& u) {
    barrier_expect(&sh.kv_full,
                   2 * Shared::kUnitBlocks * Shared::kBlockBytes + sizeof(sh.key_queries));
    bulk_load(sh.key_queries,
              (u.columns ? p.index.column_row_queries : p.index.key_queries) + u.first_row,
              sizeof(sh.key_queries), &sh.kv_full);
    for (int half = 0; half < Shared::kUnitBlocks; ++half) {
      for (int c = 0; c < Shared::kBoxes; ++c) {
        const int at = c * Shared::kKeyBoxStride + half * kBlock * 128;
        tma_load(sh.k + at, u.columns ? &maps.column_k : &maps.k, &sh.kv_full, c * 64, u.kv_head,
                 u.first_row + half * kBlock);
        tma_load(sh.v + at, u.columns ? &maps.column_v : &maps.v, &sh.kv_full, c * 64, u.kv_head,
                 u.first_row + half * kBlock);
      }
    }
    barrier_arrive(&sh.kv_full);
  }

  __device__ void decode(WorkUnit& u, int piece, int half) {
    const DeviceIndex& index = p.index;
    const int unit = piece & ((1 << kPieceShift) - 1);
    u.done = 0;
    u.columns = !sends_jobs(kDq) && (piece & kColumnUnit) != 0;
    if (u.columns) {
      const int column_tile = unit / index.column_heads();
      const int list = index.column_tile_list[column_tile];
      u.kv_head = unit % index.column_heads();
      u.part = 0;
      u.parts = 1;
      u.first_row = column_tile * kColumnTile + half * kBlock;
      u.first_key = u.first_row - index.column_row_offset[list];
      const bool shared_list = index.shape.index_heads == 1;
      u.first_head = shared_list ? u.kv_head * p.group : list / index.shape.segments;
      u.heads = shared_list ? p.group : 1;
    } else {
      u.kv_head = unit % index.shape.kv_heads;
      u.first_row = u.first_key = unit / index.shape.kv_heads * kKeyTile + half * kBlock;
      u.part = piece >> kPieceShift & 15;
      u.parts = (piece >> (kPieceShift + 4) & 15) + 1;
      const int share = first_share(p.group, u.part, u.parts);
      u.heads = first_share(p.group, u.part + 1, u.parts) - share;
      u.first_head = u.kv_head * p.group + share;
      const int number = u.first_row / Shared::kUnitKeys,
                last = static_cast<int>(index.shape.k_blocks() - 1) / Shared::kUnitBlocks;
      u.turn = sh.reversed ? last - number : number;
    }
  }
  /// Which half of a split unit an item is.
  __device__ int half_of(int item) const {
    return kSplit == 2 && sh.reversed ? 1 - item % kSplit : item % kSplit;
  }
  /// Whether an item of a split unit begins past the last key.
  __device__ bool beyond_keys(int piece, int half) const {
    const int unit = piece & ((1 << kPieceShift) - 1);
    return half > 0 && !(piece & kColumnUnit) &&
           unit / p.index.shape.kv_heads * kKeyTile + kBlock >= p.index.shape.k_tokens;
  }

  __device__ void run() {
    const int items = *p.piece_count * kSplit;
    sh.reversed = kDq == QueryGradient::turns ? *p.reversed : 0;
    int parity = 1, item = atomicAdd(p.counter, 1);
    while (true) {
      int piece = item < items ? p.pieces[item / kSplit] : 0;
      while (item < items && beyond_keys(piece, half_of(item))) {
        item = atomicAdd(p.counter, 1);
        piece = item < items ? p.pieces[item / kSplit] : 0;
      }
      barrier_wait(&sh.kv_empty, parity);
      parity ^= 1;
      if (item >= items) {
        sh.unit.done = 1;
        barrier_arrive(&sh.kv_full);
        return;
      }
      decode(sh.unit, piece, half_of(item));
      const WorkUnit& u = sh.unit;
      load_keys(u);
      if constexpr (kDq == QueryGradient::turns) {
        query_blocks_in_turn(u);
      } else if constexpr (kDq == QueryGradient::firsts) {
        for (int i = 0; i < u.heads; ++i) key_blocks_round(u.first_head + i);
      } else {
        for (int i = 0; i < u.heads; ++i) {
          if (u.columns) {
            column_blocks(u.first_head + i);
          } else if (kDq == QueryGradient::adds && p.index.shape.dense) {
            key_blocks_round(u.first_head + i);
          } else {
            key_blocks(u.first_head + i);
          }
        }
      }
      // Claimed only now, while the consumers still have tiles: the last units go to whoever is
      // free.
      item = atomicAdd(p.counter, 1);
      end();
    }
  }
};

// --- what the consumers of all head dims do alike
// -------------------------------------------------------------------------------------------------
/// Bits of the queries of a tile that may use key `r` of a block.
__device__ __forceinline__ std::uint64_t allowed_queries(const QueryTile& t, Interval seen,
                                                         std::uint64_t word, bool columns, int r) {
  const int first = t.query_block * kBlock;
  const std::uint64_t bits = interval_bits(seen.begin - first, seen.end - first);
  if (columns) return (word >> r & 1) ? 0 : bits;  // covered: the whole row of S^T
  return bits & word;
}

/// 64 queries x 64 or 32 columns of dQ, times `factor`, into boxes of 32 columns in the layout of
/// the copy engine.  row: the thread's first query, the other is + 8.
template <int kColumns>
__device__ __forceinline__ void stage_query_gradient(const float (&dq)[kColumns / 2],
                                                     unsigned char* out, int row, int lane,
                                                     float factor) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r, chunk = 2 * (j % 4) + lane % 4 / 2;
      *reinterpret_cast<float2*>(out + j / 4 * (kBlock * 128) + query * 128 +
                                 ((chunk ^ (query & 7)) << 4) + (lane % 2) * 8) =
          make_float2(dq[4 * j + 2 * r] * factor, dq[4 * j + 2 * r + 1] * factor);
    }
  }
  fence_async_proxy();
}

/// 64 keys x 2 N columns of dK or dV to (or onto) global memory, 16 bytes a thread: the four lanes
/// of a row exchange what they hold of 16 columns.  `to`: the thread's first row, column 0.
template <int N>
__device__ __forceinline__ void store_key_gradient(const float (&acc)[N], float* to,
                                                   std::int64_t stride, float factor,
                                                   std::int64_t rows_left, bool add) {
  const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
  to += threadIdx.x % 4 * 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* at = to + 8 * r * stride;
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low_columns = acc[4 * j + 2 * r + e] * factor,
                    high_columns = acc[4 * j + 4 + 2 * r + e] * factor;
        const float mine = high ? high_columns : low_columns,
                    theirs = __shfl_xor_sync(~0u, high ? low_columns : high_columns, 2);
        const float first = high ? theirs : mine, second = high ? mine : theirs;
        const float other = __shfl_xor_sync(~0u, odd ? first : second, 1);
        x[e] = odd ? other : first;
        x[2 + e] = odd ? second : other;
      }
      if (8 * r >= rows_left) continue;
      if (add) {
        global_add(at + 8 * j, x[0], x[1], x[2], x[3]);
      } else {
        *reinterpret_cast<float4*>(at + 8 * j) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

/// Host: one CTA a multiprocessor.
template <class Shared, class Kernel>
cudaError_t launch_backward(Kernel kernel, const BackwardMaps& maps, const BackwardParams& p,
                            cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return e;
  kernel<<<processors, kBackwardThreads, sizeof(Shared), stream>>>(maps, p);
  return cudaGetLastError();
}

/// The kernels of one head dim (backward_d*_sm90.cu).
cudaError_t backward_d64(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                         cudaStream_t stream);
cudaError_t backward_d96(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                         cudaStream_t stream);
cudaError_t backward_d128(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                          cudaStream_t stream);
cudaError_t backward_d256(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                          cudaStream_t stream);

}  // namespace ballast::cuda

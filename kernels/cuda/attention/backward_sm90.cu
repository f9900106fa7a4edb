// Attention backward on Hopper: key-stationary, wgmma and TMA, persistent grid.
//
// A work unit is 128 keys of one key head (or 128 gathered columns); each of the two consumer
// warpgroups owns 64 of them and keeps their dK and dV in registers while (query head, query block)
// tiles of Q and dO stream by.  Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so
// that P^T and dS^T feed dV += P^T dO and dK += dS^T Q straight from registers.  dS goes to shared
// memory once, for dQ += dS K, whose 64 columns per consumer leave as an fp32 bulk reduce-add.
// (FlashAttention-2, Dao 2023, Algorithm 2; the transposed form is FlashAttention-3's.)
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
namespace {
using namespace hopper;

constexpr int kThreads = 384;
constexpr int kConsumerArrivals = 8 * kWarpArrivals;  // of the consumers' 8 warps
constexpr int kStages = 2;

struct BackwardParams {
  DeviceIndex index;
  int group;                   // query heads per key head
  const std::int32_t* pieces;  // order of work
  const std::int32_t* piece_count;
  float scale, scale_log2;
  const float* statistics;  // [q_heads, q_blocks, {lse2, delta}, 64]
  float* dk;
  float* dv;
  std::int64_t dk_stride, dv_stride;
  float* column_dk;
  float* column_dv;
  bool add;  // dk, dv += instead of =
  int* counter;
};

struct BackwardMaps {
  CUtensorMap q, dout, k, v, column_k, column_v, dq;
};

struct WorkUnit {
  int done;       // no more work
  int columns;    // keys are gathered columns
  int first_row;  // first key, or first gathered row
  int first_key;  // the same as the masks count: key, or column of the list
  int kv_head;    // head of dk, dv or of the gathered buffer
  int cut;        // others add to the same keys
};

struct QueryTile {
  int end;
  int query_block, head;
  std::int8_t state[2];   // HalfState of either consumer's 64 keys
  std::uint64_t word[2];  // row mask, or cover word for columns
};

template <int D>
struct BackwardShared {
  static constexpr int kBoxes = D / 64;
  static constexpr int kBlockBytes = kBlock * D * 2;
  static constexpr int kQueryColumns = D / 2;  // columns of dQ that one consumer computes
  static constexpr int kKeyBoxStride = kKeyTile * 128;
  alignas(1024) unsigned char k[2 * kBlockBytes];
  alignas(1024) unsigned char v[2 * kBlockBytes];
  alignas(1024) unsigned char q[kStages][kBlockBytes];
  alignas(1024) unsigned char dout[kStages][kBlockBytes];
  alignas(1024) unsigned char ds[2][kKeyTile * 128];  // [buffer][key][64 queries]
  alignas(1024) unsigned char dq[2][kBlock * kQueryColumns *
                                    4];               // fp32, [consumer][32-column box][query]
  alignas(128) float statistics[kStages][2][kBlock];  // lse2, delta
  alignas(128) Interval key_queries[kKeyTile];        // query rows that see each of the unit's keys
  std::uint64_t q_full[kStages], dout_full[kStages], empty[kStages], kv_full, kv_empty;
  QueryTile tile[kStages];
  WorkUnit unit;
  // The producer's own, kept out of its few registers:
  RunCursor cursor[2];
  Interval queries;
  int next_unit;
};

// --- producer
// -------------------------------------------------------------------------------------------------
template <int D>
struct Producer {
  using Shared = BackwardShared<D>;
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  RingPosition<kStages> ring;

  __device__ Producer(Shared& s, const BackwardMaps& m, const BackwardParams& params)
      : sh(s), maps(m), p(params) {}

  __device__ int index_head(int head) const { return p.index.shape.index_heads == 1 ? 0 : head; }
  /// mask0, mask1: row masks of the two key blocks; for columns the cover words are looked up
  /// instead.
  __device__ void tile(int head, int qb, HalfState s0, HalfState s1, int mask0, int mask1) {
    const int s = ring.stage;
    barrier_wait(&sh.empty[s], ring.parity ^ 1);
    QueryTile& t = sh.tile[s];
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
    const std::int64_t blocks = p.index.shape.q_blocks();
    barrier_expect(&sh.q_full[s], Shared::kBlockBytes + sizeof(sh.statistics[0]));
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.q[s] + c * kBlock * 128, &maps.q, &sh.q_full[s], c * 64, head, qb * kBlock);
    }
    bulk_load(sh.statistics[s], p.statistics + (head * blocks + qb) * 2 * kBlock,
              sizeof(sh.statistics[0]), &sh.q_full[s]);
    barrier_arrive(&sh.q_full[s]);
    barrier_expect(&sh.dout_full[s], Shared::kBlockBytes);
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.dout[s] + c * kBlock * 128, &maps.dout, &sh.dout_full[s], c * 64, head,
               qb * kBlock);
    }
    barrier_arrive(&sh.dout_full[s]);
    ring.advance();
  }
  __device__ void end() {
    barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1);
    sh.tile[ring.stage].end = 1;
    barrier_arrive(&sh.q_full[ring.stage]);
    barrier_arrive(&sh.dout_full[ring.stage]);
    ring.advance();
  }

  __device__ HalfState state(int qb, int mask, int key) {
    if (mask == kAbsent || key >= p.index.shape.k_tokens) return kSkip;
    const HalfState s = visible_state(p.index.bounds[qb], key);
    return s != kSkip && mask >= 0 ? kMasked : s;
  }
  /// Query blocks of one head that use either of the unit's two key blocks.
  __device__ void key_blocks(int head) {
    RunCursor& a = sh.cursor[0];
    RunCursor& b = sh.cursor[1];
    const int kb = sh.unit.first_key / kBlock;
    open_key_block(a, p.index, index_head(head), kb);
    open_key_block(b, p.index, index_head(head), kb + 1);
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
                      s1 = column_state(bounds, head, qb, sh.unit.first_key + kBlock);
      if (s0 != kSkip || s1 != kSkip) tile(head, qb, s0, s1, kNoMask, kNoMask);
    }
  }

  __device__ void load_keys(bool columns, int kv_head, int row) {
    barrier_expect(&sh.kv_full, 4 * Shared::kBlockBytes + sizeof(sh.key_queries));
    bulk_load(sh.key_queries, (columns ? p.index.column_row_queries : p.index.key_queries) + row,
              sizeof(sh.key_queries), &sh.kv_full);
    for (int half = 0; half < 2; ++half) {
      for (int c = 0; c < Shared::kBoxes; ++c) {
        const int at = c * Shared::kKeyBoxStride + half * kBlock * 128;
        tma_load(sh.k + at, columns ? &maps.column_k : &maps.k, &sh.kv_full, c * 64, kv_head,
                 row + half * kBlock);
        tma_load(sh.v + at, columns ? &maps.column_v : &maps.v, &sh.kv_full, c * 64, kv_head,
                 row + half * kBlock);
      }
    }
    barrier_arrive(&sh.kv_full);
  }

  __device__ void run() {
    const DeviceIndex& index = p.index;
    const int items = *p.piece_count;
    int parity = 1;
    int item = atomicAdd(p.counter, 1);
    while (true) {
      if (item < items) sh.next_unit = atomicAdd(p.counter, 1);
      const int piece = item < items ? p.pieces[item] : 0;
      barrier_wait(&sh.kv_empty, parity);
      parity ^= 1;
      WorkUnit& u = sh.unit;
      u.done = item >= items;
      if (u.done) {
        barrier_arrive(&sh.kv_full);
        return;
      }
      const int unit = piece & ((1 << kPieceShift) - 1);
      if (piece & kColumnUnit) {
        const int column_tile = unit / index.column_heads();
        const int list = index.column_tile_list[column_tile];
        u.columns = 1;
        u.kv_head = unit % index.column_heads();
        u.cut = 0;
        u.first_row = column_tile * kColumnTile;
        u.first_key = u.first_row - index.column_row_offset[list];
        load_keys(true, u.kv_head, u.first_row);
        const bool shared_list = index.shape.index_heads == 1;
        const int first = shared_list ? u.kv_head * p.group : list / index.shape.segments;
        const int heads = shared_list ? p.group : 1;
        for (int i = 0; i < heads; ++i) column_blocks(first + i);
      } else {
        const int key_tile = unit / index.shape.kv_heads;
        u.columns = 0;
        u.kv_head = unit % index.shape.kv_heads;
        u.first_row = u.first_key = key_tile * kKeyTile;
        load_keys(false, u.kv_head, u.first_row);
        const int part = piece >> kPieceShift & 15, parts = (piece >> (kPieceShift + 4) & 15) + 1;
        u.cut = parts > 1;
        const int heads = p.group / parts, first = u.kv_head * p.group + part * heads;
        for (int i = 0; i < heads; ++i) key_blocks(first + i);
      }
      end();
      item = sh.next_unit;
    }
  }
};

// --- consumer
// -------------------------------------------------------------------------------------------------
template <int D, bool kWithDq>
struct Consumer {
  using Shared = BackwardShared<D>;
  static constexpr int kBoxes = Shared::kBoxes;
  static_assert(kStages == 2, "dS and the previous tile are named by the parity of the stage");
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  const int consumer, thread, lane, row;
  RingPosition<kStages> ring;
  int previous;  // head and query block of the previous tile, whose stage is the other one; kNone
                 // at the start of a unit
  static constexpr int kNone = -1, kBlockBits = 16;
  static constexpr int kDqRegisters = kWithDq ? Shared::kQueryColumns / 2 : 1;

  __device__ Consumer(Shared& s, const BackwardMaps& m, const BackwardParams& params, int which)
      : sh(s),
        maps(m),
        p(params),
        consumer(uniform(which)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  /// keys x queries product of the consumer's 64 keys: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_transposed(float (&acc)[32], const unsigned char* keys,
                                                   const unsigned char* queries) {
    const std::uint32_t a = descriptor(keys + consumer * kBlock * 128), b = descriptor(queries);
#pragma unroll
    for (int c = 0; c < kBoxes; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<64>::template ss<0, 0>(acc, advance(a, c * Shared::kKeyBoxStride + i * 32),
                                     advance(b, c * kBlock * 128 + i * 32), c + i > 0);
      }
    }
    wgmma_commit();
  }
  /// dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient(float (&acc)[D / 2], const std::uint32_t (&a)[16],
                                                 const unsigned char* queries) {
    const std::uint32_t b = descriptor(queries, kBlock * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<D>::template rs<1>(acc, a + 4 * i, advance(b, i * 2048), 1);
    wgmma_commit();
  }
  /// Queries of a tile that use key `r` of the consumer's 64, as bits.
  __device__ __forceinline__ std::uint64_t allowed_queries(const QueryTile& t, int r) {
    const Interval seen = sh.key_queries[consumer * kBlock + r];
    const int first = t.query_block * kBlock;
    const std::uint64_t bits = interval_bits(seen.begin - first, seen.end - first),
                        word = t.word[consumer];
    if (sh.unit.columns) return (word >> r & 1) ? 0 : bits;  // covered: the whole row of S^T
    return bits & word;
  }
  /// P^T from S^T: probabilities under the final LSE, zero where masked.
  __device__ __forceinline__ void probabilities(float (&s)[32], int stage) {
    const float* lse2 = sh.statistics[stage][0] + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j);
      s[4 * j] = exp2_fast(s[4 * j] * p.scale_log2 - l.x);
      s[4 * j + 1] = exp2_fast(s[4 * j + 1] * p.scale_log2 - l.y);
      s[4 * j + 2] = exp2_fast(s[4 * j + 2] * p.scale_log2 - l.x);
      s[4 * j + 3] = exp2_fast(s[4 * j + 3] * p.scale_log2 - l.y);
    }
    const QueryTile& t = sh.tile[stage];
    if (t.state[consumer] == kWhole) return;
    const std::uint64_t allowed0 = allowed_queries(t, row) >> (2 * (lane % 4));
    const std::uint64_t allowed1 = allowed_queries(t, row + 8) >> (2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(allowed0 >> (8 * j + e) & 1)) s[4 * j + e] = 0;
        if (!(allowed1 >> (8 * j + e) & 1)) s[4 * j + 2 + e] = 0;
      }
    }
  }
  /// dS^T = P^T * (dP^T - delta), as bf16 A operand.  P is the rounded one that dV uses: its fp32
  /// form would not fit in the registers beside dK and dV.
  __device__ __forceinline__ void score_gradients(const std::uint32_t (&probability)[16],
                                                  const float (&dp)[32], std::uint32_t (&ds)[16],
                                                  int stage) {
    const float* delta = sh.statistics[stage][1] + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t pair = probability[2 * j + r];
        ds[2 * j + r] =
            pack_bf16(__uint_as_float(pair << 16) * (dp[4 * j + 2 * r] - d.x),
                      __uint_as_float(pair & 0xFFFF0000u) * (dp[4 * j + 2 * r + 1] - d.y));
      }
    }
  }
  /// dS^T into shared memory, rows of 64 queries, 128-byte swizzle.
  __device__ __forceinline__ void share(const std::uint32_t (&ds)[16]) {
    const int key = thread / 32 * 16 +
                    lane % 16;  // row that this lane addresses: matrices 0, 1 are rows 0-7, 8-15
    const std::uint32_t base = smem_address(sh.ds[ring.stage]) + (consumer * kBlock + key) * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 2 * i + lane / 16;  // matrices 2, 3: the next 8 queries
      store_matrix_x4(base + ((column ^ (key & 7)) << 4), ds + 4 * i);
    }
    fence_async_proxy();
  }
  /// dS for both consumers.  The named barriers 4 to 7 are one per consumer and buffer: this
  /// consumer arrives, the other waits.
  __device__ __forceinline__ void publish(const std::uint32_t (&ds)[16]) {
    share(ds);
    named_arrive(4 + 2 * ring.stage + consumer, 256);
    named_barrier(8 + consumer, 128);
  }
  __device__ __forceinline__ void issue_query_gradient(float (&dq)[Shared::kQueryColumns / 2]) {
    const int previous_stage = uniform(ring.stage) ^ 1;
    // Columns [consumer * D / 2, ...) of K: the second 128-byte box for D = 128, the second half of
    // the box for D = 64.
    const std::uint32_t a = descriptor(sh.ds[previous_stage]);
    const std::uint32_t b =
        descriptor(sh.k + (D == 128 ? consumer * Shared::kKeyBoxStride : consumer * 64));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Wgmma<Shared::kQueryColumns>::template ss<1, 1>(dq, advance(a, i * 2048),
                                                      advance(b, i * 2048), i > 0);
    }
    wgmma_commit();
  }
  /// Sends the consumer's columns of dQ to L2, where they are added.
  __device__ __forceinline__ void reduce(const float (&dq)[Shared::kQueryColumns / 2],
                                         int query_block, int head) {
    unsigned char* out = sh.dq[consumer];
    if (thread == 0) bulk_wait_read();
    named_barrier(2 + consumer, 128);
#pragma unroll
    for (int j = 0; j < Shared::kQueryColumns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = row + 8 * r, chunk = 2 * (j % 4) + lane % 4 / 2;
        *reinterpret_cast<float2*>(out + j / 4 * (kBlock * 128) + query * 128 +
                                   ((chunk ^ (query & 7)) << 4) + (lane % 2) * 8) =
            make_float2(dq[4 * j + 2 * r] * p.scale, dq[4 * j + 2 * r + 1] * p.scale);
      }
    }
    fence_async_proxy();
    named_barrier(2 + consumer, 128);
    if (thread == 0) {
      for (int b = 0; b < Shared::kQueryColumns / 32; ++b) {
        tma_reduce_add(&maps.dq, out + b * kBlock * 128, consumer * Shared::kQueryColumns + b * 32,
                       head, query_block * kBlock);
      }
      bulk_commit();
    }
  }

  /// Starts dQ of the previous tile, once both consumers have written its dS.
  __device__ __forceinline__ void begin_query_gradient(float (&dq)[kDqRegisters]) {
    if constexpr (kWithDq) {
      named_barrier(4 + 2 * (ring.stage ^ 1) + (consumer ^ 1),
                    256);  // the other consumer's publish() arrives
      issue_query_gradient(dq);
    }
  }
  __device__ __forceinline__ void finish_query_gradient(const float (&dq)[kDqRegisters]) {
    if constexpr (kWithDq) {
      if (previous != kNone) reduce(dq, previous & ((1 << kBlockBits) - 1), previous >> kBlockBits);
    }
  }
  /// The previous tile's dK, the last reader of its stage, is complete.
  __device__ __forceinline__ void release_previous() {
    if (previous != kNone) warp_arrive(&sh.empty[ring.stage ^ 1]);
  }

  __device__ __forceinline__ void store(const float (&acc)[D / 2], float* out, std::int64_t stride,
                                        float factor, const WorkUnit& u, bool add) {
    const std::int64_t end = u.columns ? LLONG_MAX : p.index.shape.k_tokens;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t token = u.first_row + consumer * kBlock + row + 8 * r;
      if (token >= end) continue;
      float* to = out + token * stride + u.kv_head * D + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        const float x = acc[4 * j + 2 * r] * factor, y = acc[4 * j + 2 * r + 1] * factor;
        if (add) {
          global_add(to + 8 * j, x, y);
        } else {
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(x, y);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    int kv_parity = 0;
    while (true) {
      barrier_wait(&sh.kv_full, kv_parity);
      kv_parity ^= 1;
      if (sh.unit.done) break;
      float dk[D / 2], dv[D / 2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;

      // dK of tile i - 1 is in flight when tile i begins, and dQ of tile i - 1 starts only after P
      // of tile i: so the two consumers may run half a tile apart, one computing exponentials while
      // the other feeds the tensor cores.  (A barrier right after dS keeps them in step, and both
      // then wait at the same time: 10 % slower.)  The first tile of a unit computes a dQ that
      // nobody wants.
      previous = kNone;
      if (kWithDq) named_arrive(4 + 2 * (ring.stage ^ 1) + consumer, 256);
      while (true) {
        const int stage = uniform(ring.stage);
        barrier_wait(&sh.q_full[stage], ring.parity);
        const QueryTile& t = sh.tile[stage];
        if (t.end) break;
        // __shfl_sync tells the compiler that the branch is uniform, as wgmma demands.
        if (__shfl_sync(~0u, t.state[consumer], 0) != kSkip) {
          float s[32], dq[kDqRegisters];
          std::uint32_t a[16];
          wgmma_fence();
          issue_transposed(s, sh.k, sh.q[stage]);
          wgmma_wait<1>();  // dK of the previous tile
          release_previous();
          wgmma_wait<0>();
          probabilities(s, stage);
#pragma unroll
          for (int i = 0; i < 16; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
          barrier_wait(&sh.dout_full[stage], ring.parity);
          wgmma_fence();
          begin_query_gradient(dq);
          issue_gradient(dv, a, sh.dout[stage]);
          wgmma_wait<1>();
          finish_query_gradient(dq);
          float dp[32];
          wgmma_fence();
          issue_transposed(dp, sh.v, sh.dout[stage]);
          wgmma_wait<0>();
          std::uint32_t ds[16];
          score_gradients(a, dp, ds, stage);
          if (kWithDq) publish(ds);
          wgmma_fence();
          issue_gradient(dk, ds, sh.q[stage]);
        } else {
          float dq[kDqRegisters];
          wgmma_fence();
          begin_query_gradient(dq);
          wgmma_wait<0>();
          release_previous();
          finish_query_gradient(dq);
          barrier_wait(&sh.dout_full[stage], ring.parity);
          const std::uint32_t zero[16] = {};
          if (kWithDq) publish(zero);
        }
        previous = t.head << kBlockBits | t.query_block;
        ring.advance();
      }
      {
        float dq[kDqRegisters];
        wgmma_fence();
        begin_query_gradient(dq);
        wgmma_wait<0>();
        release_previous();
        finish_query_gradient(dq);
      }
      const WorkUnit u = sh.unit;
      warp_arrive(&sh.kv_empty);
      warp_arrive(&sh.empty[ring.stage]);
      ring.advance();
      const std::int64_t column_stride = p.index.column_heads() * D;
      const bool add = (p.add && !u.columns) || u.cut;
      store(dk, u.columns ? p.column_dk : p.dk, u.columns ? column_stride : p.dk_stride, p.scale, u,
            add);
      store(dv, u.columns ? p.column_dv : p.dv, u.columns ? column_stride : p.dv_stride, 1.0f, u,
            add);
    }
    if (kWithDq && thread == 0) bulk_wait();
  }
};

template <int D, bool kWithDq>
__global__ __launch_bounds__(kThreads, 1) void attention_backward_kernel(
    const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sh = *reinterpret_cast<BackwardShared<D>*>(raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&sh.q_full[s], 1);
      barrier_init(&sh.dout_full[s], 1);
      barrier_init(&sh.empty[s], kConsumerArrivals);
    }
    barrier_init(&sh.kv_full, 1);
    barrier_init(&sh.kv_empty, kConsumerArrivals);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_release<40>();
    if (threadIdx.x == 0) Producer<D>(sh, maps, p).run();
  } else {
    registers_claim<232>();
    Consumer<D, kWithDq>(sh, maps, p, threadIdx.x / 128 - 1).run();
  }
}

int processor_count() {
  int device = 0, n = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
  return n;
}

template <int D, bool kWithDq>
cudaError_t launch(const BackwardMaps& maps, const BackwardParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardShared<D>);
  static_assert(kBytes <= 232448);
  const cudaError_t e = cudaFuncSetAttribute(attention_backward_kernel<D, kWithDq>,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  attention_backward_kernel<D, kWithDq><<<processor_count(), kThreads, kBytes, stream>>>(maps, p);
  return cudaGetLastError();
}

}  // namespace

bool separate_query_gradient(const AttentionBackwardArgs& a) {
  return a.deterministic || (!a.index->shape.dense && !a.index->has_columns());
}

bool cuts_units(const AttentionBackwardArgs& a) {
  return !a.deterministic && a.q_heads > a.kv_heads;
}

cudaError_t backward_sm90(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                          cudaStream_t stream) {
  const DeviceIndex& index = *a.index;
  BackwardParams p;
  p.index = index;
  p.group = a.q_heads / a.kv_heads;
  const bool cut = cuts_units(a);
  p.pieces = cut ? index.backward_pieces : index.backward_order;
  p.piece_count = index.backward_units + (cut ? 1 : 0);
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.statistics = scratch.statistics;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dk_stride = a.dk_stride;
  p.dv_stride = a.dv_stride;
  p.column_dk = scratch.column_dk;
  p.column_dv = scratch.column_dv;
  p.add = a.accumulate_dkv;
  p.counter = scratch.counters;

  BackwardMaps maps;
  using hopper::make_tensor_map;
  const std::int64_t q_tokens = index.shape.q_tokens, k_tokens = index.shape.k_tokens;
  cudaError_t e = make_tensor_map(&maps.q, a.q, false, a.head_dim, a.q_heads, q_tokens, a.q_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.dout, a.dout, false, a.head_dim, a.q_heads, q_tokens, a.dout_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, k_tokens, a.k_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, k_tokens, a.v_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.dq, a.dq, true, a.head_dim, a.q_heads, q_tokens, a.dq_stride);
  maps.column_k = maps.k;
  maps.column_v = maps.v;
  if (e == cudaSuccess && index.has_columns()) {
    const int heads = index.column_heads();
    e = make_tensor_map(&maps.column_k, scratch.column_k, false, a.head_dim, heads,
                        index.column_rows(), heads * a.head_dim);
    if (e == cudaSuccess) {
      e = make_tensor_map(&maps.column_v, scratch.column_v, false, a.head_dim, heads,
                          index.column_rows(), heads * a.head_dim);
    }
  }
  if (e != cudaSuccess) return e;
  if (!separate_query_gradient(a))
    return a.head_dim == 128 ? launch<128, true>(maps, p, stream)
                             : launch<64, true>(maps, p, stream);
  e = query_gradient_sm90(a, scratch, stream);
  if (e != cudaSuccess) return e;
  return a.head_dim == 128 ? launch<128, false>(maps, p, stream)
                           : launch<64, false>(maps, p, stream);
}

}  // namespace ballast::cuda

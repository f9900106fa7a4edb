// The Hopper (sm_90a) instructions that the attention kernels use, one thin wrapper each, and why
// each exists.
//
// The picture: a *producer* warp asks the copy engine (TMA) to move tiles from global into shared
// memory; two *consumer* warpgroups of 128 threads multiply them with wgmma.  Nobody calls
// __syncthreads(): tiles are handed over through mbarriers, so copies, tensor cores and softmax
// arithmetic overlap.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ballast::cuda::hopper {

__device__ __forceinline__ std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// --- mbarrier
// -------------------------------------------------------------------------------------------------
// A 64-bit counter in shared memory with a *phase*.  The phase completes when the expected number
// of threads has arrived and, if somebody announced bytes (`expect`), the copy engine has delivered
// that many.  A waiter names the parity of the phase that it waits for.  A ring of stages needs two
// per stage: "full" (data is there) and "empty" (may be overwritten).
__device__ __forceinline__ void barrier_init(std::uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals));
}
/// Makes barrier initialisation visible to the copy engine; follow with __syncthreads().
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
/// Announces bytes without arriving; the phase cannot complete before they land.
__device__ __forceinline__ void barrier_expect(std::uint64_t* bar, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(smem_address(bar)),
      "r"(parity)
      : "memory");
}

// A consumer warp gives a stage back by one arrival: __syncwarp() puts the reads of its lanes
// before the arrival of one of them. compute-sanitizer's racecheck does not follow that step, so
// its builds (BALLAST_EVERY_LANE_ARRIVES) let every lane arrive.
#ifdef BALLAST_EVERY_LANE_ARRIVES
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
/// Arrivals of a whole warp, kWarpArrivals of them.
__device__ __forceinline__ void warp_arrive(std::uint64_t* bar) {
  if constexpr (kWarpArrivals == 1) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(bar);
  } else {
    barrier_arrive(bar);
  }
}

/// Named barrier over `threads` threads: unlike __syncthreads() it joins only the warps that call
/// it with this id.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at a named barrier without waiting; the others of the `threads` call named_barrier().
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- TMA
// -------------------------------------------------------------------------------------------------
// One thread names a box of a tensor described by a CUtensorMap (built on the host) and the copy
// engine does the rest: addresses, strides, zero fill outside the tensor, the shared-memory
// swizzle, and completion on an mbarrier.  The 128-byte swizzle XORs the 16-byte column of a row
// with the row number modulo 8, so that wgmma reads without bank conflicts; tiles must start at
// multiples of 1,024 bytes.  All maps here are (column, head, token).
__device__ __forceinline__ void tma_load(void* smem, const CUtensorMap* map, std::uint64_t* bar,
                                         int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(bar)), "r"(column), "r"(head), "r"(token)
      : "memory");
}
/// Plain contiguous copy; addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(void* smem, const void* global, int bytes,
                                          std::uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}
/// Adds a shared-memory box of fp32 to global memory, in the L2 cache.  Boxes leave in groups, as
/// with cp.async.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, const void* smem, int column,
                                               int head, int token) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(column), "r"(head), "r"(token)
      : "memory");
}
/// Writes a shared-memory box of fp32 to global memory, in groups as tma_reduce_add() does.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* smem, int column,
                                          int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(smem_address(smem)), "r"(column), "r"(head), "r"(token)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until the copy engine has read the shared memory of all committed groups, so that it may be
/// overwritten.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Until all committed groups are complete.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/// Between such an addition and the flag of another CTA, on either side: the copy engine's writes
/// to global memory belong to a proxy of their own.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Ordinary stores and the copy engine or tensor cores see shared memory through different proxies:
/// each writing thread runs this between its stores and the barrier that hands the data over.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- setmaxnreg
// -------------------------------------------------------------------------------------------------
// Registers are divided equally at launch; a producer needs few and accumulators need many, so the
// producer warpgroup gives some back and the consumers take them.  Needs __launch_bounds__ and each
// role in its own branch of one if/else.
template <int kCount>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// --- wgmma
// -------------------------------------------------------------------------------------------------
// D[64 x N] += A[64 x 16] B[16 x N], asynchronous, issued by a whole warpgroup.  B comes from
// shared memory, A from shared memory (ss) or registers (rs), D is in registers.  `fence` orders
// earlier register writes before the first wgmma, `commit` closes a group, `wait<n>` waits until at
// most n groups are pending; only then may D (or A registers) be touched. Accumulator d[4 j + e] of
// thread t (lane l, warp w) is row 16 w + l / 4 + 8 (e / 2), column 8 j + 2 (l % 4) + e % 2. Four
// consecutive A registers hold the same pattern of bf16 pairs, so a D tile turns into an A operand
// by conversion alone.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A matrix descriptor names a 128-byte-swizzled tile by address (16-byte units) and two strides.
// Tiles are rows of 128 bytes (64 bf16).  *K-major*: the 64 columns are the summation dimension;
// 8-row groups lie 1,024 bytes apart and a step of 16 along K adds 32 bytes to the address.
// *MN-major* (the transposed reading of the same bytes): the 64 columns are the M or N dimension,
// rows are the summation; a step of 16 along K adds 2,048 bytes, and `next_columns` is the distance
// to the tile that holds the next 64 columns. Only the low word depends on the address, so that is
// what the code carries; the high word (stride and swizzle) is constant.
__device__ __forceinline__ std::uint32_t descriptor(const void* tile, int next_columns = 16) {
  return static_cast<std::uint32_t>(next_columns >> 4) << 16 | (smem_address(tile) & 0x3FFFF) >> 4;
}
/// Descriptor moved by `bytes` inside shared memory.
__device__ __forceinline__ std::uint32_t advance(std::uint32_t desc, int bytes) {
  return desc + (bytes >> 4);
}
/// The value of lane 0, in a form that the compiler knows to be the same in all lanes.  wgmma takes
/// descriptors from uniform registers: without this, address arithmetic is done per thread and
/// moved over instruction by instruction.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

#define BALLAST_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BALLAST_D16(d, i) \
  BALLAST_D4(d, i), BALLAST_D4(d, i + 4), BALLAST_D4(d, i + 8), BALLAST_D4(d, i + 12)
#define BALLAST_D32(d) BALLAST_D16(d, 0), BALLAST_D16(d, 16)
#define BALLAST_D48(d) BALLAST_D32(d), BALLAST_D16(d, 32)
#define BALLAST_D64(d) BALLAST_D48(d), BALLAST_D16(d, 48)
#define BALLAST_D128(d) \
  BALLAST_D64(d), BALLAST_D16(d, 64), BALLAST_D16(d, 80), BALLAST_D16(d, 96), BALLAST_D16(d, 112)
#define BALLAST_R16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define BALLAST_R32 BALLAST_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BALLAST_R48 BALLAST_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BALLAST_R64 BALLAST_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BALLAST_R80 BALLAST_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define BALLAST_R96 BALLAST_R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define BALLAST_R112 \
  BALLAST_R96        \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define BALLAST_R128 \
  BALLAST_R112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// N = columns of D.  kTransA / kTransB = 1 for MN-major operands.  `add` = 0 overwrites D.
template <int N>
struct Wgmma;

#define BALLAST_WGMMA(N, REGS, DLIST, A0, A1, A2, A3, A4, A5)                                      \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    template <int kTransA, int kTransB>                                                            \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], std::uint32_t a, std::uint32_t b, \
                                              int add) {                                           \
      asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #A2                       \
                   ", 0;\n"                                                                        \
                   "mov.b64 a, {%" #A0 ", 0x40000040};\nmov.b64 b, {%" #A1                         \
                   ", 0x40000040};\n"                                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " REGS                \
                   "}, a, b"                                                                       \
                   ", p, 1, 1, %" #A3 ", %" #A4 ";\n}\n"                                           \
                   : DLIST                                                                         \
                   : "r"(a), "r"(b), "r"(add), "n"(kTransA), "n"(kTransB));                        \
    }                                                                                              \
    template <int kTransB>                                                                         \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const std::uint32_t* a,           \
                                              std::uint32_t b, int add) {                          \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #A5                          \
                   ", 0;\n"                                                                        \
                   "mov.b64 b, {%" #A4                                                             \
                   ", 0x40000040};\n"                                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " REGS "}, {%" #A0    \
                   ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, " BALLAST_STR_TRANS(N) ";\n}\n"   \
                   : DLIST                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kTransB));  \
    }                                                                                              \
  };
#define BALLAST_STR_TRANS(N) BALLAST_TRANS_##N
#define BALLAST_TRANS_32 "%22"
#define BALLAST_TRANS_64 "%38"
#define BALLAST_TRANS_96 "%54"
#define BALLAST_TRANS_128 "%70"
#define BALLAST_TRANS_256 "%134"
BALLAST_WGMMA(32, BALLAST_R16, BALLAST_D16(d, 0), 16, 17, 18, 19, 20, 21)
BALLAST_WGMMA(64, BALLAST_R32, BALLAST_D32(d), 32, 33, 34, 35, 36, 37)
BALLAST_WGMMA(96, BALLAST_R48, BALLAST_D48(d), 48, 49, 50, 51, 52, 53)
BALLAST_WGMMA(128, BALLAST_R64, BALLAST_D64(d), 64, 65, 66, 67, 68, 69)
BALLAST_WGMMA(256, BALLAST_R128, BALLAST_D128(d), 128, 129, 130, 131, 132, 133)
#undef BALLAST_WGMMA

// --- small arithmetic
// -----------------------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Two fp32 to a pair of bf16, `low` in the low half.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
/// Transposes four words in each of four neighbouring lanes: lane q gets word q of lanes 0 to 3.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  std::uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1),
                b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = a;
  (odd ? w[2] : w[3]) = b;
  a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2);
  b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  (high ? w[0] : w[2]) = a;
  (high ? w[1] : w[3]) = b;
}
/// Four 8x8 bf16 matrices from registers to shared memory; lane l gives the address of row l % 8 of
/// matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t address, const std::uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
/// Vector additions in L2 that return nothing (16 or 8 bytes, aligned).
__device__ __forceinline__ void global_add(float* p, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
__device__ __forceinline__ void global_add(float* p, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}

/// A counter in global memory by which CTAs take turns: read with acquire, raised with release.
__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void count_release(int* p) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p) : "memory");
}
/// What it held, read with acquire; where that is `expected` it holds `desired` from then on.
__device__ __forceinline__ int claim(int* p, int expected, int desired) {
  int x;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(x)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return x;
}

// --- tensor maps (host)
// ---------------------------------------------------------------------------------------------
/// Map of a [tokens, heads, head_dim] tensor with `stride` elements between tokens, read or written
/// in boxes of 128 bytes x 1 head x `rows` tokens with 128-byte swizzle.  Columns past the head dim
/// read as zeros.
cudaError_t make_tensor_map(CUtensorMap* map, const void* base, bool fp32, int head_dim, int heads,
                            std::int64_t tokens, std::int64_t stride, int rows = 64);

}  // namespace ballast::cuda::hopper

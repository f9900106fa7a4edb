// Attention on CUDA: checks, workspace, choice of kernels, and the small row kernels around them.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/attention/delta.cuh"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/index/device_index.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

int grid(std::int64_t threads) {
  return static_cast<int>(std::max<std::int64_t>(1, (threads + kThreads - 1) / kThreads));
}

struct WorkspaceLayout {
  AttentionScratch scratch;
  std::size_t bytes = 0;
};

WorkspaceLayout lay_out(void* base, const DeviceIndex& index, const RoutedWork* routed, int q_heads,
                        int head_dim, bool backward) {
  WorkspaceLayout w;
  const auto take = [&](auto*& pointer, std::int64_t bytes) {
    pointer = base == nullptr ? nullptr
                              : reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
                                    static_cast<char*>(base) + w.bytes);
    w.bytes += static_cast<std::size_t>(bytes + 255) / 256 * 256;
  };
  const std::int64_t column_elements = index.column_rows() * index.column_heads() * head_dim;
  take(w.scratch.counters, kCounters * sizeof(int));
  take(w.scratch.column_k, column_elements * 2);
  take(w.scratch.column_v, column_elements * 2);
  if (backward) {
    take(w.scratch.statistics,
         static_cast<std::int64_t>(q_heads) * index.shape.q_blocks() * 2 * kBlock * 4);
    take(w.scratch.column_dk, column_elements * 4);
    take(w.scratch.column_dv, column_elements * 4);
    if (index.shape.dense) {  // what QueryGradient::turns needs, or `firsts`, with no fewer slices
      take(w.scratch.turns,
           q_heads * index.shape.q_blocks() * backward_slices(head_dim, QueryGradient::firsts) * 4);
      take(w.scratch.part_turns, index.key_rows() / kBlock * index.shape.kv_heads * 2 * 4);
    }
  } else if (routed != nullptr) {
    const std::int64_t partials = routed_partials(*routed, head_dim);
    take(w.scratch.partial_o, partials * head_dim * 2);
    take(w.scratch.partial_lse, partials * 4);
  }
  return w;
}

/// The copy engine needs 16-byte aligned addresses and strides.
bool aligned(const void* p, std::int64_t stride, int element_bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && stride * element_bytes % 16 == 0 &&
         stride > 0;
}

cudaError_t choose(AttentionPath wanted, bool tma_possible, bool& sm90) {
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return e;
  const bool possible = major == 9 && tma_possible;
  if (wanted == AttentionPath::sm90 && !possible) return cudaErrorNotSupported;
  sm90 = wanted == AttentionPath::sm90 || (wanted == AttentionPath::automatic && possible);
  return cudaSuccess;
}

bool heads_fit(const DeviceIndex* index, int q_heads, int kv_heads, int head_dim, float scale) {
  return index != nullptr && kv_heads > 0 && q_heads % kv_heads == 0 && q_heads / kv_heads <= 16 &&
         attention_head_dim(head_dim) && scale > 0 && index->shape.q_heads == q_heads &&
         index->shape.kv_heads == kv_heads && index->shape.q_blocks() <= 1 << kBlockBits &&
         q_heads < 1 << (31 - kBlockBits);
}

DeltaOperands delta_operands(const void* dout, std::int64_t dout_stride, const void* o,
                             std::int64_t o_stride, bool o_fp32, std::int64_t tokens,
                             int head_dim) {
  return {static_cast<const __nv_bfloat16*>(dout),
          o,
          dout_stride,
          o_stride,
          tokens,
          head_dim,
          o_fp32,
          aligned(dout, dout_stride, 2) && aligned(o, o_stride, o_fp32 ? 4 : 2)};
}

/// A warp for kDeltaRows rows of a head; the heads of the same rows are neighbours.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(DeltaOperands delta_of, float* delta, int heads) {
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32,
                     token = warp / heads * kDeltaRows;
  if (token >= delta_of.tokens) return;
  const int head = static_cast<int>(warp % heads), lane = threadIdx.x % 32;
  const float d = delta_of.rows<kLanes>(token, head);
  if (lane < kDeltaRows && token + lane < delta_of.tokens)
    delta[head * delta_of.tokens + token + lane] = d;
}

/// What the backward kernels add to and find cleared: rows of gradients (16-byte aligned as their
/// stride) and their counters.
struct Cleared {
  struct Rows {
    float* at = nullptr;  ///< null: none
    std::int64_t stride = 0, rows = 0, columns = 0;
  };
  Rows dq, dk, dv;
  int* counters = nullptr;
  /// AttentionScratch::turns and part_turns (null: none), set for the mode to come: `in_turns` to
  /// the first key unit of `unit_blocks` blocks that a query block sees, and to zero.
  int* turns = nullptr;
  int* part_turns = nullptr;
  bool in_turns = false;
  bool first_stored = false;  ///< dQ is zeroed only where a query block sees no key
  const BlockBounds* bounds = nullptr;
  const std::int32_t* reversed = nullptr;  ///< DeviceIndex::backward_units[3]
  int heads = 0, slices = 0, unit_blocks = 0, last_unit = 0;
  std::int64_t q_blocks = 0, part_turn_count = 0;

  /// How many rows clear() has to see.
  std::int64_t rows() const {
    return std::max(dk.rows, (part_turn_count + kThreads - 1) / kThreads);
  }
  __device__ void clear(const Rows& r, std::int64_t row) const {
    if (r.at == nullptr || row >= r.rows) return;
    for (std::int64_t c = 4 * threadIdx.x; c < r.columns; c += 4 * kThreads)
      *reinterpret_cast<float4*>(r.at + row * r.stride + c) = make_float4(0, 0, 0, 0);
  }
  static __device__ bool sees_keys(const BlockBounds& b) { return b.begin_first < b.end_last; }
  __device__ void clear(std::int64_t row) const {
    if (!first_stored || row >= dq.rows || !sees_keys(bounds[row / kBlock])) clear(dq, row);
    clear(dk, row);
    clear(dv, row);
    if (row == 0 && threadIdx.x < kCounters) counters[threadIdx.x] = 0;
    if (turns != nullptr) begin_turns(row);
  }
  __device__ void begin_turns(std::int64_t row) const {
    const std::int64_t i = row * kThreads + threadIdx.x;
    if (i < part_turn_count) part_turns[i] = 0;
    if (row >= q_blocks) return;
    const BlockBounds b = bounds[row];
    int first = first_stored ? kHoldsNothing : kHolds;
    if (in_turns) {
      first = *reversed ? last_unit - (b.end_last - 1) / kBlock / unit_blocks
                        : b.begin_first / kBlock / unit_blocks;
      if (first_stored) first |= kFirstTurn;
    }
    for (int t = threadIdx.x; t < heads * slices; t += kThreads)
      turns[(t / slices * q_blocks + row) * slices + t % slices] = first;
  }
};

/// A CTA for kDeltaRows rows, a warp a head; what the next kernel finds cleared is cleared on the
/// way.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(DeltaOperands delta_of, const float* given_delta, const float* lse, int heads,
                      std::int64_t blocks, float* statistics, Cleared cleared) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kDeltaRows;
  for (int r = 0; r < kDeltaRows; ++r) cleared.clear(token + r);
  if (token >= blocks * kBlock) return;
  const int lane = threadIdx.x % 32;
  const bool held = lane < kDeltaRows && token + lane < delta_of.tokens;
  for (int head = threadIdx.x / 32; head < heads; head += kThreads / 32) {
    const std::int64_t at = head * delta_of.tokens + token + lane;
    const float l = held ? lse[at] : -INFINITY;
    const float delta = given_delta == nullptr ? delta_of.rows<kLanes>(token, head)
                        : held                 ? given_delta[at]
                                               : 0;
    if (lane >= kDeltaRows) continue;
    float* out = statistics + (head * blocks + token / kBlock) * 2 * kBlock + token % kBlock + lane;
    out[0] = l == -INFINITY ? INFINITY : l * kLog2E;
    out[kBlock] = delta;
  }
}

__global__ void merge_kernel(float* o, float* lse, const float* o_part, const float* lse_part,
                             std::int64_t tokens, int heads, int head_dim) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (i >= tokens * heads) return;
  const std::int64_t token = i / heads;
  const int head = static_cast<int>(i % heads);
  const float a = lse[head * tokens + token], b = lse_part[head * tokens + token];
  if (b == -INFINITY) return;  // nothing to add, also when both are empty
  const float top = fmaxf(a, b);
  const float wa = expf(a - top), wb = expf(b - top), sum = wa + wb;  // a = -inf gives wa = 0
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
    const std::int64_t at = i * head_dim + d;
    o[at] = a == -INFINITY ? o_part[at] : (wa * o[at] + wb * o_part[at]) / sum;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) lse[head * tokens + token] = top + logf(sum);
}

__global__ void fill_kernel(float* out, std::int64_t n, float value) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = value;
}

cudaError_t zero_rows(void* p, std::int64_t stride, std::int64_t columns, std::int64_t rows,
                      int element_bytes, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (stride == columns)
    return cudaMemsetAsync(p, 0, static_cast<std::size_t>(rows * columns * element_bytes), stream);
  return cudaMemset2DAsync(p, static_cast<std::size_t>(stride * element_bytes), 0,
                           static_cast<std::size_t>(columns * element_bytes),
                           static_cast<std::size_t>(rows), stream);
}

/// What the sm_90 backward finds cleared: kernels that add need zeros to add to.
Cleared to_clear(const AttentionBackwardArgs& a, const AttentionScratch& scratch) {
  const DeviceIndex& index = *a.index;
  const QueryGradient mode = query_gradient_mode(a);
  const std::int64_t k_columns = static_cast<std::int64_t>(a.kv_heads) * a.head_dim;
  Cleared c{.counters = scratch.counters};
  if (!a.accumulate_dq && mode != QueryGradient::apart)
    c.dq = {a.dq, a.dq_stride, index.shape.q_tokens,
            static_cast<std::int64_t>(a.q_heads) * a.head_dim};
  if (!a.accumulate_dkv && cuts_units(a)) {
    c.dk = {a.dk, a.dk_stride, index.shape.k_tokens, k_columns};
    c.dv = {a.dv, a.dv_stride, index.shape.k_tokens, k_columns};
  }
  if (sends_jobs(mode)) {
    c.turns = scratch.turns;
    c.part_turns = scratch.part_turns;
    c.in_turns = mode == QueryGradient::turns;
    c.first_stored = !a.accumulate_dq && stores_first(mode, a.head_dim);
    c.bounds = index.bounds;
    c.reversed = index.backward_units + 3;
    c.last_unit = static_cast<int>(index.shape.k_blocks() - 1) / backward_unit_blocks(a.head_dim);
    c.heads = a.q_heads;
    c.slices = backward_slices(a.head_dim, mode);
    c.unit_blocks = backward_unit_blocks(a.head_dim);
    c.q_blocks = index.shape.q_blocks();
    if (c.in_turns) c.part_turn_count = index.key_rows() / kBlock * a.kv_heads * 2;
  }
  return c;
}

}  // namespace

std::size_t attention_forward_workspace(const AttentionForwardArgs& a) {
  return lay_out(nullptr, *a.index, a.routed, a.q_heads, a.head_dim, false).bytes;
}
std::size_t attention_backward_workspace(const AttentionBackwardArgs& a) {
  return lay_out(nullptr, *a.index, a.routed, a.q_heads, a.head_dim, true).bytes;
}

cudaError_t attention_forward(const AttentionForwardArgs& a, cudaStream_t stream) {
  if (!heads_fit(a.index, a.q_heads, a.kv_heads, a.head_dim, a.scale)) return cudaErrorInvalidValue;
  const DeviceIndex& index = *a.index;
  const WorkspaceLayout w = lay_out(a.workspace, index, a.routed, a.q_heads, a.head_dim, false);
  const std::int64_t q_tokens = index.shape.q_tokens;
  if (q_tokens == 0) return cudaSuccess;
  if (index.shape.k_tokens == 0) {
    fill_kernel<<<grid(q_tokens * a.q_heads), kThreads, 0, stream>>>(a.lse, q_tokens * a.q_heads,
                                                                     -INFINITY);
    return zero_rows(a.o, a.o_stride, static_cast<std::int64_t>(a.q_heads) * a.head_dim, q_tokens,
                     a.o_fp32 ? 4 : 2, stream);
  }
  if (a.workspace == nullptr || a.workspace_bytes < w.bytes) return cudaErrorInvalidValue;
  // The epilogue stores pairs of elements.
  const bool tma = aligned(a.q, a.q_stride, 2) && aligned(a.k, a.k_stride, 2) &&
                   aligned(a.v, a.v_stride, 2) && a.o_stride % 2 == 0 &&
                   reinterpret_cast<std::uintptr_t>(a.o) % 8 == 0;
  bool sm90 = false;
  cudaError_t e = choose(a.path, tma, sm90);
  if (e == cudaSuccess) e = cudaMemsetAsync(w.scratch.counters, 0, kCounters * sizeof(int), stream);
  if (e == cudaSuccess && index.has_columns()) {
    e = gather_columns(index, a.k, a.k_stride, a.v, a.v_stride, a.head_dim, w.scratch.column_k,
                       w.scratch.column_v, stream);
  }
  if (e != cudaSuccess) return e;
  if (a.routed != nullptr && !(sm90 && routed_kernels(a.head_dim, a.routed->index.block_tokens)))
    return cudaErrorNotSupported;
  e = sm90 ? forward_sm90(a, w.scratch, stream) : forward_plain(a, w.scratch, stream);
  return e == cudaSuccess && a.routed != nullptr ? routed_forward_sm90(a, w.scratch, stream) : e;
}

cudaError_t attention_backward(const AttentionBackwardArgs& a, cudaStream_t stream) {
  if (!heads_fit(a.index, a.q_heads, a.kv_heads, a.head_dim, a.scale) ||
      (a.delta == nullptr && a.o == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const DeviceIndex& index = *a.index;
  const WorkspaceLayout w = lay_out(a.workspace, index, a.routed, a.q_heads, a.head_dim, true);
  const std::int64_t q_tokens = index.shape.q_tokens, k_tokens = index.shape.k_tokens;
  const std::int64_t q_columns = static_cast<std::int64_t>(a.q_heads) * a.head_dim,
                     k_columns = static_cast<std::int64_t>(a.kv_heads) * a.head_dim;
  const bool empty = q_tokens == 0 || k_tokens == 0;
  bool sm90 = false;
  cudaError_t e = cudaSuccess;
  if (!empty) {
    if (a.workspace == nullptr || a.workspace_bytes < w.bytes) return cudaErrorInvalidValue;
    const bool tma = aligned(a.q, a.q_stride, 2) && aligned(a.k, a.k_stride, 2) &&
                     aligned(a.v, a.v_stride, 2) && aligned(a.dout, a.dout_stride, 2) &&
                     aligned(a.dq, a.dq_stride, 4) && aligned(a.dk, a.dk_stride, 4) &&
                     aligned(a.dv, a.dv_stride, 4);
    e = choose(a.path, tma, sm90);
  }
  if (a.routed != nullptr &&
      (!sm90 || a.deterministic || !routed_kernels(a.head_dim, a.routed->index.block_tokens)))
    return cudaErrorNotSupported;
  if (e == cudaSuccess && empty && !a.accumulate_dq)
    e = zero_rows(a.dq, a.dq_stride, q_columns, q_tokens, 4, stream);
  if (e == cudaSuccess && empty && !a.accumulate_dkv) {
    e = zero_rows(a.dk, a.dk_stride, k_columns, k_tokens, 4, stream);
    if (e == cudaSuccess) e = zero_rows(a.dv, a.dv_stride, k_columns, k_tokens, 4, stream);
  }
  if (e != cudaSuccess || empty) return e;

  const Cleared cleared = sm90 ? to_clear(a, w.scratch) : Cleared{.counters = w.scratch.counters};
  const std::int64_t rows = std::max(index.shape.q_blocks() * kBlock, cleared.rows());
  at_row_lanes(a.head_dim, [&](auto lanes) {
    statistics_kernel<lanes.value>
        <<<static_cast<unsigned>((rows + kDeltaRows - 1) / kDeltaRows), kThreads, 0, stream>>>(
            delta_operands(a.dout, a.dout_stride, a.o, a.o_stride, a.o_fp32, q_tokens, a.head_dim),
            a.delta, a.lse, a.q_heads, index.shape.q_blocks(), w.scratch.statistics, cleared);
  });
  e = cudaGetLastError();
  if (e == cudaSuccess && index.has_columns()) {
    e = gather_columns(index, a.k, a.k_stride, a.v, a.v_stride, a.head_dim, w.scratch.column_k,
                       w.scratch.column_v, stream);
  }
  if (e == cudaSuccess)
    e = sm90 ? backward_sm90(a, w.scratch, stream) : backward_plain(a, w.scratch, stream);
  if (e == cudaSuccess && a.routed != nullptr) e = routed_backward_sm90(a, w.scratch, stream);
  if (e == cudaSuccess && index.has_columns()) {
    e = scatter_column_gradients(index, w.scratch.column_dk, w.scratch.column_dv, a.head_dim, a.dk,
                                 a.dk_stride, a.dv, a.dv_stride, stream);
  }
  return e;
}

cudaError_t attention_delta(const void* dout, std::int64_t dout_stride, const void* o,
                            std::int64_t o_stride, bool o_fp32, float* delta, std::int64_t tokens,
                            int heads, int head_dim, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const std::int64_t warps = (tokens + kDeltaRows - 1) / kDeltaRows * heads;
  at_row_lanes(head_dim, [&](auto lanes) {
    delta_kernel<lanes.value><<<grid(warps * 32), kThreads, 0, stream>>>(
        delta_operands(dout, dout_stride, o, o_stride, o_fp32, tokens, head_dim), delta, heads);
  });
  return cudaGetLastError();
}

cudaError_t attention_merge(float* o, float* lse, const float* o_part, const float* lse_part,
                            std::int64_t tokens, int heads, int head_dim, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  merge_kernel<<<grid(tokens * heads * 32), kThreads, 0, stream>>>(o, lse, o_part, lse_part, tokens,
                                                                   heads, head_dim);
  return cudaGetLastError();
}

}  // namespace ballast::cuda

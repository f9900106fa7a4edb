// XAttention on the GPU (block_launch.hpp): antidiagonal sums of queries against keys, 64 x 64
// strides at a time, and the blocks of keys that hold a share of the mass of every block of
// queries.
#include <algorithm>
#include <cmath>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/product.cuh"
#include "kernels/cuda/index/block_launch.hpp"
#include "kernels/cuda/index/heaviest.cuh"

namespace ballast::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kThreads = kProductThreads, kChooseThreads = 256;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNothing = -INFINITY;
constexpr double kMassUnit = static_cast<double>(1ll << 40);

/// Of 64 strides from `first` on: which tokens of a stride are none, all padding being at the end
/// of a block of 64.
__device__ void count_tokens(const BlockRows& at, int stride, int first, int strides, int* tokens) {
  if (threadIdx.x >= kBlock) return;
  const int token = (first + static_cast<int>(threadIdx.x)) * stride;
  tokens[threadIdx.x] = first + static_cast<int>(threadIdx.x) < strides
                            ? min(max(at.rows[token / kBlock] - token % kBlock, 0), stride)
                            : 0;
}

/// D columns of token `r` of 64 strides from the one at `from` on; padding is zero.
template <int D>
__device__ void load_strides(Tile<D>& tile, const bf16* from, std::int64_t token_stride, int stride,
                             int r, const int* tokens) {
  for (int i = threadIdx.x; i < kBlock * D / 2; i += kThreads) {
    const int row = i / (D / 2), c = 2 * (i % (D / 2));
    const std::uint32_t pair =
        r < tokens[row]
            ? *reinterpret_cast<const std::uint32_t*>(
                  from + (static_cast<std::int64_t>(row) * stride + r) * token_stride + c)
            : 0;
    *reinterpret_cast<std::uint32_t*>(tile.row + row * Tile<D>::kStride + c) = pair;
  }
}

struct Sum {
  float top = kNothing, sum = 0;  ///< sum of e^(score - top)
};

/// One CTA: 64 strides of queries of one head against the strides of as many whole blocks of keys
/// as 64 strides hold, or of one.
template <int D>
__global__ __launch_bounds__(kThreads) void stride_kernel(const Strides x, float* lse) {
  constexpr int kScoreStride = kBlock + 1;
  constexpr int kColumns = product_columns(D);
  __shared__ alignas(16) unsigned char memory[2 * sizeof(Tile<kColumns>)];
  static_assert(sizeof(memory) >= kBlock * kScoreStride * sizeof(float));
  Tile<kColumns>& queries = reinterpret_cast<Tile<kColumns>*>(memory)[0];
  Tile<kColumns>& keys = reinterpret_cast<Tile<kColumns>*>(memory)[1];
  float* scores = reinterpret_cast<float*>(memory);  // when the products are done
  __shared__ int query_tokens[kBlock], key_tokens[kBlock], first[kBlock], own[kBlock];
  const int per_block = x.block / x.stride, group = max(1, kBlock / per_block), head = blockIdx.z;
  const int q_strides = x.queries.blocks * kBlock / x.stride,
            k_strides = x.keys.blocks * kBlock / x.stride;
  const int q_first = blockIdx.y * kBlock, k_first = blockIdx.x * group * per_block,
            k_last = min(k_strides, k_first + group * per_block);
  const int blocks = (k_last - k_first) / per_block;
  const auto number = [&](int g) {
    return x.keys.own[static_cast<std::int64_t>(k_first + g * per_block) * x.stride / kBlock];
  };
  bool seen = false;
  if (threadIdx.x < kBlock && q_first + static_cast<int>(threadIdx.x) < q_strides) {
    const int block =
        static_cast<int>(static_cast<std::int64_t>(q_first + threadIdx.x) * x.stride / kBlock);
    first[threadIdx.x] = x.queries.first[block];
    own[threadIdx.x] = x.queries.own[block];
    for (int g = 0; g < blocks; ++g)
      seen |= number(g) >= first[threadIdx.x] && number(g) <= own[threadIdx.x];
  }
  if (!__syncthreads_or(seen)) return;
  count_tokens(x.queries, x.stride, q_first, q_strides, query_tokens);

  // Adds the scores of row i, pattern block g, among the tile's strides of keys from `base` on.
  const auto add = [&](int i, int g, int base, Sum& to) {
    const int block = number(g);
    if (block < first[i] || block > own[i]) return;
    const int visible = block < own[i] ? per_block : (q_first + i) % per_block + 1;
    const int begin = max(g * per_block, base) - base,
              end = min(g * per_block + visible, base + kBlock) - base;
    float top = to.top;
    for (int j = begin; j < end; ++j) top = fmaxf(top, scores[i * kScoreStride + j]);
    float sum = to.sum > 0 ? to.sum * exp2f((to.top - top) * kLog2E) : 0.0f;
    for (int j = begin; j < end; ++j) sum += exp2f((scores[i * kScoreStride + j] - top) * kLog2E);
    to = {top, sum};
  };
  const auto write = [&](int i, int g, const Sum& s) {
    const int block = number(g);
    if (block >= first[i] && block <= own[i])
      lse[(static_cast<std::int64_t>(head) * q_strides + q_first + i) * x.width + block -
          first[i]] = s.top + kLn2 * log2f(s.sum);
  };

  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4,
            column = 2 * (lane % 4);
  const bf16* q = static_cast<const bf16*>(x.q) +
                  static_cast<std::int64_t>(q_first) * x.stride * x.q_stride + head * D;
  Sum of_row;  // where several tiles make a block
  for (int base = 0; base < k_last - k_first; base += kBlock) {
    const bf16* k = static_cast<const bf16*>(x.k) +
                    static_cast<std::int64_t>(k_first + base) * x.stride * x.k_stride +
                    head / (x.q_heads / x.kv_heads) * D;
    count_tokens(x.keys, x.stride, k_first + base, k_last, key_tokens);
    float acc[8][4] = {};
    for (int r = 0; r < x.stride; ++r) {
      for (int c = 0; c < D; c += kColumns) {
        __syncthreads();
        load_strides(queries, q + c, x.q_stride, x.stride, r, query_tokens);
        load_strides(keys, k + c, x.k_stride, x.stride, x.stride - 1 - r, key_tokens);
        __syncthreads();
        add_product(acc, queries, keys);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        scores[(row + 8 * (e / 2)) * kScoreStride + 8 * j + column + e % 2] = acc[j][e] * x.scale;
    __syncthreads();
    for (int i = threadIdx.x; i < kBlock * blocks; i += kThreads) {
      if (q_first + i % kBlock >= q_strides) continue;
      if (blocks == 1) {
        add(i, 0, base, of_row);
      } else {
        Sum s;
        add(i % kBlock, i / kBlock, base, s);
        write(i % kBlock, i / kBlock, s);
      }
    }
  }
  if (blocks == 1 && threadIdx.x < kBlock && q_first + static_cast<int>(threadIdx.x) < q_strides)
    write(threadIdx.x, 0, of_row);
}

struct ChooseParams {
  const float* lse;
  BlockRows queries;
  int stride, block, width;
  double share;
  std::uint64_t* words;
  std::int64_t* counts;
  ChooseHeads heads;
};

/// One CTA: one block of queries of one head.
__global__ __launch_bounds__(kChooseThreads) void choose_kernel(const ChooseParams p) {
  extern __shared__ std::int64_t mass[];  // [width], then the rows' sums
  __shared__ Tally shared[kSteps];
  __shared__ int equal_before[kChooseThreads / 32];
  const int per_block = p.block / p.stride, halves = p.block / kBlock, head = blockIdx.y,
            lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_block = p.queries.first[blockIdx.x * halves];
  if (p.queries.rows[blockIdx.x * halves] == 0 ||
      (p.heads.chosen != nullptr &&
       p.heads.chosen[static_cast<std::int64_t>(head) * p.heads.blocks + first_block] == 0))
    return;
  const int strides = p.queries.blocks * kBlock / p.stride,
            n = p.queries.own[blockIdx.x * halves] - first_block + 1;
  float* rows = reinterpret_cast<float*>(mass + p.width);
  const float* lse = p.lse + (static_cast<std::int64_t>(head) * strides +
                              static_cast<std::int64_t>(blockIdx.x) * per_block) *
                                 p.width;
  for (int i = warp; i < per_block; i += kChooseThreads / 32) {
    const float* of_row = lse + static_cast<std::int64_t>(i) * p.width;
    float top = kNothing, sum = 0;
    for (int j = lane; j < n; j += 32) top = fmaxf(top, of_row[j]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    for (int j = lane; j < n; j += 32) sum += exp2f((of_row[j] - top) * kLog2E);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) rows[i] = top + kLn2 * log2f(sum);
  }
  __syncthreads();
  // Strides that begin with padding ask for nothing.
  const auto is_token = [&](int i) {
    const int token = i * p.stride;
    return token % kBlock < p.queries.rows[blockIdx.x * halves + token / kBlock];
  };
  for (int j = threadIdx.x; j < n; j += kChooseThreads) {
    std::int64_t sum = 0;
    for (int i = 0; i < per_block; ++i)
      if (is_token(i))
        sum += __double2ll_rn(
            static_cast<double>(
                exp2f((lse[static_cast<std::int64_t>(i) * p.width + j] - rows[i]) * kLog2E)) *
            kMassUnit);
    mass[j] = sum;
  }
  __syncthreads();
  const bool everything = p.share >= 1.0;
  const Whole all = add_list<kChooseThreads>(mass, n, shared);
  const Found found = find<kChooseThreads>(
      mass, n, everything, everything ? ULLONG_MAX : target_of(p.share, all.sum),
      p.heads.most != nullptr ? p.heads.most[head] : INT_MAX, all.bits, shared);

  Tally chosen[1] = {};
  unsigned equal_so_far = 0;
  for (int base = 0; base < p.width; base += kChooseThreads) {
    const int j = base + static_cast<int>(threadIdx.x);
    const unsigned long long value = j < n ? static_cast<unsigned long long>(mass[j]) : 0;
    const unsigned equal = __ballot_sync(~0u, j < n && value == found.threshold);
    __syncthreads();
    if (lane == 0) equal_before[warp] = __popc(equal);
    __syncthreads();
    unsigned rank = equal_so_far + __popc(equal & ((1u << lane) - 1));
    for (int w = 0; w < kChooseThreads / 32; ++w) {
      if (w < warp) rank += equal_before[w];
      equal_so_far += equal_before[w];
    }
    const bool in = j < n && (j == 0 || j == n - 1 || value > found.threshold ||
                              (value == found.threshold && rank < found.ties));
    chosen[0].count += in;
    for (int half = 0; half < halves && j < p.width; ++half) {
      const int block = blockIdx.x * halves + half, tokens = p.queries.rows[block];
      const std::uint64_t all_rows = tokens >= kBlock ? ~0ull : (1ull << tokens) - 1;
      p.words[(static_cast<std::int64_t>(head) * p.queries.blocks + block) * p.width + j] =
          in ? all_rows : 0;
    }
  }
  add_up(chosen, shared);
  if (threadIdx.x == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counts) + head,
              static_cast<unsigned long long>(chosen[0].count));
}

}  // namespace

cudaError_t score_strides(const Strides& x, float* lse, cudaStream_t stream) {
  if (!attention_head_dim(x.head_dim) || x.kv_heads <= 0 || x.q_heads % x.kv_heads != 0 ||
      x.q_stride % 2 != 0 || x.k_stride % 2 != 0 || x.stride < 1 || kBlock % x.stride != 0 ||
      x.block % kBlock != 0 || x.queries.blocks * kBlock % x.block != 0 ||
      x.keys.blocks * kBlock % x.block != 0) {
    return cudaErrorInvalidValue;
  }
  if (x.queries.blocks == 0 || x.keys.blocks == 0) return cudaSuccess;
  const int per_block = x.block / x.stride, chunk = std::max(1, kBlock / per_block) * per_block;
  const auto chunks = [&](std::int64_t tokens, int of) {
    return static_cast<unsigned>((tokens / x.stride + of - 1) / of);
  };
  const dim3 grid(chunks(std::int64_t{x.keys.blocks} * kBlock, chunk),
                  chunks(std::int64_t{x.queries.blocks} * kBlock, kBlock), x.q_heads);
  return at_head_dim(x.head_dim, [&](auto d) {
    stride_kernel<decltype(d)::value><<<grid, kThreads, 0, stream>>>(x, lse);
    return cudaGetLastError();
  });
}

cudaError_t choose_strides(const float* lse, int heads, const BlockRows& queries, int stride,
                           int block, int width, double share, std::uint64_t* words,
                           std::int64_t* counts, const ChooseHeads& of, cudaStream_t stream) {
  if (!(share > 0 && share <= 1)) return cudaErrorInvalidValue;
  if (queries.blocks == 0 || heads == 0) return cudaSuccess;
  const int bytes = width * 8 + block / stride * 4;
  const cudaError_t e = cudaFuncSetAttribute(
      choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(bytes, 48 << 10));
  if (e != cudaSuccess) return e;
  choose_kernel<<<dim3(queries.blocks * kBlock / block, heads), kChooseThreads, bytes, stream>>>(
      {lse, queries, stride, block, width, share, words, counts, of});
  return cudaGetLastError();
}

}  // namespace ballast::cuda

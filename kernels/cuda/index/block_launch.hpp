// Patterns of whole key blocks on the GPU (MoBA, XAttention): pool keys, route queries,
// score strides, and an index from what every row chose.  Plain structs of device pointers and a
// stream.
//
// A pattern block is a multiple of 64 keys, counted from its segment's start; the blocks of all
// segments are numbered one after another.
#pragma once
#include "kernels/cuda/index/device_index.hpp"

namespace ballast::cuda {

/// Where the 64-token blocks of a local axis lie, as PatternRows of
/// kernels/attention/index_scores.hpp.  All arrays on the device.
struct BlockRows {
  int blocks = 0;                       ///< 64-token blocks
  const std::int32_t* first = nullptr;  ///< [blocks] first pattern block of the segment
  const std::int32_t* own = nullptr;    ///< [blocks] pattern block that holds it
  const std::int32_t* rows =
      nullptr;  ///< [blocks] rows that are tokens, the others being padding at the end
};

/// sums [pattern blocks, kv_heads, head_dim] i64, in 2^-32: k (bf16 [64 blocks, kv_heads,
/// head_dim], k_stride elements between tokens) summed over each pattern block's rows here; zeroed
/// by the caller.  Adding is exact, so ranks may add their sums in any order.
cudaError_t pool_keys(const void* k, std::int64_t k_stride, int columns, const BlockRows& keys,
                      std::int64_t* sums, cudaStream_t stream);
/// The mean keys as two bf16 [pattern blocks, columns] whose sum has 16 bits.  block_keys [pattern
/// blocks]: keys of a block on all ranks.
cudaError_t mean_keys(const std::int64_t* sums, const std::int32_t* block_keys, int pattern_blocks,
                      int columns, void* high, void* low, cudaStream_t stream);

struct Routing {
  const void* q = nullptr;  ///< bf16 [tokens, q_heads, head_dim], q_stride elements between tokens
  std::int64_t q_stride = 0, tokens = 0;
  const void* high = nullptr;  ///< of mean_keys(): [pattern blocks, kv_heads, head_dim]
  const void* low = nullptr;
  int q_heads = 0, kv_heads = 0, head_dim = 0;  ///< attention_head_dim()
  BlockRows at;
  int width = 0;  ///< pattern blocks of the longest segment: at most kMostRoutedBlocks
};
/// words [q_heads, blocks, width]: bit i of word (h, b, j) set when row i of block b uses pattern
/// block first[b] + j: the top_k - 1 with the highest q . mean before its own, ties to the lower
/// block, and its own.  The scale does not matter to the order.
cudaError_t route_queries(const Routing& x, int top_k, std::uint64_t* words, cudaStream_t stream);

/// Coverage at the budgets of a BudgetPolicy.
struct CoverageCurve {
  float scale = 0;                       ///< of q . mean
  const std::int64_t* budget = nullptr;  ///< [budgets] ascending, from 1
  int budgets = 0;
  const std::uint32_t* weights = nullptr;  ///< logit_weights()
  std::int64_t* curve = nullptr;           ///< [budgets]
  int told = kBlock;                       ///< queries of every 64: the first, a multiple of 16
};
/// curve[i] += the softmax mass of a query's own block and of the budget[i] - 1 highest scores
/// before it, in kCoverageUnit, summed over heads and the queries told of.  As route_coverage() of
/// kernels/attention/index_scores.hpp, and its equal bit for bit where the scores are.
cudaError_t route_coverage(const Routing& x, const CoverageCurve& c, cudaStream_t stream);

/// XAttention: queries against the keys of one shard, `stride` tokens at a time.
struct Strides {
  const void* q =
      nullptr;  ///< bf16 [64 blocks, q_heads, head_dim], q_stride elements between tokens
  const void* k = nullptr;
  std::int64_t q_stride = 0, k_stride = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;  ///< attention_head_dim()
  float scale = 0;                              ///< of a sum over an antidiagonal
  BlockRows queries, keys;
  int stride = 0, block = 0;  ///< tokens: stride divides 64, pattern blocks are multiples of 64
                              ///< that lie whole on the queries' and on the keys' axis
  int width = 0;              ///< pattern blocks of the longest segment
};
/// lse [q_heads, strides of queries, width]: of every stride of queries i and every pattern block
/// of the shard's keys that it sees, at the block's number in its segment, log sum_j exp(scale
/// sum_r q[i stride + r] . k[j stride + stride - 1 - r]) over the block's strides j not behind i.
/// Padding counts as zeros.  What no stride sees stays unwritten.
cudaError_t score_strides(const Strides& x, float* lse, cudaStream_t stream);
/// Heads that choose_strides() is for; words of the others stay unwritten.
struct ChooseHeads {
  const std::uint8_t* chosen = nullptr;  ///< [heads, blocks] 1 at a segment's first pattern block;
                                         ///< null: all
  int blocks = 0;
  const std::int32_t* most = nullptr;  ///< [heads] the heaviest so many at most; null: no limit
};
/// words as in route_queries(), from lse complete: of every pattern block of queries the fewest
/// blocks of keys whose softmax mass, summed over its strides, reaches `share` of it, ties to the
/// lower block, the crossing one included, its own and the first always.  counts [heads] += blocks
/// chosen.
cudaError_t choose_strides(const float* lse, int heads, const BlockRows& queries, int stride,
                           int block, int width, double share, std::uint64_t* words,
                           std::int64_t* counts, const ChooseHeads& of, cudaStream_t stream);

/// What every 64 queries use, in words as above, against one shard's keys.
struct BlockChoice {
  const std::uint64_t* words = nullptr;
  int heads = 0, width = 0;
  BlockRows queries, keys;
  const std::int32_t* key_begin = nullptr;  ///< [q_tokens] visible keys of the shard
  const std::int32_t* key_end = nullptr;
  std::int64_t q_tokens = 0;
};
/// offset [heads * blocks + 1]: where the runs of each list begin; *pairs += (query block, key
/// block) pairs.  These are the sizes that the index needs: runs and row masks offset[last],
/// block_pairs *pairs.
cudaError_t count_block_runs(const BlockChoice& x, std::int64_t* offset, std::uint64_t* pairs,
                             cudaStream_t stream);
/// Runs and row masks of `index`, with its run_offset filled; derive_index() comes after.
cudaError_t fill_block_runs(const DeviceIndex& index, const BlockChoice& x, cudaStream_t stream);

}  // namespace ballast::cuda

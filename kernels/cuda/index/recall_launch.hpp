// Recall of an index on the GPU (kernels/attention/recall_scores.hpp): sampled queries, what the
// index computes of them, and their softmax over it.  Plain structs of device pointers and a
// stream.
#pragma once
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/routed_index.hpp"

namespace ballast::cuda {

/// The sampled queries, by segment, then position.  All arrays on the device.
struct RecallRows {
  int rows = 0;
  const std::int32_t* local = nullptr;  ///< [rows] row here, -1 on other ranks
  /// [rows + 1] first 64-bit word of a row, of one head: a word for each 64 keys of its segment.
  const std::int32_t* first_word = nullptr;
  const std::int32_t* base = nullptr;  ///< [rows] first block of its segment on the key axis
  const std::int32_t* own = nullptr;   ///< [rows] block of the segment that it lies on
  const Interval* visible = nullptr;   ///< [rows] this rank's keys that it sees
};

/// queries [rows, width] f32 = rows of q (bf16, `stride` elements apart) that are here, others
/// zero.
cudaError_t recall_queries(const RecallRows& x, const void* q, std::int64_t stride, int width,
                           float* queries, cudaStream_t stream);

/// words [heads, words_a_head] |= a bit for each key that one call computes for rows that are here.
/// key_block [k_blocks]: block of the key axis of each block of the call's keys.  `routed` may be
/// null.
cudaError_t recall_computed(const RecallRows& x, const DeviceIndex& index,
                            const RoutedIndex* routed, const std::int32_t* key_block, int heads,
                            std::int64_t words_a_head, std::uint64_t* words, cudaStream_t stream);

/// Scores of the rows' queries against this rank's keys.
struct RecallScan {
  const float* queries = nullptr;  ///< [rows, q_heads, head_dim], of all ranks
  const void* k = nullptr;         ///< bf16 [k_tokens, kv_heads, head_dim]
  std::int64_t k_stride = 0, k_tokens = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;  ///< head_dim: even, at most 256
  float scale = 0;
};
/// maximum [q_heads, rows]: raised to the highest score of a visible key; begins as bytes of
/// kBelowScores (kernels/cuda/index/slash_launch.hpp).
cudaError_t recall_maximum(const RecallRows& x, const RecallScan& scan, float* maximum,
                           cudaStream_t stream);
/// sums [q_heads, rows, 5] += exp(score - maximum) of all visible keys, then of the computed ones
/// by RecallPart, in units of 2^-40.  Integers: adding has no order.  key_block as above, of this
/// rank's keys; words [index_heads, words_a_head].
cudaError_t recall_sums(const RecallRows& x, const RecallScan& scan, const float* maximum,
                        const std::int32_t* key_block, const std::uint64_t* words, int index_heads,
                        std::int64_t words_a_head, std::int64_t* sums, cudaStream_t stream);

}  // namespace ballast::cuda

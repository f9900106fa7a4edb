// Indexes built on the GPU, brought back for comparison.
#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"

namespace ballast::test {

template <class T>
std::vector<T> array(const T* device, std::int64_t n) {
  std::vector<T> out(static_cast<std::size_t>(n));
  if (n > 0) {
    EXPECT_EQ(cudaMemcpy(out.data(), device, out.size() * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  return out;
}

/// The arrays of an index that lives on the GPU as a host value.
inline PatternArrays download(const cuda::DeviceIndex& x) {
  const std::int64_t lists = x.shape.index_heads * x.shape.q_blocks();
  PatternArrays out;
  out.k_tokens = x.shape.k_tokens, out.index_heads = x.shape.index_heads,
  out.segments = x.shape.segments;
  const auto begin = array(x.key_begin, x.shape.q_tokens), end = array(x.key_end, x.shape.q_tokens);
  for (std::size_t i = 0; i < begin.size(); ++i) out.visible.add(1, begin[i], end[i], 0);
  out.run_offset = array(x.run_offset, lists + 1);
  EXPECT_LE(out.run_offset.back(), x.shape.runs);
  out.runs = array(x.runs, out.run_offset.back());
  if (x.shape.row_masks > 0) out.row_masks = array(x.row_masks, out.run_offset.back());
  if (!x.has_columns()) return out;
  out.column_offset =
      array(x.column_offset, std::int64_t{x.shape.index_heads} * x.shape.segments + 1);
  EXPECT_LE(out.column_offset.back(), x.shape.columns);
  out.columns = array(x.columns, out.column_offset.back());
  out.block_segment = array(x.block_segment, x.shape.q_blocks());
  // On the device cover words lie at a fixed distance; packed they must be the host's.
  const auto at = array(x.cover_offset, lists + 1);
  const auto words = array(x.cover, x.shape.cover_words);
  out.cover_offset.push_back(0);
  for (std::int64_t l = 0; l < lists; ++l) {
    const std::int64_t list =
        l / x.shape.q_blocks() * out.segments + out.block_segment[l % x.shape.q_blocks()];
    const std::int64_t n = (out.column_offset[list + 1] - out.column_offset[list] + 63) / 64;
    out.cover.insert(out.cover.end(), words.begin() + at[l], words.begin() + at[l] + n);
    out.cover_offset.push_back(static_cast<std::int64_t>(out.cover.size()));
  }
  return out;
}
inline PatternArrays download(const AttentionWork& built) {
  return download(dynamic_cast<const cuda::PatternTwin&>(*built.device()).index());
}

}  // namespace ballast::test

// Q, K and V that patterns are chosen from, and the pairs that are chosen, for tests.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/parallel/context/naive_attention.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {

using testing::NaiveAttention;
using testing::SharedDraw;

inline constexpr std::int64_t kHeads = 4, kKvHeads = 2, kDim = 8;

struct LayoutCase {
  LayoutKind kind;
  std::int64_t stripe;
};
inline const LayoutCase kLayouts[] = {
    {LayoutKind::zigzag, 1}, {LayoutKind::striped, 64}, {LayoutKind::shuffled, 128}};

/// A table whose layer 3 has a head of every pattern that is not dense.
inline std::shared_ptr<HeadTable> mixed_heads() {
  auto heads = std::make_shared<HeadTable>(4, static_cast<int>(kHeads));
  heads->at(3, 0) = {HeadPattern::a_shape, 128, 192};
  heads->at(3, 1) = {HeadPattern::vertical_slash, 0, 0, 20, 2};
  heads->at(3, 2) = {HeadPattern::block_sparse, 0, 0, 0, 0, 2};
  heads->at(3, 3) = {HeadPattern::block_sparse, 0, 0, 0, 0, 4};
  return heads;
}

inline AttentionOptions options_of(const std::string& pattern) {
  AttentionOptions o;
  o.pattern = parse_or_fail<PatternKind>(pattern, "pattern");
  o.vertical_share = 0.3;
  o.slash_share = 0.5;
  o.last_q = 48;
  o.moba_block = 128;
  o.moba_top_k = 3;
  o.xattention_block = 128;
  o.xattention_threshold = 0.6;
  o.heads = mixed_heads();
  o.flex_threshold = 0.24;  // some heads of the data below go by blocks, some do not
  o.flex_share = 0.5;
  return o;
}

/// Q, K, V of a packed micro-batch (padding holds numbers too) with some heavy keys, so that
/// attention is not nearly uniform.
struct Data {
  MicroBatch batch;
  NaiveAttention all;  ///< rows by packed position

  Data(const std::vector<std::int64_t>& lengths, const AttentionOptions& options,
       SharedDraw& draw) {
    for (std::size_t s = 0; s < lengths.size(); ++s)
      batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
    batch.align = options.align();
    all.heads = kHeads;
    all.kv_heads = kKvHeads;
    all.dim = kDim;
    all.scale = 0.5;
    const std::int64_t n = batch.axis_tokens();
    all.tokens = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, n, 1), 0);
    all.q = draw.normals(n * kHeads * kDim);
    all.k = draw.normals(n * kKvHeads * kDim);
    all.v = draw.normals(n * kKvHeads * kDim);
    all.d_o = draw.normals(n * kHeads * kDim);
    for (std::int64_t i = 0; i < n; ++i)
      if (draw.integer(0, 30) == 0)
        for (std::int64_t c = 0; c < kKvHeads * kDim; ++c) all.k[i * kKvHeads * kDim + c] *= 3;
    for (double* x : {all.q.data(), all.k.data()})
      for (std::int64_t i = 0; i < n * kKvHeads * kDim; ++i) x[i] = static_cast<float>(x[i]);
  }

  std::vector<std::int64_t> packed(const SequenceLayout& layout, int rank) const {
    std::vector<std::int64_t> list;
    for (std::int64_t i = 0; i < layout.local_tokens(rank); ++i)
      list.push_back(layout.global(rank, i));
    return list;
  }
  Tensor rows(const std::vector<double>& from, std::int64_t heads,
              const std::vector<std::int64_t>& at, DType type) const {
    Tensor t = Tensor::empty({static_cast<std::int64_t>(at.size()), heads, kDim}, type);
    dispatch_float(type, [&](auto x) {
      for (std::size_t i = 0; i < at.size(); ++i)
        for (std::int64_t c = 0; c < heads * kDim; ++c)
          t.data<decltype(x)>()[static_cast<std::int64_t>(i) * heads * kDim + c] =
              static_cast<decltype(x)>(from[at[i] * heads * kDim + c]);
    });
    return t;
  }
  AttentionInputs inputs(const std::vector<std::int64_t>& at, DType type) const {
    AttentionInputs in;
    in.layer = 3;
    in.q = rows(all.q, kHeads, at, type);
    in.k = rows(all.k, kKvHeads, at, type);
    in.v = rows(all.v, kKvHeads, at, type);
    in.scale = all.scale;
    return in;
  }
};

using Mask = std::vector<char>;  ///< [head, query, key] over packed positions

/// Pairs of this rank's queries, into a mask over all packed positions.
inline void mark(const IndexSource& source, const std::vector<AttentionWork>& shards,
                 const Data& data, const SequenceLayout& layout, Mask& mask) {
  const std::int64_t n = layout.tokens();
  const auto queries = data.packed(layout, source.axes().rank);
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const PatternArrays& x = shards[s].host()->arrays();
    ASSERT_EQ(problems(x), "");
    const auto keys = data.packed(layout, static_cast<int>(s));
    for (std::int64_t h = 0; h < kHeads; ++h)
      for (std::size_t i = 0; i < queries.size(); ++i)
        for (std::int64_t j = 0; j < static_cast<std::int64_t>(keys.size()); ++j)
          if (computed(x, static_cast<int>(h), static_cast<std::int64_t>(i), j))
            mask[(h * n + queries[i]) * n + keys[j]] = 1;
  }
}

/// The choice of one rank alone.
inline Mask alone(const Data& data, const AttentionOptions& options) {
  const std::int64_t n = data.batch.axis_tokens();
  const SequenceLayout layout(LayoutKind::contiguous, n, 1, 64, options.align());
  const auto source = pattern_source(Communicator(), attention_axes(data.batch, layout, 0), options,
                                     nullptr, nullptr);
  Mask mask(static_cast<std::size_t>(kHeads * n * n), 0);
  mark(*source, source->shards(data.inputs(data.packed(layout, 0), DType::f32)), data, layout,
       mask);
  return mask;
}

inline double score(const NaiveAttention& all, std::int64_t h, std::int64_t i, std::int64_t j) {
  return all.scale * all.dot(all.q, i * kHeads + h, all.k, j * kKvHeads + h / (kHeads / kKvHeads));
}

/// Mass of every column and block diagonal of a segment under its last queries, by definition.
inline std::pair<std::vector<double>, std::vector<double>> observed_mass(
    const Data& data, const AttentionOptions& options, std::int64_t h, int s) {
  const std::int64_t first = PackedAxis(data.batch).offset[s],
                     count = data.batch.segments[s].tokens();
  std::vector<double> column(static_cast<std::size_t>(count), 0),
      slash(static_cast<std::size_t>((count + 63) / 64), 0);
  for (std::int64_t i = count - options.last_q; i < count; ++i) {
    double sum = 0;
    for (std::int64_t j = 0; j <= i; ++j) sum += std::exp(score(data.all, h, first + i, first + j));
    for (std::int64_t j = 0; j <= i; ++j) {
      const double p = std::exp(score(data.all, h, first + i, first + j)) / sum;
      column[j] += p;
      slash[i / 64 - j / 64] += p;
    }
  }
  return {column, slash};
}

}  // namespace ballast

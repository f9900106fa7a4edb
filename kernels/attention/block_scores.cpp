#include "kernels/attention/block_scores.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/plan/attention/pattern_selection.hpp"
#include "kernels/attention/index_scores.hpp"
#include "kernels/ops/backend.hpp"

namespace ballast {
namespace {

class HostBlockScores final : public BlockScores {
 public:
  HostBlockScores(const AttentionAxes& axes, const KeyAxis& axis, std::int64_t block_tokens)
      : axes_(axes),
        axis_(axis),
        blocks_(axis, block_tokens),
        queries_(blocks_.rows(axis, axes.queries)) {}

  Tensor pool(const Tensor& k) const override {
    Tensor sums = empty({blocks_.count(), k.size(1), k.size(2)}, DType::i64);
    pool_keys(k, blocks_.rows(axis_, axes_.keys[axes_.rank]), sums);
    return sums;
  }

  Tensor means(const Tensor& sums) const override {
    Tensor means = empty(sums.shape(), DType::f32);
    const std::vector<std::int32_t> keys = blocks_.keys(axis_);
    const std::int64_t width = sums.size(1) * sums.size(2);
    for (std::int64_t j = 0; j < blocks_.count(); ++j)
      for (std::int64_t c = j * width; c < (j + 1) * width; ++c)
        means.data<float>()[c] =
            keys[j] > 0 ? static_cast<float>(static_cast<double>(sums.data<std::int64_t>()[c]) /
                                             4294967296.0 / static_cast<double>(keys[j]))
                        : 0.0f;
    return means;
  }

  Tensor coverage(const Tensor& q, const Tensor& means, double scale,
                  const std::vector<std::int64_t>& budgets, int told) const override {
    Tensor mass = empty({static_cast<std::int64_t>(budgets.size())}, DType::i64);
    route_coverage(q, means, scale, queries_, budgets, told, mass);
    return mass;
  }

  Tensor route(const Tensor& q, const Tensor& means, double scale,
               std::int64_t top_k) const override {
    Tensor words = empty({q.size(1), blocks_of_64(), blocks_.widest()}, DType::i64);
    route_queries(q, means, scale, queries_, top_k, words);
    return words;
  }

  /// [2, Hq, T / stride, pattern blocks]: maximum and sum of stride_scores().
  Tensor strides(const Tensor& q, int stride) const override {
    Tensor strides = empty({2, q.size(1), q.size(0) / stride, blocks_.count()}, DType::f32);
    std::fill_n(strides.data<float>(), strides.numel() / 2,
                -std::numeric_limits<float>::infinity());
    return strides;
  }

  void score(const Tensor& q, const Tensor& keys, int shard, double scale, int stride, int block,
             Tensor& strides) const override {
    Tensor maximum = part(strides, 0), sum = part(strides, 1);
    stride_scores(q, keys, scale, stride, block, queries_, blocks_.rows(axis_, axes_.keys[shard]),
                  maximum, sum);
  }

  Tensor pooled(const Tensor& q, const Tensor& means, double scale) const override {
    Tensor all = strides(q, static_cast<int>(kBlock));
    Tensor maximum = part(all, 0), sum = part(all, 1);
    pooled_scores(q, means, scale, queries_, maximum);
    std::fill_n(sum.data<float>(), sum.numel(), 1.0f);
    return all;
  }

  Tensor choose(const Tensor& strides, int stride, int block, double share, Tensor& counts,
                const BlockHeads& which) const override {
    const std::int64_t heads = strides.size(1), rows = strides.size(2) * stride / block,
                       width = blocks_.count(), halves = block / kBlock;
    Tensor mass = empty({heads, rows, width}, DType::i64);
    stride_mass(part(strides, 0), part(strides, 1), block / stride, mass);
    Tensor words = Tensor::zeros({heads, blocks_of_64(), blocks_.widest()}, DType::i64);
    counts = Tensor::zeros({heads}, DType::i64);
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t b = 0; b < rows; ++b) {
        if (which.chosen.defined() &&
            which.chosen.data<std::uint8_t>()[h * width + queries_.first[b * halves]] == 0)
          continue;
        const std::vector<std::int64_t> chosen =
            choose_row(mass.data<std::int64_t>() + (h * rows + b) * width, b * halves, share,
                       which.most.empty() ? 0 : which.most[static_cast<std::size_t>(h)]);
        counts.data<std::int64_t>()[h] += static_cast<std::int64_t>(chosen.size());
        for (std::int64_t half = b * halves; half < (b + 1) * halves; ++half)
          for (const std::int64_t j : chosen)
            words.data<std::int64_t>()[(h * words.size(1) + half) * words.size(2) + j] = -1;
      }
    return words;
  }

  std::vector<AttentionWork> build(const Tensor& words, int q_heads, int,
                                   const Routed&) const override {
    // Padding sees nothing, so a block that all tokens of a word use needs no mask.
    const auto word = [&](int h, std::size_t b, std::int64_t j) {
      const auto bits = static_cast<std::uint64_t>(
          words.data<std::int64_t>()[(h * words.size(1) + static_cast<std::int64_t>(b)) *
                                         words.size(2) +
                                     j]);
      const std::uint64_t tokens = queries_.rows[b] == kBlock
                                       ? ~std::uint64_t{0}
                                       : (std::uint64_t{1} << queries_.rows[b]) - 1;
      return bits == tokens ? ~std::uint64_t{0} : bits;
    };
    const AttentionPattern whole =
        block_pattern(axes_.queries, axis_, q_heads, blocks_.block_tokens, word);
    const std::vector<AttentionPattern> calls = split_keys(whole, axis_, axes_.calls());
    return {calls.begin(), calls.end()};
  }

 private:
  static Tensor empty(Shape shape, DType type) {
    return Tensor::empty(std::move(shape), type, host_device(), MemoryCategory::workspace);
  }
  static Tensor part(const Tensor& strides, int which) {
    return strides.rows(which, which + 1)
        .reshape({strides.size(1), strides.size(2), strides.size(3)});
  }
  std::int64_t blocks_of_64() const { return static_cast<std::int64_t>(queries_.own.size()); }
  /// The blocks that the block of queries at `block` of 64 uses, counted from its segment's first,
  /// ascending; mass [pattern blocks].
  std::vector<std::int64_t> choose_row(const std::int64_t* mass, std::int64_t block, double share,
                                       std::int64_t most) const {
    const std::int32_t own = queries_.own[block], first = queries_.first[block];
    std::vector<MassItem> items;
    std::int64_t total = 0;
    for (std::int64_t j = first; j <= own; ++j) {
      items.push_back({j - first, mass[j]});
      total += mass[j];
    }
    std::vector<std::int64_t> chosen = top_share(std::move(items), total, share, most).chosen;
    if (chosen.empty() || chosen.front() != 0) chosen.insert(chosen.begin(), 0);
    if (chosen.back() != own - first) chosen.push_back(own - first);
    return chosen;
  }

  const AttentionAxes& axes_;
  const KeyAxis& axis_;
  const PatternBlocks blocks_;
  const PatternRows queries_;
};

}  // namespace

std::unique_ptr<BlockScores> block_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                          std::int64_t block_tokens, const Tensor& q) {
  BALLAST_ON_CUDA(q, block_scores(axes, axis, block_tokens));
  return std::make_unique<HostBlockScores>(axes, axis, block_tokens);
}

}  // namespace ballast

#include <algorithm>

#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/context/axis_range.hpp"
#include "parallel/pattern/pattern_sources.hpp"

namespace ballast {

PatternBlocks::PatternBlocks(const KeyAxis& axis, std::int64_t tokens)
    : block_tokens(tokens), first{0} {
  for (int s = 0; s < axis.segments(); ++s)
    first.push_back(first.back() + (axis.offset[s + 1] - axis.offset[s] + tokens - 1) / tokens);
}

std::int64_t PatternBlocks::widest() const {
  std::int64_t most = 1;
  for (std::size_t s = 0; s + 1 < first.size(); ++s) most = std::max(most, first[s + 1] - first[s]);
  return most;
}

PatternRows PatternBlocks::rows(const KeyAxis& axis, const std::vector<AxisToken>& tokens) const {
  PatternRows at;
  const auto blocks = query_blocks(tokens, axis);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    at.first.push_back(static_cast<std::int32_t>(first[blocks[b].segment]));
    at.own.push_back(at.first.back() +
                     static_cast<std::int32_t>(blocks[b].block * kBlock / block_tokens));
    std::int32_t rows = 0;
    while (rows < kBlock && b * kBlock + rows < tokens.size() &&
           tokens[b * kBlock + rows].segment >= 0)
      ++rows;
    at.rows.push_back(rows);
  }
  return at;
}

PatternSource::Built MobaSource::build(const AttentionInputs& in) {
#ifdef BALLAST_HAVE_CUDA
  if (in.q.space() == Space::cuda) return build_on_gpu(in);
#endif
  const PatternBlocks blocks(axis_, options_.moba_block);
  const Tensor q = index_operand(in.q), k = index_operand(in.k);
  const std::int64_t heads = q.size(1), kv_heads = k.size(1), head_dim = q.size(2);
  Tensor sums = Tensor::empty({blocks.count(), kv_heads, head_dim}, DType::i64,
                              device_of(k.space()), MemoryCategory::workspace);
  pool_keys(k, blocks.rows(axis_, axes().keys[axes().rank]), sums);
  join(sums, Reduction::sum);
  Tensor pooled = Tensor::empty(sums.shape(), DType::f32, host_device(), MemoryCategory::workspace);
  const Tensor all = sums.to(host_device());
  for (int s = 0; s < axis_.segments(); ++s)
    for (std::int64_t j = blocks.first[s]; j < blocks.first[s + 1]; ++j) {
      const std::int64_t keys =
                             std::min(blocks.block_tokens,
                                      axis_.count[s] - (j - blocks.first[s]) * blocks.block_tokens),
                         width = kv_heads * head_dim;
      for (std::int64_t c = j * width; c < (j + 1) * width; ++c)
        pooled.data<float>()[c] =
            keys > 0 ? static_cast<float>(static_cast<double>(all.data<std::int64_t>()[c]) /
                                          4294967296.0 / static_cast<double>(keys))
                     : 0.0f;
    }
  pooled = pooled.to(device_of(k.space()));

  const PatternRows at = blocks.rows(axis_, axes().queries);
  std::int64_t budget = options_.moba_top_k;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    Tensor coverage = Tensor::empty({static_cast<std::int64_t>(candidates().size())}, DType::i64,
                                    device_of(k.space()), MemoryCategory::workspace);
    route_coverage(q, pooled, in.scale, at, candidates(), coverage);
    join(coverage, Reduction::sum);
    budget = choose(in.layer, coverage, heads);
  }

  Tensor rows = Tensor::empty({heads, static_cast<std::int64_t>(at.own.size()), blocks.widest()},
                              DType::i64, device_of(q.space()), MemoryCategory::workspace);
  route_queries(q, pooled, in.scale, at, budget, rows);
  rows = rows.to(host_device());
  // Padding sees nothing, so a block that all tokens of a word use needs no mask.
  const auto word = [&](int h, std::size_t b, std::int64_t j) {
    const auto bits = static_cast<std::uint64_t>(
        rows.data<std::int64_t>()[(h * rows.size(1) + static_cast<std::int64_t>(b)) * rows.size(2) +
                                  j]);
    const std::uint64_t tokens =
        at.rows[b] == kBlock ? ~std::uint64_t{0} : (std::uint64_t{1} << at.rows[b]) - 1;
    return bits == tokens ? ~std::uint64_t{0} : bits;
  };
  Built built;
  built.index =
      block_pattern(axes().queries, axis_, static_cast<int>(heads), blocks.block_tokens, word);
  built.budgets.assign(static_cast<std::size_t>(heads), {static_cast<double>(budget), 0});
  return built;
}

}  // namespace ballast

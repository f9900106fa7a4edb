#include "kernels/cuda/index/block_builder.hpp"

#include <algorithm>
#include <optional>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/segment_limits.hpp"
#include "kernels/cuda/index/block_launch.hpp"
#include "kernels/cuda/index/heads_launch.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/index/routed_builder.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/index/uploads.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/cuda/runtime/head_dims.hpp"

namespace ballast::cuda {
namespace {

struct RowsOnGpu {
  Tensor first, own, rows;
  RowsOnGpu() = default;
  RowsOnGpu(const PatternRows& at, Device& device)
      : first(upload(at.first, device)),
        own(upload(at.own, device)),
        rows(upload(at.rows, device)) {}
  BlockRows view() const {
    return {static_cast<int>(own.numel()), first.data<std::int32_t>(), own.data<std::int32_t>(),
            rows.data<std::int32_t>()};
  }
};

}  // namespace

struct BlockBuilder::Arrays {
  Device* device = nullptr;
  int rank = 0, widest = 0, pattern_blocks = 0;
  std::int64_t q_tokens = 0;
  RowsOnGpu queries;
  Tensor block_keys, logit_weights;
  struct Call {
    std::int64_t tokens = 0;
    RowsOnGpu rows;
    Tensor key_begin, key_end;
  };
  std::vector<Call> calls;
  std::vector<std::int64_t> shard_tokens;  ///< [ranks]
  std::vector<RowsOnGpu> shard_rows;
  const AttentionAxes* axes = nullptr;
  const KeyAxis* axis = nullptr;
  std::int64_t block_tokens = 0;
  std::optional<RoutedBuilder> routed_builder;  ///< once routed words are built from

  BlockChoice choice(const Call& call, const Tensor& words, int q_heads) const;
  /// Routed lists, where they serve.
  std::optional<AttentionWork> build_routed(const Tensor& words, int q_heads, int kv_heads,
                                            const Routed& routed);
  void check_keys(const Tensor& k, int shard) const {
    require(k.size(0) == shard_tokens[shard] && (k.size(0) == 0 || k.strides()[1] == k.size(2)),
            "sparse attention: k {} does not fit the {} keys of shard {}", to_string(k.shape()),
            shard_tokens[shard], shard);
  }

  /// As routing needs them to be.
  void check_routes() const;
  Routing routing(const Tensor& q, const Tensor& means) const;
};

BlockBuilder::BlockBuilder(const AttentionAxes& axes, const KeyAxis& axis,
                           std::int64_t block_tokens, Device& device)
    : arrays_(std::make_shared<Arrays>()) {
  const PatternBlocks blocks(axis, block_tokens);
  Arrays& a = *arrays_;
  a.device = &device;
  a.axes = &axes;
  a.axis = &axis;
  a.block_tokens = block_tokens;
  a.rank = axes.rank;
  a.widest = static_cast<int>(blocks.widest());
  a.pattern_blocks = static_cast<int>(blocks.count());
  a.q_tokens = axes.q_tokens();
  a.queries = RowsOnGpu(blocks.rows(axis, axes.queries), device);
  a.block_keys = upload(blocks.keys(axis), device);
  a.logit_weights = upload({logit_weights().begin(), logit_weights().end()}, device);
  for (std::size_t k = 0; k < axes.keys.size(); ++k) {
    a.shard_tokens.push_back(token_count(axes.keys[k]));
    a.shard_rows.emplace_back(blocks.rows(axis, axes.keys[k]), device);
  }
  const std::vector<VisibleKeys> seen =
      split_visible(visible_keys(axes.queries, axis), axis, axes.calls());
  for (std::size_t k = 0; k < seen.size(); ++k) {
    Arrays::Call& call = a.calls.emplace_back();
    call.tokens = token_count(axes.calls()[k]);
    call.rows = RowsOnGpu(blocks.rows(axis, axes.calls()[k]), device);
    upload_rows(seen[k], device, call.key_begin, call.key_end);
  }
}

BlockBuilder::~BlockBuilder() = default;

Tensor BlockBuilder::pool(const Tensor& k) const {
  const Arrays& a = *arrays_;
  const int columns = static_cast<int>(k.size(1) * k.size(2));
  a.check_keys(k, a.rank);
  Tensor sums =
      Tensor::zeros({a.pattern_blocks, columns}, DType::i64, *a.device, MemoryCategory::workspace);
  check(pool_keys(k.raw(), k.strides()[0], columns, a.shard_rows[a.rank].view(),
                  sums.data<std::int64_t>(), stream()),
        "pooling of keys");
  return sums;
}

Tensor BlockBuilder::means(const Tensor& sums) const {
  const Arrays& a = *arrays_;
  Tensor means = workspace({2, sums.size(0), sums.size(1)}, DType::bf16, *a.device);
  check(mean_keys(sums.data<std::int64_t>(), a.block_keys.data<std::int32_t>(), a.pattern_blocks,
                  static_cast<int>(sums.size(1)), means.rows(0, 1).raw(), means.rows(1, 2).raw(),
                  stream()),
        "means of keys");
  return means;
}

Routing BlockBuilder::Arrays::routing(const Tensor& q, const Tensor& means) const {
  require(attention_head_dim(static_cast<int>(q.size(2))),
          "attention on CUDA needs a head dim of 64, 96, 128 or 256, got {}", q.size(2));
  Routing x;
  x.q = q.raw();
  x.q_stride = q.size(0) > 0 ? q.strides()[0] : 0;
  x.tokens = q.size(0);
  x.high = means.rows(0, 1).raw();
  x.low = means.rows(1, 2).raw();
  x.q_heads = static_cast<int>(q.size(1));
  x.head_dim = static_cast<int>(q.size(2));
  x.kv_heads = static_cast<int>(means.size(2)) / x.head_dim;
  x.at = queries.view();
  x.width = widest;
  return x;
}

void BlockBuilder::Arrays::check_routes() const {
  require(widest <= kMostRoutedBlocks,
          "moba on CUDA: a segment of {} blocks, at most {}; use a larger attention.moba_block",
          widest, kMostRoutedBlocks);
}

Tensor BlockBuilder::coverage(const Tensor& q, const Tensor& means, double scale,
                              const std::vector<std::int64_t>& budgets, int told) const {
  const Arrays& a = *arrays_;
  a.check_routes();
  const Routing x = a.routing(q, means);
  const auto count = static_cast<std::int64_t>(budgets.size());
  const Tensor budget =
      Tensor::wrap(const_cast<std::int64_t*>(budgets.data()), {count}, DType::i64).to(*a.device);
  Tensor curve = Tensor::zeros({count}, DType::i64, *a.device, MemoryCategory::workspace);
  const CoverageCurve c{
      static_cast<float>(scale),
      budget.data<std::int64_t>(),
      static_cast<int>(count),
      reinterpret_cast<const std::uint32_t*>(a.logit_weights.data<std::int32_t>()),
      curve.data<std::int64_t>(),
      told};
  check(route_coverage(x, c, stream()), "coverage of the budgets");
  return curve;
}

Tensor BlockBuilder::route(const Tensor& q, const Tensor& means, double, std::int64_t top_k) const {
  const Arrays& a = *arrays_;
  a.check_routes();
  const Routing x = a.routing(q, means);
  Tensor words = workspace({q.size(1), x.at.blocks, a.widest}, DType::i64, *a.device);
  check(route_queries(x, static_cast<int>(std::min<std::int64_t>(top_k, 1 << 30)), words_of(words),
                      stream()),
        "routing of queries");
  return words;
}

Tensor BlockBuilder::strides(const Tensor& q, int stride) const {
  return workspace({q.size(1), q.size(0) / stride, arrays_->widest}, DType::f32, *arrays_->device);
}

void BlockBuilder::score(const Tensor& q, const Tensor& keys, int shard, double scale, int stride,
                         int block, Tensor& lse) const {
  const Arrays& a = *arrays_;
  require(attention_head_dim(static_cast<int>(q.size(2))),
          "attention on CUDA needs a head dim of 64, 96, 128 or 256, got {}", q.size(2));
  a.check_keys(keys, shard);
  if (q.size(0) == 0 || keys.size(0) == 0) return;
  Strides x;
  x.q = q.raw();
  x.k = keys.raw();
  x.q_stride = q.strides()[0];
  x.k_stride = keys.strides()[0];
  x.q_heads = static_cast<int>(q.size(1));
  x.kv_heads = static_cast<int>(keys.size(1));
  x.head_dim = static_cast<int>(q.size(2));
  x.scale = static_cast<float>(scale / stride);
  x.queries = a.queries.view();
  x.keys = a.shard_rows[shard].view();
  x.stride = stride;
  x.block = block;
  x.width = a.widest;
  check(score_strides(x, lse.data<float>(), stream()), "antidiagonal scores");
}

Tensor BlockBuilder::pooled(const Tensor& q, const Tensor& means, double scale) const {
  const Routing x = arrays_->routing(q, means);
  Tensor scores = strides(q, static_cast<int>(kBlock));
  check(score_pooled(x, static_cast<float>(scale), scores.data<float>(), stream()),
        "scores of pooled queries");
  return scores;
}

Tensor BlockBuilder::choose(const Tensor& lse, int stride, int block, double share, Tensor& counts,
                            const BlockHeads& of) const {
  const Arrays& a = *arrays_;
  const BlockRows queries = a.queries.view();
  const int heads = static_cast<int>(lse.size(0));
  require(a.widest <= kMostScoredBlocks,
          "sparse attention on CUDA: a segment of {} blocks of keys to choose from, at most {}; "
          "with xattention use a larger attention.xattention_block",
          a.widest, kMostScoredBlocks);
  counts = Tensor::zeros({heads}, DType::i64, *a.device, MemoryCategory::workspace);
  Tensor words = workspace({heads, queries.blocks, a.widest}, DType::i64, *a.device);
  const Tensor most = upload(of.most, *a.device);
  ChooseHeads which;
  if (of.chosen.defined()) which.chosen = of.chosen.data<std::uint8_t>();
  which.blocks = a.pattern_blocks;
  if (!of.most.empty()) which.most = most.data<std::int32_t>();
  check(choose_strides(lse.data<float>(), heads, queries, stride, block, a.widest, share,
                       words_of(words), counts.data<std::int64_t>(), which, stream()),
        "choice of blocks");
  return words;
}

BlockChoice BlockBuilder::Arrays::choice(const Call& call, const Tensor& words, int q_heads) const {
  return {words_of(words),
          q_heads,
          widest,
          queries.view(),
          call.rows.view(),
          call.key_begin.data<std::int32_t>(),
          call.key_end.data<std::int32_t>(),
          q_tokens};
}

std::optional<AttentionWork> BlockBuilder::Arrays::build_routed(const Tensor& words, int q_heads,
                                                                int kv_heads,
                                                                const Routed& routed) {
  if (routed.top_k == 0) return std::nullopt;
  if (!routed_builder)
    routed_builder.emplace(*axes, *axis, PatternBlocks(*axis, block_tokens), *device);
  if (!routed_builder->serves(routed.top_k, q_heads, routed.head_dim)) return std::nullopt;
  return routed_builder->build(words_of(words), q_heads, kv_heads, routed.top_k);
}

std::vector<AttentionWork> BlockBuilder::build(const Tensor& words, int q_heads, int kv_heads,
                                               const Routed& routed) const {
  if (std::optional<AttentionWork> work = arrays_->build_routed(words, q_heads, kv_heads, routed))
    return {*work};
  const Arrays& a = *arrays_;
  Device& device = *a.device;
  const std::int64_t calls = static_cast<std::int64_t>(a.calls.size()),
                     lists = q_heads * a.queries.own.numel();
  const auto choice = [&](const Arrays::Call& call) { return a.choice(call, words, q_heads); };
  Tensor sizes = Tensor::zeros({3, calls}, DType::i64, device,
                               MemoryCategory::workspace);  // runs, block pairs, pairs
  std::vector<Tensor> offsets;
  for (std::int64_t k = 0; k < calls; ++k) {
    offsets.push_back(Tensor::zeros({lists + 1}, DType::i64, device, MemoryCategory::workspace));
    check(count_block_runs(choice(a.calls[k]), offsets.back().data<std::int64_t>(),
                           words_of(sizes) + calls + k, stream()),
          "counting of runs");
    Tensor to = sizes.rows(0, 1).reshape({calls}).rows(k, k + 1);
    to.copy_from(offsets.back().rows(lists, lists + 1));
  }
  const Tensor found = sizes.to(host_device());
  std::vector<PlacedIndex> placed;
  for (std::int64_t k = 0; k < calls; ++k) {
    const Arrays::Call& call = a.calls[k];
    IndexShape shape;
    shape.q_tokens = a.q_tokens;
    shape.k_tokens = call.tokens;
    shape.q_heads = shape.index_heads = q_heads;
    shape.kv_heads = kv_heads;
    shape.runs = shape.row_masks = std::max<std::int64_t>(1, found.data<std::int64_t>()[k]);
    shape.block_pairs = std::max<std::int64_t>(1, found.data<std::int64_t>()[calls + k]);
    // The arrays that do not depend on the choice are the builder's too.
    PlacedIndex& made = placed.emplace_back();
    made.shared = {call.key_begin, call.key_end, offsets[k]};
    made.buffer = index_memory(shape, device);
    made.index = bind_index(shape, made.buffer.raw(), scratch(building_bytes(shape)));
    made.index.key_begin = call.key_begin.data<std::int32_t>();
    made.index.key_end = call.key_end.data<std::int32_t>();
    made.index.run_offset = offsets[k].data<std::int64_t>();
    check(fill_block_runs(made.index, choice(call), stream()), "building of the attention pattern");
    check(derive_index(made.index, stream()), "preparation of the attention pattern");
    check(count_pairs(made.index, words_of(sizes) + 2 * calls + k, stream()),
          "pairs of the attention pattern");
  }
  const Tensor pairs = sizes.to(host_device());
  std::vector<AttentionWork> built;
  for (std::int64_t k = 0; k < calls; ++k) {
    const double mean = static_cast<double>(pairs.data<std::int64_t>()[2 * calls + k]) / q_heads;
    built.emplace_back(std::make_shared<const PatternTwin>(
        PatternCounts{a.q_tokens, a.calls[k].tokens, q_heads, {mean}},
        std::move(placed[static_cast<std::size_t>(k)])));
  }
  return built;
}

std::unique_ptr<BlockScores> block_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                          std::int64_t block_tokens) {
  return std::make_unique<BlockBuilder>(axes, axis, block_tokens, device_of(Space::cuda));
}

}  // namespace ballast::cuda

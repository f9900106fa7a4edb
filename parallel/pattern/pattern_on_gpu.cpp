// Patterns whose index is built where Q and K are: the GPU observes, selects and builds; the ranks
// of the ring join its sums by NCCL.
#ifdef BALLAST_HAVE_CUDA
#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/block_builder.hpp"
#include "kernels/cuda/index/slash_builder.hpp"
#include "parallel/pattern/pattern_sources.hpp"

namespace ballast {

PatternSource::Built VerticalSlashSource::build_on_gpu(const AttentionInputs& in) {
  const int heads = static_cast<int>(in.q.size(1)), segments = axis_.segments();
  if (!gpu_) {
    const bool full =
        policy_ == nullptr &&
        (options_.vertical_share >= 1 ||
         options_.slash_share >= 1);  // everything is chosen: nothing need be observed
    std::vector<char> whole;
    std::vector<std::int64_t> first;
    for (int s = 0; s < segments; ++s) {
      whole.push_back(full || axis_.count[s] <= options_.last_q);
      first.push_back(std::max(axes().first_query[s],
                               axis_.first_position[s] + axis_.count[s] - options_.last_q));
    }
    gpu_ = std::make_shared<cuda::SlashBuilder>(
        axes(), axis_, whole, first,
        cuda::SlashOptions{options_.vertical_share, options_.slash_share, options_.max_columns,
                           options_.max_slashes},
        device_of(in.q.space()));
  }
  Tensor mass;
  if (gpu_->observes()) {
    Tensor q = gpu_->queries(in.q);
    join(q, Reduction::sum);
    Tensor maximum = gpu_->maximum(q, in.k, in.scale);
    join(maximum, Reduction::max);
    Tensor sum = gpu_->sum(q, in.k, in.scale, maximum);
    join(sum, Reduction::sum);
    mass = gpu_->mass(q, in.k, in.scale, maximum, sum);
    join(mass, Reduction::sum);
  }
  Built built;
  cuda::SlashCounts counts;
  const int kv_heads = static_cast<int>(in.k.size(1));
  if (policy_ != nullptr) {
    const std::vector<std::int64_t> budgets = candidates();
    cuda::SlashBudgets bought;
    std::int64_t budget = 0;
    {
      Scope tuning(recorder_, EventKind::tuning);
      bought = gpu_->budgets(mass, heads, budgets, query_counts());
      budget = choose(in.layer, bought.coverage, heads);
    }
    const std::int64_t at =
        std::lower_bound(budgets.begin(), budgets.end(), budget) - budgets.begin();
    built.shards = gpu_->build(mass, heads, kv_heads, counts, bought.most.rows(at, at + 1), budget);
  } else {
    built.shards = gpu_->build(mass, heads, kv_heads, counts);
  }
  const std::vector<double> weight = query_shares();
  built.budgets.resize(static_cast<std::size_t>(heads));
  for (int h = 0; h < heads; ++h)
    for (int s = 0; s < segments; ++s) {
      const std::size_t i = static_cast<std::size_t>(h) * segments + s;
      built.budgets[h].budget +=
          weight[s] * (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      built.budgets[h].overflow += counts.cut[i];
    }
  return built;
}

namespace {

/// The builder of patterns of whole blocks for this micro-batch.
std::shared_ptr<cuda::BlockBuilder> block_builder(const AttentionAxes& axes, const KeyAxis& axis,
                                                  const PatternBlocks& blocks, Device& device) {
  cuda::BlockBuilder::Blocks at;
  at.queries = blocks.rows(axis, axes.queries);
  for (const auto& shard : axes.keys) at.shards.push_back(blocks.rows(axis, shard));
  for (const auto& call : axes.calls()) at.calls.push_back(blocks.rows(axis, call));
  for (int s = 0; s < axis.segments(); ++s)
    for (std::int64_t j = 0; j < blocks.first[s + 1] - blocks.first[s]; ++j)
      at.block_keys.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(
          axis.count[s] - j * blocks.block_tokens, 0, blocks.block_tokens)));
  at.widest = static_cast<int>(blocks.widest());
  return std::make_shared<cuda::BlockBuilder>(axes, axis, at, device);
}

}  // namespace

PatternSource::Built MobaSource::build_on_gpu(const AttentionInputs& in) {
  if (!gpu_)
    gpu_ = block_builder(axes(), axis_, PatternBlocks(axis_, options_.moba_block),
                         device_of(in.q.space()));
  Tensor sums = gpu_->pool(in.k);
  join(sums, Reduction::sum);
  const Tensor means = gpu_->means(sums);
  std::int64_t budget = options_.moba_top_k;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    Tensor coverage = gpu_->coverage(in.q, means, in.scale, candidates());
    join(coverage, Reduction::sum);
    budget = choose(in.layer, coverage, in.q.size(1));
  }
  Built built;
  built.shards = gpu_->build(gpu_->route(in.q, means, budget), static_cast<int>(in.q.size(1)),
                             static_cast<int>(in.k.size(1)));
  built.budgets.assign(static_cast<std::size_t>(in.q.size(1)), {static_cast<double>(budget), 0});
  return built;
}

PatternSource::Built XAttentionSource::build_on_gpu(const AttentionInputs& in) {
  const int block = static_cast<int>(options_.xattention_block),
            stride = static_cast<int>(options_.xattention_stride);
  if (!gpu_) {
    gpu_ = block_builder(axes(), axis_, PatternBlocks(axis_, block), device_of(in.q.space()));
    query_blocks_ = static_cast<std::int64_t>(axes().queries.size()) / block;
    if (cp_.size() > 1) query_blocks_ = cp_.all_reduce(query_blocks_, Reduction::sum);
  }
  Tensor lse = gpu_->stride_lse(in.q, stride), counts;
  turn_keys(in.k, [&](int shard, const Tensor& keys) {
    gpu_->score(in.q, keys, shard, in.scale, stride, block, lse);
  });
  const Tensor words = gpu_->choose(lse, stride, block, options_.xattention_threshold, counts);
  join(counts, Reduction::sum);
  Built built;
  built.shards = gpu_->build(words, static_cast<int>(in.q.size(1)), static_cast<int>(in.k.size(1)));
  const Tensor chosen = counts.to(host_device());
  for (std::int64_t h = 0; h < chosen.numel(); ++h)
    built.budgets.push_back({static_cast<double>(chosen.data<std::int64_t>()[h]) /
                                 static_cast<double>(std::max<std::int64_t>(1, query_blocks_)),
                             0});
  return built;
}

}  // namespace ballast
#endif

// Patterns whose index is built where Q and K are: the GPU observes, selects and builds; the ranks of the ring join its sums by NCCL.
#ifdef BALLAST_HAVE_CUDA
#include <algorithm>

#include "kernels/cuda/block_builder.hpp"
#include "kernels/cuda/slash_builder.hpp"
#include "parallel/pattern_sources.hpp"

namespace ballast {

PatternSource::Built VerticalSlashSource::build_on_gpu(const AttentionInputs& in) {
  const int heads = static_cast<int>(in.q.size(1)), segments = axis_.segments();
  if (!gpu_) {
    const bool full = options_.vertical_share >= 1 || options_.slash_share >= 1;  // everything is chosen: nothing need be observed
    std::vector<char> whole;
    std::vector<std::int64_t> first;
    for (int s = 0; s < segments; ++s) {
      whole.push_back(full || axis_.count[s] <= options_.last_q);
      first.push_back(std::max(axes().first_query[s], axis_.first_position[s] + axis_.count[s] - options_.last_q));
    }
    gpu_ = std::make_shared<cuda::SlashBuilder>(
        axes(), axis_, whole, first, cuda::SlashOptions{options_.vertical_share, options_.slash_share, options_.max_columns, options_.max_slashes}, device_of(in.q.space()));
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
  built.shards = gpu_->build(mass, heads, static_cast<int>(in.k.size(1)), counts);
  const std::vector<double> weight = query_shares();
  built.budgets.resize(static_cast<std::size_t>(heads));
  for (int h = 0; h < heads; ++h)
    for (int s = 0; s < segments; ++s) {
      const std::size_t i = static_cast<std::size_t>(h) * segments + s;
      built.budgets[h].budget += weight[s] * (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      built.budgets[h].overflow += counts.cut[i];
    }
  return built;
}

PatternSource::Built MobaSource::build_on_gpu(const AttentionInputs& in) {
  if (!gpu_) {
    const PatternBlocks blocks(axis_, options_.moba_block);
    std::vector<PatternRows> keys;
    for (const auto& shard : axes().keys) keys.push_back(blocks.rows(axis_, shard));
    std::vector<std::int32_t> block_keys(static_cast<std::size_t>(blocks.count()));
    for (int s = 0; s < axis_.segments(); ++s)
      for (std::int64_t j = blocks.first[s]; j < blocks.first[s + 1]; ++j)
        block_keys[j] = static_cast<std::int32_t>(std::clamp<std::int64_t>(axis_.count[s] - (j - blocks.first[s]) * blocks.block_tokens, 0, blocks.block_tokens));
    gpu_ = std::make_shared<cuda::BlockBuilder>(axes(), axis_, blocks.rows(axis_, axes().queries), keys, block_keys, static_cast<int>(blocks.widest()),
                                                device_of(in.q.space()));
  }
  Tensor sums = gpu_->pool(in.k);
  join(sums, Reduction::sum);
  Built built;
  built.shards = gpu_->build(gpu_->route(in.q, sums, options_.moba_top_k), static_cast<int>(in.q.size(1)), static_cast<int>(in.k.size(1)));
  built.budgets.assign(static_cast<std::size_t>(in.q.size(1)), {static_cast<double>(options_.moba_top_k), 0});
  return built;
}

}  // namespace ballast
#endif

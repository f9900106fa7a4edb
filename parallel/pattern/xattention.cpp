#include "parallel/pattern/xattention.hpp"

#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {

void XAttentionSource::turn_keys(const Tensor& own,
                                 const std::function<void(int, const Tensor&)>& visit) const {
  const int ranks = cp_.size(), rank = cp_.rank();
  Tensor held = own;
  if (ranks > 1 && !held.contiguous()) {
    held = Tensor::empty(own.shape(), own.dtype(), device_of(own.space()),
                         MemoryCategory::communication);
    if (own.numel() > 0) copy_rows(own, held);
  }
  for (int t = 0; t < ranks; ++t) {
    const int shard = (rank - t + ranks) % ranks, next = (shard - 1 + ranks) % ranks;
    Tensor arriving;
    Pending pending;
    if (t + 1 < ranks) {
      arriving = Tensor::empty({token_count(axes().keys[next]), own.size(1), own.size(2)},
                               own.dtype(), device_of(own.space()), MemoryCategory::communication);
      const Transfer transfers[] = {{arriving, (rank - 1 + ranks) % ranks, false},
                                    {held, (rank + 1) % ranks, true}};
      pending = cp_.exchange(transfers);
    }
    visit(shard, held);
    if (pending.active()) {
      Scope wait(recorder_, EventKind::ring_wait);
      wait.bytes = static_cast<std::int64_t>(held.bytes());
      pending.complete();
    }
    held = arriving;
  }
}

PatternSource::Built XAttentionSource::build(const AttentionInputs& in) {
  const int block = static_cast<int>(options_.xattention_block),
            stride = static_cast<int>(options_.xattention_stride);
  const Tensor q = index_operand(in.q), k = index_operand(in.k);
  if (!scores_) {
    scores_ = block_scores(axes(), axis_, block, q);
    query_blocks_ = axes().q_tokens() / block;
    if (cp_.size() > 1) query_blocks_ = cp_.all_reduce(query_blocks_, Reduction::sum);
  }
  Tensor strides = scores_->strides(q, stride), counts;
  turn_keys(k, [&](int shard, const Tensor& keys) {
    scores_->score(q, keys, shard, in.scale, stride, block, strides);
  });
  const Tensor words =
      scores_->choose(strides, stride, block, options_.xattention_threshold, counts);
  join(counts, Reduction::sum);
  Built built;
  built.shards = scores_->build(words, static_cast<int>(q.size(1)), static_cast<int>(k.size(1)));
  const Tensor chosen = counts.to(host_device());
  for (std::int64_t h = 0; h < chosen.numel(); ++h)
    built.budgets.push_back({static_cast<double>(chosen.data<std::int64_t>()[h]) /
                                 static_cast<double>(std::max<std::int64_t>(1, query_blocks_)),
                             0});
  return built;
}

}  // namespace ballast

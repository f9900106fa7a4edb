#include <algorithm>
#include <limits>

#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/ops/elementwise.hpp"
#include "parallel/pattern/pattern_sources.hpp"

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
      arriving = Tensor::empty(
          {static_cast<std::int64_t>(axes().keys[next].size()), own.size(1), own.size(2)},
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
#ifdef BALLAST_HAVE_CUDA
  if (in.q.space() == Space::cuda) return build_on_gpu(in);
#endif
  const std::int64_t block = options_.xattention_block, stride = options_.xattention_stride;
  const PatternBlocks blocks(axis_, block);
  const Tensor q = index_operand(in.q), k = index_operand(in.k);
  const std::int64_t heads = q.size(1), tokens = q.size(0);
  const PatternRows at = blocks.rows(axis_, axes().queries);
  const Shape shape{heads, tokens / stride, blocks.count()};
  Tensor maximum = Tensor::empty(shape, DType::f32, host_device(), MemoryCategory::workspace),
         sum = Tensor::empty(shape, DType::f32, host_device(), MemoryCategory::workspace);
  std::fill_n(maximum.data<float>(), maximum.numel(), -std::numeric_limits<float>::infinity());
  maximum = maximum.to(device_of(q.space()));
  sum = sum.to(device_of(q.space()));
  turn_keys(k, [&](int shard, const Tensor& keys) {
    stride_scores(q, keys, in.scale, static_cast<int>(stride), static_cast<int>(block), at,
                  blocks.rows(axis_, axes().keys[shard]), maximum, sum);
  });
  Tensor mass = Tensor::empty({heads, tokens / block, blocks.count()}, DType::i64,
                              device_of(q.space()), MemoryCategory::workspace);
  stride_mass(maximum, sum, static_cast<int>(block / stride), mass);
  mass = mass.to(host_device());

  // Per head and block of queries the blocks of keys that hold the threshold's share; own and sink
  // block always.
  const std::int64_t rows = tokens / block, width = blocks.count(), halves = block / kBlock;
  std::vector<char> chosen(static_cast<std::size_t>(heads * rows * width), 0);
  Built built;
  Tensor counts = Tensor::zeros({heads + 1}, DType::i64);
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t b = 0; b < rows; ++b) {
      const std::int32_t own = at.own[static_cast<std::size_t>(b * halves)],
                         first = at.first[static_cast<std::size_t>(b * halves)];
      const std::int64_t* from = mass.data<std::int64_t>() + (h * rows + b) * width;
      std::vector<MassItem> items;
      std::int64_t total = 0;
      for (std::int64_t j = first; j <= own; ++j) {
        items.push_back({j, from[j]});
        total += from[j];
      }
      char* row = &chosen[static_cast<std::size_t>((h * rows + b) * width)];
      for (std::int64_t j :
           top_share(std::move(items), total, options_.xattention_threshold, 0).chosen)
        row[j] = 1;
      row[first] = row[own] = 1;
      counts.data<std::int64_t>()[h] += std::count(row, row + width, 1);
      if (h == 0) ++counts.data<std::int64_t>()[heads];
    }
  join(counts, Reduction::sum);
  for (std::int64_t h = 0; h < heads; ++h)
    built.budgets.push_back(
        {static_cast<double>(counts.data<std::int64_t>()[h]) /
             static_cast<double>(std::max<std::int64_t>(1, counts.data<std::int64_t>()[heads])),
         0});
  built.index = block_pattern(
      axes().queries, axis_, static_cast<int>(heads), block,
      [&](int h, std::size_t b, std::int64_t j) {
        return chosen[static_cast<std::size_t>(
                   (h * rows + static_cast<std::int64_t>(b) / halves) * width + at.first[b] + j)] !=
                       0
                   ? ~std::uint64_t{0}
                   : 0;
      });
  return built;
}

}  // namespace ballast

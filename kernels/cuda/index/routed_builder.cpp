#include "kernels/cuda/index/routed_builder.hpp"

#include <algorithm>
#include <utility>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/index/uploads.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"

namespace ballast::cuda {
namespace {

/// Share of the visible pairs up to which routed lists win over block lists with row masks, which
/// turn into dense attention when everything is chosen (docs/performance_attention.md).
constexpr double kMostPairs = 0.9;
constexpr double kMostEntries = 2147483647.0;  // places have 32 bits

/// First key of every pattern block on an axis of keys; empty if some block's keys are apart.
std::vector<std::int32_t> first_keys(const PatternRows& keys, int blocks) {
  std::vector<std::int32_t> first(static_cast<std::size_t>(blocks), -1);
  for (std::size_t b = 0; b < keys.own.size(); ++b) {
    const auto block = static_cast<std::size_t>(keys.own[b]);
    if (first[block] < 0) {
      first[block] = static_cast<std::int32_t>(b * kBlock);
    } else if (keys.own[b - 1] != keys.own[b]) {
      return {};
    }
  }
  return first;
}

/// The visible keys of each row in its own block.
VisibleKeys own_keys(const VisibleKeys& visible, const PatternRows& rows,
                     const std::vector<std::int32_t>& first_key) {
  VisibleKeys own;
  visible.for_rows(0, visible.rows(), [&](std::int64_t row, KeyInterval keys) {
    const std::int32_t start =
        first_key[static_cast<std::size_t>(rows.own[static_cast<std::size_t>(row / kBlock)])];
    own.add(1, std::clamp(start, keys.begin, keys.end), keys.end, 0);
  });
  return own;
}

}  // namespace

RoutedBuilder::RoutedBuilder(const AttentionAxes& axes, const KeyAxis& axis,
                             const PatternBlocks& blocks, Device& device)
    : device_(device),
      block_tokens_(blocks.block_tokens),
      blocks_(static_cast<int>(blocks.count())),
      width_(static_cast<int>(blocks.widest())),
      rows_(blocks.rows(axis, axes.queries)) {
  if (axes.calls().size() != 1 || !routed_fits(128, block_tokens_)) return;
  const AxisRanges keys = axes.calls()[0];
  const std::vector<std::int32_t> first = first_keys(blocks.rows(axis, keys), blocks_);
  gapless_ = !first.empty() && token_count(keys) > 0;
  if (!gapless_) return;
  block_key_ = upload(first, device);
  first_ = upload(rows_.first, device);
  own_block_ = upload(rows_.own, device);
  row_count_ = upload(rows_.rows, device);
  const VisibleKeys visible =
      split_visible(visible_keys(axes.queries, axis), axis, axes.calls()).front();
  visible_pairs_ = visible.pairs();
  PatternArrays own;
  own.visible = own_keys(visible, rows_, first);
  own.k_tokens = token_count(keys);
  own.dense = true;
  own_.emplace(std::move(own));
}

double RoutedBuilder::routed_pairs(std::int64_t top_k) const {
  double pairs = 0;
  for (std::size_t b = 0; b < rows_.own.size(); ++b)
    pairs += static_cast<double>(rows_.rows[b]) * block_tokens_ *
             std::min<std::int64_t>(rows_.own[b] - rows_.first[b], top_k - 1);
  return pairs;
}

bool RoutedBuilder::serves(std::int64_t top_k, int q_heads, std::int64_t head_dim) const {
  if (!gapless_ || deterministic() || top_k < 2 || !routed_fits(head_dim, block_tokens_))
    return false;
  const double routed = routed_pairs(top_k),
               entries = routed / static_cast<double>(block_tokens_) * q_heads;
  return entries <= kMostEntries && routed + own_->pairs_per_head() <= kMostPairs * visible_pairs_;
}

RoutedAxis RoutedBuilder::routed_axis(int q_heads, int kv_heads, std::int64_t top_k) const {
  return {q_heads,
          kv_heads,
          blocks_,
          width_,
          static_cast<int>(std::min<std::int64_t>(top_k - 1, width_)),
          rows_.first,
          rows_.own};
}

AttentionWork RoutedBuilder::build(const std::uint64_t* words, int q_heads, int kv_heads,
                                   std::int64_t top_k) {
  const RoutedAxis axis = routed_axis(q_heads, kv_heads, top_k);
  if (!own_twin_) own_twin_ = place_pattern(*own_, q_heads, kv_heads);
  auto work = std::make_shared<RoutedWork>();
  RoutedIndex& x = work->index;
  x.q_tokens = own_->q_tokens();
  x.q_heads = q_heads;
  x.kv_heads = kv_heads;
  x.blocks = axis.blocks;
  x.width = axis.width;
  x.slots = axis.slots;
  x.block_tokens = static_cast<int>(block_tokens_);
  x.queries = {axis.query_blocks(), first_.data<std::int32_t>(), own_block_.data<std::int32_t>(),
               row_count_.data<std::int32_t>()};
  x.block_key = block_key_.data<std::int32_t>();
  work->chunk_begin = routed_chunks(axis, rows_.rows);
  PlacedIndex placed = dynamic_cast<const PatternTwin&>(*own_twin_->device()).placed();
  const Tensor memory =
      workspace({static_cast<std::int64_t>(routed_bytes(*work))}, DType::u8, device_);
  bind_routed(*work, memory.raw());
  const Tensor base = workspace({static_cast<std::int64_t>(q_heads) * axis.query_blocks() * width_},
                                DType::i32, device_);
  check(build_routed(*work, words, reinterpret_cast<std::uint32_t*>(base.data<std::int32_t>()),
                     stream()),
        "building of the routed lists");
  placed.shared.insert(placed.shared.end(), {memory, block_key_, first_, own_block_, row_count_});
  placed.routed = std::move(work);
  return AttentionWork(std::make_shared<const PatternTwin>(
      PatternCounts{own_->q_tokens(),
                    own_->arrays().k_tokens,
                    q_heads,
                    {own_->pairs_per_head() + routed_pairs(top_k)}},
      std::move(placed)));
}

}  // namespace ballast::cuda

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

/// Of each row its visible keys that it does not list.
VisibleKeys unlisted_keys(const VisibleKeys& visible, const RoutedAxis& axis,
                          const std::vector<std::int32_t>& first_key) {
  VisibleKeys left;
  visible.for_rows(0, visible.rows(), [&](std::int64_t row, KeyInterval keys) {
    const auto b = static_cast<int>(row / kBlock);
    std::int32_t begin = keys.begin;
    if (keys.begin < keys.end && axis.listed(b) > 0)
      begin = std::clamp(first_key[static_cast<std::size_t>(axis.own[static_cast<std::size_t>(b)])],
                         keys.begin, keys.end);
    left.add(1, begin, keys.end, 0);
  });
  return left;
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
  first_key_ = first_keys(blocks.rows(axis, keys), blocks_);
  key_tokens_ = token_count(keys);
  gapless_ = !first_key_.empty() && key_tokens_ > 0;
  if (!gapless_) return;
  block_key_ = upload(first_key_, device);
  first_ = upload(rows_.first, device);
  own_block_ = upload(rows_.own, device);
  row_count_ = upload(rows_.rows, device);
  visible_ = split_visible(visible_keys(axes.queries, axis), axis, axes.calls()).front();
}

double RoutedBuilder::routed_pairs(std::int64_t top_k) const {
  const RoutedAxis axis = routed_axis(1, 1, top_k);
  double rows = 0;
  for (int b = 0; b < axis.query_blocks(); ++b)
    rows += static_cast<double>(rows_.rows[static_cast<std::size_t>(b)]) * axis.listed(b);
  return rows * static_cast<double>(block_tokens_);
}

bool RoutedBuilder::serves(std::int64_t top_k, int q_heads, std::int64_t head_dim) const {
  if (!gapless_ || deterministic() || top_k < 2 || !routed_fits(head_dim, block_tokens_))
    return false;
  const double entries = routed_pairs(top_k) / static_cast<double>(block_tokens_) * q_heads;
  return entries > 0 && entries <= kMostEntries;
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

const RoutedBuilder::Unlisted& RoutedBuilder::unlisted(const RoutedAxis& axis) {
  const auto found = unlisted_.find(axis.slots);
  if (found != unlisted_.end()) return found->second;
  PatternArrays x;
  x.visible = unlisted_keys(visible_, axis, first_key_);
  x.k_tokens = key_tokens_;
  x.dense = true;
  const AttentionPattern pattern(std::move(x));
  const Unlisted made{pattern, place_pattern(pattern, axis.q_heads, axis.kv_heads)};
  return unlisted_.emplace(axis.slots, made).first->second;
}

AttentionWork RoutedBuilder::build(const std::uint64_t* words, int q_heads, int kv_heads,
                                   std::int64_t top_k) {
  const RoutedAxis axis = routed_axis(q_heads, kv_heads, top_k);
  const auto& [dense, twin] = unlisted(axis);
  auto work = std::make_shared<RoutedWork>();
  RoutedIndex& x = work->index;
  x.q_tokens = dense.q_tokens();
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
  PlacedIndex placed = dynamic_cast<const PatternTwin&>(*twin.device()).placed();
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
      PatternCounts{dense.q_tokens(),
                    dense.k_tokens(),
                    q_heads,
                    {dense.pairs_per_head() + routed_pairs(top_k)}},
      std::move(placed)));
}

}  // namespace ballast::cuda

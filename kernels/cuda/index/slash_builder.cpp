#include "kernels/cuda/index/slash_builder.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/segment_limits.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/heads_launch.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/index/uploads.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/cuda/runtime/head_dims.hpp"

namespace ballast::cuda {
namespace {

/// A cap of the options, where 0 means none.
std::int32_t capacity(std::int64_t cap) {
  constexpr std::int64_t none = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(cap > 0 ? std::min(cap, none) : none);
}

std::int32_t slot_of(const KeyAxis& axis, const AxisRange& token) {
  return static_cast<std::int32_t>(axis.global(token) / kBlock);
}

}  // namespace

/// What depends on the micro-batch alone.
struct SlashBuilder::Arrays {
  Device* device = nullptr;
  int slots = 0, segments = 0;
  std::vector<std::int32_t> segment_slot, query_slot;
  std::vector<std::uint8_t> whole;
  Tensor segment_slots, slot_segments, query_slots, whole_flags;
  struct Shard {
    std::int64_t tokens = 0;
    Tensor key_begin, key_end, key_slot, slot_key;
  };
  std::vector<Shard> shards;  ///< of the calls
  Shard own;                  ///< of this rank's keys; no intervals
  std::int64_t q_tokens = 0;
  // Observation: tiles of 64 rows, each a query block.
  std::vector<std::int32_t> tile_slot;
  std::vector<std::pair<std::int64_t, std::int64_t>> local;  ///< (query block here, its tile)
  Tensor tile_slots, tile_parts, visible;
  Tensor segment_tiles;            ///< [segments + 1] tiles of a segment
  Tensor tile_rows;                ///< [tiles, 2] observed rows of a tile
  std::vector<std::int64_t> keys;  ///< [segments]
  std::int64_t parts = 1;          ///< of the mass of columns
  Tensor window_blocks;            ///< [segments] blocks of observed queries

  PatternAxes axes(const Shard& shard) const {
    PatternAxes x;
    x.segments = segments;
    x.slots = slots;
    x.segment_slot = segment_slots.data<std::int32_t>();
    x.slot_segment = slot_segments.data<std::int32_t>();
    x.whole = whole_flags.data<std::uint8_t>();
    x.query_slot = query_slots.data<std::int32_t>();
    x.key_slot = shard.key_slot.data<std::int32_t>();
    x.slot_key = shard.slot_key.data<std::int32_t>();
    return x;
  }
  Observation observation(const Tensor& queries, const Tensor& k, double scale) const {
    require(k.rank() == 3 && k.strides()[2] == 1 &&
                (k.size(0) == 0 || k.strides()[1] == k.size(2)) && k.size(0) == own.tokens,
            "vertical slash: k {} does not fit the {} keys here", to_string(k.shape()), own.tokens);
    require(attention_head_dim(static_cast<int>(k.size(2))),
            "attention on CUDA needs a head dim of 64, 96, 128 or 256, got {}", k.size(2));
    Observation x;
    x.tiles = static_cast<int>(tile_slot.size());
    x.slot = tile_slots.data<std::int32_t>();
    x.visible = reinterpret_cast<const Interval*>(visible.data<std::int32_t>());
    x.q = queries.raw();
    x.k = k.raw();
    x.k_stride = k.strides()[0];
    x.k_tokens = k.size(0);
    x.q_heads = static_cast<int>(queries.size(1));
    x.kv_heads = static_cast<int>(k.size(1));
    x.head_dim = static_cast<int>(k.size(2));
    x.scale = static_cast<float>(scale);
    x.part = tile_parts.data<std::int32_t>();
    return x;
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(tile_slot.size()) * kBlock; }
  AxisRanges observe(const KeyAxis& axis, const std::vector<std::int64_t>& first_observed,
                     bool budgeted);
  BlockLists block_lists(const HeadChoices& choices) const {
    BlockLists lists;
    if (!choices.by_blocks.defined()) return lists;
    lists.by_blocks = choices.by_blocks.data<std::uint8_t>();
    lists.words = reinterpret_cast<const std::uint64_t*>(choices.words.data<std::int64_t>());
    lists.width = static_cast<int>(choices.words.size(2));
    return lists;
  }
  /// Zeros where nothing was observed.
  Tensor mass_or_none(const Tensor& mass, int q_heads) const;
};

/// The observed rows in whole query blocks, of which the other rows are padding: they see nothing.
AxisRanges SlashBuilder::Arrays::observe(const KeyAxis& axis,
                                         const std::vector<std::int64_t>& first_observed,
                                         bool budgeted) {
  AxisRanges rows;
  std::vector<std::int32_t> tile_part, blocks(static_cast<std::size_t>(segments), 0), tiles{0}, at;
  for (int s = 0; s < segments; ++s, tiles.push_back(static_cast<std::int32_t>(tile_slot.size()))) {
    const std::int64_t first = axis.first_position[s], end = first + axis.count[s];
    if (whole[s] || end <= first_observed[s]) continue;
    for (std::int64_t block = (first_observed[s] - first) / kBlock; block * kBlock < axis.count[s];
         ++block) {
      tile_slot.push_back(segment_slot[s] + static_cast<std::int32_t>(block));
      tile_part.push_back(budgeted ? blocks[s] : 0);
      parts = std::max<std::int64_t>(parts, 1 + tile_part.back());
      ++blocks[s];
      const std::int64_t begin = first + block * kBlock, seen = std::max(begin, first_observed[s]),
                         stop = std::min(begin + kBlock, end);
      append(rows, {-1, 0, seen - begin});
      append(rows, {s, seen, stop - seen});
      append(rows, {-1, 0, begin + kBlock - stop});
      at.push_back(static_cast<std::int32_t>(seen - begin));
      at.push_back(static_cast<std::int32_t>(stop - begin));
    }
  }
  segment_tiles = upload(tiles, *device);
  tile_rows = upload(at, *device);
  tile_parts = upload(tile_part, *device);
  window_blocks = upload(blocks, *device);
  return rows;
}

SlashBuilder::SlashBuilder(const AttentionAxes& axes, const KeyAxis& axis,
                           const std::vector<char>& whole,
                           const std::vector<std::int64_t>& first_observed,
                           const SlashOptions& options, Device& device)
    : arrays_(std::make_shared<Arrays>()), options_(options) {
  Arrays& a = *arrays_;
  a.device = &device;
  a.segments = axis.segments();
  a.slots = static_cast<int>(axis.tokens() / kBlock);
  a.q_tokens = axes.q_tokens();
  a.whole.assign(whole.begin(), whole.end());
  a.keys = axis.count;
  for (const std::int64_t offset : axis.offset)
    a.segment_slot.push_back(static_cast<std::int32_t>(offset / kBlock));
  std::vector<std::int32_t> slot_segment;
  for (int s = 0; s < a.segments; ++s)
    slot_segment.insert(slot_segment.end(), a.segment_slot[s + 1] - a.segment_slot[s], s);
  query_blocks(axes.queries, axis);  // its checks
  for_each_block(axes.queries, [&](std::int64_t, std::span<const AxisRange> parts) {
    a.query_slot.push_back(parts.front().padding() ? -1 : slot_of(axis, parts.front()));
  });

  const AxisRanges rows = a.observe(axis, first_observed, options.budgeted);
  for (std::size_t b = 0; b < a.query_slot.size(); ++b) {
    const auto found = std::lower_bound(a.tile_slot.begin(), a.tile_slot.end(), a.query_slot[b]);
    if (a.query_slot[b] >= 0 && found != a.tile_slot.end() && *found == a.query_slot[b])
      a.local.emplace_back(static_cast<std::int64_t>(b), found - a.tile_slot.begin());
  }

  a.segment_slots = upload(a.segment_slot, device);
  a.slot_segments = upload(slot_segment, device);
  a.query_slots = upload(a.query_slot, device);
  a.whole_flags = Tensor::wrap(a.whole.data(), {a.segments}, DType::u8).to(device);
  a.tile_slots = upload(a.tile_slot, device);
  const auto shard_of = [&](const AxisRanges& keys) {
    std::vector<std::int32_t> key_slot, slot_key(static_cast<std::size_t>(a.slots), -1);
    for_each_block(keys, [&](std::int64_t first, std::span<const AxisRange> parts) {
      const bool padding = parts.front().padding();  // a block of padding alone is never seen
      key_slot.push_back(padding ? 0 : slot_of(axis, parts.front()));
      if (!padding) slot_key[key_slot.back()] = static_cast<std::int32_t>(first / kBlock);
    });
    return Arrays::Shard{
        token_count(keys), {}, {}, upload(key_slot, device), upload(slot_key, device)};
  };
  const std::vector<VisibleKeys> seen =
      split_visible(visible_keys(axes.queries, axis), axis, axes.calls());
  for (std::size_t k = 0; k < seen.size(); ++k) {
    a.shards.push_back(shard_of(axes.calls()[k]));
    upload_rows(seen[k], device, a.shards.back().key_begin, a.shards.back().key_end);
  }
  a.own = shard_of(axes.keys[axes.rank]);
  if (a.tile_slot.empty()) return;
  const VisibleKeys own =
      split_visible(visible_keys(rows, axis), axis, {axes.keys[axes.rank]}).front();
  std::vector<std::int32_t> intervals;
  own.for_rows(0, own.rows(), [&](std::int64_t, KeyInterval keys) {
    intervals.insert(intervals.end(), {keys.begin, keys.end});
  });
  a.visible = upload(intervals, device);
}

SlashBuilder::~SlashBuilder() = default;

bool SlashBuilder::observes() const { return !arrays_->tile_slot.empty(); }

Tensor SlashBuilder::queries(const Tensor& q) const {
  const Arrays& a = *arrays_;
  Tensor all = Tensor::zeros({a.rows(), q.size(1), q.size(2)}, DType::bf16, *a.device,
                             MemoryCategory::workspace);
  for (const auto& [block, tile] : a.local) {
    const std::int64_t rows = std::min<std::int64_t>(kBlock, q.size(0) - block * kBlock);
    Tensor to = all.rows(tile * kBlock, tile * kBlock + rows);
    copy_rows(q.rows(block * kBlock, block * kBlock + rows), to);
  }
  return all;
}

Tensor SlashBuilder::maximum(const Tensor& queries, const Tensor& k, double scale) const {
  const Arrays& a = *arrays_;
  Tensor top = workspace({queries.size(1), a.rows()}, DType::f32, *a.device);
  check(cudaMemsetAsync(top.raw(), kBelowScores, top.bytes(), stream()), "cudaMemsetAsync");
  check(observe_maximum(a.observation(queries, k, scale), top.data<float>(), stream()),
        "maxima of the observed scores");
  return top;
}

Tensor SlashBuilder::sum(const Tensor& queries, const Tensor& k, double scale,
                         const Tensor& maximum) const {
  Tensor sum =
      Tensor::zeros(maximum.shape(), DType::i64, *arrays_->device, MemoryCategory::workspace);
  check(observe_sum(arrays_->observation(queries, k, scale), maximum.data<float>(),
                    sum.data<std::int64_t>(), stream()),
        "sums of the observed scores");
  return sum;
}

Tensor SlashBuilder::mass(const Tensor& queries, const Tensor& k, double scale,
                          const Tensor& maximum, const Tensor& sum) const {
  const Arrays& a = *arrays_;
  const std::int64_t slashes = queries.size(1) * a.slots;
  Tensor mass = Tensor::zeros({slashes * (1 + kBlock * a.parts)}, DType::i64, *a.device,
                              MemoryCategory::workspace);
  check(observe_mass(a.observation(queries, k, scale), a.axes(a.own), maximum.data<float>(),
                     sum.data<std::int64_t>(), mass.data<std::int64_t>() + slashes,
                     mass.data<std::int64_t>(), stream()),
        "mass of columns and slashes");
  return mass;
}

Tensor SlashBuilder::Arrays::mass_or_none(const Tensor& mass, int q_heads) const {
  return mass.defined() ? mass
                        : Tensor::zeros({std::int64_t{q_heads} * slots * (1 + kBlock)}, DType::i64,
                                        *device, MemoryCategory::workspace);
}

SlashBudgets SlashBuilder::budgets(const Tensor& mass_in, int q_heads,
                                   const std::vector<std::int64_t>& budgets,
                                   const std::vector<std::int64_t>& queries) const {
  const Arrays& a = *arrays_;
  const Tensor mass = a.mass_or_none(mass_in, q_heads);
  const auto count = static_cast<std::int64_t>(budgets.size());
  std::vector<std::int64_t> numbers = budgets;
  numbers.insert(numbers.end(), queries.begin(), queries.end());
  const Tensor given =
      Tensor::wrap(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, DType::i64)
          .to(*a.device);
  SlashBudgets made;
  made.coverage = Tensor::zeros({count}, DType::i64, *a.device, MemoryCategory::workspace);
  made.most = workspace({count, 2, std::int64_t{q_heads} * a.segments}, DType::i32, *a.device);
  made.order = workspace({std::int64_t{q_heads} * a.slots * (1 + kBlock)}, DType::i64, *a.device);
  BudgetPrices x;
  x.budget = given.data<std::int64_t>();
  x.budgets = static_cast<int>(count);
  x.queries = given.data<std::int64_t>() + count;
  x.most_columns = capacity(options_.max_columns);
  x.window_blocks = a.window_blocks.data<std::int32_t>();
  x.coverage = made.coverage.data<std::int64_t>();
  x.most = made.most.data<std::int32_t>();
  x.order = made.order.data<std::int64_t>();
  const PatternAxes axes = a.axes(a.own);
  check(price_budgets(mass.data<std::int64_t>(), q_heads, axes, x,
                      scratch(budget_scratch_bytes(q_heads, axes)), stream()),
        "coverage of the budgets");
  return made;
}

/// Slashes and columns of every head and segment.
struct SlashBuilder::Lists {
  Tensor entries, numbers;  ///< numbers [4, lists]: slashes, columns, cuts of either
  Tensor cut_shares;        ///< [2, lists]: ListCuts::share of either
  PatternLists slashes, columns;
  std::int64_t lists = 0;
  BlockLists by_blocks;
  std::int32_t most_slashes = 0, most_columns = 0;  ///< that a list may have
  std::int64_t block_pairs = 0;                     ///< of heads that go by blocks, once read

  std::int32_t* row(int i) const { return numbers.data<std::int32_t>() + i * lists; }
  /// Of slashes (0) or columns (1).
  ListCuts cuts(int i) const { return {row(2 + i), cut_shares.data<float>() + i * lists}; }
  PatternCaps caps() const {
    const auto n = static_cast<std::size_t>(lists);
    return {std::vector<std::int32_t>(n, most_slashes), std::vector<std::int32_t>(n, most_columns)};
  }
  /// What was chosen; the host waits for it.
  PatternCaps read(const Tensor& blocks) {
    const Tensor found = numbers.to(host_device());
    const std::int32_t* n = found.data<std::int32_t>();
    if (blocks.defined()) {
      const Tensor sums = blocks.to(host_device());
      block_pairs = std::accumulate(sums.data<std::int64_t>(),
                                    sums.data<std::int64_t>() + sums.numel(), std::int64_t{0});
    }
    return {{n, n + lists}, {n + lists, n + 2 * lists}};
  }
  void count(SlashCounts& counts) const {
    const Tensor found = numbers.to(host_device());
    const std::int32_t* n = found.data<std::int32_t>();
    counts.slashes.assign(n, n + lists);
    counts.columns.assign(n + lists, n + 2 * lists);
    counts.cut.resize(static_cast<std::size_t>(lists));
    counts.cut_mass.assign(static_cast<std::size_t>(lists), 0);
    for (std::int64_t i = 0; i < lists; ++i) counts.cut[i] = n[2 * lists + i] + n[3 * lists + i];
    if (std::all_of(counts.cut.begin(), counts.cut.end(), [](int cut) { return cut == 0; })) return;
    const Tensor shares = cut_shares.to(host_device());
    const float* share = shares.data<float>();
    for (std::int64_t i = 0; i < lists; ++i)
      counts.cut_mass[i] = std::max(share[i], share[lists + i]);  // a pair may lie on both
  }
  /// What each list holds, once counted; the host waits for it.
  void keep(SlashCounts& counts, const Arrays& a, int heads) const {
    const Tensor found = entries.to(host_device());
    const std::int32_t *slash = found.data<std::int32_t>(),
                       *column = slash + std::int64_t{heads} * a.slots;
    for (int s = 0; s < a.segments; ++s) {
      if (a.keys[s] == 0) continue;
      SlashStretch& stretch = counts.chosen.emplace_back();
      stretch.segment = s;
      for (int h = 0; h < heads; ++h) {
        const std::int64_t slot = std::int64_t{h} * a.slots + a.segment_slot[s];
        const std::size_t list = static_cast<std::size_t>(h * a.segments + s);
        VerticalSlash& head = stretch.heads.emplace_back();
        head.slashes.assign(slash + slot, slash + slot + counts.slashes[list]);
        head.columns.assign(column + slot * kBlock, column + slot * kBlock + counts.columns[list]);
      }
    }
  }
};

SlashBuilder::Lists SlashBuilder::choose(const Tensor& mass_in, int q_heads, const Tensor& most,
                                         std::int64_t budget, const HeadChoices& blocks) const {
  const Arrays& a = *arrays_;
  const std::int64_t slots = a.slots;
  const Tensor mass = a.mass_or_none(mass_in, q_heads);
  Lists x;
  x.lists = std::int64_t{q_heads} * a.segments;
  x.entries = workspace({q_heads * slots * (1 + kBlock)}, DType::i32, *a.device);
  x.numbers = Tensor::zeros({4, x.lists}, DType::i32, *a.device, MemoryCategory::workspace);
  x.cut_shares = Tensor::zeros({2, x.lists}, DType::f32, *a.device, MemoryCategory::workspace);
  x.slashes = {x.entries.data<std::int32_t>(), x.row(0), 1};
  x.columns = {x.entries.data<std::int32_t>() + q_heads * slots, x.row(1), kBlock};
  const PatternAxes any = a.axes(a.own);
  Selection of_slashes{options_.slash_share, capacity(options_.max_slashes), true},
      of_columns{options_.vertical_share, capacity(options_.max_columns), false};
  if (most.defined()) {
    of_slashes.most_of = most.data<std::int32_t>();
    of_slashes.most = capacity(budget);
    of_columns.most_of = most.data<std::int32_t>() + x.lists;
    of_columns.most = std::min(of_columns.most, capacity(budget * kBlock));
  }
  of_slashes.given = 1;  // the diagonal, and below the sink's columns
  of_columns.given = kBlock;
  x.most_slashes = of_slashes.most;
  x.most_columns = of_columns.most;
  check(select_heaviest(mass.data<std::int64_t>(), q_heads, any, of_slashes, x.slashes, x.cuts(0),
                        stream()),
        "selection of slashes");
  check(select_heaviest(mass.data<std::int64_t>() + q_heads * slots, q_heads, any, of_columns,
                        x.columns, x.cuts(1), stream()),
        "selection of columns");
  x.by_blocks = a.block_lists(blocks);
  if (x.by_blocks.by_blocks == nullptr) return x;
  for (const auto& [lists, cuts] :
       {std::pair(x.slashes, x.cuts(0)), std::pair(x.columns, x.cuts(1))})
    check(empty_lists(x.by_blocks.by_blocks, q_heads, any, lists, cuts, stream()),
          "heads that go by blocks");
  return x;
}

std::vector<AttentionWork> SlashBuilder::build(const Tensor& mass, int q_heads, int kv_heads,
                                               SlashCounts& counts, const Tensor& most,
                                               std::int64_t budget,
                                               const HeadChoices& blocks) const {
  const Arrays& a = *arrays_;
  Device& device = *a.device;
  Lists lists = choose(mass, q_heads, most, budget, blocks);
  // Sizes follow what was chosen, which the host must then read, unless what the caps allow is
  // little anyway.
  const auto shape_of_shard = [&](const PatternCaps& caps, const Arrays::Shard& shard) {
    return slash_shape(a.q_tokens, shard.tokens, q_heads, kv_heads, caps, a.query_slot,
                       a.segment_slot, a.whole, lists.block_pairs);
  };
  PatternCaps caps = lists.caps();
  std::size_t bytes = 0;
  for (const Arrays::Shard& shard : a.shards) bytes += held_bytes(shape_of_shard(caps, shard));
  if (bytes > static_cast<std::size_t>(kSmallIndex)) caps = lists.read(blocks.blocks);

  Tensor pairs = Tensor::zeros({static_cast<std::int64_t>(a.shards.size())}, DType::i64, device,
                               MemoryCategory::workspace);
  std::vector<PlacedIndex> placed;
  for (std::size_t k = 0; k < a.shards.size(); ++k) {
    const Arrays::Shard& shard = a.shards[k];
    const PatternAxes axes = a.axes(shard);
    const IndexShape shape = shape_of_shard(caps, shard);
    PlacedIndex& made = placed.emplace_back();
    made.shared = {shard.key_begin, shard.key_end};
    made.buffer = index_memory(shape, device);
    // First the chosen slashes, then the unsorted transpose.
    void* const building =
        scratch(std::max(slash_scratch_bytes(q_heads, axes), building_bytes(shape)));
    made.index = bind_index(shape, made.buffer.raw(), building);
    made.index.key_begin = shard.key_begin.data<std::int32_t>();
    made.index.key_end = shard.key_end.data<std::int32_t>();
    check(build_slash_index(made.index, axes, lists.slashes, lists.columns, lists.by_blocks,
                            building, stream()),
          "building of the attention pattern");
    check(derive_index(made.index, stream()), "preparation of the attention pattern");
    check(count_pairs(made.index, reinterpret_cast<std::uint64_t*>(pairs.data<std::int64_t>() + k),
                      stream()),
          "pairs of the attention pattern");
  }

  lists.count(counts);
  if (counts.keeps_chosen) lists.keep(counts, a, q_heads);
  const Tensor sums = pairs.to(host_device());
  std::vector<AttentionWork> built;
  for (std::size_t k = 0; k < placed.size(); ++k) {
    const double mean = static_cast<double>(sums.data<std::int64_t>()[k]) / q_heads;
    built.emplace_back(std::make_shared<const PatternTwin>(
        PatternCounts{a.q_tokens, a.shards[k].tokens, q_heads, {mean}}, std::move(placed[k])));
  }
  return built;
}

Tensor SlashBuilder::block_heads(std::span<const HeadRule> rules) const {
  const Arrays& a = *arrays_;
  const auto heads = static_cast<std::int64_t>(rules.size());
  Tensor marked = Tensor::zeros({heads, a.slots}, DType::u8);
  for (std::int64_t h = 0; h < heads; ++h)
    for (int s = 0; s < a.segments; ++s)
      if (rules[static_cast<std::size_t>(h)].pattern == HeadPattern::block_sparse &&
          a.whole[s] == 0 && a.keys[s] > 0)
        marked.data<std::uint8_t>()[h * a.slots + a.segment_slot[s]] = 1;
  return marked.to(*a.device);
}

Tensor SlashBuilder::alike(const Tensor& mass, const Tensor& queries, const Tensor& means,
                           double scale, double threshold) const {
  const Arrays& a = *arrays_;
  const int heads = static_cast<int>(queries.size(1));
  Tensor marked = Tensor::zeros({heads, a.slots}, DType::u8, *a.device, MemoryCategory::workspace);
  Likeness x;
  x.q = queries.raw();
  x.segment_tile = a.segment_tiles.data<std::int32_t>();
  x.tile_rows = reinterpret_cast<const Interval*>(a.tile_rows.data<std::int32_t>());
  x.high = means.rows(0, 1).raw();
  x.low = means.rows(1, 2).raw();
  x.columns = mass.data<std::int64_t>() + std::int64_t{heads} * a.slots;
  x.q_heads = heads;
  x.head_dim = static_cast<int>(queries.size(2));
  x.kv_heads = static_cast<int>(means.size(2)) / x.head_dim;
  for (int s = 0; s < a.segments; ++s)
    x.widest = std::max(x.widest, a.segment_slot[s + 1] - a.segment_slot[s]);
  x.scale = static_cast<float>(scale);
  require(x.widest <= kMostScoredBlocks, "flexprefill on CUDA: a segment of {} keys, at most {}",
          std::int64_t{x.widest} * kBlock, kMostScoredBlocks * kBlock);
  check(compare_estimates(x, a.axes(a.own), threshold, marked.data<std::uint8_t>(), stream()),
        "comparison of pooled estimates");
  return marked;
}

Tensor SlashBuilder::impose(Tensor& mass, std::span<const HeadRule> rules) const {
  const Arrays& a = *arrays_;
  const int heads = static_cast<int>(rules.size());
  mass = a.mass_or_none(mass, heads);
  std::vector<std::int32_t> imposed, most(static_cast<std::size_t>(2 * heads * a.segments), 0);
  for (int h = 0; h < heads; ++h) {
    const HeadRule& rule = rules[static_cast<std::size_t>(h)];
    const int kind = rule.pattern == HeadPattern::dense            ? 1
                     : rule.pattern == HeadPattern::a_shape        ? 2
                     : rule.pattern == HeadPattern::vertical_slash ? 0
                                                                   : 3;
    const auto window = static_cast<std::int32_t>(rule.window / kBlock);
    imposed.insert(imposed.end(), {kind, window, static_cast<std::int32_t>(rule.sink)});
    for (int s = 0; s < a.segments; ++s) {
      const std::int32_t blocks = a.segment_slot[s + 1] - a.segment_slot[s];
      std::int32_t &slashes = most[static_cast<std::size_t>(h * a.segments + s)],
                   &columns = most[static_cast<std::size_t>((heads + h) * a.segments + s)];
      if (kind == 1) slashes = blocks;
      if (kind == 2) {
        slashes = std::min(window, blocks);
        columns = static_cast<std::int32_t>(
            std::max<std::int64_t>(0, std::min(rule.sink, a.keys[s]) - kBlock));
      }
      if (kind == 0) {
        slashes = static_cast<std::int32_t>(rule.slashes);
        columns = static_cast<std::int32_t>(rule.columns);
      }
    }
  }
  static_assert(sizeof(StaticRule) == 3 * sizeof(std::int32_t));
  const Tensor on_gpu = upload(imposed, *a.device);
  check(impose_rules(mass.data<std::int64_t>(), heads, a.axes(a.own),
                     reinterpret_cast<const StaticRule*>(on_gpu.data<std::int32_t>()), stream()),
        "rules of heads");
  return upload(most, *a.device);
}

namespace {

template <class Value, class Of>
std::vector<Value> by_window(const SlashSetup& setup, Of&& of) {
  std::vector<Value> values;
  for (const SlashWindow& window : setup.windows) values.push_back(of(window));
  return values;
}

/// The builder, and the mass that it chooses by.  One window a segment.
class GpuSlashScores final : public SlashScores {
 public:
  explicit GpuSlashScores(const SlashSetup& setup)
      : builder_(*setup.axes, *setup.axis,
                 by_window<char>(setup, [](const SlashWindow& w) { return w.whole; }),
                 by_window<std::int64_t>(setup,
                                         [](const SlashWindow& w) {
                                           return w.observed() ? w.rows.front().position : 0;
                                         }),
                 {setup.options.vertical_share, setup.options.slash_share,
                  setup.options.max_columns, setup.options.max_slashes, setup.budgeted},
                 device_of(Space::cuda)),
        queries_(by_window<std::int64_t>(setup, [](const SlashWindow& w) { return w.queries(); })),
        threshold_(setup.options.flex_threshold) {}

  bool observes() const override { return builder_.observes(); }
  Tensor queries(const Tensor& q) override { return builder_.queries(q); }
  Tensor maximum(const Tensor& queries, const Tensor& k, double scale) override {
    return builder_.maximum(queries, k, scale);
  }
  Tensor sum(const Tensor& queries, const Tensor& k, double scale, const Tensor& maximum) override {
    return builder_.sum(queries, k, scale, maximum);
  }
  void mass(const Tensor& queries, const Tensor& k, double scale, const Tensor& maximum,
            const Tensor& sum, const RingJoin& ring) override {
    mass_ = builder_.mass(queries, k, scale, maximum, sum);
    ring.sum(mass_);
  }
  Tensor coverage(int heads, const std::vector<std::int64_t>& budgets) override {
    budgets_ = budgets;
    bought_ = builder_.budgets(mass_, heads, budgets, queries_);
    return bought_.coverage;
  }
  std::vector<AttentionWork> build(int q_heads, int kv_heads, std::optional<std::int64_t> budget,
                                   SlashCounts& counts) override {
    if (!budget) return builder_.build(mass_, q_heads, kv_heads, counts);
    const std::int64_t at =
        std::lower_bound(budgets_.begin(), budgets_.end(), *budget) - budgets_.begin();
    return builder_.build(bought_.order, q_heads, kv_heads, counts, bought_.most.rows(at, at + 1),
                          *budget);
  }
  Tensor block_heads(std::span<const HeadRule> rules) const override {
    return builder_.block_heads(rules);
  }
  Tensor alike(const Tensor& queries, const Tensor& means, double scale) const override {
    return builder_.alike(mass_, queries, means, scale, threshold_);
  }
  std::vector<AttentionWork> build(const HeadChoices& choices, int q_heads, int kv_heads,
                                   SlashCounts& counts) override {
    if (choices.rules.empty())
      return builder_.build(mass_, q_heads, kv_heads, counts, {}, 0, choices);
    const Tensor most = builder_.impose(mass_, choices.rules);
    std::vector<AttentionWork> built =
        builder_.build(mass_, q_heads, kv_heads, counts, most, 0, choices);
    // A rule states its numbers.
    counts.cut.assign(counts.cut.size(), 0);
    counts.cut_mass.assign(counts.cut_mass.size(), 0);
    return built;
  }

 private:
  SlashBuilder builder_;
  const std::vector<std::int64_t> queries_;  ///< [segments]
  const double threshold_;
  Tensor mass_;
  std::vector<std::int64_t> budgets_;
  SlashBudgets bought_;
};

}  // namespace

std::unique_ptr<SlashScores> slash_scores(const SlashSetup& setup) {
  require(!setup.options.causal(),
          "attention.selection = \"causal\" is chosen on the host: set run.backend = \"host\"");
  return std::make_unique<GpuSlashScores>(setup);
}

}  // namespace ballast::cuda

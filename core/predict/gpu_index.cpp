#include "core/predict/gpu_index.hpp"

#include <algorithm>
#include <cmath>

#include "core/plan/attention/block_budget.hpp"
#include "core/plan/attention/device_index.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "core/plan/attention/routed_lists.hpp"
#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {
namespace {

constexpr std::int64_t up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

/// Sum over the segment's query blocks of the key blocks that they see, `most` each at most.
std::int64_t tiles_of(const Segment& s, std::int64_t most) {
  const auto before = [most](std::int64_t blocks) {
    const std::int64_t rising = std::min(blocks, most);
    return rising * (rising + 1) / 2 + (blocks - rising) * most;
  };
  return before(up(s.end, kBlock)) - before(s.begin / kBlock);
}
std::int64_t tiles_of(const Segment& s) { return tiles_of(s, up(s.end, kBlock)); }

/// What the lists of heads hold, summed over them.
struct Chosen {
  double tiles = 0, runs = 0;
  std::int64_t columns = 0, longest = 0;  ///< longest: list of columns
  bool masked = false;                    ///< each run has a mask of its query rows
  /// Slashes and columns: every call has place for as many as its keys allow.
  bool in_each_call = false;
};

/// Slashes and columns that a head may take of a segment; of tiles a list has a place for each run.
struct SlashCaps {
  std::int64_t slashes = 0, columns = 0;
};
SlashCaps taken(double slash_share, double column_share, const Segment& s, SlashCaps caps) {
  const auto share = [](double part, std::int64_t of, std::int64_t most) {
    return std::min(most > 0 ? most : of,
                    static_cast<std::int64_t>(std::ceil(part * static_cast<double>(of))));
  };
  return {share(slash_share, up(s.end, kBlock), caps.slashes),
          share(column_share, s.end, caps.columns)};
}

class Pattern {
 public:
  Pattern(const GpuIndexRule& rule, std::span<const Segment> segments, const GpuIndexPart& part)
      : rule_(rule), segments_(segments), part_(part) {
    const HeadSplit split{part.sp, rule.query_heads, rule.kv_heads};
    q_heads_ = split.local_query_heads();
    kv_heads_ = split.local_kv_heads();
    for (const Segment& s : segments) widest_ = std::max(widest_, s.end);
  }

  GpuIndexBytes bytes() const {
    GpuIndexBytes b;
    const AttentionOptions& o = rule_.options;
    if (o.index == IndexOrigin::generated) {
      b.cached = lists(generated(), b);
    } else if (!o.chosen() || o.pattern == PatternKind::dense || takes_all()) {
      b.micro_batch = dense(b);
    } else if (o.pattern == PatternKind::moba) {
      if (!routed(b)) moba(b);
    } else if (o.pattern == PatternKind::xattention) {
      xattention(b);
    } else if (o.pattern == PatternKind::by_head && o.heads != nullptr) {
      by_head(b);
    } else if (o.pattern == PatternKind::vertical_slash) {
      vertical_slash(b);
    } else {  // flexprefill, or a table that is not read
      flexprefill(b);
    }
    return b;
  }

 private:
  std::int64_t q_blocks() const { return up(part_.queries, kBlock); }
  std::int64_t blocks_of(std::int64_t block_tokens) const {
    std::int64_t count = 0;
    for (const Segment& s : segments_) count += up(s.end, block_tokens);
    return count;
  }
  bool whole(const Segment& s) const { return s.end <= rule_.options.whole_tokens(); }
  std::int64_t moba_budget() const {
    return rule_.budget > 0 ? rule_.budget : rule_.options.moba_top_k;
  }
  bool takes_all() const {
    return rule_.options.pattern == PatternKind::moba &&
           budget_takes_all(moba_budget(), rule_.options.moba_block, widest_);
  }

  cuda::IndexShape shape(std::int64_t keys) const {
    cuda::IndexShape s;
    s.q_tokens = part_.queries, s.k_tokens = keys;
    s.q_heads = static_cast<int>(q_heads_), s.kv_heads = static_cast<int>(kv_heads_);
    return s;
  }
  /// Bytes of the arrays, and the scratch that kernels take over them.
  std::int64_t held(const cuda::IndexShape& shape, GpuIndexBytes& b) const {
    cuda::DeviceIndex x;
    x.shape = shape;
    const std::int64_t columns = x.column_rows() * x.column_heads() * rule_.head_dim;
    const std::int64_t backward = q_heads_ * shape.q_blocks() * 2 * kBlock * 4 + columns * 12;
    b.kernels = std::max({b.kernels, backward, std::int64_t(cuda::building_bytes(shape))});
    return static_cast<std::int64_t>(cuda::held_bytes(shape));
  }
  std::int64_t dense(GpuIndexBytes& b) const {
    std::int64_t sum = 0;
    for (const std::int64_t keys : part_.calls) {
      cuda::IndexShape s = shape(keys);
      s.dense = true;
      sum += held(s, b);
    }
    return sum;
  }
  std::int64_t lists(const Chosen& all, GpuIndexBytes& b) const {
    const double calls = all.in_each_call ? 1 : static_cast<double>(part_.calls.size());
    const auto count = [&](double n) {
      return std::max<std::int64_t>(1, static_cast<std::int64_t>(n / (part_.ring * calls)));
    };
    std::int64_t bytes = 0;
    for (const std::int64_t keys : part_.calls) {
      cuda::IndexShape s = shape(keys);
      s.index_heads = s.q_heads;
      s.segments = static_cast<int>(segments_.size());
      s.block_pairs = count(all.tiles);
      s.runs = std::min(s.block_pairs, count(all.runs) + q_heads_ * s.q_blocks());
      if (all.masked) s.row_masks = s.runs;
      s.columns = std::min(all.columns, q_heads_ * keys);
      if (s.columns > 0)
        s.cover_words = q_heads_ * s.q_blocks() * up(std::min(all.longest, keys), kBlock);
      bytes += held(s, b);
    }
    return bytes;
  }

  /// `share` of all tiles, chosen in blocks of `side` tiles a side that lie anywhere.
  Chosen blocks(double share, std::int64_t side) const {
    Chosen all;
    for (const Segment& s : segments_) {
      const auto tiles = static_cast<double>(tiles_of(s));
      all.tiles += whole(s) ? tiles : share * tiles;
      if (!whole(s)) all.runs += share * (1 - share) * tiles / static_cast<double>(side);
    }
    const auto heads = static_cast<double>(q_heads_);
    all.tiles *= heads, all.runs *= heads;
    return all;
  }
  void add_slashes(const Segment& s, const SlashCaps& take, std::int64_t heads, Chosen& all) const {
    all.in_each_call = true;
    const std::int64_t seen = up(*std::max_element(part_.calls.begin(), part_.calls.end()), kBlock);
    // The diagonal and the first block come on top.
    const std::int64_t most = whole(s) ? seen : std::min(seen, take.slashes + 2);
    all.tiles += static_cast<double>(heads * tiles_of(s, most));
    if (whole(s)) return;
    all.columns += heads * take.columns;
    all.longest = std::max(all.longest, take.columns);
  }
  Chosen slashes(double slash_share, double column_share, const SlashCaps& caps) const {
    Chosen all;
    for (const Segment& s : segments_)
      add_slashes(s, taken(slash_share, column_share, s, caps), q_heads_, all);
    all.runs = all.tiles;
    return all;
  }
  /// Whether lists have place for all that their caps allow, since that is little: then they do not
  /// follow what is chosen.
  bool by_caps(const SlashCaps& caps, GpuIndexBytes& b) const {
    constexpr std::int64_t little = std::int64_t{32} << 20;
    GpuIndexBytes all;
    all.layers.front() = lists(slashes(1, 1, caps), all);
    if (all.layers.front() <= little) b = all;
    observe(b);
    return all.layers.front() <= little;
  }
  void vertical_slash(GpuIndexBytes& b) const {
    const AttentionOptions& o = rule_.options;
    SlashCaps caps{o.max_slashes, o.max_columns};
    if (rule_.budget > 0)
      caps = {rule_.budget, o.max_columns > 0 ? std::min(o.max_columns, rule_.budget * kBlock)
                                              : rule_.budget * kBlock};
    if (by_caps(caps, b)) return;
    const bool bought = rule_.budget > 0;
    b.layers.front() =
        lists(slashes(bought ? 1 : o.slash_share, bought ? 1 : o.vertical_share, caps), b);
  }
  /// Estimates agree where attention is even, so that heads go by blocks.
  void flexprefill(GpuIndexBytes& b) const {
    if (by_caps({}, b)) return;
    Chosen all = blocks(rule_.options.flex_share, 1);
    all.runs = all.tiles;
    b.layers.front() = lists(all, b);
  }
  void by_head(GpuIndexBytes& b) const {
    if (by_caps({}, b)) return;
    const HeadTable& table = *rule_.options.heads;
    b.layers.assign(static_cast<std::size_t>(table.layers()), 0);
    for (int l = 0; l < table.layers(); ++l) {
      Chosen all;
      for (int h = 0; h < table.heads(); ++h)
        for (const Segment& s : segments_) add_rule(s, table.at(l, h), all);
      // A rank of an Ulysses group has its part of the heads.
      const double part = static_cast<double>(q_heads_) / std::max(1, table.heads());
      all.tiles *= part;
      all.columns = static_cast<std::int64_t>(static_cast<double>(all.columns) * part);
      all.runs = all.tiles;
      b.layers[static_cast<std::size_t>(l)] = lists(all, b);
    }
  }
  void add_rule(const Segment& s, const HeadRule& rule, Chosen& all) const {
    switch (rule.pattern) {
      case HeadPattern::dense:
        return add_slashes(s, {up(s.end, kBlock), 0}, 1, all);
      case HeadPattern::a_shape:
        return add_slashes(s, {rule.window / kBlock, std::max<std::int64_t>(0, rule.sink - kBlock)},
                           1, all);
      case HeadPattern::vertical_slash:
        return add_slashes(s, {rule.slashes, std::min(rule.columns, s.end)}, 1, all);
      case HeadPattern::block_sparse:
        return add_slashes(s, {rule.blocks, 0}, 1, all);
    }
  }
  /// Bands and columns, of which every segment has at most one in 16 keys.
  Chosen generated() const {
    const GeneratedPattern& g = rule_.options.generator;
    Chosen all;
    for (const Segment& s : segments_) {
      all.tiles += g.density * static_cast<double>(tiles_of(s) * q_heads_);
      const std::int64_t columns = std::min(g.columns, s.end / 16);
      all.columns += columns * q_heads_;
      all.longest = std::max(all.longest, columns);
    }
    all.runs = all.tiles / 8;  // slashes come in clusters of 4 to 16
    return all;
  }

  /// Mass of slashes and columns, and where budgets are bought their order, in 64 bits; the entries
  /// chosen of them in 32.
  void observe(GpuIndexBytes& b) const {
    const std::int64_t lists = q_heads_ * blocks_of(kBlock) * (1 + kBlock);
    b.micro_batch += lists * (rule_.budget > 0 ? 16 : 8);
    b.choosing += lists * 4;
    if (rule_.options.pattern != PatternKind::vertical_slash)
      b.choosing += words(kBlock) + words(kBlock) / 2;  // of heads that go by blocks, with scores
  }
  /// A word for each head, 64 queries and block of keys of the widest segment.
  std::int64_t words(std::int64_t block_tokens) const {
    return q_heads_ * q_blocks() * up(widest_, block_tokens) * 8;
  }
  void xattention(GpuIndexBytes& b) const {
    const AttentionOptions& o = rule_.options;
    Chosen all = blocks(o.xattention_threshold, up(o.xattention_block, kBlock));
    all.masked = true;
    b.layers.front() = lists(all, b);
    b.choosing = words(o.xattention_block) + q_heads_ * (part_.queries / o.xattention_stride) *
                                                 up(widest_, o.xattention_block) * 4;
  }

  /// Sixty-four queries that choose for themselves choose nearly all blocks between them.
  void moba(GpuIndexBytes& b) const {
    const std::int64_t side = rule_.options.moba_block / kBlock;
    Chosen all;
    for (const Segment& s : segments_) {
      all.tiles += static_cast<double>(q_heads_ * tiles_of(s));
      if (!budget_takes_all(moba_budget(), rule_.options.moba_block, s.end))
        all.runs += static_cast<double>(q_heads_ * tiles_of(s) / side);
    }
    all.masked = true;
    b.layers.front() = lists(all, b);
    b.choosing = words(rule_.options.moba_block);
  }
  /// Routed lists (kernels/cuda/index/routed_index.hpp), where the kernels have them.
  bool routed(GpuIndexBytes& b) const {
    const std::int64_t block = rule_.options.moba_block, dim = rule_.head_dim;
    const std::int64_t wide = up(widest_, block), slots = std::min(moba_budget() - 1, wide);
    if (part_.calls.size() != 1 || part_.ring != 1 || rule_.deterministic || slots < 1 ||
        (dim != 64 && dim != 128) || (block != 128 && block != 256))
      return false;
    std::int64_t rows = 0;  // those that list blocks: others see all before their own
    for (const Segment& s : segments_)
      rows += std::max<std::int64_t>(0, s.end - std::max(s.begin, (slots + 1) * block));
    const std::int64_t entries = q_heads_ * rows * slots;
    if (entries == 0) return false;
    const std::int64_t listed = up(q_blocks(), kRoutedChunk) * kv_heads_ * blocks_of(block);
    b.micro_batch = dense(b);
    b.layers.front() = listed * 2 * 8 + (entries / kRoutedUnit + listed) * 16 + entries * 4 +
                       q_heads_ * q_blocks() * kBlock * slots * 4;
    b.choosing = words(block) + words(block) / 2;
    // Partial outputs of whole chunks of queries, as many as fit.
    const std::int64_t chunk = kRoutedChunk * kBlock * q_heads_ * slots,
                       fit = std::max<std::int64_t>(1, kRoutedPartialBytes / (chunk * dim * 2));
    b.kernels = std::max(b.kernels, std::min(entries, fit * chunk) * (dim * 2 + 4));
    return true;
  }

  const GpuIndexRule& rule_;
  const std::span<const Segment> segments_;
  const GpuIndexPart& part_;
  std::int64_t q_heads_ = 1, kv_heads_ = 1, widest_ = 0;
};

}  // namespace

GpuIndexBytes gpu_index_bytes(const GpuIndexRule& rule, std::span<const Segment> segments,
                              const GpuIndexPart& part) {
  if (part.queries == 0) return {};
  return Pattern(rule, segments, part).bytes();
}

}  // namespace ballast

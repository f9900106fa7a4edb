#include "core/predict/gpu_index.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/division.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/plan/attention/device_index.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "core/plan/attention/routed_lists.hpp"
#include "core/plan/context/ulysses_heads.hpp"
#include "core/predict/index_workspace.hpp"

namespace ballast {
namespace {

/// Sum over the segment's query blocks of the key blocks that they see, `most` each at most.
std::int64_t tiles_of(const Segment& s, std::int64_t most) {
  const auto before = [most](std::int64_t blocks) {
    const std::int64_t rising = std::min(blocks, most);
    return rising * (rising + 1) / 2 + (blocks - rising) * most;
  };
  return before(divided_up(s.end, kBlock)) - before(s.begin / kBlock);
}
std::int64_t tiles_of(const Segment& s) { return tiles_of(s, divided_up(s.end, kBlock)); }

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
  return {share(slash_share, divided_up(s.end, kBlock), caps.slashes),
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
    for (const GpuIndexPart::Calls& c : part.calls) {
      call_count_ += c.times;
      most_keys_ = std::max(most_keys_, c.keys);
    }
    const auto whole = [&](std::int64_t budget) {
      return rule.options.pattern == PatternKind::moba &&
             budget_takes_all(budget, rule.options.moba_block, widest_);
    };
    // The largest that is not attention to everything, where there is one.
    for (const std::int64_t budget : rule.budgets)
      if (budget_ == 0 || !whole(budget)) budget_ = budget;
  }

  GpuIndexBytes bytes() const {
    GpuIndexBytes b;
    const AttentionOptions& o = rule_.options;
    if (o.index == IndexOrigin::recorded) return b;
    if (o.index == IndexOrigin::generated) {
      b.cached = lists(generated(), b);
    } else if (!o.chosen() || o.pattern == PatternKind::dense ||
               (o.pattern == PatternKind::moba && takes_all())) {
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
  std::int64_t q_blocks() const { return divided_up(part_.queries, kBlock); }
  std::int64_t blocks_of(std::int64_t block_tokens) const {
    std::int64_t count = 0;
    for (const Segment& s : segments_) count += divided_up(s.end, block_tokens);
    return count;
  }
  bool whole(const Segment& s) const {
    const AttentionOptions& o = rule_.options;
    return s.end <= o.whole_tokens() || (o.pattern == PatternKind::vertical_slash && takes_all());
  }
  std::int64_t moba_budget() const { return budget_ > 0 ? budget_ : rule_.options.moba_top_k; }
  bool takes_all() const {
    const AttentionOptions& o = rule_.options;
    if (o.pattern == PatternKind::moba)
      return budget_takes_all(moba_budget(), o.moba_block, widest_);
    return o.pattern == PatternKind::vertical_slash && budget_ == 0 &&
           (o.vertical_share >= 1 || o.slash_share >= 1);
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
  /// Bytes of all calls; what they need of the kernels' scratch goes to `b`.
  std::int64_t dense(GpuIndexBytes& b) const {
    std::int64_t sum = 0;
    for (const GpuIndexPart::Calls& c : part_.calls) {
      cuda::IndexShape s = shape(c.keys);
      s.dense = true;
      sum += c.times * held(s, b);
    }
    return sum;
  }
  /// Lists of every head in all calls, as dense().
  std::int64_t lists(const Chosen& all, GpuIndexBytes& b) const {
    const std::int64_t calls = all.in_each_call ? 1 : call_count_;
    const auto count = [&](double n) {
      return std::max<std::int64_t>(
          1, static_cast<std::int64_t>(n / static_cast<double>(part_.ring * calls)));
    };
    std::int64_t bytes = 0;
    for (const GpuIndexPart::Calls& c : part_.calls) {
      cuda::IndexShape s = shape(c.keys);
      s.index_heads = s.q_heads;
      s.segments = static_cast<int>(segments_.size());
      s.block_pairs = count(all.tiles);
      s.runs = std::min(s.block_pairs, count(all.runs) + q_heads_ * s.q_blocks());
      if (all.masked) s.row_masks = s.runs;
      s.columns = all.columns / calls;
      if (s.columns > 0)
        s.cover_words = q_heads_ * s.q_blocks() * divided_up(std::min(all.longest, c.keys), kBlock);
      bytes += c.times * held(s, b);
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
    const std::int64_t seen = divided_up(most_keys_, kBlock);
    // The diagonal and the first block come on top.
    const std::int64_t most = whole(s) ? seen : std::min(seen, take.slashes + 2);
    all.tiles += static_cast<double>(heads * tiles_of(s, most));
    if (whole(s)) return;
    const std::int64_t columns = std::min({take.columns, s.end, most_keys_});
    all.columns += heads * columns;
    all.longest = std::max(all.longest, columns);
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
    GpuIndexBytes all;
    all.layers.front() = lists(slashes(1, 1, caps), all);
    if (all.layers.front() <= cuda::kSmallIndex) b = all;
    observe(b);
    return all.layers.front() <= cuda::kSmallIndex;
  }
  void vertical_slash(GpuIndexBytes& b) const {
    const AttentionOptions& o = rule_.options;
    if (budget_ > 0) return bought_slashes(b);
    const SlashCaps caps{o.max_slashes, o.max_columns};
    if (!by_caps(caps, b))
      b.layers.front() = lists(slashes(o.slash_share, o.vertical_share, caps), b);
  }
  /// SlashPurchases: the diagonal and the first block are two of a budget's blocks, each other one
  /// is a slash or 64 columns.  Heads that buy as few columns as they may and heads that buy as
  /// many as they may are the ends between which a layer's lists lie: the larger counts.
  void bought_slashes(GpuIndexBytes& b) const {
    const std::int64_t cap = rule_.options.max_columns,
                       open = std::max<std::int64_t>(0, budget_ - 2);
    const auto columns = [cap](std::int64_t budget) {
      return cap > 0 ? std::min(cap, budget * kBlock) : budget * kBlock;
    };
    if (by_caps({budget_, columns(budget_)}, b)) return;
    for (const std::int64_t most : {columns(std::min<std::int64_t>(1, open)), columns(open)}) {
      Chosen all;
      for (const Segment& s : segments_)
        add_slashes(s, {open - divided_up(most, kBlock), most}, q_heads_, all);
      all.runs = all.tiles;
      b.layers.front() = std::max(b.layers.front(), lists(all, b));
    }
  }
  /// Estimates agree where attention is even, so that heads go by blocks.
  void flexprefill(GpuIndexBytes& b) const {
    if (by_caps({}, b)) return;
    Chosen all = blocks(rule_.options.flex_share, 1);
    // The diagonal and the first block come on top; each call has place for all of a rank's.
    all.tiles += static_cast<double>(2 * q_heads_ * blocks_of(kBlock));
    all.runs = all.tiles;
    all.in_each_call = true;
    b.layers.front() = lists(all, b);
  }
  void by_head(GpuIndexBytes& b) const {
    if (by_caps({}, b)) return;
    const HeadTable& table = *rule_.options.heads;
    b.layers.assign(static_cast<std::size_t>(table.layers()), 0);
    for (int l = 0; l < table.layers(); ++l)
      for (int first = 0; first + q_heads_ <= table.heads(); first += static_cast<int>(q_heads_)) {
        Chosen all;  // a rank of an Ulysses group has these heads
        for (int h = first; h < first + q_heads_; ++h)
          for (const Segment& s : segments_) add_rule(s, table.at(l, h), all);
        all.runs = all.tiles;
        std::int64_t& most = b.layers[static_cast<std::size_t>(l)];
        most = std::max(most, lists(all, b));
      }
  }
  void add_rule(const Segment& s, const HeadRule& rule, Chosen& all) const {
    switch (rule.pattern) {
      case HeadPattern::dense:
        return add_slashes(s, {divided_up(s.end, kBlock), 0}, 1, all);
      case HeadPattern::a_shape:
        return add_slashes(
            s,
            {rule.window / kBlock, std::max<std::int64_t>(0, std::min(rule.sink, s.end) - kBlock)},
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
    if (rule_.options.pattern == PatternKind::vertical_slash && takes_all()) return;
    const std::int64_t slots = q_heads_ * blocks_of(kBlock), lists = slots * (1 + kBlock),
                       parts = budget_ > 0 ? divided_up(rule_.options.last_q, kBlock) + 1 : 1;
    b.micro_batch += slots * (1 + kBlock * parts) * 8 + (budget_ > 0 ? lists * 8 : 0);
    b.choosing += lists * 4;
    if (rule_.options.pattern != PatternKind::vertical_slash)
      b.choosing += words(kBlock) + words(kBlock) / 2;  // of heads that go by blocks, with scores
  }
  /// A word for each head, 64 queries and block of keys of the widest segment.
  std::int64_t words(std::int64_t block_tokens) const {
    return q_heads_ * q_blocks() * divided_up(widest_, block_tokens) * 8;
  }
  void xattention(GpuIndexBytes& b) const {
    const AttentionOptions& o = rule_.options;
    Chosen all = blocks(o.xattention_threshold, divided_up(o.xattention_block, kBlock));
    all.masked = true;
    b.layers.front() = lists(all, b);
    b.choosing = words(o.xattention_block) + q_heads_ * (part_.queries / o.xattention_stride) *
                                                 divided_up(widest_, o.xattention_block) * 4;
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
    const std::int64_t wide = divided_up(widest_, block), slots = std::min(moba_budget() - 1, wide);
    if (call_count_ != 1 || part_.ring != 1 || rule_.deterministic || slots < 1 ||
        !routed_kernels(dim, block))
      return false;
    std::int64_t rows = 0;  // those that list blocks: others see all before their own
    for (const Segment& s : segments_)
      rows += std::max<std::int64_t>(0, s.end - std::max(s.begin, (slots + 1) * block));
    const std::int64_t entries = q_heads_ * rows * slots;
    if (entries == 0 || entries > std::numeric_limits<std::int32_t>::max()) return false;
    const std::int64_t listed = divided_up(q_blocks(), kRoutedChunk) * kv_heads_ * blocks_of(block);
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
  std::int64_t call_count_ = 0, most_keys_ = 0, budget_ = 0;
};

}  // namespace

GpuIndexBytes gpu_index_bytes(const GpuIndexRule& rule, std::span<const Segment> segments,
                              const GpuIndexPart& part) {
  if (part.queries == 0 || part.calls.empty()) return {};
  GpuIndexBytes bytes = Pattern(rule, segments, part).bytes();
  // Of rows their queries, maxima, and sums of all keys and of four parts.
  const IndexWork recall = recall_work(rule.options, segments, part.ring);
  bytes.recall = rule.query_heads / part.sp *
                 (recall.recall.rows * (rule.head_dim * 4 + 4 + 5 * 8) + recall.recall_blocks * 8);
  return bytes;
}

}  // namespace ballast

#include "kernels/attention/slash_scores.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/attention/slash_purchases.hpp"
#include "kernels/attention/index_scores.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {
namespace {

/// Observed mass of all ranks in one gather: slashes are summed, of columns each rank sends those
/// that have mass, since what a cap leaves out is counted too.
class MassExchange {
 public:
  /// `most` [lists]: columns that a rank may send of each.
  explicit MassExchange(std::vector<std::int64_t> most)
      : columns_(most.size()), most_(std::move(most)) {}
  void add(std::size_t list, MassItem item) {
    if (item.mass > 0) columns_[list].push_back(item);
  }
  /// The lists of all ranks; `slashes` becomes their sum.
  std::vector<std::vector<MassItem>> gather(const RingJoin& ring, int ranks, Tensor& slashes) {
    if (ranks == 1) return std::move(columns_);
    std::vector<std::int64_t> message(slashes.data<std::int64_t>(),
                                      slashes.data<std::int64_t>() + slashes.numel());
    for (const auto& list : columns_) {
      message.push_back(static_cast<std::int64_t>(list.size()));
      for (const MassItem& item : list) message.insert(message.end(), {item.index, item.mass});
    }
    const std::int64_t longest = slashes.numel() + static_cast<std::int64_t>(most_.size()) +
                                 2 * std::accumulate(most_.begin(), most_.end(), std::int64_t{0});
    message.resize(static_cast<std::size_t>(longest));
    const Tensor all = ring.gather(Tensor::wrap(message.data(), {longest}, DType::i64));
    std::vector<std::vector<MassItem>> lists(most_.size());
    slashes.zero();
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t* at = all.data<std::int64_t>() + r * longest;
      for (std::int64_t i = 0; i < slashes.numel(); ++i) slashes.data<std::int64_t>()[i] += *at++;
      for (auto& list : lists)
        for (std::int64_t n = *at++; n > 0; --n, at += 2) list.push_back({at[0], at[1]});
    }
    return lists;
  }

 private:
  std::vector<std::vector<MassItem>> columns_;
  std::vector<std::int64_t> most_;
};

/// [segments] keys of a segment on the rank that has most of them.
std::vector<std::int64_t> widest_shards(const AttentionAxes& axes, int segments) {
  std::vector<std::int64_t> widest(static_cast<std::size_t>(segments), 0), here(widest.size());
  for (std::size_t shard = 0; shard < axes.keys.size(); ++shard) {
    std::fill(here.begin(), here.end(), 0);
    for (const AxisRange& key : axes.keys[shard])
      if (!key.padding()) here[key.segment] += key.count;
    for (std::size_t s = 0; s < here.size(); ++s) widest[s] = std::max(widest[s], here[s]);
  }
  return widest;
}

/// Where the observed rows see this rank's keys.
ObservedRows rows_on_shard(const AxisRanges& observed, const KeyAxis& axis, const AxisRanges& own) {
  ObservedRows rows;
  rows.key_block = global_blocks(axis, own);
  const VisibleKeys visible = split_visible(visible_keys(observed, axis), axis, {own}).front();
  visible.for_rows(0, visible.rows(), [&](std::int64_t, KeyInterval keys) {
    rows.key_begin.push_back(keys.begin);
    rows.key_end.push_back(keys.end);
  });
  return rows;
}

class HostSlashScores final : public SlashScores {
 public:
  explicit HostSlashScores(SlashSetup setup) : setup_(std::move(setup)) {
    if (std::none_of(setup_.windows.begin(), setup_.windows.end(),
                     [](const SlashWindow& w) { return w.observed(); }))
      return;
    places_.resize(setup_.windows.size());
    const std::vector<std::size_t> edges =
        observed_batches(setup_.windows, axis(), setup_.options.last_q);
    for (std::size_t b = 0; b + 1 < edges.size(); ++b) add_batch(edges[b], edges[b + 1]);
  }

  bool observes() const override { return !batches_.empty(); }
  bool more() const override { return now_ > 0; }

  Tensor queries(const Tensor& q) override {
    Tensor all = Tensor::zeros({token_count(batch().observed), q.size(1), q.size(2)}, DType::f32,
                               host_device(), MemoryCategory::workspace);
    std::int64_t local = 0;
    for (const AxisRange& have : axes().queries) {
      std::int64_t row = 0;
      for (const AxisRange& want : batch().observed) {
        const std::int64_t first = std::max(have.position, want.position),
                           n = std::min(have.end(), want.end()) - first;
        if (have.segment == want.segment && n > 0) {
          Tensor to = all.rows(row + first - want.position, row + first - want.position + n);
          const std::int64_t from = local + first - have.position;
          copy_rows(q.rows(from, from + n), to);
        }
        row += want.count;
      }
      local += have.count;
    }
    return all;
  }

  Tensor maximum(const Tensor& queries, const Tensor& k, double scale) override {
    const ObservedRows& rows = batch().rows;
    scores_ = empty({queries.size(1), rows.places().back()}, DType::f32);
    Tensor top = empty({queries.size(1), rows.size()}, DType::f32);
    observe_scores(queries, k, scale, rows, scores_, top);
    return top;
  }

  Tensor sum(const Tensor&, const Tensor&, double, const Tensor& maximum) override {
    Tensor sum = empty(maximum.shape(), DType::i64);
    observe_sum(scores_, maximum, batch().rows, sum);
    return sum;
  }

  void mass(const Tensor&, const Tensor& k, double, const Tensor& maximum, const Tensor& sum,
            const RingJoin& ring) override {
    const std::int64_t heads = maximum.size(0);
    Tensor columns = empty({batch().parts, heads, k.size(0)}, DType::i64),
           slashes = empty({heads, batch().slots}, DType::i64);
    observe_mass(scores_, sum, batch().rows, columns, slashes);
    scores_ = {};
    std::vector<std::vector<MassItem>> gathered = exchange(columns, slashes, ring);
    if (now_ == 0) mass_.assign(setup_.windows.size() * static_cast<std::size_t>(heads), {});
    for (std::size_t w = batch().first; w < batch().last; ++w)
      for (std::int64_t h = 0; h < heads; ++h) {
        HeadMass& of = mass_[w * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)];
        const std::int64_t* from =
            slashes.data<std::int64_t>() + h * batch().slots + places_[w].slot;
        of.slashes.assign(from, from + places_[w].slots);
        for (std::int64_t m : of.slashes) of.total += m;
        if (setup_.budgeted) of.query_block = places_[w].blocks;
        for (std::int64_t p = 0; p < std::ssize(places_[w].blocks); ++p)
          of.columns.push_back(
              std::move(gathered[list(places_[w].part + p, setup_.windows[w].segment, h, heads)]));
      }
    now_ = (now_ + 1) % batches_.size();
  }

  Tensor coverage(int heads, const std::vector<std::int64_t>& budgets) override {
    Tensor sums = Tensor::zeros({static_cast<std::int64_t>(budgets.size())}, DType::i64);
    budgets_ = budgets;
    purchases_.clear();
    for (std::size_t w = 0; w < setup_.windows.size(); ++w)
      for (int h = 0; h < heads; ++h) {
        std::vector<std::int64_t> part(budgets.size(), static_cast<std::int64_t>(kCoverageUnit));
        if (setup_.windows[w].observed())
          part = purchases_
                     .emplace(std::pair(w, h),
                              SlashPurchases(mass_of(w, h, heads), budgets, setup_.options))
                     .first->second.coverage();
        for (std::size_t i = 0; i < part.size(); ++i)
          sums.data<std::int64_t>()[i] += setup_.windows[w].queries() * part[i];
      }
    return sums;
  }

  std::vector<AttentionWork> build(int q_heads, int, std::optional<std::int64_t> budget,
                                   SlashCounts& counts) override {
    const std::vector<HeadChoice> handed_in = std::exchange(counts.carried, {});
    std::vector<SlashStretch> stretches =
        make_stretches(q_heads, counts, [&](std::size_t w, int h) {
          const SlashWindow& window = setup_.windows[w];
          return window.whole || window.observed() ? choose(w, h, q_heads, budget)
                                                   : handed_in.at(static_cast<std::size_t>(h));
        });
    return cut_calls(std::move(stretches), nullptr, counts);
  }

  Tensor block_heads(std::span<const HeadRule> rules) const override {
    return mark_blocks(static_cast<int>(rules.size()), [&](std::size_t, int h) {
      return rules[static_cast<std::size_t>(h)].pattern == HeadPattern::block_sparse;
    });
  }

  Tensor alike(const Tensor& queries, const Tensor& means, double scale) const override {
    const std::int64_t heads = queries.size(1);
    std::vector<std::int64_t> row{0};  // of each window's first observed query
    for (const SlashWindow& window : setup_.windows)
      row.push_back(row.back() + (window.observed() ? token_count(window.rows) : 0));
    return mark_blocks(static_cast<int>(heads), [&](std::size_t w, int h) {
      if (!setup_.windows[w].observed()) return false;
      const int segment = setup_.windows[w].segment;
      const std::int64_t first = axis().offset[segment] / kBlock,
                         last = first + (axis().count[segment] + kBlock - 1) / kBlock;
      std::vector<double> estimate, held(static_cast<std::size_t>(last - first), 0);
      const std::vector<float> scores = score_pooled(mean_query(queries, h, row[w], row[w + 1]),
                                                     means, h, heads, scale, first, last);
      const float top = *std::max_element(scores.begin(), scores.end());
      for (const float score : scores) estimate.push_back(std::exp(double{score} - double{top}));
      for (const MassItem& item : mass_of(w, h, static_cast<int>(heads)).columns.at(0))
        held[static_cast<std::size_t>(item.index / kBlock)] += static_cast<double>(item.mass);
      return divergence(estimate, held) < setup_.options.flex_threshold;
    });
  }

  std::vector<AttentionWork> build(const HeadChoices& choices, int q_heads, int,
                                   SlashCounts& counts) override {
    ChosenBlocks chosen;
    const auto by_blocks = [&](std::size_t w, int h) {
      const std::int64_t first = axis().offset[setup_.windows[w].segment] / kBlock;
      return choices.by_blocks.defined() &&
             choices.by_blocks.data<std::uint8_t>()[h * choices.by_blocks.size(1) + first] != 0;
    };
    std::vector<SlashStretch> stretches =
        make_stretches(q_heads, counts, [&](std::size_t w, int h) {
          const SlashWindow& window = setup_.windows[w];
          if (by_blocks(w, h)) return HeadChoice{};
          if (window.whole || choices.rules.empty()) return choose(w, h, q_heads, std::nullopt);
          const HeadRule& rule = choices.rules[static_cast<std::size_t>(h)];
          const bool observed = rule.pattern == HeadPattern::vertical_slash;
          return HeadChoice{choose_by_rule(rule, observed ? &mass_of(w, h, q_heads) : nullptr,
                                           axis().count[window.segment]),
                            0};
        });
    if (choices.words.defined()) {
      chosen.words = choices.words.data<std::int64_t>();
      chosen.width = choices.words.size(2);
      for (std::size_t w = 0; w < setup_.windows.size(); ++w)
        for (int h = 0; h < q_heads; ++h) chosen.heads.push_back(by_blocks(w, h) ? 1 : 0);
    }
    return cut_calls(std::move(stretches), choices.words.defined() ? &chosen : nullptr, counts);
  }

 private:
  /// [heads, blocks of the key axis]: 1 at the first block of each window's segment where it is not
  /// computed whole and test(window, head) holds.
  template <class Test>
  Tensor mark_blocks(int heads, Test&& test) const {
    Tensor marked = Tensor::zeros({heads, axis().tokens() / kBlock}, DType::u8, host_device(),
                                  MemoryCategory::workspace);
    for (std::size_t w = 0; w < setup_.windows.size(); ++w) {
      const SlashWindow& window = setup_.windows[w];
      for (int h = 0; h < heads && !window.whole && axis().count[window.segment] > 0; ++h)
        if (test(w, h))
          marked.data<std::uint8_t>()[h * marked.size(1) + axis().offset[window.segment] / kBlock] =
              1;
    }
    return marked;
  }

  /// The choice of every window and head, counted; that of a window without queries is for
  /// counts.carried, and counts where its queries are.
  template <class Choose>
  std::vector<SlashStretch> make_stretches(int q_heads, SlashCounts& counts, Choose&& choose) {
    const std::size_t windows = setup_.windows.size();
    const std::size_t lists = static_cast<std::size_t>(q_heads) * windows;
    counts.slashes.assign(lists, 0);
    counts.columns.assign(lists, 0);
    counts.cut.assign(lists, 0);
    counts.cut_mass.assign(lists, 0);
    std::vector<SlashStretch> stretches;
    for (std::size_t w = 0; w < windows; ++w) {
      const SlashWindow& window = setup_.windows[w];
      const std::int64_t before = axis().first_position[window.segment];
      SlashStretch stretch{window.segment,
                           (window.begin - before) / kBlock,
                           setup_.options.causal() && !window.whole,
                           {}};
      std::vector<HeadChoice> choices;
      for (int h = 0; h < q_heads && axis().count[window.segment] > 0; ++h)
        choices.push_back(choose(w, h));
      if (window.queries() == 0 && !window.whole) {
        counts.carried = std::move(choices);
        continue;
      }
      for (std::size_t h = 0; h < choices.size(); ++h) {
        HeadChoice& choice = choices[h];
        const std::size_t i = h * windows + w;
        counts.slashes[i] = static_cast<std::int32_t>(choice.head.slashes.size());
        counts.columns[i] = static_cast<std::int32_t>(choice.head.columns.size());
        counts.cut[i] = static_cast<std::int32_t>(choice.overflow);
        counts.cut_mass[i] = choice.overflow_mass;
        stretch.heads.push_back(std::move(choice.head));
      }
      stretches.push_back(std::move(stretch));
    }
    return stretches;
  }
  std::vector<AttentionWork> cut_calls(std::vector<SlashStretch> stretches,
                                       const ChosenBlocks* chosen, SlashCounts& counts) const {
    const AttentionPattern whole =
        vertical_slash_pattern(axes().queries, axis(), stretches, true, chosen);
    counts.chosen = std::move(stretches);
    const std::vector<AttentionPattern> calls = split_keys(whole, axis(), axes().calls());
    return {calls.begin(), calls.end()};
  }
  const AttentionAxes& axes() const { return *setup_.axes; }
  const KeyAxis& axis() const { return *setup_.axis; }
  AxisRanges own() const { return axes().keys[axes().rank]; }
  static Tensor empty(Shape shape, DType type) {
    return Tensor::empty(std::move(shape), type, host_device(), MemoryCategory::workspace);
  }
  /// Where the mass of a window is summed.
  struct Place {
    std::int64_t slot = 0;   ///< of its slash 0
    std::int64_t part = 0;   ///< of its segment's columns: its first
    std::int64_t slots = 0;  ///< slashes
    /// One a list of columns: where budgets buy them the blocks that have observed rows, else one.
    std::vector<std::int64_t> blocks;
  };
  /// Windows that are observed together.
  struct Batch {
    std::size_t first = 0, last = 0;
    AxisRanges observed;
    ObservedRows rows;                  ///< on this rank's keys
    std::int64_t slots = 0, parts = 1;  ///< that slashes and columns are kept in
  };
  const Batch& batch() const { return batches_[now_]; }
  void add_batch(std::size_t first, std::size_t last) {
    Batch& batch = batches_.emplace_back();
    batch.first = first, batch.last = last;
    std::vector<std::int64_t> parts(static_cast<std::size_t>(axis().segments()), 0);
    for (std::size_t w = first; w < last; ++w) {
      const SlashWindow& window = setup_.windows[w];
      Place& place = places_[w];
      place.slot = batch.slots, place.part = parts[window.segment];
      if (window.observed()) {
        batch.observed.insert(batch.observed.end(), window.rows.begin(), window.rows.end());
        place_window(window, place);
      }
      batch.slots += place.slots;
      parts[window.segment] += std::ssize(place.blocks);
      batch.parts = std::max(batch.parts, parts[window.segment]);
    }
    batch.rows = rows_on_shard(batch.observed, axis(), own());
    for (std::size_t w = first; w < last; ++w)
      place_rows(setup_.windows[w], places_[w], batch.rows);
  }
  std::int64_t block_of(const SlashWindow& window, std::int64_t position) const {
    return (position - axis().first_position[window.segment]) / kBlock;
  }
  /// The blocks and the slashes of an observed window.
  void place_window(const SlashWindow& window, Place& place) const {
    for (const AxisRange& range : window.rows)
      for (std::int64_t p = range.position; p < range.end(); ++p)
        if (const std::int64_t block = block_of(window, p);
            place.blocks.empty() || place.blocks.back() != block)
          place.blocks.push_back(block);
    // What budgets buy ends with every slash of the segment.
    const std::int64_t last = window.rows.back().end(),
                       end = setup_.budgeted ? std::max(last, window.end) : last;
    place.slots = block_of(window, end - 1) + 1;
    if (!setup_.budgeted) place.blocks.resize(1);
  }
  void place_rows(const SlashWindow& window, const Place& place, ObservedRows& rows) const {
    if (!window.observed()) return;
    for (const AxisRange& range : window.rows)
      for (std::int64_t p = range.position; p < range.end(); ++p) {
        const std::int64_t block = block_of(window, p);
        const auto part = setup_.budgeted
                              ? std::lower_bound(place.blocks.begin(), place.blocks.end(), block) -
                                    place.blocks.begin()
                              : 0;
        rows.row_slot.push_back(
            static_cast<std::int32_t>(place.slot + block + axis().offset[window.segment] / kBlock));
        rows.row_part.push_back(static_cast<std::int32_t>(place.part + part));
      }
  }
  const HeadMass& mass_of(std::size_t window, int head, int heads) const {
    return mass_[window * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)];
  }
  HeadChoice choose(std::size_t w, int h, int heads, std::optional<std::int64_t> budget) const {
    const SlashWindow& window = setup_.windows[w];
    if (window.whole) return {dense_head(window.end - axis().first_position[window.segment]), 0};
    if (!budget) return choose_vertical_slash(mass_of(w, h, heads), setup_.options);
    const auto at = std::lower_bound(budgets_.begin(), budgets_.end(), *budget) - budgets_.begin();
    return {purchases_.at({w, h}).choice(static_cast<std::size_t>(at)), 0};
  }
  std::size_t list(std::int64_t part, int segment, std::int64_t head, std::int64_t heads) const {
    return static_cast<std::size_t>((part * axis().segments() + segment) * heads + head);
  }
  /// Columns of all ranks by list(); `slashes` becomes the sum over the ranks.
  std::vector<std::vector<MassItem>> exchange(const Tensor& columns, Tensor& slashes,
                                              const RingJoin& ring) const {
    const std::int64_t heads = columns.size(1), tokens = columns.size(2);
    std::vector<std::int64_t> widest = widest_shards(axes(), axis().segments()), most;
    std::vector<char> seen(widest.size(), 0);
    for (const AxisRange& range : batch().observed) seen[range.segment] = 1;
    for (std::size_t s = 0; s < seen.size(); ++s) widest[s] *= seen[s];
    for (std::int64_t p = 0; p < batch().parts; ++p)
      for (const std::int64_t keys : widest)
        most.insert(most.end(), static_cast<std::size_t>(heads), keys);
    MassExchange exchange(std::move(most));
    for (std::int64_t i = 0; i < batch().parts * heads; ++i) {
      const std::int64_t* column = columns.data<std::int64_t>() + i * tokens;
      for (const AxisRange& range : own()) {
        if (!range.padding())
          for (std::int64_t j = 0; j < range.count; ++j)
            exchange.add(list(i / heads, range.segment, i % heads, heads),
                         {axis().global(range) + j - axis().offset[range.segment], column[j]});
        column += range.count;
      }
    }
    return exchange.gather(ring, static_cast<int>(axes().keys.size()), slashes);
  }

  const SlashSetup setup_;
  std::vector<Batch> batches_;
  std::size_t now_ = 0;  ///< the batch that is observed
  Tensor scores_;
  std::vector<Place> places_;   ///< [windows] in their batch
  std::vector<HeadMass> mass_;  ///< [windows][heads]
  std::vector<std::int64_t> budgets_;
  std::map<std::pair<std::size_t, int>, SlashPurchases> purchases_;  ///< (window, head)
};

}  // namespace

std::unique_ptr<SlashScores> slash_scores(const SlashSetup& setup, const Tensor& q) {
  BALLAST_ON_CUDA(q, slash_scores(setup));
  return std::make_unique<HostSlashScores>(setup);
}

}  // namespace ballast

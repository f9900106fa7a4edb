// A packed axis over ranks, and an index by rules and blocks on it: built on the GPU, compared pair
// by pair.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "kernels/cuda/index/heads_launch.hpp"
#include "kernels/cuda/standalone/attention_problem.cuh"

namespace bench {
using namespace ballast::cuda;

/// A packed axis of segments, of which rank `rank` of `ranks` has every ranks-th block of 64.
struct Axis {
  std::vector<int> tokens;
  std::vector<std::int32_t> segment_slot{0}, slot_segment;
  int slots() const { return segment_slot.back(); }
  int segments() const { return static_cast<int>(tokens.size()); }
  explicit Axis(std::vector<int> lengths) : tokens(std::move(lengths)) {
    for (int s = 0; s < segments(); ++s) {
      const int n = (tokens[s] + 63) / 64;
      segment_slot.push_back(segment_slot.back() + n);
      slot_segment.insert(slot_segment.end(), n, s);
    }
  }
  int base(int slot) const { return segment_slot[slot_segment[slot]]; }
  /// Tokens of a slot.
  int rows(int slot) const {
    return std::clamp(tokens[slot_segment[slot]] - (slot - base(slot)) * 64, 0, 64);
  }
  std::vector<std::int32_t> of_rank(int rank, int ranks) const {
    std::vector<std::int32_t> mine;
    for (int slot = rank; slot < slots(); slot += ranks) mine.push_back(slot);
    return mine;
  }
};

/// Blocks of 64 of one rank as the choosing kernels read them.
struct Rows {
  std::vector<std::int32_t> first, own, rows;
  Buffer<std::int32_t> d_first, d_own, d_rows;
  Rows(const Axis& axis, const std::vector<std::int32_t>& slots)
      : first(map(slots, [&](int s) { return axis.base(s); })),
        own(slots),
        rows(map(slots, [&](int s) { return axis.rows(s); })),
        d_first(first),
        d_own(own),
        d_rows(rows) {}
  template <class Of>
  static std::vector<std::int32_t> map(const std::vector<std::int32_t>& slots, Of of) {
    std::vector<std::int32_t> out;
    for (int s : slots) out.push_back(of(s));
    return out;
  }
  BlockRows view() const {
    return {static_cast<int>(own.size()), d_first.data, d_own.data, d_rows.data};
  }
};

/// Device arrays of a PatternAxes of queries and keys in these slots.
struct Axes {
  Buffer<std::int32_t> segment_slot, slot_segment, query_slot, key_slot, slot_key;
  Buffer<std::uint8_t> whole;
  int segments, slots;
  Axes(const Axis& axis, const std::vector<std::uint8_t>& whole_segments,
       const std::vector<std::int32_t>& queries, const std::vector<std::int32_t>& keys)
      : segment_slot(axis.segment_slot),
        slot_segment(axis.slot_segment),
        query_slot(queries),
        key_slot(keys),
        slot_key(places(axis, keys)),
        whole(whole_segments),
        segments(axis.segments()),
        slots(axis.slots()) {}
  static std::vector<std::int32_t> places(const Axis& axis, const std::vector<std::int32_t>& keys) {
    std::vector<std::int32_t> at(axis.slots(), -1);
    for (std::size_t k = 0; k < keys.size(); ++k) at[keys[k]] = static_cast<std::int32_t>(k);
    return at;
  }
  PatternAxes view() const {
    return {segments,   slots,           segment_slot.data, slot_segment.data,
            whole.data, query_slot.data, key_slot.data,     slot_key.data};
  }
};

/// What one head of the index below does.
struct Rule {
  StaticRule imposed;
  int slashes = 0, columns = 0;
  bool by_blocks = false;
};

/// Index of a rank's queries against a shard's keys, by rules and blocks, pair by pair.
class IndexCase {
 public:
  IndexCase(const Axis& axis, const std::vector<Rule>& rules, int rank, int shard, int ranks,
            std::mt19937& rng)
      : axis_(axis),
        rules_(rules),
        heads_(static_cast<int>(rules.size())),
        queries_(axis.of_rank(rank, ranks)),
        keys_(axis.of_rank(shard, ranks)),
        q_blocks_(static_cast<int>(queries_.size())),
        whole_(short_segments(axis)),
        axes_(axis, whole_, queries_, keys_),
        mass_(static_cast<std::size_t>(heads_) * axis.slots() * 65) {
    for (auto& x : mass_) x = static_cast<std::int64_t>(rng() % 1000000);
    for (int s = 0; s < axis.segments(); ++s)
      width_ = std::max(width_, axis.segment_slot[s + 1] - axis.segment_slot[s]);
    by_blocks_.assign(static_cast<std::size_t>(heads_) * axis.slots(), 0);
    for (int h = 0; h < heads_; ++h)
      for (int s = 0; s < axis.segments(); ++s)
        if (rules[h].by_blocks && whole_[s] == 0)
          by_blocks_[h * axis.slots() + axis.segment_slot[s]] = 1;
    draw_words(rng);
    see_keys();
  }
  std::int64_t wrong_pairs() {
    build();
    std::int64_t wrong = offset_.back() > static_cast<std::int64_t>(runs_.size());
    for (int h = 0; h < heads_; ++h)
      for (int b = 0; b < q_blocks_; ++b) wrong += wrong_in(h, b);
    return wrong + (counted_on_gpu_ < counted_);  // padding rows see keys too, and count there
  }

 private:
  static std::vector<std::uint8_t> short_segments(const Axis& axis) {
    std::vector<std::uint8_t> whole;
    for (int tokens : axis.tokens) whole.push_back(tokens <= 64);
    return whole;
  }
  void draw_words(std::mt19937& rng) {
    words_.assign(static_cast<std::size_t>(heads_) * q_blocks_ * width_, 0);
    for (int h = 0; h < heads_; ++h)
      for (int b = 0; b < q_blocks_; ++b)
        for (int j = 0; j <= queries_[b] - axis_.base(queries_[b]); ++j) {
          const bool in = j == 0 || j == queries_[b] - axis_.base(queries_[b]) || rng() % 3 == 0;
          words_[(static_cast<std::size_t>(h) * q_blocks_ + b) * width_ + j] = in ? ~0ull : 0;
          block_pairs_ += in && by_blocks_[h * axis_.slots() + axis_.base(queries_[b])] != 0;
        }
  }
  /// Visible keys of the shard by row, as its own keys are counted.
  void see_keys() {
    for (int b = 0; b < q_blocks_; ++b)
      for (int i = 0; i < 64; ++i) {
        int before = 0, seen = 0;
        for (const int key : keys_) {
          if (key < axis_.base(queries_[b])) before += 64;
          if (key < queries_[b]) seen += 64;
          if (key == queries_[b]) seen += std::min(i + 1, axis_.rows(queries_[b]));
        }
        begin_.push_back(before);
        end_.push_back(std::max(before, seen));
      }
  }
  /// [2, heads, segments] slashes and columns that rules state.
  std::vector<std::int32_t> numbers() const {
    const int lists = heads_ * axis_.segments();
    std::vector<std::int32_t> most(static_cast<std::size_t>(2) * lists);
    for (int i = 0; i < lists; ++i) {
      const int s = i % axis_.segments(), n = axis_.segment_slot[s + 1] - axis_.segment_slot[s];
      const Rule& rule = rules_[i / axis_.segments()];
      most[i] = rule.imposed.kind == 1   ? n
                : rule.imposed.kind == 2 ? std::min(n, rule.imposed.window)
                                         : rule.slashes;
      most[lists + i] = rule.imposed.kind == 2
                            ? std::max(0, std::min(axis_.tokens[s], rule.imposed.sink) - 64)
                            : rule.columns;
    }
    return most;
  }
  void build() {
    const int slots = axis_.slots(), lists = heads_ * axis_.segments();
    std::vector<StaticRule> imposed;
    for (const Rule& rule : rules_) imposed.push_back(rule.imposed);
    Buffer<std::int64_t> mass(mass_);
    Buffer<StaticRule> rules(imposed);
    CHECK(impose_rules(mass.data, heads_, axes_.view(), rules.data, 0));
    Buffer<std::int32_t> most(numbers()), entries(static_cast<std::int64_t>(heads_) * slots * 65),
        counts(4 * lists);
    Buffer<float> cut_shares(2 * lists);
    const PatternLists slashes{entries.data, counts.data, 1},
        columns{entries.data + heads_ * slots, counts.data + lists, 64};
    const ListCuts slash_cuts{counts.data + 2 * lists, cut_shares.data},
        column_cuts{counts.data + 3 * lists, cut_shares.data + lists};
    CHECK(select_heaviest(mass.data, heads_, axes_.view(), {1, INT_MAX, true, most.data}, slashes,
                          slash_cuts, 0));
    CHECK(select_heaviest(mass.data + heads_ * slots, heads_, axes_.view(),
                          {1, INT_MAX, false, most.data + lists}, columns, column_cuts, 0));
    Buffer<std::uint8_t> by_blocks(by_blocks_);
    CHECK(empty_lists(by_blocks.data, heads_, axes_.view(), slashes, slash_cuts, 0));
    CHECK(empty_lists(by_blocks.data, heads_, axes_.view(), columns, column_cuts, 0));
    Buffer<std::uint64_t> words(words_), pairs(std::vector<std::uint64_t>(1, 0));
    Buffer<std::int32_t> begin(begin_), end(end_);
    const std::vector<std::int32_t> n = counts.host();
    const IndexShape shape = slash_shape(
        q_blocks_ * 64, static_cast<std::int64_t>(keys_.size()) * 64, heads_, heads_ / 2,
        {{n.begin(), n.begin() + lists}, {n.begin() + lists, n.begin() + 2 * lists}}, queries_,
        axis_.segment_slot, whole_, block_pairs_);
    Buffer<char> memory(static_cast<std::int64_t>(index_bytes(shape))),
        scratch(static_cast<std::int64_t>(slash_scratch_bytes(heads_, axes_.view())));
    memory.poison();
    DeviceIndex index = bind_index(shape, memory.data);
    index.key_begin = begin.data;
    index.key_end = end.data;
    CHECK(build_slash_index(index, axes_.view(), slashes, columns,
                            {by_blocks.data, words.data, width_}, scratch.data, 0));
    CHECK(derive_index(index, 0));
    CHECK(count_pairs(index, pairs.data, 0));
    CHECK(cudaDeviceSynchronize());
    counted_on_gpu_ = pairs.host()[0];
    download(index);
  }
  template <class T>
  static std::vector<T> copy(const T* from, std::int64_t count) {
    std::vector<T> to(static_cast<std::size_t>(count));
    CHECK(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
  void download(const DeviceIndex& index) {
    const int lists = heads_ * axis_.segments();
    offset_ = copy(index.run_offset, static_cast<std::int64_t>(heads_) * q_blocks_ + 1);
    runs_ = copy(index.runs, index.shape.runs);
    column_offset_.assign(static_cast<std::size_t>(lists) + 1, 0);
    if (index.shape.columns == 0) return;
    column_offset_ = copy(index.column_offset, lists + 1);
    columns_ = copy(index.columns, index.shape.columns);
    cover_offset_ = copy(index.cover_offset, static_cast<std::int64_t>(heads_) * q_blocks_ + 1);
    cover_ = copy(index.cover, index.shape.cover_words);
  }
  /// How often the index computes each key of the shard for the rows of a block.
  std::vector<int> times(int h, int b) const {
    std::vector<int> n(keys_.size() * 64, 0);
    const int list = h * q_blocks_ + b,
              columns = h * axis_.segments() + axis_.slot_segment[queries_[b]];
    for (std::int64_t r = offset_[list]; r < offset_[list + 1]; ++r)
      for (int k = runs_[r].first * 64; k < runs_[r].last * 64; ++k) ++n[k];
    for (std::int64_t c = column_offset_[columns]; c < column_offset_[columns + 1]; ++c) {
      const std::int64_t at = c - column_offset_[columns];
      if (!(cover_[cover_offset_[list] + at / 64] >> (at % 64) & 1)) ++n[columns_[c]];
    }
    return n;
  }
  /// The heaviest of mass[at, at + count).
  std::set<int> heaviest(std::int64_t at, int count, int most) const {
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return mass_[at + a] > mass_[at + b]; });
    order.resize(std::min(count, most));
    return {order.begin(), order.end()};
  }
  std::int64_t wrong_in(int h, int b) {
    const int slot = queries_[b], base = axis_.base(slot), s = axis_.slot_segment[slot],
              count = axis_.segment_slot[s + 1] - base;
    const std::int64_t list = static_cast<std::int64_t>(h) * axis_.slots() + base;
    const Rule& rule = rules_[h];
    const std::set<int> slashes = heaviest(list, count, rule.slashes),
                        columns =
                            heaviest(static_cast<std::int64_t>(heads_) * axis_.slots() + list * 64,
                                     count * 64, rule.columns);
    const std::vector<int> found = times(h, b);
    std::int64_t wrong = 0;
    for (int i = 0; i < axis_.rows(slot); ++i)
      for (int k = begin_[b * 64 + i]; k < end_[b * 64 + i]; ++k) {
        const int key_slot = keys_[k / 64], back = slot - key_slot,
                  key = (key_slot - base) * 64 + k % 64;
        bool in = key_slot == base || back == 0 || whole_[s] != 0;
        if (rule.by_blocks)
          in |=
              words_[(static_cast<std::size_t>(h) * q_blocks_ + b) * width_ + key_slot - base] != 0;
        else if (rule.imposed.kind == 1)
          in = true;
        else if (rule.imposed.kind == 2)
          in |= back < rule.imposed.window || key < rule.imposed.sink;
        else
          in |= slashes.count(back) != 0 || columns.count(key) != 0;
        counted_ += in;
        wrong += found[k] != (in ? 1 : 0);
      }
    return wrong;
  }

  const Axis& axis_;
  const std::vector<Rule>& rules_;
  const int heads_;
  const std::vector<std::int32_t> queries_, keys_;
  const int q_blocks_;
  const std::vector<std::uint8_t> whole_;
  Axes axes_;
  std::vector<std::int64_t> mass_;
  std::vector<std::uint8_t> by_blocks_;
  std::vector<std::uint64_t> words_;
  int width_ = 0;
  std::int64_t block_pairs_ = 0;
  std::vector<std::int32_t> begin_, end_;
  std::vector<std::int64_t> offset_, column_offset_, cover_offset_;
  std::vector<BlockRun> runs_;
  std::vector<std::int32_t> columns_;
  std::vector<std::uint64_t> cover_;
  std::uint64_t counted_on_gpu_ = 0, counted_ = 0;
};

}  // namespace bench

// Checks the kernels that choose and build patterns which differ by head (by_head, flexprefill)
// against plain loops, without the rest of Ballast (see build.sh).
//   index_check [seed]
#include <algorithm>
#include <climits>
#include <numeric>
#include <random>
#include <set>

#include "kernels/cuda/index/heads_launch.hpp"
#include "kernels/cuda/standalone/attention_problem.cuh"

using namespace bench;
using namespace ballast::cuda;

namespace {

int failures = 0;
void expect(bool good, const char* what, double figure) {
  std::printf("%-58s %12.4g %s\n", what, figure, good ? "ok" : "WRONG");
  failures += !good;
}

float to_float(bf16 x) { return static_cast<float>(x); }

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

/// Q and mean keys of one rank, and the pooled scores of the GPU beside those of plain loops.
struct Pooled {
  int heads, kv_heads, d, width = 0;
  float scale = 0.3f;
  std::vector<std::int32_t> slots;
  Rows rows;
  Buffer<bf16> q, high, low;
  std::vector<bf16> h_q, h_high, h_low;
  Buffer<float> scores;
  Pooled(const Axis& axis, int rank, int ranks, int heads_in, int kv, int dim, std::uint64_t seed)
      : heads(heads_in),
        kv_heads(kv),
        d(dim),
        slots(axis.of_rank(rank, ranks)),
        rows(axis, slots),
        q(static_cast<std::int64_t>(slots.size()) * 64 * heads * d),
        high(static_cast<std::int64_t>(axis.slots()) * kv_heads * d),
        low(high.size),
        scores(1) {
    for (int s = 0; s < axis.segments(); ++s)
      width = std::max(width, axis.segment_slot[s + 1] - axis.segment_slot[s]);
    randomise(q, seed + 100 + rank);
    randomise(high, seed);
    randomise(low, seed + 1);
    h_q = q.host(), h_high = high.host(), h_low = low.host();
  }
  float mean_key(int slot, int kv, int c) const {
    const std::size_t at = (static_cast<std::size_t>(slot) * kv_heads + kv) * d + c;
    return to_float(h_high[at]) + to_float(h_low[at]) / 256;
  }
  Routing routing() {
    // The low part is below the last bit of the high one.
    std::vector<bf16> small;
    for (bf16 x : h_low) small.push_back(bf16(to_float(x) / 256));
    CHECK(cudaMemcpy(low.data, small.data(), small.size() * sizeof(bf16), cudaMemcpyHostToDevice));
    Routing x;
    x.q = q.data;
    x.q_stride = static_cast<std::int64_t>(heads) * d;
    x.tokens = static_cast<std::int64_t>(slots.size()) * 64;
    x.high = high.data;
    x.low = low.data;
    x.q_heads = heads;
    x.kv_heads = kv_heads;
    x.head_dim = d;
    x.at = rows.view();
    x.width = width;
    return x;
  }
  double score(int h, int b, int slot) const {
    double sum = 0;
    for (int c = 0; c < d; ++c) {
      double mean = 0;
      for (int i = 0; i < rows.rows[b]; ++i)
        mean += to_float(h_q[((static_cast<std::size_t>(b) * 64 + i) * heads + h) * d + c]);
      sum += mean / rows.rows[b] * mean_key(slot, h / (heads / kv_heads), c);
    }
    return scale * sum;
  }
};

void check_scores(const Axis& axis, int ranks, int d, std::uint64_t seed) {
  double worst = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Pooled p(axis, rank, ranks, 4, 2, d, seed);
    Buffer<float> scores(static_cast<std::int64_t>(4) * p.slots.size() * p.width);
    scores.poison();
    CHECK(score_pooled(p.routing(), p.scale, scores.data, 0));
    const std::vector<float> found = scores.host();
    for (int h = 0; h < 4; ++h)
      for (std::size_t b = 0; b < p.slots.size(); ++b)
        for (int j = p.rows.first[b]; j <= p.rows.own[b]; ++j) {
          const double got = found[(h * p.slots.size() + b) * p.width + j - p.rows.first[b]],
                       miss = std::abs(got - p.score(h, static_cast<int>(b), j));
          worst = miss <= worst ? worst : miss;  // a NaN stays
        }
  }
  expect(worst < 1e-4,
         d == 64 ? "pooled scores, head dim 64: largest error"
                 : "pooled scores, head dim 128: largest error",
         worst);
}

/// Blocks of the fewest heaviest mass that reach a share, at most `most`; own and first always.
std::set<int> chosen_blocks(const std::vector<double>& scores, double share, int most) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  double all = 0, reached = 0;
  for (double s : scores) all += std::exp(s - scores[order[0]]);
  std::set<int> in{0, static_cast<int>(scores.size()) - 1};
  for (int i = 0; i < std::min<int>(most, static_cast<int>(order.size())); ++i) {
    if (i > 0 && share < 1 && reached >= share) break;
    in.insert(order[i]);
    reached += std::exp(scores[order[i]] - scores[order[0]]) / all;
  }
  return in;
}

void check_blocks(const Axis& axis, double share, bool limited, std::mt19937& rng) {
  const int heads = 5;
  const Rows rows(axis, axis.of_rank(0, 1));
  const int blocks = axis.slots();
  int width = 0;
  for (int s = 0; s < axis.segments(); ++s)
    width = std::max(width, axis.segment_slot[s + 1] - axis.segment_slot[s]);
  std::vector<float> scores(static_cast<std::size_t>(heads) * blocks * width);
  for (float& x : scores) x = static_cast<float>(static_cast<int>(rng() % 4000)) / 1000;
  std::vector<std::uint8_t> by_blocks(static_cast<std::size_t>(heads) * blocks, 0);
  for (int h = 0; h < heads; ++h)
    for (int s = 0; s < axis.segments(); ++s)
      by_blocks[h * blocks + axis.segment_slot[s]] = (h + s) % 3 != 0;
  const std::vector<std::int32_t> most{1, 2, 3, 5, 9};
  Buffer<float> d_scores(scores);
  Buffer<std::uint8_t> d_chosen(by_blocks);
  Buffer<std::int32_t> d_most(most);
  Buffer<std::uint64_t> words(static_cast<std::int64_t>(heads) * blocks * width);
  Buffer<std::int64_t> counts(std::vector<std::int64_t>(heads, 0));
  words.poison();
  CHECK(choose_strides(d_scores.data, heads, rows.view(), 64, 64, width, share, words.data,
                       counts.data, {d_chosen.data, blocks, limited ? d_most.data : nullptr}, 0));
  const std::vector<std::uint64_t> found = words.host();
  const std::vector<std::int64_t> found_counts = counts.host();
  std::int64_t wrong = 0;
  for (int h = 0; h < heads; ++h) {
    std::int64_t count = 0;
    for (int b = 0; b < blocks; ++b) {
      if (by_blocks[h * blocks + rows.first[b]] == 0) continue;
      const float* row = &scores[(static_cast<std::size_t>(h) * blocks + b) * width];
      const std::set<int> in = chosen_blocks({row, row + rows.own[b] - rows.first[b] + 1}, share,
                                             limited ? most[h] : INT_MAX);
      count += static_cast<std::int64_t>(in.size());
      for (int j = 0; j <= rows.own[b] - rows.first[b]; ++j)
        wrong += (found[(static_cast<std::size_t>(h) * blocks + b) * width + j] != 0) !=
                 (in.count(j) != 0);
    }
    wrong += count != found_counts[h];
  }
  expect(wrong == 0, limited ? "blocks by number: wrong words" : "blocks by share: wrong words",
         static_cast<double>(wrong));
}

void check_likeness(const Axis& axis, int d, std::uint64_t seed, std::mt19937& rng) {
  const int heads = 4, kv_heads = 2, last_q = 80;
  Pooled keys(axis, 0, 1, heads, kv_heads, d, seed);
  const Routing routing = keys.routing();
  std::vector<std::uint8_t> whole;
  std::vector<std::int32_t> segment_tile{0}, tile_rows;
  for (int tokens : axis.tokens) {
    whole.push_back(tokens <= last_q);
    for (int block = (tokens - last_q) / 64; tokens > last_q && block * 64 < tokens; ++block) {
      tile_rows.push_back(std::max(tokens - last_q - block * 64, 0));
      tile_rows.push_back(std::min(tokens - block * 64, 64));
    }
    segment_tile.push_back(static_cast<std::int32_t>(tile_rows.size()) / 2);
  }
  const int tiles = segment_tile.back();
  Buffer<bf16> q(static_cast<std::int64_t>(tiles) * 64 * heads * d);
  randomise(q, seed + 7);
  const std::vector<bf16> h_q = q.host();
  std::vector<std::int64_t> columns(static_cast<std::size_t>(heads) * axis.slots() * 64);
  for (auto& x : columns) x = static_cast<std::int64_t>(rng() % 1000) << 28;
  Buffer<std::int32_t> d_tiles(segment_tile), d_rows(tile_rows);
  Buffer<std::int64_t> d_columns(columns);
  Axes axes(axis, whole, axis.of_rank(0, 1), axis.of_rank(0, 1));
  Likeness x;
  x.q = q.data;
  x.segment_tile = d_tiles.data;
  x.tile_rows = reinterpret_cast<const Interval*>(d_rows.data);
  x.high = routing.high;
  x.low = routing.low;
  x.columns = d_columns.data;
  x.q_heads = heads, x.kv_heads = kv_heads, x.head_dim = d;
  x.widest = keys.width;
  x.scale = 0.5f;
  std::vector<double> distance;
  for (int h = 0; h < heads; ++h)
    for (int s = 0; s < axis.segments(); ++s) {
      const int base = axis.segment_slot[s], n = axis.segment_slot[s + 1] - base;
      std::vector<double> mean(d, 0), p(n), m(n, 0);
      double rows = 0, all_p = 0, all_m = 0, sum = 0;
      for (int t = segment_tile[s]; t < segment_tile[s + 1]; ++t)
        for (int i = tile_rows[2 * t]; i < tile_rows[2 * t + 1]; ++i, ++rows)
          for (int c = 0; c < d; ++c)
            mean[c] += to_float(h_q[((static_cast<std::size_t>(t) * 64 + i) * heads + h) * d + c]);
      for (int j = 0; j < n && rows > 0; ++j) {
        double dot = 0;
        for (int c = 0; c < d; ++c)
          dot += mean[c] / rows * keys.mean_key(base + j, h / (heads / kv_heads), c);
        all_p += p[j] = std::exp(0.5 * dot);
        for (int c = 0; c < 64; ++c)
          m[j] += static_cast<double>(
              columns[(static_cast<std::size_t>(h) * axis.slots() + base + j) * 64 + c]);
        all_m += m[j];
      }
      for (int j = 0; j < n && rows > 0; ++j) {
        const double a = p[j] / all_p, b = m[j] / all_m;
        sum += a * std::log(2 * a / (a + b)) / 2 + b * std::log(2 * b / (a + b)) / 2;
      }
      distance.push_back(rows > 0 ? std::sqrt(sum) : 2);
    }
  std::int64_t wrong = 0;
  for (const double around : distance) {
    if (around > 1) continue;
    for (const double off : {-1e-5, 1e-5}) {
      Buffer<std::uint8_t> by_blocks(
          std::vector<std::uint8_t>(static_cast<std::size_t>(heads) * axis.slots(), 0));
      CHECK(compare_estimates(x, axes.view(), around + off, by_blocks.data, 0));
      const std::vector<std::uint8_t> found = by_blocks.host();
      for (int h = 0; h < heads; ++h)
        for (int slot = 0; slot < axis.slots(); ++slot) {
          const int s = axis.slot_segment[slot];
          const double mine = distance[h * axis.segments() + s];
          if (std::abs(mine - around - off) < 5e-6) continue;
          wrong += found[h * axis.slots() + slot] !=
                   (slot == axis.base(slot) && mine < around + off ? 1 : 0);
        }
    }
  }
  expect(wrong == 0, "online choice around every divergence: wrong heads",
         static_cast<double>(wrong));
}

/// What one head of the index below does.
struct Rule {
  StaticRule imposed;
  int slashes = 0, columns = 0;
  bool by_blocks = false;
};

/// Index of a rank's queries against a shard's keys, by rules and blocks, pair by pair.
std::int64_t wrong_pairs(const Axis& axis, const std::vector<Rule>& rules, int rank, int shard,
                         int ranks, std::mt19937& rng) {
  const int heads = static_cast<int>(rules.size()), slots = axis.slots();
  const std::vector<std::int32_t> queries = axis.of_rank(rank, ranks),
                                  keys = axis.of_rank(shard, ranks);
  std::vector<std::uint8_t> whole;
  for (int tokens : axis.tokens) whole.push_back(tokens <= 64);
  Axes axes(axis, whole, queries, keys);
  std::vector<std::int64_t> mass(static_cast<std::size_t>(heads) * slots * 65);
  for (auto& x : mass) x = static_cast<std::int64_t>(rng() % 1000000);
  std::vector<StaticRule> imposed;
  std::vector<std::int32_t> most(static_cast<std::size_t>(2) * heads * axis.segments());
  std::vector<std::uint8_t> by_blocks(static_cast<std::size_t>(heads) * slots, 0);
  for (int h = 0; h < heads; ++h) {
    imposed.push_back(rules[h].imposed);
    for (int s = 0; s < axis.segments(); ++s) {
      const int n = axis.segment_slot[s + 1] - axis.segment_slot[s], i = h * axis.segments() + s;
      most[i] = rules[h].imposed.kind == 1   ? n
                : rules[h].imposed.kind == 2 ? std::min(n, rules[h].imposed.window)
                                             : rules[h].slashes;
      most[heads * axis.segments() + i] =
          rules[h].imposed.kind == 2
              ? std::max(0, std::min(axis.tokens[s], rules[h].imposed.sink) - 64)
              : rules[h].columns;
      if (rules[h].by_blocks && whole[s] == 0) by_blocks[h * slots + axis.segment_slot[s]] = 1;
    }
  }
  const std::vector<std::int64_t> observed = mass;
  Buffer<std::int64_t> d_mass(mass);
  Buffer<StaticRule> d_rules(imposed);
  CHECK(impose_rules(d_mass.data, heads, axes.view(), d_rules.data, 0));
  Buffer<std::int32_t> d_most(most), entries(static_cast<std::int64_t>(heads) * slots * 65),
      counts(4 * heads * axis.segments());
  const int lists = heads * axis.segments();
  const PatternLists slashes{entries.data, counts.data, 1},
      columns{entries.data + heads * slots, counts.data + lists, 64};
  CHECK(select_heaviest(d_mass.data, heads, axes.view(), {1, INT_MAX, true, d_most.data}, slashes,
                        counts.data + 2 * lists, 0));
  CHECK(select_heaviest(d_mass.data + heads * slots, heads, axes.view(),
                        {1, INT_MAX, false, d_most.data + lists}, columns, counts.data + 3 * lists,
                        0));
  Buffer<std::uint8_t> d_by_blocks(by_blocks);
  CHECK(empty_lists(d_by_blocks.data, heads, axes.view(), slashes, counts.data + 2 * lists, 0));
  CHECK(empty_lists(d_by_blocks.data, heads, axes.view(), columns, counts.data + 3 * lists, 0));

  int width = 0;
  for (int s = 0; s < axis.segments(); ++s)
    width = std::max(width, axis.segment_slot[s + 1] - axis.segment_slot[s]);
  const int q_blocks = static_cast<int>(queries.size());
  std::vector<std::uint64_t> words(static_cast<std::size_t>(heads) * q_blocks * width, 0);
  std::int64_t block_pairs = 0;
  for (int h = 0; h < heads; ++h)
    for (int b = 0; b < q_blocks; ++b)
      for (int j = 0; j <= queries[b] - axis.base(queries[b]); ++j) {
        const bool in = j == 0 || j == queries[b] - axis.base(queries[b]) || rng() % 3 == 0;
        words[(static_cast<std::size_t>(h) * q_blocks + b) * width + j] = in ? ~0ull : 0;
        block_pairs += in && by_blocks[h * slots + axis.base(queries[b])] != 0;
      }
  Buffer<std::uint64_t> d_words(words);

  // Visible keys of the shard by row, as its own keys are counted.
  std::vector<std::int32_t> begin, end;
  for (int b = 0; b < q_blocks; ++b)
    for (int i = 0; i < 64; ++i) {
      int before = 0, seen = 0;
      for (std::size_t k = 0; k < keys.size(); ++k) {
        if (keys[k] < axis.base(queries[b])) before += 64;
        if (keys[k] < queries[b]) seen += 64;
        if (keys[k] == queries[b]) seen += std::min(i + 1, axis.rows(queries[b]));
      }
      begin.push_back(before);
      end.push_back(std::max(before, seen));
    }
  Buffer<std::int32_t> d_begin(begin), d_end(end);
  const std::vector<std::int32_t> n = counts.host();
  const IndexShape shape =
      slash_shape(q_blocks * 64, static_cast<std::int64_t>(keys.size()) * 64, heads, heads / 2,
                  {{n.begin(), n.begin() + lists}, {n.begin() + lists, n.begin() + 2 * lists}},
                  queries, axis.segment_slot, whole, block_pairs);
  Buffer<char> memory(static_cast<std::int64_t>(index_bytes(shape))),
      scratch(static_cast<std::int64_t>(slash_scratch_bytes(heads, axes.view())));
  memory.poison();
  DeviceIndex index = bind_index(shape, memory.data);
  index.key_begin = d_begin.data;
  index.key_end = d_end.data;
  CHECK(build_slash_index(index, axes.view(), slashes, columns,
                          {d_by_blocks.data, d_words.data, width}, scratch.data, 0));
  CHECK(derive_index(index, 0));
  Buffer<std::uint64_t> pairs(std::vector<std::uint64_t>(1, 0));
  CHECK(count_pairs(index, pairs.data, 0));
  CHECK(cudaDeviceSynchronize());

  const auto copy = [](auto* from, std::int64_t count) {
    std::vector<std::remove_reference_t<decltype(*from)>> to(static_cast<std::size_t>(count));
    CHECK(cudaMemcpy(to.data(), from, count * sizeof(*from), cudaMemcpyDeviceToHost));
    return to;
  };
  const auto offset = copy(index.run_offset, static_cast<std::int64_t>(heads) * q_blocks + 1);
  const auto runs = copy(index.runs, shape.runs);
  std::vector<std::int64_t> column_offset(static_cast<std::size_t>(lists) + 1, 0), cover_offset;
  std::vector<std::int32_t> column;
  std::vector<std::uint64_t> cover;
  if (shape.columns > 0) {
    column_offset = copy(index.column_offset, lists + 1);
    column = copy(index.columns, shape.columns);
    cover_offset = copy(index.cover_offset, static_cast<std::int64_t>(heads) * q_blocks + 1);
    cover = copy(index.cover, shape.cover_words);
  }
  std::int64_t wrong = offset.back() > shape.runs;
  std::uint64_t counted = 0;
  for (int h = 0; h < heads; ++h) {
    for (int b = 0; b < q_blocks; ++b) {
      const int slot = queries[b], base = axis.base(slot), s = axis.slot_segment[slot];
      std::set<int> heavy_slashes, heavy_columns;  // of a head that is chosen by mass
      const auto heaviest = [&](std::int64_t at, int count, int most_in) {
        std::vector<int> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int c) { return observed[at + a] > observed[at + c]; });
        order.resize(std::min(count, most_in));
        return std::set<int>(order.begin(), order.end());
      };
      const int count = axis.segment_slot[s + 1] - base;
      if (rules[h].imposed.kind == 0) {
        heavy_slashes =
            heaviest(static_cast<std::int64_t>(h) * slots + base, count, rules[h].slashes);
        heavy_columns = heaviest(static_cast<std::int64_t>(heads) * slots +
                                     (static_cast<std::int64_t>(h) * slots + base) * 64,
                                 count * 64, rules[h].columns);
      }
      for (int i = 0; i < axis.rows(slot); ++i) {
        std::vector<int> times(keys.size() * 64, 0);
        for (std::int64_t r = offset[h * q_blocks + b]; r < offset[h * q_blocks + b + 1]; ++r)
          for (int k = runs[r].first * 64; k < runs[r].last * 64; ++k) ++times[k];
        for (std::int64_t c = column_offset[h * axis.segments() + s];
             c < column_offset[h * axis.segments() + s + 1]; ++c) {
          const std::int64_t at = c - column_offset[h * axis.segments() + s];
          if (!(cover[cover_offset[h * q_blocks + b] + at / 64] >> (at % 64) & 1))
            ++times[column[c]];
        }
        const int row = b * 64 + i;
        for (int k = begin[row]; k < end[row]; ++k) {
          const int key_slot = keys[k / 64], back = slot - key_slot,
                    key = (key_slot - base) * 64 + k % 64;
          bool in = key_slot == base || back == 0 || whole[s] != 0;
          if (rules[h].by_blocks)
            in |=
                words[(static_cast<std::size_t>(h) * q_blocks + b) * width + key_slot - base] != 0;
          else if (rules[h].imposed.kind == 1)
            in = true;
          else if (rules[h].imposed.kind == 2)
            in |= back < rules[h].imposed.window || key < rules[h].imposed.sink;
          else
            in |= heavy_slashes.count(back) != 0 || heavy_columns.count(key) != 0;
          counted += in;
          wrong += times[k] != (in ? 1 : 0);
        }
      }
    }
  }
  // Padding rows see keys too, and count.
  return wrong + (pairs.host()[0] < counted);
}

void check_index(const Axis& axis, int ranks, std::mt19937& rng) {
  const std::vector<Rule> rules{{{1, 0, 0}},        {{2, 3, 128}},
                                {{0, 0, 0}, 2, 30}, {{3, 0, 0}, 0, 0, true},
                                {{0, 0, 0}, 1, 0},  {{2, 1, 64}}};
  std::int64_t wrong = 0;
  for (int rank = 0; rank < ranks; ++rank)
    for (int shard = 0; shard < ranks; ++shard)
      wrong += wrong_pairs(axis, rules, rank, shard, ranks, rng);
  char what[80];
  std::snprintf(what, sizeof(what), "index by head, %d segments, %d ranks: wrong pairs",
                axis.segments(), ranks);
  expect(wrong == 0, what, static_cast<double>(wrong));
}

/// Milliseconds of what a layer's choice adds at length.
void time_choice(int tokens, int heads, int kv_heads) {
  const Axis axis({tokens});
  Pooled p(axis, 0, 1, heads, kv_heads, 128, 5);
  const Routing x = p.routing();
  Buffer<float> scores(static_cast<std::int64_t>(heads) * p.slots.size() * p.width);
  Buffer<std::uint64_t> words(scores.size);
  Buffer<std::int64_t> counts(std::vector<std::int64_t>(heads, 0));
  const double score = median_ms([&] { CHECK(score_pooled(x, 0.1f, scores.data, 0)); }, 5),
               choose = median_ms(
                   [&] {
                     CHECK(choose_strides(scores.data, heads, x.at, 64, 64, p.width, 0.95,
                                          words.data, counts.data, {}, 0));
                   },
                   5);
  std::printf(
      "%d tokens, %d query and %d key heads of 128: pooled scores %.3f ms, choice of blocks "
      "%.3f ms\n",
      tokens, heads, kv_heads, score, choose);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1;
  std::mt19937 rng(seed);
  std::printf("seed %u\n", seed);
  const Axis one({1000}), packed({700, 30, 64, 333, 129}), longer({5000, 3000});
  for (const Axis* axis : {&one, &packed, &longer}) {
    for (int ranks : {1, 3})
      for (int d : {64, 128}) check_scores(*axis, ranks, d, seed);
    check_blocks(*axis, 0.7, false, rng);
    check_blocks(*axis, 1.0, true, rng);
    for (int d : {64, 128}) check_likeness(*axis, d, seed, rng);
  }
  for (const Axis* axis : {&one, &packed})
    for (int ranks : {1, 2, 3}) check_index(*axis, ranks, rng);
  time_choice(32768, 16, 2);
  time_choice(131072, 16, 2);
  std::printf(failures == 0 ? "all good\n" : "%d checks failed\n", failures);
  return failures != 0;
}

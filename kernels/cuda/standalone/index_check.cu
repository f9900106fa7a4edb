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
#include "kernels/cuda/standalone/index_case.cuh"

using namespace bench;
using namespace ballast::cuda;

namespace {

int failures = 0;
void expect(bool good, const char* what, double figure) {
  std::printf("%-58s %12.4g %s\n", what, figure, good ? "ok" : "WRONG");
  failures += !good;
}

float to_float(bf16 x) { return static_cast<float>(x); }

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

/// Observed queries of every segment in whole blocks, and made-up mass on the keys.
struct Seen {
  static constexpr int kLast = 80;
  std::vector<std::uint8_t> whole;
  std::vector<std::int32_t> segment_tile{0}, tile_rows;
  std::vector<std::int64_t> columns;
  Seen(const Axis& axis, int heads, std::mt19937& rng)
      : columns(static_cast<std::size_t>(heads) * axis.slots() * 64) {
    for (int tokens : axis.tokens) {
      whole.push_back(tokens <= kLast);
      for (int block = (tokens - kLast) / 64; tokens > kLast && block * 64 < tokens; ++block) {
        tile_rows.push_back(std::max(tokens - kLast - block * 64, 0));
        tile_rows.push_back(std::min(tokens - block * 64, 64));
      }
      segment_tile.push_back(static_cast<std::int32_t>(tile_rows.size()) / 2);
    }
    for (auto& x : columns) x = static_cast<std::int64_t>(rng() % 1000) << 28;
  }
  int tiles() const { return segment_tile.back(); }
};

/// Divergence of one head of a segment by plain loops; 2 where nothing is observed.
double distance_of(const Axis& axis, const Seen& seen, const Pooled& keys,
                   const std::vector<bf16>& q, int h, int s, float scale) {
  const int d = keys.d, base = axis.segment_slot[s], n = axis.segment_slot[s + 1] - base;
  std::vector<double> mean(d, 0), p(n), m(n, 0);
  double rows = 0, all_p = 0, all_m = 0, sum = 0;
  for (int t = seen.segment_tile[s]; t < seen.segment_tile[s + 1]; ++t)
    for (int i = seen.tile_rows[2 * t]; i < seen.tile_rows[2 * t + 1]; ++i, ++rows)
      for (int c = 0; c < d; ++c)
        mean[c] += to_float(q[((static_cast<std::size_t>(t) * 64 + i) * keys.heads + h) * d + c]);
  if (rows == 0) return 2;
  for (int j = 0; j < n; ++j) {
    double dot = 0;
    for (int c = 0; c < d; ++c)
      dot += mean[c] / rows * keys.mean_key(base + j, h / (keys.heads / keys.kv_heads), c);
    all_p += p[j] = std::exp(scale * dot);
    for (int c = 0; c < 64; ++c)
      m[j] += static_cast<double>(
          seen.columns[(static_cast<std::size_t>(h) * axis.slots() + base + j) * 64 + c]);
    all_m += m[j];
  }
  for (int j = 0; j < n; ++j) {
    const double a = p[j] / all_p, b = m[j] / all_m;
    sum += a * std::log(2 * a / (a + b)) / 2 + b * std::log(2 * b / (a + b)) / 2;
  }
  return std::sqrt(sum);
}

/// Heads that choose otherwise than their divergence says, at a threshold on either side of every
/// one.
std::int64_t wrong_choices(const Likeness& x, const Axis& axis, const PatternAxes& axes,
                           const std::vector<double>& distance) {
  std::int64_t wrong = 0;
  for (const double around : distance) {
    if (around > 1) continue;
    for (const double off : {-1e-5, 1e-5}) {
      Buffer<std::uint8_t> by_blocks(
          std::vector<std::uint8_t>(static_cast<std::size_t>(x.q_heads) * axis.slots(), 0));
      CHECK(compare_estimates(x, axes, around + off, by_blocks.data, 0));
      const std::vector<std::uint8_t> found = by_blocks.host();
      for (int h = 0; h < x.q_heads; ++h)
        for (int slot = 0; slot < axis.slots(); ++slot) {
          const double mine = distance[h * axis.segments() + axis.slot_segment[slot]];
          if (std::abs(mine - around - off) < 5e-6) continue;
          wrong += found[h * axis.slots() + slot] !=
                   (slot == axis.base(slot) && mine < around + off ? 1 : 0);
        }
    }
  }
  return wrong;
}

void check_likeness(const Axis& axis, int d, std::uint64_t seed, std::mt19937& rng) {
  const int heads = 4, kv_heads = 2;
  Pooled keys(axis, 0, 1, heads, kv_heads, d, seed);
  const Routing routing = keys.routing();
  const Seen seen(axis, heads, rng);
  Buffer<bf16> q(static_cast<std::int64_t>(seen.tiles()) * 64 * heads * d);
  randomise(q, seed + 7);
  const std::vector<bf16> h_q = q.host();
  Buffer<std::int32_t> d_tiles(seen.segment_tile), d_rows(seen.tile_rows);
  Buffer<std::int64_t> d_columns(seen.columns);
  Axes axes(axis, seen.whole, axis.of_rank(0, 1), axis.of_rank(0, 1));
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
    for (int s = 0; s < axis.segments(); ++s)
      distance.push_back(distance_of(axis, seen, keys, h_q, h, s, x.scale));
  const std::int64_t wrong = wrong_choices(x, axis, axes.view(), distance);
  expect(wrong == 0, "online choice around every divergence: wrong heads",
         static_cast<double>(wrong));
}

void check_index(const Axis& axis, int ranks, std::mt19937& rng) {
  const std::vector<Rule> rules{{{1, 0, 0}},        {{2, 3, 128}},
                                {{0, 0, 0}, 2, 30}, {{3, 0, 0}, 0, 0, true},
                                {{0, 0, 0}, 1, 0},  {{2, 1, 64}}};
  std::int64_t wrong = 0;
  for (int rank = 0; rank < ranks; ++rank)
    for (int shard = 0; shard < ranks; ++shard)
      wrong += IndexCase(axis, rules, rank, shard, ranks, rng).wrong_pairs();
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

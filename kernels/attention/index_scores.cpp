#include "kernels/attention/index_scores.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast {
namespace {

using host::parallel_for;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// q or k opened by (token, head).
struct Rows {
  const float* data = nullptr;
  std::int64_t stride = 0, heads = 0, head_dim = 0, tokens = 0;
  explicit Rows(const Tensor& t)
      : data(t.data<float>()),
        stride(t.size(0) > 1 ? t.strides()[0] : 0),
        heads(t.size(1)),
        head_dim(t.size(2)),
        tokens(t.size(0)) {
    require(
        t.space() == Space::host && t.rank() == 3,
        "index scores: operands are host tensors [tokens, heads, head_dim]; take index_operand()");
  }
  const float* at(std::int64_t token, std::int64_t head) const {
    return data + token * stride + head * head_dim;
  }
};

float dot(const float* a, const float* b, std::int64_t n) {
  return static_cast<float>(host::lane_sum<float>(n, [=](std::int64_t d) { return a[d] * b[d]; }));
}

/// Keys (or pooled keys) as a product reads them: 64 of one head side by side for every element of
/// the head dimension.
class KeyTiles {
 public:
  explicit KeyTiles(const Rows& k)
      : head_dim_(k.head_dim),
        tiles_((k.tokens + kBlock - 1) / kBlock),
        data_(static_cast<std::size_t>(k.heads * tiles_ * k.head_dim * kBlock), 0.0f) {
    for (std::int64_t g = 0; g < k.heads; ++g)
      for (std::int64_t j = 0; j < k.tokens; ++j)
        for (std::int64_t d = 0; d < head_dim_; ++d)
          data_[static_cast<std::size_t>((at(g, j / kBlock) + d) * kBlock + j % kBlock)] =
              k.at(j, g)[d];
  }
  std::int64_t tiles() const { return tiles_; }
  /// scores[j - begin] = scale q . key j for the keys of [begin, end) in one tile.  Every product
  /// is summed in the order of its elements.
  void scores(const float* q, std::int64_t head, std::int64_t tile, float scale, std::int64_t begin,
              std::int64_t end, float* to) const {
    float sum[kBlock] = {};
    const float* keys = &data_[static_cast<std::size_t>(at(head, tile) * kBlock)];
    for (std::int64_t d = 0; d < head_dim_; ++d)
      for (int j = 0; j < kBlock; ++j) sum[j] += q[d] * keys[d * kBlock + j];
    for (std::int64_t j = begin; j < end; ++j) to[j - begin] = scale * sum[j - tile * kBlock];
  }

 private:
  std::int64_t at(std::int64_t head, std::int64_t tile) const {
    return (head * tiles_ + tile) * head_dim_;
  }
  std::int64_t head_dim_, tiles_;
  std::vector<float> data_;
};

/// A share in kMassUnit, rounded: as a number, and as an integer (its low mantissa bits, which
/// unlike std::llrint vectorises).  |share| < 2^10.
constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
double rounded(double share) { return (share * kMassUnit + kMagic) - kMagic; }
std::int64_t fixed(double share) {
  return std::bit_cast<std::int64_t>(share * kMassUnit + kMagic) -
         std::bit_cast<std::int64_t>(kMagic);
}

void check_heads(const Rows& q, const Rows& k) {
  require(k.heads > 0 && q.heads % k.heads == 0 && q.head_dim == k.head_dim,
          "index scores: {} query heads of {} against {} key heads of {}", q.heads, q.head_dim,
          k.heads, k.head_dim);
}

}  // namespace

Tensor index_operand(const Tensor& t) {
  if (t.space() != Space::host || t.dtype() == DType::f32) return t;
  Tensor copy = Tensor::empty(t.shape(), DType::f32, host_device(), MemoryCategory::workspace);
  if (t.numel() > 0) copy_rows(t, copy);
  return copy;
}

std::vector<std::int64_t> ObservedRows::places() const {
  std::vector<std::int64_t> places(key_begin.size() + 1, 0);
  for (std::size_t r = 0; r < key_begin.size(); ++r)
    places[r + 1] = places[r] + std::max(0, key_end[r] - key_begin[r]);
  return places;
}

void observe_scores(const Tensor& q_, const Tensor& k_, double scale, const ObservedRows& rows,
                    Tensor& scores, Tensor& row_max) {
  const Rows q(q_), k(k_);
  check_heads(q, k);
  const std::int64_t count = rows.size(), group = q.heads / k.heads;
  const std::vector<std::int64_t> place = rows.places();
  require(q.tokens == count && scores.shape() == Shape{q.heads, place.back()} &&
              row_max.shape() == Shape{q.heads, count},
          "observe_scores: {} rows of {} queries, scores {}", count, q.tokens,
          to_string(scores.shape()));
  float* to = scores.data<float>();
  float* most = row_max.data<float>();
  const KeyTiles tiles(k);
  parallel_for("observe scores", q.heads * tiles.tiles(), [&, to](std::int64_t i) {
    const std::int64_t h = i / tiles.tiles(), tile = i % tiles.tiles(), first = tile * kBlock,
                       last = std::min(k.tokens, first + kBlock);
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t begin = std::clamp<std::int64_t>(rows.key_begin[r], first, last),
                         end = std::clamp<std::int64_t>(rows.key_end[r], begin, last);
      if (begin < end)
        tiles.scores(q.at(r, h), h / group, tile, static_cast<float>(scale), begin, end,
                     to + h * place.back() + place[r] + begin - rows.key_begin[r]);
    }
  });
  parallel_for("observe maxima", q.heads * count, [&, to, most](std::int64_t i) {
    const float *row = to + i / count * place.back(), *end = row + place[i % count + 1];
    float top = kNothing;
    for (row += place[i % count]; row < end; ++row) top = *row > top ? *row : top;
    most[i] = top;
  });
}

void observe_sum(Tensor& scores, const Tensor& row_max, const ObservedRows& rows, Tensor& row_sum) {
  const std::int64_t heads = scores.size(0), count = rows.size();
  const std::vector<std::int64_t> place = rows.places();
  const float* most = row_max.data<float>();
  float* score = scores.data<float>();
  std::int64_t* to = row_sum.data<std::int64_t>();
  parallel_for("observe sum", heads * count, [&, score, most, to](std::int64_t i) {
    float* row = score + i / count * place.back() + place[i % count];
    const std::int64_t keys = place[i % count + 1] - place[i % count];
    const float top = most[i];
    std::int64_t sum = 0;
    for (std::int64_t j = 0; j < keys; ++j) row[j] = host::fast_exp(row[j] - top);
    for (std::int64_t j = 0; j < keys; ++j)
      sum += fixed(row[j]);  // a loop of its own: together they do not vectorise
    to[i] = sum;
  });
}

void observe_mass(const Tensor& scores, const Tensor& row_sum, const ObservedRows& rows,
                  Tensor& columns, Tensor& slashes) {
  const std::int64_t heads = scores.size(0), count = rows.size(), tokens = columns.size(2),
                     slots = slashes.size(1);
  const std::vector<std::int64_t> place = rows.places();
  const float* from = scores.data<float>();
  const std::int64_t* sums = row_sum.data<std::int64_t>();
  columns.zero();
  slashes.zero();
  std::int64_t *column = columns.data<std::int64_t>(), *slash = slashes.data<std::int64_t>();
  parallel_for("observe mass", heads, [&, from, sums, column, slash](std::int64_t h) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t i = h * count + r;
      if (sums[i] == 0) continue;
      const double share = 1.0 / static_cast<double>(sums[i]);
      for (std::int64_t j = rows.key_begin[r]; j < rows.key_end[r];) {
        const std::int64_t block = j / kBlock,
                           end = std::min<std::int64_t>(rows.key_end[r], (block + 1) * kBlock);
        std::int64_t of_block = 0;
        const float* e = from + h * place.back() + place[r];
        std::int64_t* sum = column + (rows.row_part[r] * heads + h) * tokens;
        for (; j < end; ++j) {
          const std::int64_t mass = fixed(rounded(e[j - rows.key_begin[r]]) * share);
          sum[j] += mass;
          of_block += mass;
        }
        slash[h * slots + rows.row_slot[r] - rows.key_block[block]] += of_block;
      }
    }
  });
}

void pool_keys(const Tensor& k_, const PatternRows& at, Tensor& sums) {
  const Rows k(k_);
  sums.zero();
  std::int64_t* to = sums.data<std::int64_t>();
  const std::int64_t width = k.heads * k.head_dim;
  constexpr double unit = 4294967296.0, limit = 16384;
  for (std::size_t b = 0; b < at.own.size(); ++b)
    for (std::int64_t i = 0; i < at.rows[b]; ++i) {
      const float* row = k.at(static_cast<std::int64_t>(b) * kBlock + i, 0);
      std::int64_t* sum = to + at.own[b] * width;
      for (std::int64_t c = 0; c < width; ++c) {
        const double x = std::isnan(row[c]) ? 0 : std::clamp<double>(row[c], -limit, limit);
        sum[c] += std::llrint(x * unit);
      }
    }
}

namespace {

/// Calls visit(head, block of 64, row, routing scores of the pattern blocks up to the row's own)
/// for the first `most` rows of every block.
template <class Visit>
void for_each_route(const char* label, const Rows& q, const Rows& pooled, double scale,
                    const PatternRows& at, std::int64_t most, const Visit& visit) {
  check_heads(q, pooled);
  const std::int64_t group = q.heads / pooled.heads,
                     blocks = static_cast<std::int64_t>(at.own.size());
  const KeyTiles tiles(pooled);
  parallel_for(label, q.heads * blocks, [&](std::int64_t n) {
    const std::int64_t h = n / blocks, b = n % blocks, first = at.first[b], last = at.own[b] + 1;
    std::vector<float> scores(static_cast<std::size_t>(last - first));
    for (std::int64_t i = 0; i < std::min<std::int64_t>(at.rows[b], most); ++i) {
      for (std::int64_t begin = first; begin < last;) {
        const std::int64_t tile = begin / kBlock, end = std::min(last, (tile + 1) * kBlock);
        tiles.scores(q.at(b * kBlock + i, h), h / group, tile, static_cast<float>(scale), begin,
                     end, &scores[static_cast<std::size_t>(begin - first)]);
        begin = end;
      }
      visit(h, b, i, scores);
    }
  });
}

}  // namespace

void route_queries(const Tensor& q_, const Tensor& pooled_, double scale, const PatternRows& at,
                   std::int64_t top_k, Tensor& rows) {
  const Rows q(q_), pooled(pooled_);
  rows.zero();
  std::int64_t* words = rows.data<std::int64_t>();
  const std::int64_t blocks = rows.size(1), width = rows.size(2);
  for_each_route(
      "route queries", q, pooled, scale, at, kBlock,
      [&, words](std::int64_t h, std::int64_t b, std::int64_t i, const std::vector<float>& scores) {
        const std::int64_t own = static_cast<std::int64_t>(scores.size()) - 1,
                           chosen = std::min(top_k - 1, own);
        std::vector<std::int32_t> order(static_cast<std::size_t>(own));
        for (std::size_t j = 0; j < order.size(); ++j) order[j] = static_cast<std::int32_t>(j);
        if (chosen < own)
          std::nth_element(order.begin(), order.begin() + chosen, order.end(),
                           [&](std::int32_t x, std::int32_t y) {
                             return scores[x] != scores[y] ? scores[x] > scores[y] : x < y;
                           });
        std::int64_t* word = words + (h * blocks + b) * width;
        const auto bit = static_cast<std::int64_t>(std::uint64_t{1} << i);
        for (std::int64_t j = 0; j < chosen; ++j) word[order[j]] |= bit;
        word[own] |= bit;
      });
}

void route_coverage(const Tensor& q_, const Tensor& pooled_, double scale, const PatternRows& at,
                    const std::vector<std::int64_t>& budgets, int told, Tensor& mass) {
  const Rows q(q_), pooled(pooled_);
  mass.zero();
  const std::int64_t blocks = static_cast<std::int64_t>(at.own.size()),
                     count = static_cast<std::int64_t>(budgets.size());
  std::vector<std::int64_t> part(static_cast<std::size_t>(q.heads * blocks * count),
                                 0);  // of one (head, block of 64): no two threads share it
  const std::vector<std::uint32_t>& weights = logit_weights();
  for_each_route(
      "route coverage", q, pooled, scale, at, told,
      [&](std::int64_t h, std::int64_t b, std::int64_t, const std::vector<float>& scores) {
        const float highest = *std::max_element(scores.begin(), scores.end());
        std::array<std::int64_t, kLogitSteps> counts{};  // of the blocks before the own one
        std::int64_t total = 0;
        for (float s : scores) {
          const int step = logit_step(highest, s);
          ++counts[step];
          total += weights[step];
        }
        const int own = logit_step(highest, scores.back());
        --counts[own];
        std::int64_t reached = weights[own], taken = 1;  // of the own block and the steps before
        int step = 0;
        for (std::int64_t n = 0; n < count; ++n) {
          for (; step < kLogitSteps && taken + counts[step] <= budgets[n]; ++step) {
            taken += counts[step];
            reached += counts[step] * weights[step];
          }
          const std::int64_t mass_of_budget =
              reached + (step < kLogitSteps ? (budgets[n] - taken) * weights[step] : 0);
          part[(h * blocks + b) * count + n] += std::llrint(
              static_cast<double>(mass_of_budget) / static_cast<double>(total) * kCoverageUnit);
        }
      });
  for (std::size_t i = 0; i < part.size(); ++i)
    mass.data<std::int64_t>()[i % budgets.size()] += part[i];
}

std::vector<float> mean_query(const Tensor& q_, std::int64_t head, std::int64_t first,
                              std::int64_t last) {
  const Rows q(q_);
  std::vector<float> mean(static_cast<std::size_t>(q.head_dim), 0.0f);
  for (std::int64_t i = first; i < last; ++i)
    for (std::int64_t d = 0; d < q.head_dim; ++d) mean[d] += q.at(i, head)[d];
  for (float& x : mean) x /= static_cast<float>(std::max<std::int64_t>(1, last - first));
  return mean;
}

std::vector<float> score_pooled(const std::vector<float>& query, const Tensor& pooled_,
                                std::int64_t head, std::int64_t heads, double scale,
                                std::int64_t first, std::int64_t last) {
  const Rows pooled(pooled_);
  std::vector<float> scores;
  for (std::int64_t j = first; j < last; ++j)
    scores.push_back(static_cast<float>(scale) * dot(query.data(),
                                                     pooled.at(j, head / (heads / pooled.heads)),
                                                     pooled.head_dim));
  return scores;
}

void pooled_scores(const Tensor& q, const Tensor& pooled, double scale, const PatternRows& at,
                   Tensor& scores) {
  check_heads(Rows(q), Rows(pooled));
  const std::int64_t heads = q.size(1), blocks = static_cast<std::int64_t>(at.own.size());
  float* to = scores.data<float>();
  parallel_for("pooled scores", heads * blocks, [&, to](std::int64_t n) {
    const std::int64_t h = n / blocks, b = n % blocks, first = at.first[b], last = at.own[b] + 1;
    if (at.rows[b] == 0) return;
    const std::vector<float> row =
        score_pooled(mean_query(q, h, b * kBlock, b * kBlock + at.rows[b]), pooled, h, heads, scale,
                     first, last);
    std::copy(row.begin(), row.end(), to + n * scores.size(2) + first);
  });
}

void stride_scores(const Tensor& q_, const Tensor& k_, double scale, int stride, int block_tokens,
                   const PatternRows& queries, const PatternRows& keys, Tensor& maximum,
                   Tensor& sum) {
  const Rows q(q_), k(k_);
  if (k.tokens == 0 || q.tokens == 0) return;
  check_heads(q, k);
  const std::int64_t group = q.heads / k.heads, strides = q.tokens / stride,
                     columns = maximum.size(2), per_block = block_tokens / stride;
  const float factor = static_cast<float>(scale / stride);
  float *most = maximum.data<float>(), *mass = sum.data<float>();
  const auto is_token = [](const PatternRows& at, std::int64_t i) {
    return i % kBlock < at.rows[i / kBlock];
  };
  // Antidiagonals pair the first query of a stride with the last key: the reversed keys of a stride
  // lie side by side, once for all queries.
  std::vector<float> reversed(static_cast<std::size_t>(k.heads * k.tokens * k.head_dim), 0.0f),
      forward(static_cast<std::size_t>(q.heads * q.tokens * q.head_dim), 0.0f);
  const std::int64_t width = stride * q.head_dim;
  for (std::int64_t g = 0; g < k.heads; ++g)
    for (std::int64_t i = 0; i < k.tokens; ++i)
      if (is_token(keys, i))
        std::copy_n(
            k.at(i, g), k.head_dim,
            &reversed[(g * k.tokens + i / stride * stride + stride - 1 - i % stride) * k.head_dim]);
  for (std::int64_t h = 0; h < q.heads; ++h)
    for (std::int64_t i = 0; i < q.tokens; ++i)
      if (is_token(queries, i))
        std::copy_n(q.at(i, h), q.head_dim, &forward[(h * q.tokens + i) * q.head_dim]);
  parallel_for("stride scores", q.heads * strides, [&, most, mass](std::int64_t n) {
    const std::int64_t h = n / strides, i = n % strides, query_block = i * stride / kBlock;
    if (!is_token(queries, i * stride)) return;  // padding asks for nothing
    const std::int32_t own = queries.own[query_block], first = queries.first[query_block];
    for (std::int64_t key = 0; key < k.tokens; key += block_tokens) {
      const std::int32_t block = keys.own[key / kBlock];
      if (block < first || block > own) continue;
      // In the own block strides up to this row's; both count from the block's start.
      const std::int64_t visible = block < own ? per_block : i % per_block + 1;
      std::vector<float> scores(static_cast<std::size_t>(visible));
      float top = kNothing;
      for (std::int64_t j = 0; j < visible; ++j) {
        scores[j] =
            factor * dot(&forward[(h * q.tokens + i * stride) * q.head_dim],
                         &reversed[(h / group * k.tokens + key + j * stride) * k.head_dim], width);
        top = std::max(top, scores[j]);
      }
      float total = 0;
      for (float s : scores) total += host::fast_exp(s - top);
      most[n * columns + block] = top;
      mass[n * columns + block] = total;
    }
  });
}

void stride_mass(const Tensor& maximum, const Tensor& sum, int rows_per_block, Tensor& mass) {
  const std::int64_t heads = maximum.size(0), rows = maximum.size(1), columns = maximum.size(2),
                     blocks = mass.size(1);
  const float *most = maximum.data<float>(), *total = sum.data<float>();
  mass.zero();
  std::int64_t* to = mass.data<std::int64_t>();
  parallel_for("stride mass", heads * blocks, [&, most, total, to](std::int64_t n) {
    const std::int64_t h = n / blocks, b = n % blocks;
    for (std::int64_t i = b * rows_per_block; i < std::min(rows, (b + 1) * rows_per_block); ++i) {
      const float *m = most + (h * rows + i) * columns, *e = total + (h * rows + i) * columns;
      const float top = *std::max_element(m, m + columns);
      if (top == kNothing) continue;
      double whole = 0;
      for (std::int64_t j = 0; j < columns; ++j)
        if (m[j] != kNothing) whole += static_cast<double>(e[j] * host::fast_exp(m[j] - top));
      for (std::int64_t j = 0; j < columns; ++j)
        if (m[j] != kNothing)
          to[n * columns + j] +=
              fixed(static_cast<double>(e[j] * host::fast_exp(m[j] - top)) / whole);
    }
  });
}

}  // namespace ballast

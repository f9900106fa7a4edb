// Sparse patterns over context-parallel ranks: the choice itself by brute force, the same choice on
// any number of ranks, ring attention under it.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/plan/attention/attention_pattern.hpp"
#include "parallel/context/ring_attention.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "parallel/pattern/recall.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"
#include "tests/parallel/pattern/stated_budget.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::SharedDraw;

class Patterns : public ::testing::TestWithParam<const char*> {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{31};
};

TEST_P(Patterns, TheSameChoiceOnAnyNumberOfRanks) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of(GetParam());
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{1000}, {300, 40, 577, 64}}) {
    const Data data(lengths, options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    const Mask expected = alone(data, options);
    for (const LayoutCase& l : kLayouts) {
      if (deals_stripes(l.kind) && l.stripe % options.align() != 0) continue;
      const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
      const auto source = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                         options, nullptr, nullptr);
      const AttentionInputs in = data.inputs(data.packed(layout, world.rank()), DType::f32);
      const auto& shards = source->shards(in);
      Mask mask(expected.size(), 0);
      mark(*source, shards, data, layout, mask);
      std::int64_t wrong = 0;
      for (std::int64_t q : data.packed(layout, world.rank()))
        for (std::int64_t h = 0; h < kHeads; ++h)
          for (std::int64_t j = 0; j < n; ++j)
            wrong += mask[(h * n + q) * n + j] != expected[(h * n + q) * n + j];
      EXPECT_EQ(wrong, 0) << name(l.kind) << " " << l.stripe << ", " << lengths.size()
                          << " segments";
      EXPECT_EQ(&source->shards(in), &shards)
          << "one index for forward, recomputation and backward";
    }
  }
}

TEST_P(Patterns, FullBudgetIsDense) {
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = options_of(GetParam());
  options.vertical_share = options.xattention_threshold = options.flex_share = 1;
  options.heads = std::make_shared<HeadTable>(4, static_cast<int>(kHeads));
  options.max_columns = 3;  // caps do not hold back a full budget
  options.moba_top_k = 1000000;
  const Data data({333, 130}, options, draw);
  const SequenceLayout layout(LayoutKind::zigzag, data.batch.axis_tokens(), world.size(), 64,
                              options.align());
  const auto source = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                     options, nullptr, nullptr);
  double pairs = 0;
  for (const auto& shard :
       source->shards(data.inputs(data.packed(layout, world.rank()), DType::f32)))
    pairs += shard.pairs_per_head();
  EXPECT_EQ(world.all_reduce(pairs), data.batch.attention_pairs());
}

/// Ring attention of the pattern against its definition under the mask that one rank alone chooses;
/// gradients against differences.
TEST_P(Patterns, RingAttentionUnderTheMask) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of(GetParam());
  Data data({300, 200}, options, draw);
  const std::int64_t n = data.batch.axis_tokens();
  data.all.mask = alone(data, options);
  data.all.run();
  for (int outer = 1; outer <= world.size(); ++outer) {
    if (world.size() % outer != 0) continue;
    const RingGroup group{world, plan_ring(world.rank(), outer, world.size() / outer)};
    const LayoutCase l = kLayouts[outer % 2 == 0 ? 0 : 2];
    const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
    const auto at = data.packed(layout, world.rank());
    RingAttention attention(group,
                            pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                           options, nullptr, nullptr),
                            nullptr);
    AttentionInputs in = data.inputs(at, DType::f64);
    const auto like = [](const Tensor& t) { return Tensor::zeros(t.shape(), t.dtype()); };
    Tensor o = like(in.q), lse = Tensor::zeros({kHeads, in.q.size(0)}, DType::f64),
           d_o = data.rows(data.all.d_o, kHeads, at, DType::f64);
    attention.forward(in, o, lse);
    Tensor dq = like(in.q), dk = like(in.k), dv = like(in.v);
    attention.backward(in, o, lse, d_o, dq, dk, dv);
    const auto error = [&](const Tensor& got, const std::vector<double>& expected,
                           std::int64_t heads) {
      return testing::relative_error(testing::elements(got),
                                     testing::elements(data.rows(expected, heads, at, DType::f64)));
    };
    EXPECT_LT(error(o, data.all.o, kHeads), 1e-10) << outer;
    EXPECT_LT(error(dq, data.all.dq, kHeads), 1e-10) << outer;
    EXPECT_LT(error(dk, data.all.dk, kKvHeads), 1e-10) << outer;
    EXPECT_LT(error(dv, data.all.dv, kKvHeads), 1e-10) << outer;

    // Along a random direction of q, k and v: the derivative of sum(o d_o) by central differences,
    // the index staying what it was.
    const std::vector<double> direction =
        testing::SharedDraw(77 + outer).normals(n * (kHeads + 2 * kKvHeads) * kDim);
    double slope = 0, expected = 0;
    for (double sign : {1.0, -1.0}) {
      AttentionInputs moved = data.inputs(at, DType::f64);
      std::size_t offset = 0;
      for (auto* t : {&moved.q, &moved.k, &moved.v}) {
        const std::int64_t width = t->size(1) * kDim;
        const Tensor& gradient = t == &moved.q ? dq : t == &moved.k ? dk : dv;
        for (std::size_t i = 0; i < at.size(); ++i)
          for (std::int64_t c = 0; c < width; ++c) {
            const double d = direction[offset + static_cast<std::size_t>(at[i] * width + c)];
            t->data<double>()[static_cast<std::int64_t>(i) * width + c] += sign * 1e-5 * d;
            if (sign > 0)
              expected += d * gradient.data<double>()[static_cast<std::int64_t>(i) * width + c];
          }
        offset += static_cast<std::size_t>(n * width);
      }
      attention.forward(moved, o, lse);
      for (std::int64_t i = 0; i < o.numel(); ++i)
        slope += sign * o.data<double>()[i] * d_o.data<double>()[i] / 2e-5;
    }
    slope = world.all_reduce(slope);
    expected = world.all_reduce(expected);
    EXPECT_NEAR(slope, expected, 1e-6 * std::max(1.0, std::abs(expected))) << outer;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Patterns,
                         ::testing::Values("vertical_slash", "moba", "xattention", "by_head",
                                           "flexprefill"),
                         [](const auto& info) { return std::string(info.param); });

class Budgets : public Patterns {
 protected:
  /// Of the parameter: a pattern, with coverage of sampled rows where "_sampled" follows.
  static AttentionOptions tuned_options(const std::string& what) {
    const auto sampled = what.find("_sampled");
    AttentionOptions options = options_of(what.substr(0, sampled));
    if (sampled != std::string::npos) options.coverage_rows = CoverageRows::sampled;
    return options;
  }
  /// Observed queries of a segment.
  static std::vector<std::int64_t> observed(const Data& data, const AttentionOptions& options,
                                            int s) {
    std::vector<std::int64_t> rows;
    const std::int64_t count = data.batch.segments[s].tokens();
    if (options.coverage_rows == CoverageRows::last) {
      for (std::int64_t i = count - options.last_q; i < count; ++i) rows.push_back(i);
      return rows;
    }
    const SequenceLayout flat(LayoutKind::contiguous, data.batch.axis_tokens(), 1, 64,
                              options.align());
    const AttentionAxes axes = attention_axes(data.batch, flat, 0);
    for (const SampledQuery& query : sample_queries(axes, key_axis(axes), options.last_q, 0,
                                                    options.recall_seed, 0, kCoverageDraw))
      if (query.segment == s) rows.push_back(query.position);
    return rows;
  }
  /// Share of the observed queries' softmax that lies on pairs of the mask; 1 where none is.
  static double held(const Data& data, const AttentionOptions& options, const Mask& mask,
                     std::int64_t h, int s) {
    const std::int64_t n = data.batch.axis_tokens(), first = PackedAxis(data.batch).offset[s],
                       count = data.batch.segments[s].tokens();
    if (count <= options.last_q) return 1;
    double sum = 0;
    for (const std::int64_t i : observed(data, options, s)) {
      double in = 0, all = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        const double e = std::exp(score(data.all, h, first + i, first + j));
        all += e;
        if (mask[(h * n + first + i) * n + first + j] != 0) in += e;
      }
      sum += in / all;
    }
    return sum / static_cast<double>(options.last_q);
  }
  /// What one rank alone computes at a budget; `told`: its coverage curve.
  static Mask at_budget(const Data& data, const AttentionOptions& options, std::int64_t budget,
                        std::vector<double>* told = nullptr) {
    const std::int64_t n = data.batch.axis_tokens();
    const SequenceLayout flat(LayoutKind::contiguous, n, 1, 64, options.align());
    Stated policy(budget);
    const auto source = pattern_source(Communicator(), attention_axes(data.batch, flat, 0), options,
                                       &policy, nullptr);
    Mask mask(static_cast<std::size_t>(kHeads * n * n), 0);
    mark(*source, source->shards(data.inputs(data.packed(flat, 0), DType::f32)), data, flat, mask);
    if (told != nullptr) *told = policy.coverage;
    return mask;
  }
  /// C(k) of the candidates (BudgetPolicy) by definition, in fp64: routing mass (moba), or what the
  /// candidates' masks hold (vertical_slash).
  static std::vector<double> coverage(const Data& data, const AttentionOptions& options,
                                      std::span<const std::int64_t> candidates) {
    const PackedAxis axis(data.batch);
    std::vector<Mask> masks;
    if (options.pattern == PatternKind::vertical_slash)
      for (std::int64_t budget : candidates) masks.push_back(at_budget(data, options, budget));
    std::vector<double> sums(candidates.size(), 0);
    double queries = 0;
    for (std::size_t s = 0; s < data.batch.segments.size(); ++s)
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const std::int64_t first = axis.offset[s], count = data.batch.segments[s].tokens();
        // Shares of the own block, the last one, and the k - 1 heaviest before it.
        const auto add = [&](std::vector<double> mass, double total, double weight) {
          std::rotate(mass.begin(), std::prev(mass.end()), mass.end());
          std::sort(std::next(mass.begin()), mass.end(), std::greater<>());
          for (std::size_t c = 0; c < candidates.size(); ++c) {
            double sum = 0;
            for (std::size_t k = 0; k < mass.size() && static_cast<std::int64_t>(k) < candidates[c];
                 ++k)
              sum += mass[k];
            sums[c] += weight * std::min(1.0, sum / total);
          }
        };
        if (options.pattern == PatternKind::moba) {
          const std::int64_t width = options.moba_block;
          std::vector<std::vector<double>> logits(static_cast<std::size_t>(count));
          for (std::int64_t b = 0; b * width < count; ++b) {
            const std::int64_t keys = std::min(width, count - b * width);
            for (std::int64_t i = b * width; i < count; ++i) {
              double mean = 0;
              for (std::int64_t j = b * width; j < b * width + keys; ++j)
                mean += score(data.all, h, first + i, first + j) / static_cast<double>(keys);
              logits[i].push_back(std::exp(mean));
            }
          }
          for (std::int64_t i = 0; i < count; ++i)
            if (options.coverage_rows == CoverageRows::last || i % 64 < 16) {
              const auto& row = logits[static_cast<std::size_t>(i)];
              add(row, std::accumulate(row.begin(), row.end(), 0.0), 1);
              ++queries;
            }
        } else {
          queries += static_cast<double>(count);
          for (std::size_t c = 0; c < candidates.size(); ++c)
            sums[c] +=
                static_cast<double>(count) * held(data, options, masks[c], h, static_cast<int>(s));
        }
      }
    for (double& sum : sums) sum /= queries;
    return sums;
  }
};

TEST_P(Budgets, CoverageIsThatOfItsDefinitionAndTheSameOnAnyNumberOfRanks) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = tuned_options(GetParam());
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{1000}, {300, 40, 577, 64}}) {
    const Data data(lengths, options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    const std::vector<double> definition = coverage(data, options, Stated(2).candidates());
    for (std::int64_t budget : {2, 6}) {
      std::vector<double> told;
      const Mask expected = at_budget(data, options, budget, &told);
      ASSERT_EQ(told.size(), definition.size());
      for (std::size_t c = 0; c < definition.size(); ++c)
        EXPECT_NEAR(told[c], definition[c], 1e-4) << "candidate " << c;
      if (options.pattern == PatternKind::moba) {
        for (std::int64_t i = 0; i < lengths[0]; ++i) {
          std::int64_t blocks = 0;
          for (std::int64_t j = 0; j <= i; j += options.moba_block)
            blocks += expected[static_cast<std::size_t>(i * n + j)];
          ASSERT_EQ(blocks, std::min(budget, i / options.moba_block + 1)) << "query " << i;
        }
      }
      for (const LayoutCase& l : kLayouts) {
        const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
        Stated policy(budget);
        const auto spread = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                           options, &policy, nullptr);
        Mask mask(expected.size(), 0);
        mark(*spread, spread->shards(data.inputs(data.packed(layout, world.rank()), DType::f32)),
             data, layout, mask);
        EXPECT_EQ(policy.coverage, told) << name(l.kind) << " " << l.stripe;
        std::int64_t wrong = 0;
        for (std::int64_t q : data.packed(layout, world.rank()))
          for (std::int64_t h = 0; h < kHeads; ++h)
            for (std::int64_t j = 0; j < n; ++j)
              wrong += mask[(h * n + q) * n + j] != expected[(h * n + q) * n + j];
        EXPECT_EQ(wrong, 0) << name(l.kind) << " " << l.stripe;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Budgets,
                         ::testing::Values("vertical_slash", "vertical_slash_sampled", "moba",
                                           "moba_sampled"),
                         [](const auto& info) { return std::string(info.param); });

class Choice : public ::testing::Test {
 protected:
  SharedDraw draw{37};
};

TEST_F(Choice, ColumnsAndSlashesAreTheFewestThatReachTheirShare) {
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = options_of("vertical_slash");
  const Data data({600, 700, 30}, options, draw);
  const std::int64_t n = data.batch.axis_tokens();
  const Mask mask = alone(data, options);
  const PackedAxis axis(data.batch);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (int s = 0; s < 2; ++s) {
      const std::int64_t first = axis.offset[s], count = data.batch.segments[s].tokens();
      const auto [column, slash] = observed_mass(data, options, h, s);
      // The last block of queries shows every slash, and single columns beside them.
      const std::int64_t last = count - 1;
      const auto at = [&](std::int64_t i, std::int64_t j) {
        return mask[(h * n + first + i) * n + first + j] != 0;
      };
      std::set<std::int64_t> columns, slashes;
      for (std::int64_t d = 0; d <= last / 64; ++d) {
        const std::int64_t j0 = (last / 64 - d) * 64;
        bool whole = true;
        for (std::int64_t j = j0; j < std::min(j0 + 64, count); ++j)
          whole &= at(last, j) || j > last;
        if (whole) slashes.insert(d);
      }
      // A column is seen by every later query: take it where its own block's slashes do not cover
      // it, far from the diagonal or near.
      for (std::int64_t j = 0; j < count; ++j) {
        bool always = true;
        for (std::int64_t i = j; i < count; ++i) always &= at(i, j);
        if (always) columns.insert(j);
      }
      const auto expect_share = [&](const std::vector<double>& values,
                                    const std::set<std::int64_t>& chosen, double share,
                                    const char* what) {
        std::vector<double> sorted = values;
        std::sort(sorted.rbegin(), sorted.rend());
        double total = 0, reached = 0;
        for (double v : values) total += v;
        std::size_t least = 0;
        while (reached < share * total - 1e-6) reached += sorted[least++];
        const double smallest = sorted[least - 1];
        // Every element above the smallest needed one is in.
        for (std::size_t e = 0; e < values.size(); ++e)
          if (values[e] > smallest * (1 + 1e-4)) {
            EXPECT_TRUE(chosen.count(static_cast<std::int64_t>(e)) != 0)
                << what << " " << e << " of head " << h << ", segment " << s;
          }
      };
      expect_share(column, columns, options.vertical_share, "column");
      expect_share(slash, slashes, options.slash_share, "slash");
      // And nothing else: pairs of the mask are pairs of chosen slashes, of the sink block or of
      // the fewest columns.
      std::vector<double> by_mass = column;
      std::sort(by_mass.rbegin(), by_mass.rend());
      double reached = 0, total = 0;
      for (double v : column) total += v;
      std::size_t fewest = 0;
      while (reached < options.vertical_share * total + 1e-6) reached += by_mass[fewest++];
      std::size_t extra = 0;
      for (std::int64_t j = 64; j < last / 64 * 64; ++j)
        extra += at(last, j) && slashes.count(last / 64 - j / 64) == 0;
      EXPECT_LE(extra, fewest);
      for (std::int64_t i = 0; i < count; i += 37) {
        EXPECT_TRUE(at(i, i));
        EXPECT_TRUE(at(i, 0)) << "the sink block is always in";
      }
    }
  const std::int64_t shortest = axis.offset[2];
  for (std::int64_t i = 0; i < 30; ++i)
    for (std::int64_t j = 0; j <= i; ++j)
      ASSERT_TRUE(mask[(shortest + i) * n + shortest + j])
          << "segments no longer than last_q are dense";
}

TEST_F(Choice, CapsKeepTheHeaviestColumns) {
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = options_of("vertical_slash");
  options.slash_share = 1e-6;  // the heaviest slash alone
  options.vertical_share = 0.9;
  const Data data({1024}, options, draw);
  const auto columns_of = [&](std::int64_t cap) {
    options.max_columns = cap;
    const SequenceLayout layout(LayoutKind::contiguous, 1024, 1, 64, 64);
    const auto source = pattern_source(Communicator(), attention_axes(data.batch, layout, 0),
                                       options, nullptr, nullptr);
    const AttentionWork work =
        source->shards(data.inputs(data.packed(layout, 0), DType::f32)).front();
    const PatternArrays& index = work.host()->arrays();
    return std::set<std::int32_t>(index.columns.begin(),
                                  index.columns.begin() + index.column_offset[1]);  // head 0
  };
  const auto all = columns_of(0), few = columns_of(20);
  EXPECT_GT(all.size(), 20u);
  EXPECT_EQ(few.size(), 20u);
  EXPECT_TRUE(std::includes(all.begin(), all.end(), few.begin(), few.end()));
}

/// Entries of `mass` that its share asks for beyond the heaviest `cap`, and their share of it; the
/// first `given` are computed anyway.
std::pair<std::int64_t, double> left_out(const std::vector<double>& mass, double share,
                                         std::size_t cap, std::size_t given) {
  std::vector<std::size_t> order(mass.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return mass[a] > mass[b]; });
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  double reached = 0, lost = 0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < order.size() && reached < share * total; reached += mass[order[i++]])
    if (i >= cap && order[i] >= given) ++count, lost += mass[order[i]] / total;
  return {count, lost};
}

TEST_F(Choice, WhatCapsLeaveOutIsCountedOnAnyNumberOfRanks) {
  SCOPED_TRACE(draw.trace());
  const Communicator world = Communicator::world();
  AttentionOptions options = options_of("vertical_slash");
  options.vertical_share = 0.6, options.max_columns = 12;
  options.slash_share = 0.8, options.max_slashes = 3;
  const Data data({900}, options, draw);
  const SequenceLayout layout(LayoutKind::zigzag, data.batch.axis_tokens(), world.size(), 64,
                              options.align());
  Recorder recorder;
  recorder.enabled = true;
  const auto source = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                     options, nullptr, &recorder);
  source->shards(data.inputs(data.packed(layout, world.rank()), DType::f32));
  const std::vector<BudgetRow> rows = recorder.take_budgets();
  ASSERT_EQ(rows.size(), static_cast<std::size_t>(kHeads));
  std::int64_t cut = 0;
  for (const BudgetRow& row : rows) {
    const auto [column, slash] = observed_mass(data, options, row.head, 0);
    const auto columns = left_out(column, options.vertical_share, 12, 64),
               slashes = left_out(slash, options.slash_share, 3, 1);
    cut += columns.first;
    // A sum that crosses its share by a last bit of fp32 may want one more or less of either.
    EXPECT_NEAR(static_cast<double>(row.overflow),
                static_cast<double>(columns.first + slashes.first), 2)
        << "head " << row.head;
    EXPECT_NEAR(row.overflow_mass, std::max(columns.second, slashes.second), 0.01);
  }
  EXPECT_GT(cut, 0) << "no cap decided";
}

TEST_F(Choice, MobaTakesTheBlocksWithTheHighestScores) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of("moba");
  const Data data({900, 500}, options, draw);
  const std::int64_t n = data.batch.axis_tokens(), width = options.moba_block;
  const Mask mask = alone(data, options);
  const PackedAxis axis(data.batch);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (int s = 0; s < 2; ++s) {
      const std::int64_t first = axis.offset[s], count = data.batch.segments[s].tokens();
      for (std::int64_t i = 0; i < count; i += 3) {
        double worst_in = INFINITY, best_out = -INFINITY;
        std::int64_t blocks = 0;
        for (std::int64_t b = 0; b * width <= i; ++b) {
          const std::int64_t end = std::min((b + 1) * width, count);
          double mean = 0;
          for (std::int64_t j = b * width; j < end; ++j)
            mean += score(data.all, h, first + i, first + j) / static_cast<double>(end - b * width);
          const bool in = mask[(h * n + first + i) * n + first + b * width] != 0;
          for (std::int64_t j = b * width; j < std::min(end, i + 1); ++j)
            ASSERT_EQ(mask[(h * n + first + i) * n + first + j] != 0, in) << "blocks are whole";
          blocks += in;
          if (b == i / width) {
            EXPECT_TRUE(in) << "own block";
          } else if (in) {
            worst_in = std::min(worst_in, mean);
          } else {
            best_out = std::max(best_out, mean);
          }
        }
        EXPECT_EQ(blocks, std::min(options.moba_top_k, i / width + 1));
        EXPECT_GE(worst_in, best_out - 1e-5);
      }
    }
}

/// `threshold`: of a row's mass, which the sink block or the own one need not be part of.
void expect_thresholds(SharedDraw& draw, double threshold) {
  AttentionOptions options = options_of("xattention");
  options.xattention_threshold = threshold;
  const Data data({1000, 200, 387}, options, draw);  // one ends with padding behind three tokens
  const std::int64_t n = data.batch.axis_tokens(), width = options.xattention_block,
                     stride = options.xattention_stride;
  const Mask mask = alone(data, options);
  const PackedAxis axis(data.batch);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (int s = 0; s < 3; ++s) {
      const std::int64_t first = axis.offset[s], count = data.batch.segments[s].tokens();
      for (std::int64_t row = 0; row * width < count; ++row) {
        std::vector<double> mass(static_cast<std::size_t>(row + 1), 0);
        const std::int64_t strides = std::min((row + 1) * width, count + stride - 1) / stride;
        for (std::int64_t i = row * width / stride; i < strides; ++i) {
          std::vector<double> e;
          double sum = 0;
          for (std::int64_t j = 0; j <= i; ++j) {
            double logit = 0;
            for (std::int64_t r = 0; r < stride; ++r) {
              const std::int64_t query = i * stride + r, key = j * stride + stride - 1 - r;
              if (query < count && key < count)
                logit +=
                    score(data.all, h, first + query, first + key) / static_cast<double>(stride);
            }
            sum += e.emplace_back(std::exp(logit));
          }
          for (std::int64_t j = 0; j <= i; ++j)
            mass[static_cast<std::size_t>(j * stride / width)] +=
                e[static_cast<std::size_t>(j)] / sum;
        }
        std::vector<double> sorted = mass;
        std::sort(sorted.rbegin(), sorted.rend());
        double total = 0, reached = 0;
        for (double m : mass) total += m;
        std::size_t fewest = 0;
        while (reached < options.xattention_threshold * total) reached += sorted[fewest++];
        for (std::int64_t b = 0; b <= row; ++b) {
          const bool in = mask[(h * n + first + std::min(count, (row + 1) * width) - 1) * n +
                               first + b * width] != 0;
          const double m = mass[static_cast<std::size_t>(b)], needed = sorted[fewest - 1];
          if (b == 0 || b == row || m > needed * (1 + 1e-4)) {
            EXPECT_TRUE(in) << "block " << b << " of row " << row;
          } else if (m < needed * (1 - 1e-4)) {
            EXPECT_FALSE(in) << "block " << b << " of row " << row;
          }
        }
      }
    }
}

TEST_F(Choice, XAttentionKeepsTheThresholdOfEveryRowOfBlocks) {
  SCOPED_TRACE(draw.trace());
  for (const double threshold : {0.6, 0.01}) expect_thresholds(draw, threshold);
}

}  // namespace
}  // namespace ballast

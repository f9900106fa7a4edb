// Indexes chosen on the GPU against those the host chooses from the same Q and K: coverage of
// budgets, budgets, blocks; the same on any number of shards.
#include <algorithm>
#include <map>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/slash_purchases.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/block_builder.hpp"
#include "kernels/cuda/index/slash_builder.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/cuda/index/download_index.hpp"
#include "tests/cuda/index/spread.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

constexpr int kHeads = 4, kKvHeads = 2;

/// Chooses the smallest budget whose coverage reaches a share, and keeps what it was told.
class Asked final : public BudgetPolicy {
 public:
  Asked(std::vector<std::int64_t> candidates, double share)
      : candidates_(std::move(candidates)), share_(share) {}
  std::span<const std::int64_t> candidates() const override { return candidates_; }
  std::int64_t choose(int, std::span<const double> told) override {
    coverage.assign(told.begin(), told.end());
    const auto at =
        std::find_if(coverage.begin(), coverage.end(), [&](double c) { return c >= share_; });
    budget = candidates_[std::min<std::size_t>(at - coverage.begin(), candidates_.size() - 1)];
    ++times;
    return budget;
  }
  std::vector<double> coverage;
  std::int64_t budget = 0;
  int times = 0;

 private:
  std::vector<std::int64_t> candidates_;
  double share_;
};

/// Which of the 64 queries of a block use a key block: [head][query block][key block], padding left
/// out.
std::vector<std::uint64_t> words(const PatternArrays& index, const AxisRanges& axis) {
  const auto queries = tokens_of(axis);
  std::vector<std::uint64_t> out(
      static_cast<std::size_t>(index.index_heads * index.q_blocks() * index.k_blocks()), 0);
  for (std::int64_t l = 0; l < index.index_heads * index.q_blocks(); ++l) {
    std::uint64_t tokens = 0;
    const std::int64_t first = l % index.q_blocks() * kBlock;
    for (std::int64_t i = 0; i < kBlock && first + i < static_cast<std::int64_t>(queries.size());
         ++i)
      tokens |= static_cast<std::uint64_t>(queries[first + i].segment >= 0) << i;
    for (std::int64_t r = index.run_offset[l]; r < index.run_offset[l + 1]; ++r)
      for (std::int64_t k = index.runs[r].first; k < index.runs[r].last; ++k)
        out[l * index.k_blocks() + k] |=
            tokens & (index.runs[r].row_mask < 0 ? ~std::uint64_t{0}
                                                 : index.row_masks[index.runs[r].row_mask]);
  }
  return out;
}

class CudaPatterns : public CudaTest {
 protected:
  /// Whole numbers up to `most`, over 4.
  Tensor whole(const Shape& shape, int most) {
    Tensor t = Tensor::empty(shape, DType::f64);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<double>()[i] = (static_cast<int>(rng() % (2 * most + 1)) - most) / 4.0;
    return t;
  }
  /// The index of one rank's source from q and k, on either backend.
  PatternArrays chosen(const Spread& spread, const AttentionOptions& options, Asked* policy,
                       const Tensor& q, const Tensor& k, double scale, bool on_gpu) {
    const auto source = pattern_source(Communicator(), spread.axes[0], options, policy, nullptr);
    AttentionInputs in;
    const Tensor q_rows = spread.take(q, spread.axes[0].queries),
                 k_rows = spread.take(k, spread.axes[0].queries);
    in.q = on_gpu ? to_gpu(q_rows, DType::bf16) : as_f32(q_rows);
    in.k = in.v = on_gpu ? to_gpu(k_rows, DType::bf16) : as_f32(k_rows);
    in.scale = scale;
    const AttentionWork& index = source->shards(in).front();
    EXPECT_EQ(&source->shards(in).front(), &index)
        << "one index for forward, recomputation and backward";
    if (policy) {
      EXPECT_EQ(policy->times, 1);
    }
    const PatternArrays host = on_gpu ? download(index) : index.host()->arrays();
    EXPECT_EQ(problems(host), "") << "seed " << seed;
    EXPECT_EQ(AttentionPattern(host).pairs_per_head(), index.pairs_per_head()) << "seed " << seed;
    return host;
  }
};

TEST_F(CudaPatterns, InjectedRoutingLogitsGiveTheHostsCoverageBudgetAndBlocks) {
  for (const auto& [dim, block, rows] : {std::tuple{64, 64, CoverageRows::last},
                                         {128, 192, CoverageRows::last},
                                         {64, 64, CoverageRows::sampled}}) {
    const Spread spread({2900, 100, 0, 700}, LayoutKind::contiguous, 1, kBlock);
    AttentionOptions options;
    options.pattern = PatternKind::moba;
    options.moba_block = block;
    options.coverage_rows = rows;
    // Keys that are equal inside a block, of few bits: their means and all dot products are exact.
    const Tensor q = whole({spread.rows(), kHeads, dim}, 3);
    Tensor k = whole({spread.rows(), kKvHeads, dim}, 3);
    for (const auto& [token, i] : spread.row)
      std::copy_n(k.data<double>() +
                      spread.row.at({token.first, token.second / block * block}) * kKvHeads * dim,
                  kKvHeads * dim, k.data<double>() + i * kKvHeads * dim);
    for (double share : {0.3, 0.7, 0.97}) {
      Asked host({1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 64}, share),
          gpu_({1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 64}, share);
      const PatternArrays expected = chosen(spread, options, &host, q, k, 0.1, false),
                          found = chosen(spread, options, &gpu_, q, k, 0.1, true);
      EXPECT_EQ(host.coverage, gpu_.coverage) << "seed " << seed;
      EXPECT_EQ(host.budget, gpu_.budget) << "seed " << seed;
      EXPECT_LT(host.coverage.front(), 0.9);
      EXPECT_EQ(host.coverage.back(), 1.0);
      EXPECT_EQ(words(expected, spread.axes[0].queries), words(found, spread.axes[0].queries))
          << "share " << share << " seed " << seed;
    }
  }
}

TEST_F(CudaPatterns, CoverageOfRandomQAndKIsTheHostsWithinRounding) {
  const Spread spread({2000, 90, 500}, LayoutKind::contiguous, 1, kBlock);
  for (const char* pattern : {"moba", "vertical_slash"}) {
    AttentionOptions options;
    options.pattern = parse_or_fail<PatternKind>(pattern, "pattern");
    options.moba_block = 64;
    options.max_columns = 300;
    const Tensor q = random({spread.rows(), kHeads, 64}, 1.5),
                 k = random({spread.rows(), kKvHeads, 64});
    Asked host({1, 2, 4, 8, 12, 16, 24, 32}, 0.5), on_gpu({1, 2, 4, 8, 12, 16, 24, 32}, 0.5);
    const PatternArrays expected = chosen(spread, options, &host, q, k, 0.125, false),
                        found = chosen(spread, options, &on_gpu, q, k, 0.125, true);
    for (std::size_t i = 0; i < host.coverage.size(); ++i)
      EXPECT_NEAR(host.coverage[i], on_gpu.coverage[i], 2e-4)
          << pattern << " " << i << " seed " << seed;
    EXPECT_EQ(host.budget, on_gpu.budget) << pattern << " seed " << seed;
    const double pairs = AttentionPattern(expected).pairs_per_head();
    EXPECT_NEAR(pairs, AttentionPattern(found).pairs_per_head(), 1e-3 * pairs)
        << pattern << " seed " << seed;
    const auto a = words(expected, spread.axes[0].queries),
               b = words(found, spread.axes[0].queries);
    std::int64_t used = 0, different = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      used += __builtin_popcountll(a[i]), different += __builtin_popcountll(a[i] ^ b[i]);
    EXPECT_LE(different, used / 200) << pattern << " seed " << seed;
  }
}

TEST_F(CudaPatterns, IndexesThatAreStoredAreTheHosts) {
  const Spread spread({2000, 90, 0, 700}, LayoutKind::contiguous, 1, kBlock);
  AttentionOptions options;
  options.pattern = PatternKind::vertical_slash;
  options.max_columns = 300;
  options.indexes_every = 5;
  const Tensor q = random({spread.rows(), kHeads, 64}, 1.5),
               k = random({spread.rows(), kKvHeads, 64});
  const auto stored = [&](bool on_gpu, int step) {
    Recorder recorder;
    recorder.enabled = true;
    recorder.context.step = step;
    const auto source = pattern_source(Communicator(), spread.axes[0], options, nullptr, &recorder);
    AttentionInputs in;
    const Tensor q_rows = spread.take(q, spread.axes[0].queries),
                 k_rows = spread.take(k, spread.axes[0].queries);
    in.q = on_gpu ? to_gpu(q_rows, DType::bf16) : as_f32(q_rows);
    in.k = in.v = on_gpu ? to_gpu(k_rows, DType::bf16) : as_f32(k_rows);
    in.scale = 0.125;
    source->shards(in);
    return recorder.take_indexes();
  };
  EXPECT_TRUE(stored(true, 4).empty());
  const std::vector<IndexRow> host = stored(false, 10), found = stored(true, 10);
  ASSERT_EQ(found.size(), 3u * kHeads);
  ASSERT_EQ(found.size(), host.size());
  std::size_t all = 0, shared = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].head, host[i].head);
    EXPECT_EQ(found[i].tokens, host[i].tokens);
    ASSERT_EQ(found[i].stretches.size(), 1u);
    ASSERT_EQ(host[i].stretches.size(), 1u);
    const auto count = [&](const auto& a, const auto& b) {
      EXPECT_TRUE(std::is_sorted(b.begin(), b.end()));
      for (const auto x : a) shared += std::binary_search(b.begin(), b.end(), x);
      all += std::max(a.size(), b.size());
    };
    count(host[i].stretches[0].slashes, found[i].stretches[0].slashes);
    count(host[i].stretches[0].columns, found[i].stretches[0].columns);
  }
  EXPECT_GT(all, 1000u);
  EXPECT_GE(static_cast<double>(shared), 0.99 * static_cast<double>(all)) << "ties aside";
}

TEST_F(CudaPatterns, HeadsThatDifferChooseWhatTheHostChooses) {
  const Spread spread({2000, 50, 500, 0, 130}, LayoutKind::contiguous, 1, kBlock);
  for (const char* pattern : {"by_head", "flexprefill"}) {
    AttentionOptions options;
    options.pattern = parse_or_fail<PatternKind>(pattern, "pattern");
    auto heads = std::make_shared<HeadTable>(1, kHeads);
    heads->at(0, 0) = {HeadPattern::a_shape, 128, 256};
    heads->at(0, 1) = {HeadPattern::vertical_slash, 0, 0, 100, 3};
    heads->at(0, 2) = {HeadPattern::block_sparse, 0, 0, 0, 0, 4};
    options.heads = heads;
    options.flex_share = 0.6;
    const Tensor q = random({spread.rows(), kHeads, 64}, 1.5),
                 k = random({spread.rows(), kKvHeads, 64});
    for (const double threshold : {0.0, 0.3, 1.0}) {
      options.flex_threshold = threshold;
      const PatternArrays expected = chosen(spread, options, nullptr, q, k, 0.125, false),
                          found = chosen(spread, options, nullptr, q, k, 0.125, true);
      const double pairs = AttentionPattern(expected).pairs_per_head();
      EXPECT_LT(pairs, spread.batch.attention_pairs()) << pattern;
      EXPECT_NEAR(pairs, AttentionPattern(found).pairs_per_head(), 1e-2 * pairs)
          << pattern << " seed " << seed;
      const auto a = words(expected, spread.axes[0].queries),
                 b = words(found, spread.axes[0].queries);
      std::int64_t used = 0, different = 0;
      for (std::size_t i = 0; i < a.size(); ++i)
        used += __builtin_popcountll(a[i]), different += __builtin_popcountll(a[i] ^ b[i]);
      EXPECT_LE(different, used / 100) << pattern << " " << threshold << " seed " << seed;
    }
  }
}

TEST_F(CudaPatterns, CoverageSumsAreTheSameOnAnyNumberOfShards) {
  const std::vector<std::int64_t> lengths{1500, 70, 640}, budgets{1, 2, 3, 5, 9, 17};
  const int dim = 64, block = 128;
  std::vector<std::int64_t> first;
  Tensor q, k;
  for (const auto& [kind, ranks] : {std::pair{LayoutKind::contiguous, 1},
                                    {LayoutKind::striped, 2},
                                    {LayoutKind::striped, 4},
                                    {LayoutKind::zigzag, 2}}) {
    const Spread spread(lengths, kind, ranks, block);
    if (!q.defined())
      q = random({spread.rows(), kHeads, dim}, 1.5), k = random({spread.rows(), kKvHeads, dim});
    std::vector<cuda::BlockBuilder> builders;
    std::vector<std::int64_t> sums, curve(budgets.size(), 0);
    const auto add = [](std::vector<std::int64_t>& to, const Tensor& t) {
      const Tensor host = t.to(host_device());
      to.resize(static_cast<std::size_t>(host.numel()), 0);
      for (std::int64_t i = 0; i < host.numel(); ++i) to[i] += host.data<std::int64_t>()[i];
    };
    Shape shape;
    for (int r = 0; r < ranks; ++r) {
      builders.emplace_back(spread.axes[r], spread.axis, block, *gpu);
      const Tensor part =
          builders.back().pool(to_gpu(spread.take(k, spread.axes[r].keys[r]), DType::bf16));
      shape = part.shape();
      add(sums, part);
    }
    const Tensor means = builders[0].means(Tensor::wrap(sums.data(), shape, DType::i64).to(*gpu));
    for (int r = 0; r < ranks; ++r)
      add(curve, builders[r].coverage(to_gpu(spread.take(q, spread.axes[r].queries), DType::bf16),
                                      means, 0.125, budgets, kBlock));
    if (first.empty()) first = curve;
    EXPECT_EQ(curve, first) << ranks << " shards, seed " << seed;
    EXPECT_GT(curve.back(), curve.front());
  }
}

TEST_F(CudaPatterns, BudgetsOfSlashesAndColumnsAreTheHosts) {
  const std::vector<std::int64_t> lengths{1500, 64, 700, 0, 200},
      budgets{1, 2, 3, 5, 8, 13, 21, 34, 60};
  const std::int64_t last_q = 64;
  for (const auto& [range, max_columns] : {std::pair{std::int64_t{4}, std::int64_t{0}},
                                           {std::int64_t{1} << 45, std::int64_t{0}},
                                           {1000, 130},
                                           {1, 0}}) {
    const Spread spread(lengths, LayoutKind::zigzag, 2, kBlock);
    const KeyAxis& axis = spread.axis;
    const std::int64_t slots = axis.tokens() / kBlock;
    std::vector<char> whole_segments;
    std::vector<std::int64_t> first, queries;
    for (int s = 0; s < axis.segments(); ++s) {
      whole_segments.push_back(axis.count[s] <= last_q);
      first.push_back(std::max<std::int64_t>(0, axis.count[s] - last_q));
      queries.push_back(axis.count[s]);
    }
    // Two blocks of observed queries a segment: neither length ends one.
    const std::int64_t parts = 2;
    const auto part_at = [&](std::int64_t w, int h, std::int64_t slot) {
      return kHeads * slots + ((w * kHeads + h) * slots + slot) * kBlock;
    };
    std::vector<std::int64_t> mass(static_cast<std::size_t>(kHeads * slots * (1 + parts * kBlock)),
                                   0);
    std::vector<std::vector<HeadMass>> of(static_cast<std::size_t>(axis.segments()),
                                          std::vector<HeadMass>(kHeads));
    for (int s = 0; s < axis.segments(); ++s)
      for (int h = 0; h < kHeads; ++h) {
        const std::int64_t base = axis.offset[s] / kBlock,
                           blocks = (axis.count[s] + kBlock - 1) / kBlock;
        HeadMass& m = of[s][h];
        m.slashes.assign(static_cast<std::size_t>(blocks), 0);
        m.columns.resize(static_cast<std::size_t>(parts));
        for (std::int64_t w = 0; w < parts; ++w) m.query_block.push_back(blocks - parts + w);
        for (std::int64_t w = 0; w < parts && !whole_segments[s]; ++w)
          for (std::int64_t j = 0; j < std::min(axis.count[s], (blocks - parts + w + 1) * kBlock);
               ++j) {
            const std::int64_t d = blocks - parts + w - j / kBlock;
            if (rng() % 3 == 0) continue;
            const auto x = static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(range)) *
                           (d < 2 || j % 41 == 3 ? 30 : 1);
            if (x == 0) continue;
            m.columns[w].push_back({j, x});
            mass[part_at(w, h, base) + j] = x;
            mass[h * slots + base + d] += x;
            m.slashes[d] += x;
            m.total += x;
          }
      }
    AttentionOptions options;
    options.max_columns = max_columns;
    cuda::SlashBuilder builder(spread.axes[1], axis, whole_segments, first,
                               cuda::SlashOptions{0.9, 0.9, max_columns, 0, true}, *gpu);
    const Tensor on_gpu =
        Tensor::wrap(mass.data(), {static_cast<std::int64_t>(mass.size())}, DType::i64).to(*gpu);
    const cuda::SlashBudgets made = builder.budgets(on_gpu, kHeads, budgets, queries);
    std::vector<std::int64_t> expected(budgets.size(), 0);
    const auto bought = [&](int s, int h) { return SlashPurchases(of[s][h], budgets, options); };
    for (int s = 0; s < axis.segments(); ++s)
      for (int h = 0; h < kHeads; ++h) {
        const auto part = whole_segments[s]
                              ? std::vector<std::int64_t>(budgets.size(),
                                                          static_cast<std::int64_t>(kCoverageUnit))
                              : bought(s, h).coverage();
        for (std::size_t i = 0; i < part.size(); ++i) expected[i] += queries[s] * part[i];
      }
    const Tensor coverage = made.coverage.to(host_device());
    for (std::size_t i = 0; i < budgets.size(); ++i)
      EXPECT_EQ(coverage.data<std::int64_t>()[i], expected[i])
          << "budget " << budgets[i] << " seed " << seed;

    for (std::size_t i = 0; i < budgets.size(); i += 2) {
      std::vector<std::vector<VerticalSlash>> heads(static_cast<std::size_t>(axis.segments()));
      for (int s = 0; s < axis.segments(); ++s)
        for (int h = 0; h < kHeads && axis.count[s] > 0; ++h)
          heads[s].push_back(whole_segments[s] ? dense_head(axis.count[s])
                                               : bought(s, h).choice(i));
      const auto host =
          split_keys(vertical_slash_pattern(spread.axes[1].queries, axis, heads, true), axis,
                     spread.axes[1].keys);
      SlashCounts counts;
      const auto built = builder.build(
          made.order, kHeads, kKvHeads, counts,
          made.most.rows(static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1),
          budgets[i]);
      for (std::size_t shard = 0; shard < built.size(); ++shard) {
        const PatternArrays found = download(built[shard]);
        EXPECT_EQ(problems(found), "");
        EXPECT_EQ(words(found, spread.axes[1].queries),
                  words(host[shard].arrays(), spread.axes[1].queries))
            << "budget " << budgets[i] << " seed " << seed;
        EXPECT_EQ(found.columns, host[shard].arrays().columns)
            << "budget " << budgets[i] << " seed " << seed;
        EXPECT_EQ(built[shard].pairs_per_head(), host[shard].pairs_per_head())
            << "budget " << budgets[i] << " seed " << seed;
      }
      EXPECT_EQ(*std::max_element(counts.cut.begin(), counts.cut.end()), 0);
    }
  }
}

TEST_F(CudaPatterns, StridesChooseTheHostsBlocksUpToRounding) {
  for (const auto& [dim, block, stride] :
       {std::tuple{64, 128, 16}, {128, 128, 16}, {64, 64, 8}, {64, 192, 32}, {64, 2048, 16}}) {
    AttentionOptions options;
    options.pattern = PatternKind::xattention;
    options.xattention_block = block;
    options.xattention_stride = stride;
    options.xattention_threshold = 0.7;
    const Spread spread({2900, 130, 700}, LayoutKind::contiguous, 1, options.align());
    const Tensor q = random({spread.rows(), kHeads, dim}, 1.5);
    Tensor k = random({spread.rows(), kKvHeads, dim}, 1.5);
    for (std::int64_t i = 0; i < spread.rows(); ++i)  // some heavy keys
      if (rng() % 100 == 0)
        for (std::int64_t c = i * kKvHeads * dim; c < (i + 1) * kKvHeads * dim; ++c)
          k.data<double>()[c] *= 8;
    const PatternArrays expected = chosen(spread, options, nullptr, q, k, 0.25, false),
                        found = chosen(spread, options, nullptr, q, k, 0.25, true);
    const auto a = words(expected, spread.axes[0].queries),
               b = words(found, spread.axes[0].queries);
    std::int64_t used = 0, different = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      used += __builtin_popcountll(a[i]), different += __builtin_popcountll(a[i] ^ b[i]);
    EXPECT_GT(used, 0);
    EXPECT_LE(different, used / 100)
        << "block " << block << " stride " << stride << " seed " << seed;
    if (block <= 192) {
      EXPECT_LT(AttentionPattern(expected).pairs_per_head(), 0.97 * expected.visible.pairs())
          << "something is left out";
    }
  }
}

TEST_F(CudaPatterns, StridesChooseTheSameBlocksOnAnyNumberOfShards) {
  const int dim = 64, block = 128, stride = 16;
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::int64_t>>
      first;  // (segment, position of 64 queries) -> words of all heads
  std::vector<std::int64_t> first_counts;
  Tensor q, k;
  for (const auto& [kind, ranks] : {std::pair{LayoutKind::contiguous, 1},
                                    {LayoutKind::striped, 2},
                                    {LayoutKind::striped, 4},
                                    {LayoutKind::zigzag, 2}}) {
    const Spread spread({1500, 70, 640}, kind, ranks, block);
    if (!q.defined())
      q = random({spread.rows(), kHeads, dim}, 1.5),
      k = random({spread.rows(), kKvHeads, dim}, 1.5);
    std::vector<std::int64_t> counts(kHeads, 0);
    for (int r = 0; r < ranks; ++r) {
      const auto queries = tokens_of(spread.axes[r].queries);
      const cuda::BlockBuilder builder(spread.axes[r], spread.axis, block, *gpu);
      const Tensor mine = to_gpu(spread.take(q, spread.axes[r].queries), DType::bf16);
      Tensor lse = builder.strides(mine, stride), chosen_blocks;
      for (int shard = 0; shard < ranks; ++shard)
        builder.score(mine, to_gpu(spread.take(k, spread.axes[r].keys[shard]), DType::bf16), shard,
                      0.25, stride, block, lse);
      const Tensor found = builder.choose(lse, stride, block, 0.6, chosen_blocks).to(host_device());
      const Tensor counted = chosen_blocks.to(host_device());
      for (int h = 0; h < kHeads; ++h) counts[h] += counted.data<std::int64_t>()[h];
      for (std::int64_t b = 0; b < found.size(1); ++b) {
        if (queries[b * kBlock].segment < 0) continue;
        std::vector<std::int64_t> all;
        for (int h = 0; h < kHeads; ++h) {
          const std::int64_t* from =
              found.data<std::int64_t>() + (h * found.size(1) + b) * found.size(2);
          all.insert(all.end(), from, from + found.size(2));
        }
        const auto [known, fresh] = first.emplace(
            std::pair(std::int64_t{queries[b * kBlock].segment}, queries[b * kBlock].position),
            all);
        EXPECT_EQ(known->second, all) << ranks << " shards, seed " << seed;
        EXPECT_EQ(fresh, ranks == 1);
      }
    }
    if (first_counts.empty()) first_counts = counts;
    EXPECT_EQ(counts, first_counts) << ranks << " shards, seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::test

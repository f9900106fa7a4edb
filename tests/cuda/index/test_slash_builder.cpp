// Vertical-slash indexes built on the GPU: observed mass against fp64, selection against a sort,
// the built index pair by pair.
#include <algorithm>
#include <map>
#include <numeric>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/cuda/index/slash_builder.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/cuda/index/download_index.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using cuda::SlashBuilder;
using cuda::SlashOptions;
constexpr double kOne = static_cast<double>(std::int64_t{1} << cuda::kMassBits);

/// A micro-batch of these segments (begin, end) spread over ranks, and one builder a rank.
struct Spread {
  MicroBatch batch;
  std::vector<AttentionAxes> axes;
  KeyAxis axis;
  std::vector<SlashBuilder> builders;

  Spread(const std::vector<std::int64_t>& lengths, LayoutKind kind, int ranks, std::int64_t last_q,
         const SlashOptions& options, Device& gpu) {
    batch.align = kBlock;
    for (std::size_t s = 0; s < lengths.size(); ++s)
      batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
    const SequenceLayout layout(kind, batch.axis_tokens(), ranks, kBlock, kBlock);
    for (int r = 0; r < ranks; ++r) axes.push_back(attention_axes(batch, layout, r));
    axis = key_axis(axes[0]);
    std::vector<char> whole;
    std::vector<std::int64_t> first;
    for (int s = 0; s < axis.segments(); ++s) {
      whole.push_back(axis.count[s] <= last_q);
      first.push_back(axis.count[s] - std::min(axis.count[s], last_q));
    }
    for (int r = 0; r < ranks; ++r)
      builders.emplace_back(axes[r], axis, whole, first, options, gpu);
  }
};

std::vector<std::int64_t> integers_of(const Tensor& t) {
  const Tensor host = t.to(host_device());
  return {host.data<std::int64_t>(), host.data<std::int64_t>() + host.numel()};
}
class CudaSlash : public CudaTest {};

TEST_F(CudaSlash, MassIsThatOfTheReferenceAndTheSameOnAnyNumberOfShards) {
  const std::vector<std::int64_t> lengths = {700, 50, 0, 331};
  const std::int64_t last_q = 100, dim = 64, kv_heads = 2, heads = 6;
  const double scale = 0.125;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t>
      row;  // (segment, position) -> row of q, k
  for (std::size_t s = 0; s < lengths.size(); ++s)
    for (std::int64_t p = 0; p < lengths[s]; ++p)
      row.emplace(std::pair(static_cast<std::int64_t>(s), p),
                  static_cast<std::int64_t>(row.size()));
  const Tensor q = random({static_cast<std::int64_t>(row.size()), heads, dim}, 2.0),
               k = random({static_cast<std::int64_t>(row.size()), kv_heads, dim}, 2.0);
  const auto slice = [&](const Tensor& from, const AxisRanges& axis) {
    const auto tokens = tokens_of(axis);
    Tensor out =
        Tensor::zeros({static_cast<std::int64_t>(tokens.size()), from.size(1), dim}, DType::f64);
    const std::int64_t n = from.size(1) * dim;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i].segment >= 0)
        std::copy_n(from.data<double>() + row.at({tokens[i].segment, tokens[i].position}) * n, n,
                    out.data<double>() + static_cast<std::int64_t>(i) * n);
    return to_gpu(out, DType::bf16);
  };

  std::vector<std::int64_t> first_mass;
  for (const auto& [kind, ranks] : {std::pair{LayoutKind::contiguous, 1},
                                    {LayoutKind::striped, 2},
                                    {LayoutKind::striped, 4},
                                    {LayoutKind::zigzag, 2}}) {
    Spread spread(lengths, kind, ranks, last_q, {}, *gpu);
    std::vector<Tensor> ks;
    Tensor queries, top, total;
    for (int r = 0; r < ranks; ++r) {
      ks.push_back(slice(k, spread.axes[r].keys[r]));
      const Tensor mine = spread.builders[r].queries(slice(q, spread.axes[r].queries));
      const Tensor host = to_host(mine);
      if (r == 0) queries = Tensor::zeros(host.shape(), DType::f64);
      for (std::int64_t i = 0; i < host.numel(); ++i)
        queries.data<double>()[i] += host.data<double>()[i];
    }
    const Tensor all = to_gpu(queries, DType::bf16);
    Tensor best;
    for (int r = 0; r < ranks; ++r) {
      const Tensor mine = to_host(spread.builders[r].maximum(all, ks[r], scale));
      if (r == 0) best = mine.clone();
      for (std::int64_t i = 0; i < mine.numel(); ++i)
        best.data<double>()[i] = std::max(best.data<double>()[i], mine.data<double>()[i]);
    }
    top = to_gpu(best, DType::f32);
    std::vector<std::int64_t> sums, mass;
    const auto join = [](std::vector<std::int64_t>& into, const Tensor& part) {
      const auto more = integers_of(part);
      into.resize(more.size(), 0);
      for (std::size_t i = 0; i < more.size(); ++i) into[i] += more[i];
    };
    for (int r = 0; r < ranks; ++r) join(sums, spread.builders[r].sum(all, ks[r], scale, top));
    total = Tensor::wrap(sums.data(), top.shape(), DType::i64).to(*gpu);
    for (int r = 0; r < ranks; ++r)
      join(mass, spread.builders[r].mass(all, ks[r], scale, top, total));
    if (!first_mass.empty()) {
      EXPECT_EQ(mass, first_mass) << ranks << " ranks, seed " << seed;
      continue;
    }
    first_mass = mass;

    // Reference: softmax over all earlier keys of the segment, row by row.
    const std::int64_t slots = spread.axis.tokens() / kBlock;
    std::vector<double> expected(mass.size(), 0.0);
    for (int s = 0; s < spread.axis.segments(); ++s) {
      const std::int64_t n = spread.axis.count[s], base = spread.axis.offset[s] / kBlock;
      if (n <= last_q) continue;
      for (std::int64_t i = n - last_q; i < n; ++i)
        for (std::int64_t h = 0; h < heads; ++h) {
          std::vector<double> score;
          for (std::int64_t j = 0; j <= i; ++j) {
            double dot = 0;
            for (std::int64_t d = 0; d < dim; ++d)
              dot += q.data<double>()[(row.at({s, i}) * heads + h) * dim + d] *
                     k.data<double>()[(row.at({s, j}) * kv_heads + h / 3) * dim + d];
            score.push_back(scale * dot);
          }
          const double most = *std::max_element(score.begin(), score.end());
          double sum = 0;
          for (double& x : score) sum += x = std::exp(x - most);
          for (std::int64_t j = 0; j <= i; ++j) {
            expected[heads * slots + (h * slots + base) * kBlock + j] += score[j] / sum * kOne;
            expected[h * slots + base + i / kBlock - j / kBlock] += score[j] / sum * kOne;
          }
        }
    }
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < mass.size(); ++i) {
      difference += std::pow(static_cast<double>(mass[i]) - expected[i], 2);
      norm += expected[i] * expected[i];
    }
    EXPECT_LT(std::sqrt(difference / norm), 1e-5) << "seed " << seed;
  }
}

/// What a cap leaves out: entries, and their share of the mass.
struct Cut {
  std::int64_t count = 0;
  double share = 0;
};
/// The rule of select_heaviest by a sort; entries below `given` are computed anyway.
std::vector<std::int32_t> choose(const std::vector<std::int64_t>& v, double share,
                                 std::int64_t most, bool diagonal, std::int32_t given, Cut& cut) {
  std::vector<std::int32_t> order(v.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return v[a] > v[b]; });
  const double total = static_cast<double>(std::accumulate(v.begin(), v.end(), std::int64_t{0}));
  std::size_t wanted = v.size();
  if (share < 1) {
    std::int64_t sum = 0;
    for (wanted = 0; wanted < v.size() && total > 0 &&
                     (wanted == 0 || static_cast<double>(sum) < share * total);
         ++wanted)
      sum += v[order[wanted]];
  }
  for (std::size_t i = static_cast<std::size_t>(most); i < wanted; ++i) {
    if (order[i] < given) continue;
    ++cut.count;
    cut.share += static_cast<double>(v[order[i]]) / std::max(total, 1.0);
  }
  order.resize(std::min<std::size_t>(wanted, static_cast<std::size_t>(most)));
  if (diagonal && !v.empty() && std::find(order.begin(), order.end(), 0) == order.end())
    order.push_back(0);
  std::sort(order.begin(), order.end());
  return order;
}

TEST_F(CudaSlash, BuiltIndexesComputeTheHeaviestSlashesAndColumnsAndNothingElse) {
  const std::vector<std::int64_t> lengths = {1500, 64, 130, 0, 700};
  const int heads = 4, kv_heads = 2;
  const std::int64_t last_q = 128;
  struct Case {
    SlashOptions options;
    std::int64_t range;  ///< masses are drawn from [0, range): a small one makes ties
  };
  for (const auto& [options, range] :
       {Case{{0.5, 0.3, 0, 0}, 5}, Case{{0.3, 0.6, 0, 0}, std::int64_t{1} << 45},
        Case{{0.9, 0.9, 37, 3}, 1000}, Case{{1e-9, 1e-9, 0, 0}, 1 << 20},
        Case{{0.4, 1.0, 64, 0}, 7}, Case{{0.5, 0.5, 40, 5}, 1}}) {
    for (const auto& [kind, ranks] : {std::pair{LayoutKind::contiguous, 1},
                                      {LayoutKind::striped, 3},
                                      {LayoutKind::zigzag, 2}}) {
      Spread spread(lengths, kind, ranks, last_q, options, *gpu);
      const KeyAxis& axis = spread.axis;
      const std::int64_t slots = axis.tokens() / kBlock;
      std::uniform_int_distribution<std::int64_t> draw(0, range - 1);
      std::vector<std::int64_t> mass(static_cast<std::size_t>(heads * slots * (1 + kBlock)));
      for (auto& m : mass) m = draw(rng) * (rng() % 3 == 0);
      const Tensor on_gpu =
          Tensor::wrap(mass.data(), {static_cast<std::int64_t>(mass.size())}, DType::i64).to(*gpu);
      double pairs = 0;
      for (int r = 0; r < ranks; ++r) {
        SlashCounts counts;
        const std::vector<AttentionWork> built =
            spread.builders[r].build(on_gpu, heads, kv_heads, counts);
        const auto queries = tokens_of(spread.axes[r].queries);
        for (int shard = 0; shard < ranks; ++shard) {
          const PatternArrays found = download(built[shard]);
          ASSERT_EQ(problems(found), "") << "seed " << seed;
          const auto keys = tokens_of(spread.axes[r].keys[shard]);
          const auto seen = found.visible.expand();
          double shard_pairs = 0;
          for (int h = 0; h < heads; ++h)
            for (int s = 0; s < axis.segments(); ++s) {
              const std::int64_t base = axis.offset[s] / kBlock,
                                 n = (axis.offset[s + 1] - axis.offset[s]) / kBlock;
              const bool whole = axis.count[s] <= last_q;
              const auto part = [&](std::int64_t width, std::int64_t start) {
                const auto from = mass.begin() + start + (h * slots + base) * width;
                return std::vector<std::int64_t>(from, from + n * width);
              };
              Cut cut[2];
              const auto cap = [](std::int64_t c) { return c > 0 ? c : std::int64_t{1} << 40; };
              const auto slashes = choose(part(1, 0), options.slash_share, cap(options.max_slashes),
                                          true, 1, cut[0]);
              const auto columns = choose(part(kBlock, heads * slots), options.vertical_share,
                                          cap(options.max_columns), false, kBlock, cut[1]);
              const std::size_t list = static_cast<std::size_t>(h * axis.segments() + s);
              if (!whole) {
                ASSERT_EQ(counts.slashes[list], static_cast<int>(slashes.size()))
                    << "seed " << seed;
                ASSERT_EQ(counts.columns[list], static_cast<int>(columns.size()))
                    << "seed " << seed;
                ASSERT_EQ(counts.cut[list], cut[0].count + cut[1].count) << "seed " << seed;
                ASSERT_NEAR(counts.cut_mass[list], std::max(cut[0].share, cut[1].share), 1e-6)
                    << "seed " << seed;
              }
              std::vector<char> slash_in(static_cast<std::size_t>(n), whole),
                  column_in(static_cast<std::size_t>(n * kBlock), 0);
              for (int d : slashes) slash_in[d] = 1;
              if (!whole)
                for (int c : columns) column_in[c] = 1;
              for (std::size_t i = 0; i < queries.size(); ++i) {
                if (queries[i].segment != s) continue;
                const std::int64_t block = static_cast<std::int64_t>(i) / kBlock,
                                   qb = queries[i].position / kBlock,
                                   l = h * found.q_blocks() + block;
                std::vector<char> computed(keys.size(), 0);
                std::vector<char> covered(keys.size(), 0);
                for (std::int64_t x = found.run_offset[l]; x < found.run_offset[l + 1]; ++x)
                  for (std::int64_t j = found.runs[x].first * kBlock;
                       j < found.runs[x].last * kBlock; ++j)
                    covered[j] = 1;
                computed = covered;
                if (found.has_columns())
                  for (std::int64_t b = found.column_offset[list];
                       b < found.column_offset[list + 1]; ++b)
                    computed[found.columns[b]] = 1;
                for (std::size_t j = 0; j < keys.size(); ++j) {
                  const bool visible =
                      keys[j].segment == s && keys[j].position <= queries[i].position;
                  ASSERT_EQ(visible, static_cast<std::int64_t>(j) >= seen[i].begin &&
                                         static_cast<std::int64_t>(j) < seen[i].end);
                  if (!visible) continue;
                  const std::int64_t kb = keys[j].position / kBlock;
                  const bool wanted = kb == 0 || slash_in[qb - kb] || column_in[keys[j].position];
                  ASSERT_EQ(computed[j] != 0, wanted)
                      << "head " << h << " query " << i << " key " << j << " shard " << shard
                      << " seed " << seed;
                  shard_pairs += wanted;
                }
              }
            }
          EXPECT_EQ(built[shard].pairs_per_head() * heads, shard_pairs) << "seed " << seed;
          EXPECT_EQ(AttentionPattern(found).pairs_per_head() * heads, shard_pairs);
          pairs += shard_pairs;
        }
      }
      EXPECT_GT(pairs, 0);
    }
  }
}

TEST_F(CudaSlash, AttentionUnderABuiltIndexIsTheHosts) {
  const int heads = 4, kv_heads = 2;
  const std::int64_t dim = 64;
  const double scale = 0.125;
  Spread spread({900, 40, 400}, LayoutKind::contiguous, 1, 64, {0.2, 0.2, 0, 0}, *gpu);
  const std::int64_t slots = spread.axis.tokens() / kBlock, tokens = spread.axes[0].q_tokens();
  std::vector<std::int64_t> mass(static_cast<std::size_t>(heads * slots * (1 + kBlock)));
  for (auto& m : mass) m = static_cast<std::int64_t>(rng() % 100000);
  SlashCounts counts;
  const AttentionWork built =
      spread.builders[0]
          .build(Tensor::wrap(mass.data(), {static_cast<std::int64_t>(mass.size())}, DType::i64)
                     .to(*gpu),
                 heads, kv_heads, counts)
          .front();
  const AttentionPattern host(download(built));
  const Tensor q = random({tokens, heads, dim}), k = random({tokens, kv_heads, dim}),
               v = random({tokens, kv_heads, dim}), d_o = random({tokens, heads, dim});
  const auto run = [&](const AttentionWork& index, const auto& put, DType sums) {
    const Tensor q_ = put(q), k_ = put(k), v_ = put(v), d_o_ = put(d_o);
    Device& device = device_of(q_.space());
    Tensor o = Tensor::empty(q.shape(), q_.dtype(), device),
           lse = Tensor::empty({heads, tokens}, sums, device),
           delta = Tensor::empty({heads, tokens}, sums, device);
    Tensor dq = Tensor::zeros(q.shape(), sums, device), dk = Tensor::zeros(k.shape(), sums, device),
           dv = Tensor::zeros(v.shape(), sums, device);
    attention_forward(index, q_, k_, v_, scale, o, lse);
    attention_delta(o, d_o_, delta);
    attention_backward(index, q_, k_, v_, scale, lse, delta, d_o_, dq, dk, dv);
    return std::vector<Tensor>{o, dq, dk, dv};
  };
  const auto expected = run(
      host, [](const Tensor& t) { return t; }, DType::f64);
  const auto found = run(
      built, [&](const Tensor& t) { return to_gpu(t, DType::bf16); }, DType::f32);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_CLOSE(found[i], expected[i], 1e-2);
}

}  // namespace
}  // namespace ballast::test

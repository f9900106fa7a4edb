// MoBA on the GPU: routing against fp64 scores, and the index of what every row chose, pair by
// pair.
#include <algorithm>
#include <cmath>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/predict/latency_model.hpp"
#include "kernels/cuda/index/block_launch.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/cuda/index/download_index.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

/// Blocks of 64 of a local axis among pattern blocks of `slots` x 64 keys, on the host and on the
/// GPU.
struct Blocks {
  std::vector<std::int32_t> first, own, rows;
  Tensor on_gpu;
  Blocks(const std::vector<AxisToken>& tokens, const KeyAxis& axis, std::int64_t slots,
         Device& gpu) {
    std::vector<std::int32_t> start{0};
    for (int s = 0; s < axis.segments(); ++s)
      start.push_back(
          start.back() +
          static_cast<std::int32_t>((axis.offset[s + 1] - axis.offset[s]) / kBlock + slots - 1) /
              static_cast<std::int32_t>(slots));
    for (std::size_t b = 0; b < tokens.size(); b += kBlock) {
      const AxisToken& t = tokens[b];
      first.push_back(start[t.segment]);
      own.push_back(start[t.segment] + static_cast<std::int32_t>(t.position / kBlock / slots));
      int n = 0;
      while (n < kBlock && b + n < tokens.size() && tokens[b + n].segment >= 0) ++n;
      rows.push_back(n);
    }
    std::vector<std::int32_t> all = first;
    all.insert(all.end(), own.begin(), own.end());
    all.insert(all.end(), rows.begin(), rows.end());
    on_gpu = Tensor::wrap(all.data(), {static_cast<std::int64_t>(all.size())}, DType::i32).to(gpu);
    count = start.back();
  }
  cuda::BlockRows device() const {
    const auto n = static_cast<std::int64_t>(first.size());
    const std::int32_t* p = on_gpu.data<std::int32_t>();
    return {static_cast<int>(n), p, p + n, p + 2 * n};
  }
  int count = 0;
};

struct Packed {
  MicroBatch batch;
  std::vector<AttentionAxes> axes;
  KeyAxis axis;
  Packed(const std::vector<std::int64_t>& lengths, LayoutKind kind, int ranks) {
    batch.align = kBlock;
    for (std::size_t s = 0; s < lengths.size(); ++s)
      batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
    const SequenceLayout layout(kind, batch.axis_tokens(), ranks, kBlock, kBlock);
    for (int r = 0; r < ranks; ++r) axes.push_back(attention_axes(batch, layout, r));
    axis = key_axis(axes[0]);
  }
};

class CudaBlocks : public CudaTest {};

TEST_F(CudaBlocks, EveryRowTakesItsBestBlocksAndItsOwn) {
  const int heads = 4, kv_heads = 2, top_k = 4;
  for (const auto& [dim, slots] : {std::pair{64, 1}, {128, 3}}) {
    const Packed packed({2900, 100, 0, 500}, LayoutKind::contiguous, 1);
    const auto tokens = tokens_of(packed.axes[0].queries);
    const std::int64_t count = static_cast<std::int64_t>(tokens.size());
    const Blocks blocks(tokens, packed.axis, slots, *gpu);
    const Tensor q = random({count, heads, dim}), k = random({count, kv_heads, dim});
    const Tensor q_gpu = to_gpu(q, DType::bf16), k_gpu = to_gpu(k, DType::bf16);
    const int columns = kv_heads * dim, width = blocks.count;
    Tensor sums = Tensor::zeros({blocks.count, columns}, DType::i64, *gpu),
           high = unwritten({blocks.count, columns}, DType::bf16),
           low = unwritten({blocks.count, columns}, DType::bf16);
    std::vector<std::int32_t> block_keys(static_cast<std::size_t>(blocks.count), 0);
    std::vector<double> mean(static_cast<std::size_t>(blocks.count) * columns, 0.0);
    for (std::int64_t i = 0; i < count; ++i) {
      if (tokens[i].segment < 0) continue;
      const int block = blocks.own[i / kBlock];
      ++block_keys[block];
      for (int c = 0; c < columns; ++c)
        mean[static_cast<std::size_t>(block) * columns + c] += k.data<double>()[i * columns + c];
    }
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] /= block_keys[i / columns];
    const Tensor keys_gpu = integers(block_keys).to(*gpu);
    ASSERT_EQ(cuda::pool_keys(k_gpu.raw(), columns, columns, blocks.device(),
                              sums.data<std::int64_t>(), cuda::stream()),
              cudaSuccess);
    ASSERT_EQ(cuda::mean_keys(sums.data<std::int64_t>(), keys_gpu.data<std::int32_t>(),
                              blocks.count, columns, high.raw(), low.raw(), cuda::stream()),
              cudaSuccess);
    Tensor words = Tensor::empty({heads, static_cast<std::int64_t>(blocks.own.size()), width},
                                 DType::i64, *gpu);
    const cuda::Routing routing{q_gpu.raw(), heads * dim, count, high.raw(),      low.raw(),
                                heads,       kv_heads,    dim,   blocks.device(), width};
    ASSERT_EQ(cuda::route_queries(routing, top_k,
                                  reinterpret_cast<std::uint64_t*>(words.data<std::int64_t>()),
                                  cuda::stream()),
              cudaSuccess);
    const Tensor found = words.to(host_device());

    for (std::int64_t i = 0; i < count; ++i)
      for (int h = 0; h < heads; ++h) {
        const std::int64_t b = i / kBlock;
        const int own = blocks.own[b] - blocks.first[b];
        std::vector<double> score;
        std::vector<char> chosen;
        for (int j = 0; j < width; ++j) {
          const auto word = static_cast<std::uint64_t>(
              found.data<std::int64_t>()[(h * found.size(1) + b) * width + j]);
          chosen.push_back(word >> (i % kBlock) & 1);
          if (tokens[i].segment < 0 || j > own) {
            ASSERT_EQ(chosen[j], 0) << "row " << i << " block " << j << " seed " << seed;
            continue;
          }
          double dot = 0;
          for (int d = 0; d < dim; ++d)
            dot +=
                q.data<double>()[(i * heads + h) * dim + d] *
                mean[(static_cast<std::size_t>(blocks.first[b]) + j) * columns + h / 2 * dim + d];
          score.push_back(dot);
        }
        if (tokens[i].segment < 0) continue;
        ASSERT_TRUE(chosen[own]);
        ASSERT_EQ(std::count(chosen.begin(), chosen.end(), 1), std::min(top_k, own + 1))
            << "row " << i << " seed " << seed;
        double least = INFINITY, most = -INFINITY;
        for (int j = 0; j < own; ++j) {
          if (chosen[j]) least = std::min(least, score[j]);
          if (!chosen[j]) most = std::max(most, score[j]);
        }
        ASSERT_GE(least, most - 1e-3) << "row " << i << " head " << h << " seed " << seed;
      }
  }
}

TEST_F(CudaBlocks, TheIndexHoldsWhatEveryRowChose) {
  const int heads = 2, kv_heads = 1;
  const std::int64_t slots = 2;
  for (const auto& [kind, ranks] :
       {std::pair{LayoutKind::contiguous, 1}, {LayoutKind::striped, 3}, {LayoutKind::zigzag, 2}}) {
    const Packed packed({1000, 70, 300}, kind, ranks);
    for (int r = 0; r < ranks; ++r) {
      const auto queries = tokens_of(packed.axes[r].queries);
      const Blocks at(queries, packed.axis, slots, *gpu);
      const int width = at.count;
      std::vector<std::int64_t> words(static_cast<std::size_t>(heads) * at.own.size() * width, 0);
      for (auto& w : words)
        w = rng() % 3 == 0 ? -1
            : rng() % 2 == 0
                ? static_cast<std::int64_t>(static_cast<std::uint64_t>(rng()) << 32 | rng())
                : 0;
      const Tensor words_gpu =
          Tensor::wrap(words.data(), {static_cast<std::int64_t>(words.size())}, DType::i64)
              .to(*gpu);
      const auto seen = split_visible(visible_keys(packed.axes[r].queries, packed.axis),
                                      packed.axis, packed.axes[r].keys);
      for (int shard = 0; shard < ranks; ++shard) {
        const auto keys = tokens_of(packed.axes[r].keys[shard]);
        const Blocks key_at(keys, packed.axis, slots, *gpu);
        std::vector<std::int32_t> begins, ends;
        for (const KeyInterval& row : seen[shard].expand())
          begins.push_back(row.begin), ends.push_back(row.end);
        const Tensor begin = integers(begins).to(*gpu), end = integers(ends).to(*gpu);
        const cuda::BlockChoice choice{
            reinterpret_cast<const std::uint64_t*>(words_gpu.data<std::int64_t>()),
            heads,
            width,
            at.device(),
            key_at.device(),
            begin.data<std::int32_t>(),
            end.data<std::int32_t>(),
            static_cast<std::int64_t>(queries.size())};
        const std::int64_t lists = heads * static_cast<std::int64_t>(at.own.size());
        Tensor offset = Tensor::empty({lists + 1}, DType::i64, *gpu),
               pairs = Tensor::zeros({2}, DType::i64, *gpu);
        auto* totals = reinterpret_cast<std::uint64_t*>(pairs.data<std::int64_t>());
        ASSERT_EQ(
            cuda::count_block_runs(choice, offset.data<std::int64_t>(), totals, cuda::stream()),
            cudaSuccess);
        const Tensor offsets = offset.to(host_device());
        cuda::IndexShape shape;
        shape.q_tokens = choice.q_tokens, shape.k_tokens = static_cast<std::int64_t>(keys.size());
        shape.q_heads = shape.index_heads = heads, shape.kv_heads = kv_heads;
        shape.runs = shape.row_masks =
            std::max<std::int64_t>(1, offsets.data<std::int64_t>()[lists]);
        shape.block_pairs =
            std::max<std::int64_t>(1, pairs.to(host_device()).data<std::int64_t>()[0]);
        const Tensor buffer =
            Tensor::empty({static_cast<std::int64_t>(cuda::index_bytes(shape))}, DType::u8, *gpu);
        cuda::DeviceIndex index = cuda::bind_index(shape, buffer.raw());
        index.key_begin = begin.data<std::int32_t>(), index.key_end = end.data<std::int32_t>(),
        index.run_offset = offset.data<std::int64_t>();
        ASSERT_EQ(cuda::fill_block_runs(index, choice, cuda::stream()), cudaSuccess);
        ASSERT_EQ(cuda::derive_index(index, cuda::stream()), cudaSuccess);
        ASSERT_EQ(cuda::count_pairs(index, totals + 1, cuda::stream()), cudaSuccess);
        gpu->synchronize();
        const PatternArrays found = download(index);
        ASSERT_EQ(problems(found), "") << "seed " << seed;
        double expected = 0;
        for (int h = 0; h < heads; ++h)
          for (std::size_t i = 0; i < queries.size(); ++i) {
            const std::int64_t b = static_cast<std::int64_t>(i) / kBlock,
                               l = h * static_cast<std::int64_t>(at.own.size()) + b;
            std::vector<char> computed(keys.size(), 0);
            for (std::int64_t x = found.run_offset[l]; x < found.run_offset[l + 1]; ++x) {
              const BlockRun& run = found.runs[x];
              if (run.row_mask >= 0 && !(found.row_masks[run.row_mask] >> (i % kBlock) & 1))
                continue;
              std::fill(computed.begin() + run.first * kBlock, computed.begin() + run.last * kBlock,
                        1);
            }
            for (std::size_t j = 0; j < keys.size(); ++j) {
              if (queries[i].segment < 0 || keys[j].segment != queries[i].segment ||
                  keys[j].position > queries[i].position)
                continue;
              const int block = key_at.own[j / kBlock] - at.first[b];
              const bool wanted = block == at.own[b] - at.first[b] ||
                                  (words[l * width + block] >> (i % kBlock) & 1);
              ASSERT_EQ(computed[j] != 0, wanted) << "head " << h << " query " << i << " key " << j
                                                  << " shard " << shard << " seed " << seed;
              expected += wanted;
            }
          }
        EXPECT_EQ(static_cast<double>(pairs.to(host_device()).data<std::int64_t>()[1]), expected)
            << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::test

// Work orders of dense indexes (order.cu): every unit of work once, packed segments one
// after another, and the backward that takes them so against the one that takes whole units.
#include <algorithm>
#include <map>
#include <set>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/cuda/index/download_index.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using Axis = std::vector<AxisToken>;

/// Packed segments, of which a rank has stripes of 64.
Axis packed(const std::vector<std::int64_t>& lengths, int ranks = 1, int rank = 0) {
  Axis tokens;
  std::int64_t at = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s)
    for (std::int64_t p = 0; p < lengths[s]; ++p, ++at)
      if (at / kBlock % ranks == rank) tokens.push_back({static_cast<std::int32_t>(s), p});
  return tokens;
}

class CudaOrder : public CudaTest {
 protected:
  /// Every part of every unit once; whatever a piece waits for, the part before it and the same
  /// part of the tile before it, stands before it.
  void expect_turns(const std::vector<std::int32_t>& pieces, std::int64_t units, int kv_heads,
                    int group, bool reversed) {
    std::map<int, int> parts;                  // unit -> parts so far
    std::map<std::pair<int, int>, int> tiles;  // (key head, part) -> tiles so far
    int of = 0;
    for (const int piece : pieces) {
      const int unit = piece & ((1 << cuda::kPieceShift) - 1),
                part = piece >> cuda::kPieceShift & 15;
      of = (piece >> (cuda::kPieceShift + 4) & 15) + 1;
      const int tile = tiles[{unit % kv_heads, part}]++;
      ASSERT_TRUE(parts[unit]++ == part &&
                  unit / kv_heads == (reversed ? units / kv_heads - 1 - tile : tile))
          << "unit " << unit << ", part " << part << ", seed " << seed;
    }
    EXPECT_TRUE(static_cast<std::int64_t>(pieces.size()) == units * of && of <= group)
        << pieces.size() << " pieces of " << units << " units, seed " << seed;
  }
  void TearDown() override {
    if (gpu) cuda::set_deterministic(false);
  }
  /// Derives the index on the GPU and checks its orders; returns how often the segment changes from
  /// piece to piece, over the pieces.
  double check_orders(const Axis& queries, const Axis& keys, int q_heads, int kv_heads,
                      int head_dim = 128) {
    const PatternArrays host = dense_pattern(queries, keys).arrays();
    const cuda::IndexShape shape = cuda::shape_of(host, q_heads, kv_heads, head_dim);
    EXPECT_TRUE(shape.dense);
    EXPECT_EQ(shape.pairs, host.visible.pairs());
    const Tensor buffer =
        unwritten({static_cast<std::int64_t>(cuda::index_bytes(shape))}, DType::u8);
    cuda::DeviceIndex x = cuda::bind_index(shape, buffer.raw());
    cuda::check(cuda::upload_index(host, x,
                                   [](void* to, const void* from, std::size_t bytes) {
                                     return cuda::copy_to_gpu(to, from, bytes), cudaSuccess;
                                   }),
                "upload");
    cuda::check(cuda::derive_index(x, cuda::stream()), "derive_index");
    gpu->synchronize();

    constexpr int kUnit = (1 << cuda::kPieceShift) - 1;
    const int group = q_heads / kv_heads;
    const std::int64_t units = (shape.k_tokens + cuda::kKeyTile - 1) / cuda::kKeyTile * kv_heads;
    const auto counts = array(x.backward_units, 4);
    EXPECT_EQ(counts[0], units);
    const auto once = [&](const char* what, const std::vector<std::int32_t>& order,
                          std::int64_t n) {
      std::set<int> seen;
      for (const int piece : order) seen.insert(piece & kUnit);
      EXPECT_TRUE(static_cast<std::int64_t>(seen.size()) == n &&
                  (n == 0 || (*seen.begin() == 0 && *seen.rbegin() == n - 1)))
          << what << ": " << seen.size() << " different units of " << n << ", seed " << seed;
    };
    once("forward", array(x.forward_order, x.forward_units()), x.forward_units());
    once("backward", array(x.backward_order, units), units);
    if (counts[1] < units || counts[1] > units * group) {
      ADD_FAILURE() << counts[1] << " pieces of " << units << " units, seed " << seed;
      return 1;
    }
    const auto pieces = array(x.backward_pieces, counts[1]);
    std::map<int, std::multiset<std::pair<int, int>>> parts;  // unit -> (parts, part)
    for (const int piece : pieces)
      parts[piece & kUnit].insert(
          {(piece >> (cuda::kPieceShift + 4) & 15) + 1, piece >> cuda::kPieceShift & 15});
    EXPECT_EQ(static_cast<std::int64_t>(parts.size()), units) << "seed " << seed;
    for (const auto& [unit, list] : parts) {
      const int of = list.begin()->first;
      std::multiset<std::pair<int, int>> expected;
      for (int part = 0; part < of; ++part) expected.insert({of, part});
      EXPECT_TRUE(list == expected && of <= group)
          << "unit " << unit << ": " << list.size() << " pieces of " << of << ", seed " << seed;
    }
    if (x.triple_units() > 0)
      once("triples", array(x.triple_order, x.triple_units()), x.triple_units());
    expect_turns(array(x.turn_pieces, counts[2]), units, kv_heads, group, counts[3] != 0);
    const auto range = array(x.query_range, shape.k_blocks());
    std::int64_t changes = 0;
    for (std::size_t i = 1; i < pieces.size(); ++i) {
      const auto end = [&](int piece) {
        return range[std::min<std::size_t>(2 * ((piece & kUnit) / kv_heads) + 1, range.size() - 1)]
            .end;
      };
      changes += end(pieces[i]) != end(pieces[i - 1]);
    }
    return static_cast<double>(changes) / static_cast<double>(pieces.size());
  }
};

TEST_F(CudaOrder, EveryUnitOfWorkIsTakenOnce) {
  const std::pair<int, int> heads[] = {{1, 1},  {4, 2},   {14, 2}, {16, 1},
                                       {28, 4}, {12, 12}, {16, 2}};
  for (int i = 0; i < 30; ++i) {
    std::vector<std::int64_t> lengths;
    for (int s = 1 + static_cast<int>(rng() % 6); s > 0; --s) {
      const int kind = static_cast<int>(rng() % 8);
      lengths.push_back(kind == 0   ? 0
                        : kind == 1 ? 1
                        : kind == 2 ? 63 + static_cast<int>(rng() % 3)
                        : kind < 6  ? rng() % 1000
                                    : 2000 + rng() % 6000);
    }
    const auto [q_heads, kv_heads] = heads[rng() % 7];
    const int ranks = 1 + static_cast<int>(rng() % 4);
    const Axis queries = packed(lengths, ranks, 0),
               keys = packed(lengths, ranks, static_cast<int>(rng() % ranks));
    const int head_dim = 64 << rng() % 3;
    if (!queries.empty() && !keys.empty()) check_orders(queries, keys, q_heads, kv_heads, head_dim);
  }
}

TEST_F(CudaOrder, RoundsOfHeadsOverlapWhereTheyFitInL2) {
  for (const std::int64_t tokens : {5200, 8192, 20000}) {
    for (const auto& [q_heads, kv_heads] : {std::pair{16, 2}, {14, 2}, {15, 3}, {16, 16}, {5, 1}}) {
      const Axis axis = packed({tokens});
      for (const int head_dim : {64, 96, 128, 256})
        check_orders(axis, axis, q_heads, kv_heads, head_dim);
    }
  }
}

TEST_F(CudaOrder, LongPiecesOfPackedSegmentsComeSegmentAfterSegment) {
  EXPECT_LT(
      check_orders(packed({9000, 6000, 12000, 8000}), packed({9000, 6000, 12000, 8000}), 16, 2),
      0.12)
      << "seed " << seed;
  check_orders(packed(std::vector<std::int64_t>(300, 512)),
               packed(std::vector<std::int64_t>(300, 512)), 28, 4);
  check_orders(packed({524288}), packed({524288}), 16, 2);
}

TEST_F(CudaOrder, CutPiecesOfPacksGiveTheGradientsOfWholeUnits) {
  const double scale = 0.125;
  // Key tiles ascend in the deterministic order of the first pack, descend in that of the second.
  const Axis packs[] = {packed({5000, 100, 1, 2500, 64, 3000, 65}),
                        packed({900, 100, 1, 1700, 64, 130, 65, 30, 31, 1100})};
  for (const Axis& tokens : packs) {
    for (const std::int64_t dim : {64, 96, 128, 256}) {
      const AttentionPattern index = dense_pattern(tokens, tokens);
      const auto n = static_cast<std::int64_t>(tokens.size()), q_heads = std::int64_t{8},
                 kv_heads = std::int64_t{2};
      const Tensor q = to_gpu(random({n, q_heads, dim}), DType::bf16),
                   k = to_gpu(random({n, kv_heads, dim}), DType::bf16),
                   v = to_gpu(random({n, kv_heads, dim}), DType::bf16);
      const Tensor d_o = to_gpu(random({n, q_heads, dim}), DType::bf16);
      Tensor o = unwritten({n, q_heads, dim}, DType::bf16),
             lse = unwritten({q_heads, n}, DType::f32), delta = unwritten({q_heads, n}, DType::f32);
      const AttentionWork work = place_pattern(index, q, k);
      attention_forward(work, q, k, v, scale, o, lse);
      attention_delta(o, d_o, delta);
      std::vector<std::vector<Tensor>> gradients;
      for (const bool whole : {true, false}) {
        cuda::set_deterministic(whole);
        std::vector<Tensor> made = {Tensor::zeros(q.shape(), DType::f32, *gpu),
                                    Tensor::zeros(k.shape(), DType::f32, *gpu),
                                    Tensor::zeros(k.shape(), DType::f32, *gpu)};
        attention_backward(work, q, k, v, scale, lse, delta, d_o, made[0], made[1], made[2]);
        gradients.push_back(std::move(made));
      }
      const char* const names[] = {"dq", "dk", "dv"};
      // Both sum the same dS, rounded to bf16, in two orders; a lost piece costs far more.
      for (int g = 0; g < 3; ++g) {
        const double e = error(gradients[1][g], to_host(gradients[0][g]));
        EXPECT_TRUE(e <= (g == 0 ? 5e-3 : 2e-3))
            << names[g] << " of head dim " << dim << ", " << n << " tokens: relative error " << e
            << ", seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::test

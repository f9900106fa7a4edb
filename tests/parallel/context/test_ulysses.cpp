// Ulysses alone and round a ring against attention by its definition: every sp x ring of the ranks,
// all ways that heads can divide.
#include <gtest/gtest.h>

#include "parallel/context/ulysses.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "tests/parallel/context/naive_attention.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::NaiveAttention;
using testing::SharedDraw;

MicroBatch packed(const std::vector<std::int64_t>& lengths) {
  MicroBatch batch;
  for (std::size_t s = 0; s < lengths.size(); ++s)
    batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
  return batch;
}

NaiveAttention reference_of(const MicroBatch& batch, std::int64_t heads, std::int64_t kv_heads,
                            SharedDraw& draw) {
  NaiveAttention all;
  all.heads = heads;
  all.kv_heads = kv_heads;
  all.dim = 4;
  all.scale = 0.5;
  all.tokens = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, batch.tokens(), 1), 0);
  const std::int64_t n = batch.tokens();
  all.q = draw.normals(n * heads * all.dim);
  all.k = draw.normals(n * kv_heads * all.dim);
  all.v = draw.normals(n * kv_heads * all.dim);
  all.d_o = draw.normals(n * heads * all.dim);
  all.run();
  return all;
}

/// Rows `packed` of a list [T, columns].
std::vector<double> rows(const std::vector<double>& all, const std::vector<std::int64_t>& packed,
                         std::int64_t columns) {
  std::vector<double> list;
  for (const std::int64_t p : packed)
    list.insert(list.end(), all.begin() + p * columns, all.begin() + (p + 1) * columns);
  return list;
}

void fill(Tensor t, const std::vector<double>& values) {
  dispatch_float(t.dtype(), [&](auto x) {
    for (std::size_t i = 0; i < values.size(); ++i)
      t.data<decltype(x)>()[i] = static_cast<decltype(x)>(values[i]);
  });
}

/// Mean square of what differs over all ranks, relative to the expected size or to `least`.
/// Collective.
double error(const std::vector<double>& mine, const std::vector<double>& expected, double least) {
  double sums[2] = {mine.size() == expected.size() ? 0 : INFINITY, 0};
  for (std::size_t i = 0; i < std::min(mine.size(), expected.size()); ++i) {
    sums[0] += (mine[i] - expected[i]) * (mine[i] - expected[i]);
    sums[1] += expected[i] * expected[i];
  }
  Tensor both = Tensor::wrap(sums, {2}, DType::f64);
  Communicator::world().all_reduce(both);
  return std::isnan(sums[0]) ? INFINITY : std::sqrt(sums[0]) / std::max(std::sqrt(sums[1]), least);
}

/// One forward and backward over this rank's part, as a layer calls them: q, k, v are columns of
/// one buffer.
struct Part {
  std::vector<std::int64_t> position;  ///< packed position of each token of this rank
  Tensor joined, o, lse, d_o, dq, dk, dv;

  Part(const NaiveAttention& all, const MicroBatch& batch, const Mesh& mesh, const RingGroup& ring,
       DType type, Recorder* recorder = nullptr) {
    const SequenceLayout layout(LayoutKind::zigzag, batch.tokens(), mesh.shape.cp());
    const std::int64_t whole = layout.local_tokens(ring.plan.rank);
    const auto [begin, end] = even_part(whole, mesh.sp.rank(), mesh.sp.size());
    for (const auto& [first, last] : layout.pieces(ring.plan.rank, begin, end))
      for (std::int64_t p = first; p < last; ++p) position.push_back(p);
    const std::int64_t n = end - begin, width = all.heads + 2 * all.kv_heads;
    EXPECT_EQ(static_cast<std::int64_t>(position.size()), n);
    joined = Tensor::empty({n, width, all.dim}, type);
    dispatch_float(type, [&](auto t) {
      using T = decltype(t);
      for (std::int64_t i = 0; i < n; ++i) {
        T* row = joined.data<T>() + i * width * all.dim;
        for (const auto& [from, columns] :
             {std::pair{&all.q, all.heads}, {&all.k, all.kv_heads}, {&all.v, all.kv_heads}})
          for (std::int64_t c = 0; c < columns * all.dim; ++c)
            *row++ = static_cast<T>((*from)[position[i] * columns * all.dim + c]);
      }
    });
    AttentionInputs in;
    in.q = joined.narrow(1, 0, all.heads);
    in.k = joined.narrow(1, all.heads, all.heads + all.kv_heads);
    in.v = joined.narrow(1, all.heads + all.kv_heads, width);
    in.scale = all.scale;
    const auto nan = [&](Shape shape) {
      Tensor t = Tensor::empty(std::move(shape), type);
      fill(t, std::vector<double>(static_cast<std::size_t>(t.numel()), NAN));
      return t;
    };
    o = nan({n, all.heads, all.dim});
    lse = nan({all.heads, n});
    dq = nan({n, all.heads, all.dim});
    dk = nan({n, all.kv_heads, all.dim});
    dv = nan({n, all.kv_heads, all.dim});
    d_o = nan({n, all.heads, all.dim});
    fill(d_o, rows(all.d_o, position, all.heads * all.dim));
    UlyssesAttention attention(
        mesh.sp, *ring.buffers, whole,
        std::make_unique<RingAttention>(ring, dense_source(batch, layout, ring.plan.rank, recorder),
                                        recorder),
        recorder);
    attention.forward(in, o, lse);
    attention.backward(in, o, lse, d_o, dq, dk, dv);
  }

  void expect_like(const NaiveAttention& all, DType type) const {
    const double tolerance = type == DType::f64 ? 1e-10 : 1e-5,
                 least = std::sqrt(1.0 + static_cast<double>(all.tokens.size()));
    const std::int64_t q = all.heads * all.dim, kv = all.kv_heads * all.dim;
    std::vector<double> lse_rows;
    for (std::int64_t h = 0; h < all.heads; ++h)
      for (const std::int64_t p : position)
        lse_rows.push_back(all.lse[h * static_cast<std::int64_t>(all.tokens.size()) + p]);
    EXPECT_LE(error(testing::elements(lse), lse_rows, least), tolerance);
    EXPECT_LE(error(testing::elements(o), rows(all.o, position, q), least), tolerance);
    EXPECT_LE(error(testing::elements(dq), rows(all.dq, position, q), least), tolerance);
    EXPECT_LE(error(testing::elements(dk), rows(all.dk, position, kv), least), tolerance);
    EXPECT_LE(error(testing::elements(dv), rows(all.dv, position, kv), least), tolerance);
  }
};

/// Every cp_outer x cp_inner x sp that fills the ranks.
std::vector<MeshShape> shapes(int ranks) {
  std::vector<MeshShape> list;
  for (int sp = 1; sp <= ranks; ++sp)
    for (int outer = 1; outer * sp <= ranks; ++outer)
      if (ranks % (sp * outer) == 0) list.push_back({1, 1, outer, ranks / sp / outer, sp, 1, 0});
  return list;
}

RingGroup ring_of(const Mesh& mesh) {
  return {mesh.cp, plan_ring(mesh.at.cp(mesh.shape), mesh.shape.cp_outer, mesh.shape.cp_inner)};
}

class Ulysses : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{21};
};

TEST_F(Ulysses, EqualsTheDefinitionRoundEveryRing) {
  SCOPED_TRACE(draw.trace());
  const std::vector<std::vector<std::int64_t>> batches{
      {1},                  // fewer tokens than ranks
      {37},                 // divides nothing
      {5, 1, 0, 40, 1, 3},  // packed: one-token and empty samples
      {0},                  // no tokens at all
      {draw.integer(1, 60), draw.integer(1, 60), draw.integer(1, 60)},
  };
  for (const auto& lengths : batches) {
    const MicroBatch batch = packed(lengths);
    for (const std::int64_t kv_heads : {8, 2, 1}) {
      const NaiveAttention all = reference_of(batch, 8, kv_heads, draw);
      for (const MeshShape& shape : shapes(world.size())) {
        SCOPED_TRACE(
            fmt::format("{} tokens, 8 heads on {}, {}", batch.tokens(), kv_heads, describe(shape)));
        const Mesh& mesh = testing::mesh_of(shape);
        const RingGroup ring = ring_of(mesh);
        Part(all, batch, mesh, ring, DType::f64).expect_like(all, DType::f64);
        if (kv_heads == 2) Part(all, batch, mesh, ring, DType::f32).expect_like(all, DType::f32);
      }
    }
  }
}

TEST_F(Ulysses, KeyHeadsThatNeitherDivideNorAreDividedByTheRanks) {
  SCOPED_TRACE(draw.trace());
  const int ranks = world.size();
  MeshShape shape;
  shape.sp = ranks;
  const Mesh& mesh = testing::mesh_of(shape);
  const RingGroup ring = ring_of(mesh);
  const MicroBatch batch = packed({29, 12});
  for (const auto& [heads, kv_heads] :
       {std::pair<std::int64_t, std::int64_t>{3 * ranks, 3}, {6 * ranks, 6}, {12 * ranks, 12}}) {
    SCOPED_TRACE(fmt::format("{} heads on {}", heads, kv_heads));
    const NaiveAttention all = reference_of(batch, heads, kv_heads, draw);
    Part(all, batch, mesh, ring, DType::f64).expect_like(all, DType::f64);
  }
}

TEST_F(Ulysses, RepeatsItsBitsAndItsBuffersAndCountsItsBytes) {
  MeshShape shape;
  shape.sp = world.size();
  const Mesh& mesh = testing::mesh_of(shape);
  const RingGroup ring = ring_of(mesh);
  const MicroBatch batch = packed({41, 7});
  const NaiveAttention all = reference_of(batch, 8, 8, draw);
  const Part first(all, batch, mesh, ring, DType::f32);
  const auto held = memory_use().current[static_cast<int>(MemoryCategory::communication)];
  Recorder recorder;
  const Part second(all, batch, mesh, ring, DType::f32, &recorder);
  EXPECT_EQ(memory_use().current[static_cast<int>(MemoryCategory::communication)], held);
  for (const auto t : {&Part::o, &Part::lse, &Part::dq, &Part::dk, &Part::dv})
    EXPECT_TRUE(testing::bit_equal(first.*t, second.*t));

  std::int64_t bytes = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) bytes += e.kind == EventKind::sequence_exchange ? e.bytes : 0;
  });
  // Forward q k v out and o, LSE home; backward q k v o d_o and LSE out, dq dk dv home: 12 tensors
  // of 8 heads and 2 LSE.  All but 1 / ranks moves.
  const std::int64_t per_token = 12 * 8 * all.dim + 2 * 8, ranks = world.size();
  EXPECT_EQ(
      world.all_reduce(bytes),
      batch.tokens() * per_token * static_cast<std::int64_t>(sizeof(float)) * (ranks - 1) / ranks);
}

TEST_F(Ulysses, HeadsThatDoNotDivideAreRefusedWithTheArithmetic) {
  if (world.size() == 1) GTEST_SKIP() << "one rank holds all heads";
  MeshShape shape;
  shape.sp = world.size();
  const Mesh& mesh = testing::mesh_of(shape);
  const RingGroup ring = ring_of(mesh);
  const MicroBatch batch = packed({16});
  const NaiveAttention all = reference_of(batch, world.size() + 1, 1, draw);
  try {
    Part(all, batch, mesh, ring, DType::f64);
    ADD_FAILURE() << "not refused";
  } catch (const Error& e) {
    EXPECT_NE(
        std::string(e.what()).find(fmt::format("{} = 1 x {} + 1", world.size() + 1, world.size())),
        std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace ballast

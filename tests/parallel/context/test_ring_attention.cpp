// Ring attention against attention by its definition, on every factorisation of the ranks, layout
// and awkward micro-batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "parallel/context/ring_attention.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "tests/parallel/context/naive_attention.hpp"
#include "tests/parallel/sent_tags.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::NaiveAttention;
using testing::SharedDraw;

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kDim = 8, kWidth = (kHeads + 2 * kKvHeads) * kDim;

MicroBatch micro_batch(const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges) {
  MicroBatch batch;
  for (std::size_t s = 0; s < ranges.size(); ++s)
    batch.segments.push_back({static_cast<std::int64_t>(s), ranges[s].first, ranges[s].second, 0});
  return batch;
}

struct LayoutCase {
  LayoutKind kind;
  std::int64_t stripe;
};
const LayoutCase kLayouts[] = {{LayoutKind::contiguous, 1}, {LayoutKind::zigzag, 1},
                               {LayoutKind::striped, 1},    {LayoutKind::striped, 3},
                               {LayoutKind::striped, 64},   {LayoutKind::shuffled, 3}};

/// outer x inner = ranks.
std::vector<std::pair<int, int>> rings(int ranks) {
  std::vector<std::pair<int, int>> list;
  for (int outer = 1; outer <= ranks; ++outer)
    if (ranks % outer == 0) list.emplace_back(outer, ranks / outer);
  return list;
}

/// A micro-batch with random data and what its attention must be.
NaiveAttention reference_of(const MicroBatch& batch, SharedDraw& draw) {
  NaiveAttention all;
  all.heads = kHeads;
  all.kv_heads = kKvHeads;
  all.dim = kDim;
  all.scale = 0.4;
  all.tokens = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, batch.tokens(), 1), 0);
  const std::int64_t n = batch.tokens();
  all.q = draw.normals(n * kHeads * kDim);
  all.k = draw.normals(n * kKvHeads * kDim);
  all.v = draw.normals(n * kKvHeads * kDim);
  all.d_o = draw.normals(n * kHeads * kDim);
  all.run();
  return all;
}

/// This rank's side: q, k and v as slices of one joined buffer, as the layers have them.
struct LocalData {
  std::vector<std::int64_t> packed;  ///< packed position of each local token
  AttentionInputs in;
  Tensor d_o, o, lse, d_joined, dq, dk, dv;

  LocalData(const NaiveAttention& all, const SequenceLayout& layout, int rank, DType type) {
    const std::int64_t n = layout.local_tokens(rank);
    for (std::int64_t i = 0; i < n; ++i) packed.push_back(layout.global(rank, i));
    Tensor joined = Tensor::empty({n, kHeads + 2 * kKvHeads, kDim}, type);
    d_joined = Tensor::empty(joined.shape(), type);
    in.q = joined.narrow(1, 0, kHeads);
    in.k = joined.narrow(1, kHeads, kHeads + kKvHeads);
    in.v = joined.narrow(1, kHeads + kKvHeads, kHeads + 2 * kKvHeads);
    dq = d_joined.narrow(1, 0, kHeads);
    dk = d_joined.narrow(1, kHeads, kHeads + kKvHeads);
    dv = d_joined.narrow(1, kHeads + kKvHeads, kHeads + 2 * kKvHeads);
    in.scale = all.scale;
    d_o = Tensor::empty({n, kHeads, kDim}, type);
    o = Tensor::empty({n, kHeads, kDim}, type);
    lse = Tensor::empty({kHeads, n}, type);
    dispatch_float(type, [&](auto t) {
      using T = decltype(t);
      for (std::int64_t i = 0; i < n; ++i) {
        T* row = joined.data<T>() + i * kWidth;
        const auto put = [&](const std::vector<double>& from, std::int64_t columns, T* to) {
          for (std::int64_t c = 0; c < columns; ++c)
            to[c] = static_cast<T>(from[packed[i] * columns + c]);
        };
        put(all.q, kHeads * kDim, row);
        put(all.k, kKvHeads * kDim, row + kHeads * kDim);
        put(all.v, kKvHeads * kDim, row + (kHeads + kKvHeads) * kDim);
        put(all.d_o, kHeads * kDim, d_o.data<T>() + i * kHeads * kDim);
      }
      std::fill_n(d_joined.data<T>(), d_joined.numel(), static_cast<T>(NAN));
      std::fill_n(o.data<T>(), o.numel(), static_cast<T>(NAN));
      std::fill_n(lse.data<T>(), lse.numel(), static_cast<T>(NAN));
    });
  }

  /// Rows of a list [T, columns] for the local tokens.
  std::vector<double> rows(const std::vector<double>& all, std::int64_t columns) const {
    std::vector<double> list;
    for (std::int64_t p : packed)
      list.insert(list.end(), all.begin() + p * columns, all.begin() + (p + 1) * columns);
    return list;
  }
  std::vector<double> lse_rows(const NaiveAttention& all) const {
    std::vector<double> list;
    for (std::int64_t h = 0; h < kHeads; ++h)
      for (std::int64_t p : packed)
        list.push_back(all.lse[h * static_cast<std::int64_t>(all.tokens.size()) + p]);
    return list;
  }
  /// A slice of d_joined, dense.
  std::vector<double> gradient(std::int64_t first, std::int64_t heads) const {
    const std::vector<double> all = testing::elements(d_joined);
    std::vector<double> list;
    for (std::size_t i = 0; i < packed.size(); ++i)
      list.insert(list.end(), all.begin() + static_cast<std::ptrdiff_t>(i * kWidth + first * kDim),
                  all.begin() + static_cast<std::ptrdiff_t>(i * kWidth + (first + heads) * kDim));
    return list;
  }
};

/// Collects |mine - expected|^2 and |expected|^2 of several tensors, and joins them over the ranks
/// in one reduction.
class Errors {
 public:
  void add(const char* name, const std::vector<double>& mine, const std::vector<double>& expected) {
    double difference = mine.size() == expected.size() ? 0 : INFINITY, size = 0;
    for (std::size_t i = 0; i < std::min(mine.size(), expected.size()); ++i) {
      difference += (mine[i] - expected[i]) * (mine[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    names_.push_back(name);
    sums_.insert(sums_.end(), {difference, size});
  }
  /// Relative to the expected size, or to `least` for tensors that are zero by nature.  Collective.
  void expect_below(const Communicator& group, double tolerance, double least) {
    Tensor all = Tensor::wrap(sums_.data(), {static_cast<std::int64_t>(sums_.size())}, DType::f64);
    group.all_reduce(all);
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const double difference = sums_[2 * i], size = sums_[2 * i + 1];
      EXPECT_LE(std::sqrt(difference), tolerance * std::max(std::sqrt(size), least)) << names_[i];
    }
  }

 private:
  std::vector<const char*> names_;
  std::vector<double> sums_;
};

void check(const RingGroup& group, const MicroBatch& batch, const SequenceLayout& layout,
           DType type, const NaiveAttention& all) {
  LocalData local(all, layout, group.plan.rank, type);
  RingAttention attention(group, dense_source(batch, layout, group.plan.rank, nullptr), nullptr);
  attention.forward(local.in, local.o, local.lse);
  attention.backward(local.in, local.o, local.lse, local.d_o, local.dq, local.dk, local.dv);
  Errors errors;
  errors.add("o", testing::elements(local.o), local.rows(all.o, kHeads * kDim));
  errors.add("lse", testing::elements(local.lse), local.lse_rows(all));
  errors.add("dq", local.gradient(0, kHeads), local.rows(all.dq, kHeads * kDim));
  errors.add("dk", local.gradient(kHeads, kKvHeads), local.rows(all.dk, kKvHeads * kDim));
  errors.add("dv", local.gradient(kHeads + kKvHeads, kKvHeads),
             local.rows(all.dv, kKvHeads * kDim));
  errors.expect_below(group.cp, type == DType::f64 ? 1e-10 : 1e-5,
                      std::sqrt(static_cast<double>(batch.tokens())));
}

class Ring : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{11};
  RingGroup ring(int outer, int inner) { return {world, plan_ring(world.rank(), outer, inner)}; }
};

TEST_F(Ring, EqualsTheDefinitionOnEveryRingLayoutAndMicroBatch) {
  SCOPED_TRACE(draw.trace());
  const MicroBatch batches[] = {
      micro_batch({{0, 1}}),   // fewer tokens than ranks: some hold none
      micro_batch({{0, 37}}),  // divides nothing
      micro_batch({{0, 5}, {0, 1}, {0, 0}, {0, 70}, {0, 1}, {0, 3}}),  // packed: one-token and
                                                                       // empty segments
      micro_batch({{100, 133}, {0, 9}}),  // starts inside its sample: sees what the layout covers
      micro_batch({{0, 0}}),              // no tokens at all
  };
  for (std::size_t b = 0; b < std::size(batches); ++b) {
    const NaiveAttention all = reference_of(batches[b], draw);
    for (const auto& [outer, inner] : rings(world.size())) {
      const RingGroup group = ring(outer, inner);
      for (const LayoutCase& l : kLayouts) {
        const SequenceLayout layout(l.kind, batches[b].tokens(), world.size(), l.stripe);
        SCOPED_TRACE(fmt::format("micro-batch {}, ring {} x {}, {} {}", b, outer, inner,
                                 name(l.kind), l.stripe));
        check(group, batches[b], layout, DType::f64, all);
        if (l.kind == LayoutKind::zigzag) check(group, batches[b], layout, DType::f32, all);
      }
    }
  }
}

TEST_F(Ring, RandomMicroBatches) {
  SCOPED_TRACE(draw.trace());
  for (int round = 0; round < 6; ++round) {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    const std::int64_t segments = draw.integer(1, 6);
    for (std::int64_t s = 0; s < segments; ++s) {
      const std::int64_t begin = draw.integer(0, 1) * draw.integer(0, 200);
      ranges.emplace_back(begin, begin + draw.integer(0, 90));
    }
    const MicroBatch batch = micro_batch(ranges);
    const NaiveAttention all = reference_of(batch, draw);
    const auto shapes = rings(world.size());
    const auto [outer, inner] = shapes[static_cast<std::size_t>(
        draw.integer(0, static_cast<std::int64_t>(shapes.size()) - 1))];
    const LayoutCase l = kLayouts[draw.integer(0, 5)];
    const std::int64_t stripe = deals_stripes(l.kind) ? draw.integer(1, 40) : 1;
    SCOPED_TRACE(fmt::format("round {}, {} tokens, ring {} x {}, {} {}", round, batch.tokens(),
                             outer, inner, name(l.kind), stripe));
    check(ring(outer, inner), batch, SequenceLayout(l.kind, batch.tokens(), world.size(), stripe),
          round % 2 ? DType::f64 : DType::f32, all);
  }
}

TEST_F(Ring, RepeatsItsBitsAndItsBuffers) {
  const MicroBatch batch = micro_batch({{0, 101}, {0, 20}});
  const NaiveAttention all = reference_of(batch, draw);
  for (const auto& [outer, inner] : rings(world.size())) {
    const RingGroup group = ring(outer, inner);
    const SequenceLayout layout(LayoutKind::zigzag, batch.tokens(), world.size());
    LocalData first(all, layout, world.rank(), DType::f32), second = first;
    second.o = first.o.clone();
    second.lse = first.lse.clone();
    second.d_joined = first.d_joined.clone();
    second.dq = second.d_joined.narrow(1, 0, kHeads);
    second.dk = second.d_joined.narrow(1, kHeads, kHeads + kKvHeads);
    second.dv = second.d_joined.narrow(1, kHeads + kKvHeads, kHeads + 2 * kKvHeads);
    const auto once = [&](LocalData& data) {
      RingAttention attention(group, dense_source(batch, layout, group.plan.rank, nullptr),
                              nullptr);
      attention.forward(data.in, data.o, data.lse);
      attention.backward(data.in, data.o, data.lse, data.d_o, data.dq, data.dk, data.dv);
    };
    once(first);
    const auto communication = [] {
      return memory_use().current[static_cast<int>(MemoryCategory::communication)];
    };
    const std::int64_t held = communication();
    reset_peak_memory();
    for (int layer = 0; layer < 3; ++layer) once(second);
    EXPECT_EQ(communication(), held);
    EXPECT_EQ(memory_use().peak[static_cast<int>(MemoryCategory::communication)], held)
        << "later layers and micro-batches reuse the ring's buffers";
    EXPECT_TRUE(testing::bit_equal(first.o, second.o));
    EXPECT_TRUE(testing::bit_equal(first.lse, second.lse));
    EXPECT_TRUE(testing::bit_equal(first.d_joined, second.d_joined));
  }
}

TEST_F(Ring, RecordsStepsWorkAndBytes) {
  const MicroBatch batch = micro_batch({{0, 77}, {0, 30}});
  const NaiveAttention all = reference_of(batch, draw);
  for (const auto& [outer, inner] : rings(world.size())) {
    const RingGroup group = ring(outer, inner);
    const SequenceLayout layout(LayoutKind::striped, batch.tokens(), world.size(), 4);
    LocalData local(all, layout, world.rank(), DType::f32);
    Recorder recorder;
    RingAttention attention(group, dense_source(batch, layout, group.plan.rank, &recorder),
                            &recorder);
    attention.forward(local.in, local.o, local.lse);
    attention.backward(local.in, local.o, local.lse, local.d_o, local.dq, local.dk, local.dv);
    EXPECT_EQ(recorder.context.outer, -1);
    std::vector<Event> events;
    recorder.flush([&](std::span<const Event> list) { events.assign(list.begin(), list.end()); });

    const auto bytes_of = [&](const std::optional<RingHop>& hop) {  // K and V, f32
      return hop ? 2 * layout.local_tokens(hop->send_shard) * kKvHeads * kDim *
                       static_cast<std::int64_t>(sizeof(float))
                 : 0;
    };
    std::int64_t planned_bytes = 0, bytes = 0;
    std::vector<std::pair<int, int>> planned_steps[2], steps[2];
    for (const auto* list : {&group.plan.forward, &group.plan.backward})
      for (const RingStep& step : *list) {
        planned_bytes += bytes_of(step.kv_inner) + bytes_of(step.kv_outer) +
                         bytes_of(step.dkv_inner) + bytes_of(step.dkv_outer);
        if (step.shard >= 0)
          planned_steps[list == &group.plan.backward].emplace_back(step.outer, step.inner);
      }
    double flops[2] = {0, 0};
    for (const Event& e : events) {
      if (e.kind == EventKind::ring_wait) bytes += e.bytes;
      if (e.kind != EventKind::attention_forward && e.kind != EventKind::attention_backward)
        continue;
      const int backward = e.kind == EventKind::attention_backward;
      steps[backward].emplace_back(e.outer, e.inner);
      flops[backward] += e.flops;
    }
    EXPECT_EQ(bytes, planned_bytes);
    for (int b : {0, 1}) EXPECT_EQ(steps[b], planned_steps[b]);
    const double pairs = batch.attention_pairs();
    EXPECT_DOUBLE_EQ(world.all_reduce(flops[0]), 4.0 * kDim * kHeads * pairs);
    EXPECT_DOUBLE_EQ(world.all_reduce(flops[1]), 10.0 * kDim * kHeads * pairs);
  }
}

// Hops between nodes must not wait for those inside one, nor the other way round.
TEST_F(Ring, LevelsTravelOnChannelsOfTheirOwn) {
  const MicroBatch batch = micro_batch({{0, 77}, {0, 30}});
  const NaiveAttention all = reference_of(batch, draw);
  for (const auto& [outer, inner] : rings(world.size())) {
    const RingGroup group = ring(outer, inner);
    const SequenceLayout layout(LayoutKind::zigzag, batch.tokens(), world.size(), 1);
    LocalData local(all, layout, world.rank(), DType::f32);
    RingAttention attention(group, dense_source(batch, layout, group.plan.rank, nullptr), nullptr);
    const testing::SentTags tags;
    attention.forward(local.in, local.o, local.lse);
    attention.backward(local.in, local.o, local.lse, local.d_o, local.dq, local.dk, local.dv);
    std::set<int> expected[2], sent[2];  // of outer and inner hops
    for (const auto* list : {&group.plan.forward, &group.plan.backward})
      for (const RingStep& step : *list)
        for (const auto* hop : {&step.kv_inner, &step.kv_outer, &step.dkv_inner, &step.dkv_outer})
          if (*hop) expected[(*hop)->level == RingLevel::inner].insert((*hop)->to);
    for (const auto& [peer, tag] : tags.list())
      for (int level : {0, 1})
        if (expected[level].contains(peer)) sent[level].insert(tag);
    for (int level : {0, 1}) EXPECT_EQ(sent[level].size(), expected[level].empty() ? 0u : 1u);
    if (outer > 1 && inner > 1) {
      EXPECT_NE(sent[0], sent[1]) << outer << " x " << inner;
    }
  }
}

TEST_F(Ring, SizesThatDisagreeAreErrors) {
  const MicroBatch batch = micro_batch({{0, 16}});
  const RingGroup group = ring(1, world.size());
  const SequenceLayout layout(LayoutKind::contiguous, 16, world.size());
  EXPECT_THROW(dense_source(micro_batch({{0, 15}}), layout, world.rank(), nullptr), Error);
  const SequenceLayout wider(LayoutKind::contiguous, 16, world.size() + 1);
  EXPECT_THROW(RingAttention(group, dense_source(batch, wider, world.rank(), nullptr), nullptr),
               Error);
  const RingGroup longer{world, plan_ring(world.rank(), 1, world.size() + 1)};
  EXPECT_THROW(RingAttention(longer, dense_source(batch, wider, world.rank(), nullptr), nullptr),
               Error);
  RingAttention attention(group, dense_source(batch, layout, group.plan.rank, nullptr), nullptr);
  AttentionInputs in;
  in.q = in.k = in.v = Tensor::zeros({layout.local_tokens(world.rank()) + 1, 1, 4}, DType::f32);
  Tensor o = Tensor::zeros(in.q.shape(), DType::f32),
         lse = Tensor::zeros({1, in.q.size(0)}, DType::f32);
  EXPECT_THROW(attention.forward(in, o, lse), Error);
}

TEST(RingAttention, EachRingLevelHasItsOwnChannel) {
  // Rank 1 of 2 nodes of 2 ranks: inside the node it turns with rank 0, between nodes with rank 3.
  const RingPlan plan = plan_ring(1, 2, 2);
  const Tensor received = Tensor::zeros({1}, DType::f32), sent = Tensor::zeros({1}, DType::f32);
  std::map<RingLevel, std::set<int>> channels;
  for (const auto* steps : {&plan.forward, &plan.backward})
    for (const RingStep& step : *steps)
      for (const auto* hop : {&step.kv_inner, &step.kv_outer, &step.dkv_inner, &step.dkv_outer}) {
        if (!*hop) continue;
        const HopTransfers transfers = hop_transfers(**hop, received, sent);
        channels[(*hop)->level].insert(transfers.channel);
        EXPECT_FALSE(transfers.list[0].send);
        EXPECT_EQ(transfers.list[0].tensor.raw(), received.raw());
        EXPECT_TRUE(transfers.list[1].send);
        EXPECT_EQ(transfers.list[1].tensor.raw(), sent.raw());
        const int peer = (*hop)->level == RingLevel::inner ? 0 : 3;
        EXPECT_EQ(transfers.list[0].peer, peer);
        EXPECT_EQ(transfers.list[1].peer, peer);
      }
  ASSERT_EQ(channels.size(), 2u);
  EXPECT_EQ(channels[RingLevel::inner].size(), 1u);
  EXPECT_EQ(channels[RingLevel::outer].size(), 1u);
  EXPECT_NE(channels[RingLevel::inner], channels[RingLevel::outer]);
}

}  // namespace
}  // namespace ballast

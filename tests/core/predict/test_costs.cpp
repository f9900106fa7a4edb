// The three sources of costs, each against what it is made from.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "core/base/error.hpp"
#include "core/model/presets.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/stated_costs.hpp"
#include "core/predict/table_costs.hpp"

namespace ballast {
namespace {

/// On one rank.
PassTime layer(const Costs& costs, const MicroBatch& m, std::int64_t budget,
               Recompute mode = Recompute::none) {
  return layer_time(costs, m, budget, {}, mode);
}

TEST(StatedCosts, CountsTokensAndVisiblePairsOfAStage) {
  StatedTimes times;
  times.token_s = 2, times.pair_s = 0.5, times.micro_batch_s = 3;
  times.backward_over_forward = 2, times.weight_share = 0.25, times.block_tokens = 4;
  const StatedCosts costs(times);
  const MicroBatch m{{{0, 0, 4, 0}, {1, 8, 10, 0}}};
  const PassTime time = layer(costs, m, 0);
  EXPECT_DOUBLE_EQ(time.forward_s, 3 + 2 * 6 + 0.5 * (10 + 19));
  EXPECT_DOUBLE_EQ(time.backward_s, 2 * time.forward_s);
  EXPECT_DOUBLE_EQ(time.weight_s, 2 * 0.25 * 2 * 6);
  // One block of four keys: the last chunk's queries see four each.
  EXPECT_DOUBLE_EQ(layer(costs, m, 1).forward_s, 3 + 2 * 6 + 0.5 * (10 + 8));
  // Full recompute adds a forward, shared micro-batches divide.
  EXPECT_DOUBLE_EQ(layer(costs, m, 0, Recompute::full).backward_s, 3 * time.forward_s);
  EXPECT_DOUBLE_EQ(layer_time(costs, m, 0, {2, 1, 1}, Recompute::none).forward_s,
                   3 + (12 + 14.5) / 2);
  EXPECT_DOUBLE_EQ(costs.layer_scale(4), 0.25);
  // Padding between segments and behind the last costs as tokens do.
  EXPECT_DOUBLE_EQ(layer(costs, {m.segments, 1, -1, 8}, 0).forward_s, 3 + 2 * 16 + 0.5 * (10 + 19));
}

TEST(StatedCosts, AlignsBudgetsToATarget) {
  StatedTimes times;
  times.token_s = 1e-6, times.pair_s = 1e-9;
  const StatedCosts costs(times);
  const MicroBatch m{{{0, 0, 8192, 0}}};
  const std::vector<std::int64_t> candidates{1, 2, 4, 8, 16, 32};
  for (const std::int64_t k : candidates)
    EXPECT_EQ(align_budget(costs, m, layer(costs, m, k).total_s(), candidates, {}, Recompute::none),
              k);
  EXPECT_EQ(align_budget(costs, m, 0, candidates, {}, Recompute::none), 1);
}

WorkShape work_of(const std::string& preset) {
  WorkShape work;
  work.model = model_preset(preset);
  return work;
}

// Steps of one H200 at 8K tokens, measured early: 367 ms of Qwen2.5-3B, 92.7 ms of 0.5B,
// whose attention (head dim 64) is slower than the rates say.
TEST(RateCosts, AreNearAMeasuredStep) {
  for (const auto& [preset, measured_s, within] :
       {std::tuple{"qwen2.5-3b", 0.367, 0.1}, std::tuple{"qwen2.5-0.5b", 0.0927, 0.25}}) {
    const WorkShape work = work_of(preset);
    const RateCosts costs(device_rates(DeviceKind::h200), work);
    const MicroBatch m{{{0, 0, 8192, 0}}};
    const double step_s = static_cast<double>(work.model.layers) * layer(costs, m, 0).total_s() +
                          costs.head(8192, {}).total_s() +
                          costs.optimizer(work.model.parameters(), false);
    EXPECT_NEAR(step_s, measured_s, within * measured_s) << preset;
  }
}

TEST(RateCosts, KnowKindsOfDevicesAndOrderThem) {
  EXPECT_EQ(device_kind("NVIDIA H200 (driver 580)"), DeviceKind::h200);
  EXPECT_EQ(device_kind("NVIDIA A100-SXM4-80GB"), DeviceKind::a100);
  EXPECT_EQ(device_kind("AMD EPYC 9654"), DeviceKind::host_core);
  EXPECT_EQ(device_kind("something new"), DeviceKind::generic);
  const MicroBatch m{{{0, 0, 16384, 0}}};
  double before = 1e30;
  for (const DeviceKind kind : {DeviceKind::host_core, DeviceKind::generic, DeviceKind::a100,
                                DeviceKind::h100, DeviceKind::h200}) {
    const RateCosts costs(device_rates(kind), work_of("llama3.1-8b"));
    const double seconds = layer(costs, m, 0).total_s();
    EXPECT_LT(seconds, before);
    before = seconds;
  }
}

/// Seconds in which an H100 moves `bytes_of_a_token` for 8,192 tokens of a rank, and launches.
double moved(double bytes_of_a_token, int launches) {
  const DeviceRates& h100 = device_rates(DeviceKind::h100);
  return 8192 * bytes_of_a_token / h100.memory_bytes + launches * h100.launch_s;
}

// Qwen2.5-3B: 2,048 elements of o, 512 of k and v together, bf16 beside fp32 sums.
TEST(RateCosts, ARingJoinsPartialResultsOfItsShards) {
  const RateCosts costs(device_rates(DeviceKind::h100), work_of("qwen2.5-3b"));
  EXPECT_EQ(costs.ring_sums(8192, {}, false), 0);
  EXPECT_EQ(costs.ring_sums(8192, {2, 1, 1}, true), 0);
  // Two outputs of 4 bytes in place of 2, one join of 12, one rounding of 6.
  EXPECT_DOUBLE_EQ(costs.ring_sums(2 * 8192, {1, 1, 2}, false), moved(2048.0 * (4 + 12 + 6), 2));
  EXPECT_DOUBLE_EQ(costs.ring_sums(4 * 8192, {1, 2, 2}, false), moved(2048.0 * (8 + 36 + 6), 4));
  // Two sums of zeros that are read again, one addition of 12, one rounding of 6.
  EXPECT_DOUBLE_EQ(costs.ring_sums(2 * 8192, {1, 1, 2}, true), moved(512.0 * (16 + 12 + 6), 4));
  // A rank of a Ulysses group has half of the heads and twice the tokens of its ring's rank.
  EXPECT_DOUBLE_EQ(costs.ring_sums(4 * 8192, {2, 1, 2}, false), moved(2048.0 * (4 + 12 + 6), 2));
}

TEST(RateCosts, FrozenWeightsHaveNoGradient) {
  WorkShape work = work_of("qwen2.5-3b");
  const MicroBatch m{{{0, 0, 4096, 0}}};
  const RateCosts whole(device_rates(DeviceKind::h200), work);
  work.model.lora.rank = 16;
  const RateCosts adapters(device_rates(DeviceKind::h200), work);
  EXPECT_LT(layer(adapters, m, 0).backward_s, 0.75 * layer(whole, m, 0).backward_s);
  // Nor has the head: its backward is one product and what moves, as forward is.
  EXPECT_DOUBLE_EQ(adapters.head(4096, {}).backward_s, adapters.head(4096, {}).forward_s);
  EXPECT_GT(whole.head(4096, {}).backward_s, 1.5 * whole.head(4096, {}).forward_s);
}

TEST(RateCosts, WhatLeavesANodeTakesTheNetwork) {
  MeshShape mesh;
  mesh.ranks_per_node = 4;
  const RateCosts costs(device_rates(DeviceKind::h200), work_of("llama3.1-8b"));
  const auto exchange = [&](int sp) {
    const ContextSplit split{sp, 1, 1};
    return sp * costs.exchange(1 << 20, split, exchange_link(mesh, split));
  };
  EXPECT_GT(exchange(8), 5 * exchange(4));
  const auto hop = [&](const ContextSplit& split) {
    return split.ring() * costs.ring_hop(1 << 20, split, RingLevel::inner, false,
                                         ring_link(mesh, split, RingLevel::inner));
  };
  EXPECT_GT(hop({1, 1, 8}), 5 * hop({1, 1, 4}));
  mesh.cp_outer = 2, mesh.cp_inner = 4;
  const double nested = hop({1, 2, 4});
  mesh.cp_outer = mesh.cp_inner = 1;
  EXPECT_NEAR(nested, hop({1, 1, 4}), 0.01 * hop({1, 1, 4}));
  EXPECT_GT(costs.stage_hop(1 << 20, {}, Link::network),
            5 * costs.stage_hop(1 << 20, {}, Link::node));
  for (const bool scattered : {false, true}) {
    const auto seconds = [&](Link link) {
      return costs.reduce({.elements = 1 << 28, .ranks = 8, .link = link, .scattered = scattered}) +
             costs.gather({.elements = 1 << 28, .ranks = 8, .link = link});
    };
    EXPECT_GT(seconds(Link::network), 5 * seconds(Link::node));
  }
}

TEST(RateCosts, StateInBf16HasFewerBytes) {
  WorkShape work = work_of("qwen2.5-0.5b");
  const DeviceRates& rates = device_rates(DeviceKind::h200);
  const auto bytes = [&](bool full_gradients = false) {
    return RateCosts(rates, work).optimizer(1000, full_gradients) * rates.memory_bytes / 1000;
  };
  const auto reduction = [&] {
    return RateCosts(rates, work).reduce({.elements = 1 << 30, .ranks = 4, .scattered = true});
  };
  const double full = reduction();
  EXPECT_NEAR(bytes(), 4 * 3 + 2 * 8 + 2, 1e-9);
  work.moment_bytes = 2;
  EXPECT_NEAR(bytes(), 4 * 3 + 2 * 4 + 2, 1e-9);
  work.bf16_gradients = true;
  EXPECT_NEAR(bytes(), 2 + 4 * 2 + 2 * 4 + 2, 1e-9);
  EXPECT_NEAR(reduction() / full, 0.5, 0.01);
  EXPECT_EQ(RateCosts(rates, work).reduce({1 << 30, 4, Link::node, true, true}), full)
      << "of a shard's sums";
  EXPECT_NEAR(bytes(true), 4 * 3 + 2 * 4 + 2, 1e-9) << "of a shard's sums";
}

/// A layer that takes `token_s` a token and `pair_s` a pair forward, twice that backward, measured
/// dense and at MoBA's budgets of 64-token blocks.
ProfileTable drawn_table(double token_s, double pair_s) {
  ProfileTable table;
  table.block_tokens = 64;
  for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward}) {
    const double factor = pass == ProfilePass::forward ? 1 : 2;
    const auto row = [&](ProfilePart part, std::optional<PatternKind> pattern, std::int64_t n,
                         std::int64_t budget, double seconds) {
      table.rows.push_back(
          {part, pattern, n, 0, budget, 1, Recompute::none, pass, factor * seconds, 0, 0});
    };
    for (std::int64_t n = 64; n <= (1 << 20); n *= 2) {
      const double tokens = static_cast<double>(n);
      row(ProfilePart::rest, {}, n, 0, token_s * tokens);
      for (std::int64_t k = 0; k <= n / 64; k = std::max<std::int64_t>(1, 2 * k))
        row(ProfilePart::attention, k == 0 ? PatternKind::dense : PatternKind::moba, n, k,
            pair_s * tokens * mean_keys(n, 0, k, 64));
    }
  }
  std::vector<std::string> notes;
  return checked(std::move(table), 0, notes);
}

TEST(StatedCosts, HopsAndExchangesTakeTheirPartOfAToken) {
  StatedTimes times;
  times.ring_hop_token_s = times.exchange_token_s = 4e-6;
  const StatedCosts costs(times);
  const ContextSplit ring{1, 1, 4}, ulysses{2, 1, 1};
  // Keys and values go in both passes, their gradients, twice the bytes, in one.
  EXPECT_DOUBLE_EQ(costs.ring_hop(1000, ring, RingLevel::inner, false, Link::node), 2.5e-4);
  EXPECT_DOUBLE_EQ(costs.ring_hop(1000, ring, RingLevel::inner, true, Link::node), 5e-4);
  EXPECT_EQ(costs.ring_hop(1000, ulysses, RingLevel::inner, true, Link::node), 0);
  // Half of the time a pass; each of two ranks keeps half and sends a rank's share.
  EXPECT_DOUBLE_EQ(costs.exchange(1000, ulysses, Link::node), 4e-6 * 1000 / 2 / 2 / 2);
}

TEST(RateCosts, CollectivesAndRecomputation) {
  const DeviceRates& rates = device_rates(DeviceKind::h200);
  const RateCosts costs(rates, work_of("qwen2.5-3b"));
  const auto beyond = [&](bool scattered) {
    return costs.reduce({1 << 24, 8, Link::node, scattered}) - rates.node_latency_s;
  };
  EXPECT_NEAR(beyond(false), 2 * beyond(true), 1e-9);
  const auto backward = [&](Recompute mode) { return costs.rest(8192, {}, mode).backward_s; };
  EXPECT_LT(backward(Recompute::none), backward(Recompute::selective));
  EXPECT_LT(backward(Recompute::selective), backward(Recompute::full));
}

TEST(TableCosts, GradientsOfKeysAndValuesTravelAsFp32) {
  ProfileTable table = drawn_table(1e-6, 1e-9);
  table.links = {{"inner", 1e-5, 1e9}};
  const TableCosts costs("t", table, PatternKind::moba, work_of("qwen2.5-0.5b"));
  const auto hop = [&](bool gradients) {
    return costs.ring_hop(4000, {1, 1, 4}, RingLevel::inner, gradients, Link::node) - 1e-5;
  };
  EXPECT_NEAR(hop(false), 2.0 * 4000 * 2 * 64 * 2 / 4 / 1e9, 1e-15);
  EXPECT_NEAR(hop(true), 2 * hop(false), 1e-15);
}

TEST(TableCosts, BothPassesExchange) {
  ProfileTable table = drawn_table(1e-6, 1e-9);
  table.links = {{"inner", 1e-5, 1e9}};
  LatencyOptions options;
  options.pattern = PatternKind::moba;
  options.sp = 2;
  options.exchange_bytes_per_token = 1000;
  const LatencyModel model(table, options);
  const MicroBatch m{{{0, 0, 4096, 0}}};
  const LayerTime all = model.predict(m), rest = model.rest(4096),
                  attention = model.attention(4096, 0, 0);
  EXPECT_NEAR(model.exchange(4096), 2e-5 + 0.5 * 1000 / 1e9 * 4096 / 2, 1e-12);
  EXPECT_NEAR(all.forward_s - rest.forward_s - attention.forward_s, model.exchange(4096), 1e-12);
  EXPECT_NEAR(all.backward_s - rest.backward_s - attention.backward_s, model.exchange(4096), 1e-12);
}

TEST(TableCosts, ReadsLayersFromTheTableAndTheRestFromRates) {
  const WorkShape work = work_of("qwen2.5-0.5b");
  ProfileTable table = drawn_table(1e-6, 1e-9);
  table.links = {{"stage", 1e-5, 1e9}};
  const TableCosts costs("a.h5", table, PatternKind::moba, work);
  EXPECT_EQ(costs.source(), "times of a.h5");
  LatencyOptions options;
  options.pattern = PatternKind::moba;
  const LatencyModel model(table, options);
  const MicroBatch m{{{0, 0, 5000, 0}, {1, 4096, 6000, 0}}};
  for (const std::int64_t budget : {0, 4, 32}) {
    EXPECT_DOUBLE_EQ(layer(costs, m, budget).forward_s, model.predict(m, budget).forward_s);
    EXPECT_DOUBLE_EQ(layer(costs, m, budget).backward_s, model.predict(m, budget).backward_s);
  }
  // No series of recomputation: one more forward.
  const PassTime kept = layer(costs, m, 4), again = layer(costs, m, 4, Recompute::full);
  EXPECT_DOUBLE_EQ(again.backward_s, kept.backward_s + kept.forward_s);
  EXPECT_DOUBLE_EQ(again.weight_s, kept.weight_s);
  EXPECT_DOUBLE_EQ(costs.stage_hop(1000, {}, Link::network), 1e-5 + 1000.0 * 896 * 2 / 1e9);
  EXPECT_GT(costs.optimizer(1 << 20, false), 0);
  EXPECT_THROW(TableCosts("a.h5", table, PatternKind::vertical_slash, work), Error);
}

/// The same with heads, as if all of it had been measured with another recompute alone.
ProfileTable one_mode_table(Recompute mode) {
  ProfileTable table = drawn_table(1e-6, 1e-9);
  for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward})
    for (const std::int64_t n : {1024, 4096})
      table.rows.push_back({ProfilePart::head,
                            {},
                            n,
                            0,
                            0,
                            1,
                            Recompute::none,
                            pass,
                            1e-7 * static_cast<double>(n),
                            0,
                            0});
  for (ProfileRow& row : table.rows) row.recompute = mode;
  return table;
}

TEST(TableCosts, OneMeasuredModeAnswersForAll) {
  const WorkShape work = work_of("qwen2.5-0.5b");
  const double selective_s = RateCosts(device_rates(DeviceKind::generic), work)
                                 .rest(4096, {}, Recompute::selective)
                                 .recompute_s;
  ASSERT_GT(selective_s, 0);
  for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full}) {
    const TableCosts costs("t", one_mode_table(mode), PatternKind::moba, work);
    const double forward = 1e-6 * 4096, measured = 2 * forward;
    const auto again = [&](Recompute of) {
      return of == Recompute::full ? forward : of == Recompute::selective ? selective_s : 0;
    };
    EXPECT_NEAR(costs.head(4096, {}).forward_s, 1e-7 * 4096, 1e-12);
    EXPECT_GT(costs.exchange(4096, {2, 1, 1}, Link::node), 0);
    for (const Recompute asked : {Recompute::none, Recompute::selective, Recompute::full}) {
      const PassTime rest = costs.rest(4096, {}, asked);
      EXPECT_NEAR(rest.forward_s, forward, 1e-12);
      EXPECT_NEAR(rest.backward_s, measured - again(mode) + again(asked), 1e-9 * measured)
          << name(mode) << " " << name(asked);
      EXPECT_NEAR(rest.weight_s, 0.5 * (measured - again(mode)), 1e-9 * measured);
      const PassTime pairs = costs.attention(4096, 0, 8, {}, asked);
      EXPECT_NEAR(pairs.backward_s - pairs.recompute_s,
                  mode == Recompute::full ? pairs.forward_s : 2 * pairs.forward_s,
                  1e-9 * pairs.forward_s);
    }
  }
}

TEST(TableCosts, ExchangesCarryRepeatedHeadsAndAreNeverFree) {
  const WorkShape work = work_of("qwen2.5-0.5b");  // 14 query heads, 2 of keys and of values
  ProfileTable table = drawn_table(1e-6, 1e-9);
  const ContextSplit seven{7, 1, 1};
  EXPECT_DOUBLE_EQ(
      TableCosts("t", table, PatternKind::moba, work).exchange(7000, seven, Link::network),
      RateCosts(device_rates(DeviceKind::generic), work).exchange(7000, seven, Link::network));
  table.links = {{"inner", 1e-5, 1e9}};
  EXPECT_NEAR(TableCosts("t", table, PatternKind::moba, work).exchange(7000, seven, Link::network),
              2e-5 + 6.0 / 7 * (2 * 14 + 2 * 14) * 64 * 2 * 1000 / 1e9, 1e-12);
  // Rows of seven ranks hold their exchanges.
  for (ProfileRow row : std::vector<ProfileRow>(table.rows)) {
    row.sp = 7, row.median_s /= 7;
    table.rows.push_back(row);
  }
  table.links.clear();
  EXPECT_EQ(TableCosts("t", table, PatternKind::moba, work).exchange(7000, seven, Link::network),
            0);
}

TEST(TableCosts, AllRanksShareTheHeadWhoeverWasMeasured) {
  ProfileTable table = one_mode_table(Recompute::none);
  const auto head = [&] {
    return TableCosts("t", table, PatternKind::moba, work_of("qwen2.5-0.5b"))
        .head(4096, {2, 1, 1})
        .forward_s;
  };
  const double divided = head();
  for (ProfileRow row : std::vector<ProfileRow>(table.rows))
    if (row.part != ProfilePart::head) {
      row.sp = 2, row.median_s /= 2;
      table.rows.push_back(row);
    }
  EXPECT_NEAR(divided, 1e-7 * 4096 / 2, 1e-12);
  EXPECT_DOUBLE_EQ(head(), divided);
}

// Where no budget counts pairs, all costs take the pattern's share of the visible ones, and budgets
// stay what they are.
TEST(Costs, TimeTheShareOfAPattern) {
  const auto quarter = std::make_shared<const PatternWork>(0.25);
  StatedTimes times;
  times.pair_s = 1e-9;
  WorkShape work = work_of("qwen2.5-0.5b"), sparse_work = work;
  sparse_work.pattern = quarter;
  StatedTimes sparse_times = times;
  sparse_times.pattern = quarter;
  const ProfileTable table = drawn_table(1e-6, 1e-9);
  const StatedCosts stated(times), sparse_stated(sparse_times);
  const RateCosts rates(device_rates(DeviceKind::h200), work),
      sparse_rates(device_rates(DeviceKind::h200), sparse_work);
  const TableCosts measured("t", table, PatternKind::dense, work),
      sparse_measured("t", table, PatternKind::dense, sparse_work);
  const double launch = device_rates(DeviceKind::h200).launch_s;
  for (const auto& [dense, sparse, fixed] :
       {std::tuple<const Costs&, const Costs&, double>{stated, sparse_stated, 0},
        {rates, sparse_rates, launch},
        {measured, sparse_measured, 0}}) {
    const PassTime all = dense.attention(30000, 1000, 0, {}, Recompute::none),
                   some = sparse.attention(30000, 1000, 0, {}, Recompute::none);
    EXPECT_NEAR(some.forward_s - fixed, 0.25 * (all.forward_s - fixed), 1e-9 * all.forward_s);
    EXPECT_NEAR(some.backward_s - fixed, 0.25 * (all.backward_s - fixed), 1e-9 * all.backward_s);
    EXPECT_EQ(dense.attention(30000, 0, 8, {}, Recompute::none).forward_s,
              sparse.attention(30000, 0, 8, {}, Recompute::none).forward_s);
  }
}

}  // namespace
}  // namespace ballast

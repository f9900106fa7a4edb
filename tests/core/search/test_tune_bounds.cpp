// Lower bounds of `ballast tune` against the clock.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>

#include "core/search/tune_bounds.hpp"
#include "tests/core/search/tune_decks.hpp"

namespace ballast {
namespace {

/// Whether no bound of a space, every `stride`-th of its candidates, is above the clock; how many
/// were compared, and how many bounds are above half of it.
std::pair<std::size_t, std::size_t> compare_bounds(const TuneInput& in, std::size_t stride) {
  TuneTrials trials(in);
  TuneBounds bounds(in, trials);
  std::size_t compared = 0, tight = 0;
  const auto space = tune_space(in.base, in.limits.ranks, in.longest.tokens, {0}).candidates;
  for (std::size_t i = 0; i < space.size(); i += stride) {
    const TuneBounds::Figures f = bounds.of(space[i]);
    const Trial t = trials.lightest(space[i]);
    if (t.state != TrialState::fits) continue;
    EXPECT_LE(f.bound_s, t.first_step_s * (1 + 1e-9)) << describe(t.candidate);
    EXPECT_LE(f.bytes, t.bytes) << describe(t.candidate);
    ++compared, tight += f.bound_s > 0.5 * t.first_step_s;
  }
  return {compared, tight};
}

TEST(TuneSlow, LowerBoundsAreBelowTheClock) {
  Config base = deck();
  hold(base, {"chunk.k"});
  const auto [compared, tight] = compare_bounds(input(base, 6, kMixed), 7);
  EXPECT_GT(compared, 50u);
  EXPECT_GT(tight, compared / 4);
}

/// A deck of tuned budgets of key blocks.
Config tuned_deck(std::int64_t base_budget) {
  Config base = deck();
  hold(base, {"chunk.k", "ring.layout", "pipeline.schedule"});
  base.attention.pattern = PatternKind::moba;
  base.attention.moba_block = 64, base.attention.moba_top_k = base_budget;
  base.dst.enabled = true, base.dst.anchor = Anchor::min;
  base.dst.threshold = 0.9, base.dst.base_budget = base_budget;
  base.dst.simulated_coverage = {4};
  base.costs.forward_token_s = 1e-7, base.costs.forward_pair_s = 2e-9;
  return base;
}

// Tuning lowers the budgets of slow micro-batches below the base.
TEST(TuneSlow, LowerBoundsAreBelowTheClockOfTunedBudgets) {
  const Config base = tuned_deck(64);
  const auto [compared, tight] =
      compare_bounds(input(base, 4, {16384, 9000, 4096, 2000, 900, 600, 512, 512}), 11);
  EXPECT_GT(compared, 20u);
  EXPECT_GT(tight, 0u);
}

/// The deck's model by built-in rates, on nodes of so many ranks.
TuneInput rated_input(int ranks, int node) {
  Config base = deck();
  base.from.settings.clear();
  base.mesh.ranks_per_node = node;
  hold(base, {"chunk.k", "ring.layout", "pipeline.schedule", "batching.micro_batch_tokens"});
  return input(base, ranks, kMixed);
}

// Sums of a pipeline's replicas leave the node that sums of as many neighbours stay on.
TEST(Tune, SumsGoWhereTheRanksOfTheCandidateLie) {
  const TuneInput in = rated_input(8, 4);
  TuneTrials trials(in);
  Candidate near, far;
  near.method = far.method = Batching::packed, near.capacity = far.capacity = 512;
  near.mesh = {1, 2, 1, 4, 1, 1, 4}, far.mesh = {4, 2, 1, 1, 1, 1, 4};
  const double near_s = trials.end_s(near), far_s = trials.end_s(far);
  EXPECT_GT(far_s, near_s);
  EXPECT_EQ(TuneTrials(in).end_s(far), far_s);  // whichever was asked for first
}

TEST(TuneSlow, LowerBoundsAreBelowTheClockOfNodes) {
  for (const int node : {2, 4}) EXPECT_GT(compare_bounds(rated_input(8, node), 5).first, 50u);
}

// Many short samples in a micro-batch that is longer than any of them.
TEST(TuneSlow, LowerBoundsAreBelowTheClockOfManySamplesTogether) {
  Config base = deck();
  base.batching.micro_batch_tokens = 64, base.batching.micro_batch_samples = 16;
  base.costs.forward_micro_batch_s = 0.01;
  hold(base, {"batching.micro_batch_tokens"});
  EXPECT_GT(compare_bounds(input(base, 2, std::vector<std::int64_t>(50, 64)), 1).first, 10u);
}

/// Times of stated costs, attention dearer by a factor of its tokens and budget.
class DearAttention final : public Costs {
 public:
  using Factor = std::function<double(std::int64_t tokens, std::int64_t budget)>;
  DearAttention(std::shared_ptr<const Costs> like, Factor factor)
      : like_(std::move(like)), factor_(std::move(factor)) {}
  std::string source() const override { return "a test"; }
  PassTime rest(std::int64_t tokens, const ContextSplit& s, Recompute mode) const override {
    return like_->rest(tokens, s, mode);
  }
  PassTime head(std::int64_t tokens, const ContextSplit& s) const override {
    return like_->head(tokens, s);
  }
  PassTime attention(std::int64_t query, std::int64_t prefix, std::int64_t budget,
                     const ContextSplit& s, Recompute mode) const override {
    PassTime time = like_->attention(query, prefix, budget, s, mode);
    const double dear = factor_(query, budget);
    time.forward_s *= dear, time.backward_s *= dear, time.recompute_s *= dear;
    return time;
  }
  double layer_scale(std::int64_t layers) const override { return like_->layer_scale(layers); }
  double exchange(std::int64_t, const ContextSplit&, Link) const override { return 0; }
  double ring_hop(std::int64_t, const ContextSplit&, RingLevel, bool, Link) const override {
    return 0;
  }
  double stage_hop(std::int64_t, const ContextSplit&, Link) const override { return 0; }
  double host_copy(std::int64_t, const ContextSplit&) const override { return 0; }
  double reduce(const Collective&) const override { return 0; }
  double gather(const Collective&) const override { return 0; }
  double optimizer(std::int64_t, bool) const override { return 0; }

 private:
  std::shared_ptr<const Costs> like_;
  Factor factor_;
};

/// Costs of `ballast tune` that are such.
void make_dear(TuneInput& in, const DearAttention::Factor& factor) {
  in.costs = [factor](const Config& config) -> std::shared_ptr<const Costs> {
    return std::make_shared<DearAttention>(stated_costs(config, nullptr), factor);
  };
}

TEST(TuneSlow, LowerBoundsAreBelowTheClockOfCutSamples) {
  Config base = deck();
  hold(base, {"chunk.k", "ring.layout", "pipeline.schedule"});
  TuneInput in = input(base, 2, kMixed);
  // Pairs take longer the longer their sample is.
  make_dear(in, [](std::int64_t tokens, std::int64_t) { return static_cast<double>(tokens) / 64; });
  EXPECT_GT(compare_bounds(in, 3).first, 20u);
}

// As in a table whose sparse kernels are slower than dense ones where few blocks are left.
TEST(TuneSlow, LowerBoundsAreBelowTheClockOfDearSmallBudgets) {
  Config base = tuned_deck(16);
  base.dst.threshold = 0.01;  // so that tuning leaves the dear ones alone
  TuneInput in = input(base, 4, {4096, 2000, 900, 600, 512, 512});
  make_dear(in, [](std::int64_t, std::int64_t budget) { return budget < 8 ? 20.0 : 1.0; });
  const auto [compared, tight] = compare_bounds(in, 11);
  EXPECT_GT(compared, 20u);
  EXPECT_GT(tight, 0u);
}

/// A step of pairs; of the first the chosen answer is one half.
TuneInput pairs(const Config& base, int ranks) {
  TuneInput in = input(base, ranks, {64});
  for (auto& step : in.steps)
    step = {{0, 2000, 0, 1000, 0}, {1, 1910, 0, 1900, 0}, {2, 400, 0, 100, 0}, {3, 64, 0, 32, 0}};
  in.longest = {0, 2000, 0, 1000, 0};
  return in;
}

TEST(TuneSlow, LowerBoundsAreBelowTheClockOfPairs) {
  Config base = deck();
  base.costs.forward_pair_s = 1e-6;
  hold(base, {"chunk.k", "chunk.tokens", "ring.layout", "pipeline.schedule"});
  const auto [compared, tight] = compare_bounds(pairs(base, 4), 1);
  EXPECT_GT(compared, 50u);
  EXPECT_GT(tight, compared / 4);
}

// A pack on two joined ranks that three heads do not go over is a ring, as the mesh's may be.
TEST(TuneBounds, AreTheSameWhateverWasAskedBefore) {
  Config base = deck();
  base.model.query_heads = 3, base.model.kv_heads = 3;
  base.costs.ring_hop_token_s = 1e-2;
  const TuneInput in = input(base, 2, kMixed);
  Candidate joined, ring;
  joined.method = Batching::hbp, joined.groups = {{2048, 2, -1}}, joined.capacity = 2048;
  joined.mesh.dp = 2;
  ring.method = Batching::packed, ring.capacity = 2048, ring.mesh.cp_inner = 2;
  const auto both = [&](const Candidate& first, const Candidate& second) {
    TuneTrials trials(in);
    TuneBounds bounds(in, trials);
    bounds.of(first);
    return bounds.of(second).estimate_s;
  };
  EXPECT_EQ(both(joined, ring), both(ring, ring));
  EXPECT_EQ(both(ring, joined), both(joined, joined));
}

}  // namespace
}  // namespace ballast

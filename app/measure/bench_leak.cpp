// `ballast bench leak DECK`: what later tokens change for earlier ones through the attention index.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "app/measure/bench.hpp"
#include "app/measure/bench_weights.hpp"
#include "app/train/step_planner.hpp"
#include "core/base/random.hpp"
#include "kernels/attention/recall_scores.hpp"

namespace ballast {
namespace {

/// What one forward pass gives for the tokens before the cut of their sample.
struct Pass {
  std::vector<double> log_probability;  ///< of a token drawn for each position
  std::vector<std::vector<std::uint64_t>>
      pairs;  ///< of every index made, in order: bits of its keys
};

class LeakTest {
 public:
  LeakTest(Session& session, StepPlan plan, const BenchSettings& settings)
      : session_(session),
        plan_(std::move(plan)),
        at_(settings.real("at", 0, 1)),
        align_(settings.integer("align")),
        rows_(settings.integer("rows")),
        seed_(settings.seed(session.mesh.world)),
        mine_(plan_.list(session.mesh.at.dp)) {}

  /// `redrawn`: tokens from each sample's cut on are drawn anew.
  Pass run(bool redrawn) {
    Pass pass;
    ChunkStores stores = session_.chunk_stores(plan_);
    const auto prepare = [&](int m) {
      session_.index_made = [this, m, &pass](const AttentionInputs&, const AttentionAxes& axes,
                                             const std::vector<AttentionWork>& calls) {
        if (session_.options.attention.sparse()) pass.pairs.push_back(pairs(mine_[m], axes, calls));
      };
      MicroBatchWork work = session_.prepare(plan_, m, 0, stores.at(m));
      draw(mine_[m], work.batch, redrawn);
      return work;
    };
    const auto take = [&](int m, const LocalBatch& local, const StageOutput& output) {
      if (!output.token_loss.defined()) return;
      for (std::int64_t i = 0; i < local.size(); ++i)
        if (before_cut(mine_[m], local, i))
          pass.log_probability.push_back(-output.token_loss.data<double>()[i]);
    };
    run_stage(plan_.schedule(session_.mesh.at.dp), static_cast<int>(mine_.size()), session_.model,
              session_.links, {prepare, {}, take, nullptr}, nullptr);
    session_.index_made = nullptr;
    return pass;
  }

  /// Tokens of a sample from the cut on.
  std::int64_t redrawn(std::int64_t sample) const {
    return std::max<std::int64_t>(0, session_.dataset->length(sample) - cut(sample));
  }

 private:
  std::int64_t cut(std::int64_t sample) const {
    const double length = static_cast<double>(session_.dataset->length(sample));
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(at_ * length) / align_) * align_;
  }
  bool before_cut(const MicroBatch& batch, const LocalBatch& local, std::int64_t i) const {
    const std::int32_t segment = local.segment[static_cast<std::size_t>(i)];
    return segment >= 0 && local.positions.data<std::int32_t>()[i] <
                               cut(batch.segments[static_cast<std::size_t>(segment)].sample);
  }
  std::int32_t token(const char* stream, std::int64_t sample, std::int64_t position) const {
    const auto vocabulary = static_cast<std::uint64_t>(session_.dataset->vocabulary());
    const std::uint64_t bits =
        random_bits(seed_, stream_of(stream) + static_cast<std::uint64_t>(sample),
                    static_cast<std::uint64_t>(position));
    return static_cast<std::int32_t>(bits % vocabulary);
  }
  /// Targets become drawn tokens, the same in every pass.
  void draw(const MicroBatch& batch, LocalBatch& local, bool redrawn) const {
    for (std::int64_t i = 0; i < local.size(); ++i) {
      const std::int32_t segment = local.segment[static_cast<std::size_t>(i)];
      if (segment < 0) continue;
      const std::int64_t sample = batch.segments[static_cast<std::size_t>(segment)].sample,
                         position = local.positions.data<std::int32_t>()[i];
      local.targets.data<std::int32_t>()[i] = token("leak targets", sample, position);
      if (redrawn && position >= cut(sample))
        local.tokens.data<std::int32_t>()[i] = token("leak tokens", sample, position);
    }
  }
  /// Computed pairs of this rank's queries before the cut, `rows_` a segment at most.
  std::vector<std::uint64_t> pairs(const MicroBatch& batch, const AttentionAxes& axes,
                                   const std::vector<AttentionWork>& calls) const {
    const KeyAxis axis = key_axis(axes);
    AxisRanges rows;
    for (const AxisRange& range : axes.queries) {
      if (range.padding()) continue;
      const std::int64_t end = cut(batch.segments[static_cast<std::size_t>(range.segment)].sample);
      const std::int64_t step = std::max<std::int64_t>(1, (end + rows_ - 1) / rows_);
      for (std::int64_t p = range.position; p < std::min(range.end(), end); ++p)
        if (p % step == 0) rows.push_back({range.segment, p, 1});
    }
    std::vector<std::uint64_t> seen;
    if (rows.empty()) return seen;
    const Space space = calls.front().host() != nullptr ? Space::host : Space::cuda;
    const Tensor bits = recall_scores(axes, axis, rows, space)->computed(calls).to(host_device());
    const auto* word = reinterpret_cast<const std::uint64_t*>(bits.data<std::int64_t>());
    for (int h = 0; h < calls.front().index_heads(); ++h)
      for (const AxisRange& row : rows) {
        const std::int64_t keys = row.position - axis.first_position[row.segment] + 1,
                           words = (axis.count[row.segment] + kBlock - 1) / kBlock;
        for (std::int64_t b = 0; b < words; ++b, ++word) {
          const std::int64_t visible = std::clamp<std::int64_t>(keys - b * kBlock, 0, kBlock);
          seen.push_back(visible == kBlock ? *word : *word & ((std::uint64_t{1} << visible) - 1));
        }
      }
    return seen;
  }

  Session& session_;
  const StepPlan plan_;
  const double at_;
  const std::int64_t align_, rows_;
  const std::uint64_t seed_;
  const std::vector<MicroBatch> mine_;
};

struct Leak {
  double pairs = 0, changed_pairs = 0;    ///< computed, and in one of the passes alone
  double tokens = 0, changed_tokens = 0;  ///< with other bits
  double largest = 0;                     ///< change of a log-probability
};

Leak compare(const Pass& before, const Pass& after, const Communicator& world) {
  Leak leak;
  for (std::size_t i = 0; i < before.pairs.size(); ++i)
    for (std::size_t w = 0; w < before.pairs[i].size(); ++w) {
      leak.pairs += std::popcount(before.pairs[i][w]);
      leak.changed_pairs += std::popcount(before.pairs[i][w] ^ after.pairs[i][w]);
    }
  leak.tokens = static_cast<double>(before.log_probability.size());
  for (std::size_t i = 0; i < before.log_probability.size(); ++i) {
    const double a = before.log_probability[i], b = after.log_probability[i];
    leak.changed_tokens += std::bit_cast<std::uint64_t>(a) != std::bit_cast<std::uint64_t>(b);
    leak.largest = larger(leak.largest, std::abs(a - b));
  }
  for (double* sum : {&leak.pairs, &leak.changed_pairs, &leak.tokens, &leak.changed_tokens})
    *sum = world.all_reduce(*sum);
  leak.largest = world.all_reduce(leak.largest, Reduction::max);
  return leak;
}

BenchResult run_leak(const Config& deck, const BenchSettings& settings) {
  const Communicator world = Communicator::world();
  Config config = deck;
  config.run.backend = Backend::host;
  config.run.precision = Precision::fp64;
  Session session(world, config);
  session.recorder.enabled = false;
  take_weights(session, settings.text("checkpoint"));
  StepPlanner planner(session, nullptr);
  std::vector<std::int64_t> samples(
      static_cast<std::size_t>(std::min(settings.integer("samples"), session.dataset->samples())));
  std::iota(samples.begin(), samples.end(), std::int64_t{0});
  const double at = settings.real("at", 0, 1);
  LeakTest test(session, planner.evaluation(samples), settings);
  std::int64_t redrawn = 0;
  for (const std::int64_t sample : samples) redrawn += test.redrawn(sample);
  check_all(world, redrawn > 0,
            fmt::format("bench leak: none of {} samples has a token behind its cut, at least {} "
                        "tokens (align); choose longer samples, a smaller at or align",
                        samples.size(), settings.integer("align")));
  const Pass before = test.run(false), after = test.run(true);
  const Leak leak = compare(before, after, world);
  const double pairs = leak.changed_pairs / std::max(1.0, leak.pairs),
               tokens = leak.changed_tokens / std::max(1.0, leak.tokens);
  BenchResult result;
  result.text = fmt::format(
      "leak {}{}: {} tokens, from {:.2f} of each of {} samples on, are drawn anew; of those "
      "before\n"
      "  {:.4f} of the computed pairs change, {:.4f} of the tokens have other logits, the largest "
      "change of a log-probability is {:.3g}\n",
      name(config.attention.pattern), session.options.attention.causal() ? " causal" : "", redrawn,
      at, samples.size(), pairs, tokens, leak.largest);
  if (session.tuning)
    result.text +=
        "  at dst.base_budget: budgets that DST picks in training follow later tokens as well\n";
  result.json = {{"benchmark", "leak"},
                 {"pattern", name(config.attention.pattern)},
                 {"selection", name(config.attention.selection)},
                 {"samples", samples.size()},
                 {"at", at},
                 {"redrawn_tokens", redrawn},
                 {"pairs", leak.pairs},
                 {"changed_pairs_share", pairs},
                 {"tokens", leak.tokens},
                 {"changed_tokens_share", tokens},
                 {"largest_log_probability_change", leak.largest}};
  return result;
}

}  // namespace

Benchmark leak_benchmark() {
  return {"leak",
          "what later tokens change for earlier ones through the attention index, in fp64 on the "
          "host: share of computed pairs, of tokens with other logits",
          {{"samples", "4", "of the deck's data, from the first on"},
           {"at", "0.5", "share of a sample behind which its tokens are drawn anew"},
           {"align", "64",
            "tokens of which the cut is a multiple; inside a block of 64, which queries compute "
            "together, last bits may follow the order of its tiles"},
           {"rows", "512", "queries of a segment whose pairs are compared, at most"},
           {"checkpoint", "", "whose weights run; empty: model.weights or initial values"},
           {"seed", "1", "of the new tokens"}},
          nullptr,
          run_leak};
}

}  // namespace ballast

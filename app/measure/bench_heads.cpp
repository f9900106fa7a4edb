// `ballast bench heads DECK`: searches the pattern of every head for attention.pattern = "by_head"
// on the deck's model and data, and writes the table.  Idea: MInference (Jiang et al., 2024).
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "app/measure/bench.hpp"
#include "app/measure/bench_weights.hpp"
#include "app/observe/text_table.hpp"
#include "app/train/communicator_join.hpp"
#include "app/train/step_planner.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "io/profile/head_table.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "parallel/pattern/recall.hpp"

namespace ballast {
namespace {

constexpr const char* kCriterion =
    "highest mean share of the exact softmax over measured queries, among candidates that compute "
    "no more of a head's visible pairs than the budget";

/// Share of the visible pairs that a window of so many blocks and the sink compute.
double window_share(const std::vector<MicroBatch>& batches, std::int64_t window) {
  double computed = 0, visible = 0;
  for (const MicroBatch& batch : batches)
    for (const Segment& segment : batch.segments)
      for (std::int64_t block = 0; block * kBlock < segment.tokens(); ++block) {
        visible += static_cast<double>(block + 1);
        computed += static_cast<double>(std::min(block + 1, window + 1));
      }
  return visible > 0 ? computed / visible : 1;
}

/// Rules of all kinds and sizes, from the least on to twice what a window of the budget's share of
/// the pairs needs; whether they keep to it, measurement tells.
std::vector<HeadRule> candidates_of(const std::vector<MicroBatch>& batches, double pairs) {
  std::vector<std::int64_t> sizes{1, 2, 3};
  for (std::int64_t power = 4; power <= 1 << 20; power *= 2)
    for (const std::int64_t size : {power, power + power / 2})
      if (window_share(batches, size / 2) <= pairs) sizes.push_back(size);
  std::vector<HeadRule> found;
  for (const std::int64_t size : sizes) {
    found.push_back({HeadPattern::a_shape, kBlock, size * kBlock});
    if (size >= 8)
      found.push_back({HeadPattern::a_shape, size / 4 * kBlock, (size - size / 4) * kBlock});
    std::set<std::int64_t> slashes{1};
    for (const std::int64_t quarter : {1, 2, 3, 4})
      slashes.insert(std::max<std::int64_t>(1, size * quarter / 4));
    for (const std::int64_t n : slashes)
      found.push_back({HeadPattern::vertical_slash, 0, 0, (size - n) * kBlock, n});
    found.push_back({HeadPattern::block_sparse, 0, 0, 0, 0, size});
  }
  return found;
}

/// Recall of every candidate in every head, and the share of the visible pairs that it computes.
struct Measured {
  std::vector<HeadRule> candidates;
  int layers = 0, heads = 0;
  double budget = 0;  ///< share of a head's visible pairs
  /// [candidate][layer][head] recall times queries, then queries, then computed and visible pairs.
  std::vector<double> sums;
  std::size_t of(std::size_t candidate, int layer, int head, int what) const {
    const std::size_t at =
        (candidate * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) *
            static_cast<std::size_t>(heads) +
        static_cast<std::size_t>(head);
    return at * 4 + static_cast<std::size_t>(what);
  }
  double recall(std::size_t c, int layer, int head) const {
    return sums[of(c, layer, head, 0)] / sums[of(c, layer, head, 1)];
  }
  double pairs(std::size_t c, int layer, int head) const {
    return sums[of(c, layer, head, 2)] / sums[of(c, layer, head, 3)];
  }
  /// The candidate, among those whose rule `counts`, with the highest recall within the budget of
  /// pairs; of equal ones the fewest pairs, then the first.  Where none keeps to it, the fewest
  /// pairs.
  template <class Counts>
  std::size_t best(int layer, int head, Counts&& counts) const {
    const auto worth = [&](std::size_t c) {
      const bool within = pairs(c, layer, head) <= budget;
      return std::tuple(counts(candidates[c]), within, within ? recall(c, layer, head) : 0.0,
                        -pairs(c, layer, head));
    };
    std::size_t found = 0;
    for (std::size_t c = 1; c < candidates.size(); ++c)
      if (worth(c) > worth(found)) found = c;
    return found;
  }
};

class HeadSearch {
 public:
  HeadSearch(Session& session, StepPlan plan, const BenchSettings& settings)
      : session_(session),
        plan_(std::move(plan)),
        last_(parse_or_fail<CoverageRows>(settings.text("queries"), "bench heads: queries") ==
              CoverageRows::last),
        rows_(settings.integer("rows")),
        seed_(settings.seed(session.mesh.world)),
        mine_(plan_.list(session.mesh.at.dp)) {
    found_.budget = settings.real("pairs", 0, 1);
    std::vector<MicroBatch> all;  // every rank tries the same
    for (const PlannedMicroBatch& m : plan_.micro_batches) all.push_back(m.micro_batch());
    found_.candidates = candidates_of(all, found_.budget);
    found_.layers = static_cast<int>(session.options.model.layers);
    found_.heads = static_cast<int>(session.options.model.query_heads);
    found_.sums.assign(found_.of(found_.candidates.size(), 0, 0, 0), 0);
  }

  std::uint64_t seed() const { return seed_; }

  /// One forward pass with dense attention, whose Q and K every candidate chooses from.
  Measured run() {
    ChunkStores stores = session_.chunk_stores(plan_);
    const auto prepare = [&](int m) {
      session_.index_made = [this, m](const AttentionInputs& in, const AttentionAxes& axes,
                                      const std::vector<AttentionWork>&) { measure(m, in, axes); };
      return session_.prepare(plan_, m, 0, stores.at(m));
    };
    run_stage(plan_.schedule(session_.mesh.at.dp), static_cast<int>(mine_.size()), session_.model,
              session_.links, {prepare, {}, {}, nullptr}, nullptr);
    session_.index_made = nullptr;
    session_.mesh.world.all_reduce(std::span<double>(found_.sums));
    return found_;
  }

 private:
  /// Queries whose attention counts: the last ones of every segment, or some from all of it.
  std::vector<SampledQuery> queries(int m, int layer, const AttentionAxes& axes,
                                    const KeyAxis& axis) const {
    const std::int64_t least = session_.options.attention.whole_tokens();
    if (!last_) return sample_queries(axes, axis, rows_, least, seed_, m, layer);
    std::vector<SampledQuery> found;
    for (int s = 0; s < axis.segments(); ++s) {
      const std::int64_t end = axis.first_position[s] + axis.count[s];
      if (axis.count[s] <= least) continue;
      for (std::int64_t p = std::max(axes.first_query[s], end - rows_); p < end; ++p)
        found.push_back({s, p, 1});
    }
    return found;
  }
  void measure(int m, const AttentionInputs& in, const AttentionAxes& axes) {
    const Communicator& sequence = session_.mesh.sequence(mine_[m].sp);
    const Communicator& ranks = session_.mesh.ring(mine_[m].sp);
    const CommunicatorJoin ring(ranks);
    const KeyAxis axis = key_axis(axes);
    const int heads = static_cast<int>(in.q.size(1)), first = sequence.rank() * heads;
    const double visible = visible_keys(axes.queries, axis).pairs();
    AttentionOptions options = session_.options.attention;
    const std::vector<SampledQuery> measured = queries(m, in.layer, axes, axis);
    if (measured.empty()) return;
    for (std::size_t c = 0; c < found_.candidates.size(); ++c) {
      options.heads =
          std::make_shared<HeadTable>(found_.layers, found_.heads, found_.candidates[c]);
      const auto source = pattern_source(ranks, axes, options, nullptr, nullptr, sequence);
      const std::vector<AttentionWork>& calls = source->shards(in);
      const std::vector<RecallRow> held =
          measure_recall(axes, axis, measured, in, calls, first, ring);
      for (int h = 0; h < heads; ++h) {
        if (ranks.rank() == 0) {  // the same on every rank of a ring
          const RecallRow& row = held[static_cast<std::size_t>(h)];
          found_.sums[found_.of(c, in.layer, first + h, 0)] += row.mean * row.queries;
          found_.sums[found_.of(c, in.layer, first + h, 1)] += row.queries;
        }
        for (const AttentionWork& call : calls)
          found_.sums[found_.of(c, in.layer, first + h, 2)] += call.counts().pairs(h);
        found_.sums[found_.of(c, in.layer, first + h, 3)] += visible;
      }
    }
  }

  Session& session_;
  const StepPlan plan_;
  const bool last_;
  const std::int64_t rows_;
  const std::uint64_t seed_;
  const std::vector<MicroBatch> mine_;
  Measured found_;
};

/// Refuses a budget that some head has no candidate for.
void require_within(const Measured& found) {
  double least = 0;  // budget that every head can keep to
  for (int layer = 0; layer < found.layers; ++layer)
    for (int head = 0; head < found.heads; ++head)
      least = std::max(
          least,
          found.pairs(found.best(layer, head, [](const HeadRule&) { return true; }), layer, head));
  const double remedy = std::ceil(least * 1000) / 1000;
  require(least <= found.budget,
          "bench heads: pairs = {} is too few for some head: its least pattern computes {:.3f} of "
          "its visible pairs on these samples; set pairs={:.3f} or more, or search longer samples",
          found.budget, remedy, remedy);
}

struct Chosen {
  double recall = 0, pairs = 0;  ///< mean over heads
  std::int64_t dense = 0;        ///< heads that stay dense
};

/// Rules of one layer; a head whose best one holds less than `dense_below` stays dense.
nlohmann::ordered_json choose_layer(const Measured& found, int layer, double dense_below,
                                    Chosen& chosen, TextTable& table) {
  nlohmann::ordered_json rules = nlohmann::ordered_json::array();
  for (int head = 0; head < found.heads; ++head) {
    const std::size_t best = found.best(layer, head, [](const HeadRule&) { return true; });
    const std::size_t next = found.best(layer, head, [&](const HeadRule& rule) {
      return rule.pattern != found.candidates[best].pattern;
    });
    const bool dense = found.recall(best, layer, head) < dense_below;
    const HeadRule rule = dense ? HeadRule{} : found.candidates[best];
    const double recall = dense ? 1.0 : found.recall(best, layer, head),
                 pairs = dense ? 1.0 : found.pairs(best, layer, head),
                 heads = found.layers * found.heads;
    chosen.recall += recall / heads;
    chosen.pairs += pairs / heads;
    chosen.dense += dense;
    nlohmann::ordered_json json = to_json(rule);
    json["recall"] = recall;
    json["pairs"] = pairs;
    rules.push_back(json);
    table.row({fmt::to_string(layer), fmt::to_string(head), to_text(rule),
               fmt::format("{:.4f}", recall), fmt::format("{:.3f}", pairs),
               fmt::format("{:.4f} {}", found.recall(next, layer, head),
                           to_text(found.candidates[next]))});
  }
  return rules;
}

/// What one pattern for all heads, each with its own best size, would hold within the budget.
nlohmann::ordered_json single_patterns(const Measured& found, std::string& lines) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  const double heads = found.layers * found.heads;
  for (const auto& [pattern, text] : EnumNames<HeadPattern>::table) {
    if (pattern == HeadPattern::dense) continue;
    double recall = 0, pairs = 0;
    for (int layer = 0; layer < found.layers; ++layer)
      for (int head = 0; head < found.heads; ++head) {
        const std::size_t c = found.best(
            layer, head, [wanted = pattern](const HeadRule& r) { return r.pattern == wanted; });
        recall += found.recall(c, layer, head) / heads;
        pairs += found.pairs(c, layer, head) / heads;
      }
    list.push_back({{"pattern", text}, {"recall", recall}, {"pairs", pairs}});
    lines += fmt::format("  every head {}, of its best size: recall {:.4f}, {:.3f} of the pairs\n",
                         text, recall, pairs);
  }
  return list;
}

/// The deck with dense heads, so that its layout is that of a run by the table.
Config searched(const Config& deck) {
  Config config = deck;
  config.attention.pattern = PatternKind::by_head;
  config.attention.index = IndexOrigin::pattern;
  config.attention.selection = IndexSelection::last;
  config.attention.heads.clear();
  config.dst.enabled = false;
  config.run.backend = Backend::host;
  if (config.run.precision == Precision::bf16) config.run.precision = Precision::fp32;
  return config;
}

BenchResult run_heads(const Config& deck, const BenchSettings& settings) {
  const Communicator world = Communicator::world();
  together(world, [&] {
    if (world.rank() == 0) check_head_table_target(settings.text("out"));
  });
  Session session(world, searched(deck));
  session.recorder.enabled = false;
  take_weights(session, settings.text("checkpoint"));
  StepPlanner planner(session, nullptr);
  std::vector<std::int64_t> samples = session.sampler.validation();
  const bool held_out = !samples.empty();
  if (!held_out) {
    samples.resize(static_cast<std::size_t>(session.dataset->samples()));
    std::iota(samples.begin(), samples.end(), std::int64_t{0});
  }
  if (std::ssize(samples) > settings.integer("samples"))
    samples.resize(static_cast<std::size_t>(settings.integer("samples")));
  HeadSearch search(session, planner.evaluation(samples), settings);
  const Measured found = search.run();
  require(found.sums[found.of(0, 0, 0, 1)] > 0,
          "bench heads: no sample of {} is longer than attention.last_q = {}; shorter ones are "
          "dense whatever the table says",
          samples.size(), session.options.attention.last_q);
  require_within(found);
  const double dense_below = settings.real("dense_below", 0, 1);
  BenchResult result;
  result.text = fmt::format("heads: {}: {} of the pairs, {} queries of {} {}; {} candidates\n",
                            kCriterion, found.budget, settings.text("queries"), samples.size(),
                            held_out ? "held-out samples" : "samples", found.candidates.size());
  result.json = {{"benchmark", "heads"},
                 {"layers", found.layers},
                 {"heads", found.heads},
                 {"criterion", kCriterion},
                 {"pair_budget", found.budget},
                 {"queries", settings.text("queries")},
                 {"rows", settings.integer("rows")},
                 {"samples", samples.size()},
                 {"held_out", held_out},
                 {"seed", search.seed()},
                 {"dense_below", dense_below}};
  Chosen chosen;
  TextTable table({"layer", "head", "pattern", "recall", "pairs", "best of another pattern"});
  nlohmann::ordered_json rules = nlohmann::ordered_json::array();
  for (int layer = 0; layer < found.layers; ++layer)
    rules.push_back(choose_layer(found, layer, dense_below, chosen, table));
  result.json["recall"] = chosen.recall;
  result.json["pairs"] = chosen.pairs;
  result.json["dense_heads"] = chosen.dense;
  result.json["single_patterns"] = single_patterns(found, result.text);
  result.json["rules"] = rules;
  const std::string& out = settings.text("out");
  if (world.rank() == 0) write_head_table(out, result.json);
  result.text += fmt::format(
      "{}  by head: recall {:.4f}, {:.3f} of the pairs, {} of {} heads dense; written to {}\n",
      table.text(), chosen.recall, chosen.pairs, chosen.dense, found.layers * found.heads, out);
  return result;
}

}  // namespace

Benchmark heads_benchmark() {
  return {"heads",
          "searches the pattern of every head for attention.pattern = \"by_head\", on the host, "
          "and writes the table",
          {{"samples", "8", "of the deck's held-out data, else of its data, from the first on"},
           {"rows", "64", "how many of a segment"},
           {"queries", "sampled",
            "that are measured: the last ones of a segment, or sampled from all of it"},
           {"pairs", "0.3", "share of a head's visible pairs that its pattern may compute"},
           {"dense_below", "0", "recall below which a head stays dense"},
           {"checkpoint", "", "whose weights run; empty: model.weights or initial values"},
           {"out", "heads.json", "file for attention.heads"},
           {"seed", "1", "of the sampled queries"}},
          nullptr,
          run_heads};
}

}  // namespace ballast

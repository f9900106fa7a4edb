// `ballast bench heads DECK`: searches the pattern of every head for attention.pattern = "by_head"
// on the deck's model and data, and writes the table.  Idea: MInference (Jiang et al., 2024).
#include <algorithm>
#include <numeric>
#include <set>
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
    "highest mean share of the exact softmax over sampled queries, at an equal budget of blocks";

/// What a head may do for at most `budget` blocks of 64 keys a block of queries, sink and diagonal
/// included.
std::vector<HeadRule> candidates_of(std::int64_t budget) {
  std::vector<HeadRule> found;
  std::set<std::int64_t> sinks{1}, slashes{1};
  if (budget >= 8) sinks.insert(budget / 4);
  const std::int64_t rest = budget - 2;
  for (const std::int64_t quarter : {1, 2, 3, 4})
    slashes.insert(std::max<std::int64_t>(1, rest * quarter / 4));
  for (const std::int64_t s : sinks)
    found.push_back({HeadPattern::a_shape, s * kBlock, (budget - s) * kBlock});
  for (const std::int64_t s : slashes)
    found.push_back({HeadPattern::vertical_slash, 0, 0, (rest - s) * kBlock, s});
  found.push_back({HeadPattern::block_sparse, 0, 0, 0, 0, rest});
  return found;
}

/// Recall of every candidate in every head, and the share of the visible pairs that it computes.
struct Measured {
  std::vector<HeadRule> candidates;
  int layers = 0, heads = 0;
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
  /// Of every head the candidate with the highest recall; of equal ones the fewest pairs, then the
  /// first.
  std::size_t best(int layer, int head) const {
    std::size_t found = 0;
    for (std::size_t c = 1; c < candidates.size(); ++c)
      if (std::pair(recall(c, layer, head), -pairs(c, layer, head)) >
          std::pair(recall(found, layer, head), -pairs(found, layer, head)))
        found = c;
    return found;
  }
};

class HeadSearch {
 public:
  HeadSearch(Session& session, StepPlan plan, const BenchSettings& settings)
      : session_(session),
        plan_(std::move(plan)),
        rows_(settings.integer("rows")),
        seed_(settings.seed()),
        mine_(plan_.list(session.mesh.at.dp)) {
    found_.candidates = candidates_of(settings.integer("budget", 4));
    found_.layers = static_cast<int>(session.options.model.layers);
    found_.heads = static_cast<int>(session.options.model.query_heads);
    found_.sums.assign(found_.of(found_.candidates.size(), 0, 0, 0), 0);
  }

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
  void measure(int m, const AttentionInputs& in, const AttentionAxes& axes) {
    const Communicator& sequence = session_.mesh.sequence(mine_[m].sp);
    const CommunicatorJoin ring(session_.mesh.cp);
    const KeyAxis axis = key_axis(axes);
    const int heads = static_cast<int>(in.q.size(1)), first = sequence.rank() * heads;
    const double visible = visible_keys(axes.queries, axis).pairs();
    AttentionOptions options = session_.options.attention;
    const std::vector<SampledQuery> queries =
        sample_queries(axes, axis, rows_, options.whole_tokens(), seed_, m, in.layer);
    if (queries.empty()) return;
    for (std::size_t c = 0; c < found_.candidates.size(); ++c) {
      options.heads =
          std::make_shared<HeadTable>(found_.layers, found_.heads, found_.candidates[c]);
      const auto source =
          pattern_source(session_.mesh.cp, axes, options, nullptr, nullptr, sequence);
      const std::vector<AttentionWork>& calls = source->shards(in);
      const std::vector<RecallRow> held =
          measure_recall(axes, axis, queries, in, calls, first, ring);
      for (int h = 0; h < heads; ++h) {
        if (session_.mesh.cp.rank() == 0) {  // the same on every rank of a ring
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
  const std::int64_t rows_;
  const std::uint64_t seed_;
  const std::vector<MicroBatch> mine_;
  Measured found_;
};

/// The chosen rules, and figures of every candidate beside them.
struct Chosen {
  HeadTable table;
  nlohmann::ordered_json rules = nlohmann::ordered_json::array();
  double recall = 0;       ///< mean over heads
  std::int64_t dense = 0;  ///< heads that stay dense
  std::string lines;
};

Chosen choose(const Measured& found, double dense_below) {
  Chosen chosen{HeadTable(found.layers, found.heads)};
  TextTable table({"layer", "head", "pattern", "recall", "pairs", "next best"});
  for (int layer = 0; layer < found.layers; ++layer) {
    nlohmann::ordered_json of_layer = nlohmann::ordered_json::array();
    for (int head = 0; head < found.heads; ++head) {
      const std::size_t c = found.best(layer, head);
      const double recall = found.recall(c, layer, head);
      const bool dense = recall < dense_below;
      const HeadRule rule = dense ? HeadRule{} : found.candidates[c];
      std::size_t next = found.candidates.size();  // of another pattern
      for (std::size_t o = 0; o < found.candidates.size(); ++o)
        if (found.candidates[o].pattern != found.candidates[c].pattern &&
            (next == found.candidates.size() ||
             found.recall(o, layer, head) > found.recall(next, layer, head)))
          next = o;
      chosen.table.at(layer, head) = rule;
      chosen.recall += (dense ? 1.0 : recall) / (found.layers * found.heads);
      chosen.dense += dense;
      nlohmann::ordered_json json = to_json(rule);
      json["recall"] = dense ? 1.0 : recall;
      json["pairs"] = dense ? 1.0 : found.pairs(c, layer, head);
      of_layer.push_back(json);
      table.row({fmt::to_string(layer), fmt::to_string(head), to_text(rule),
                 fmt::format("{:.4f}", dense ? 1.0 : recall),
                 fmt::format("{:.3f}", dense ? 1.0 : found.pairs(c, layer, head)),
                 fmt::format("{:.4f} {}", found.recall(next, layer, head),
                             name(found.candidates[next].pattern))});
    }
    chosen.rules.push_back(of_layer);
  }
  chosen.lines = table.text();
  return chosen;
}

/// Figures of every candidate, as if all heads did it.
nlohmann::ordered_json candidate_figures(const Measured& found, std::string& lines) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  const double heads = found.layers * found.heads;
  for (std::size_t c = 0; c < found.candidates.size(); ++c) {
    double recall = 0, pairs = 0;
    for (int layer = 0; layer < found.layers; ++layer)
      for (int head = 0; head < found.heads; ++head) {
        recall += found.recall(c, layer, head) / heads;
        pairs += found.pairs(c, layer, head) / heads;
      }
    nlohmann::ordered_json json = to_json(found.candidates[c]);
    json["recall"] = recall;
    json["pairs"] = pairs;
    list.push_back(json);
    lines += fmt::format("  every head {}: recall {:.4f}, {:.3f} of the pairs\n",
                         to_text(found.candidates[c]), recall, pairs);
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

BenchResult run(const Config& deck, const BenchSettings& settings) {
  const Communicator world = Communicator::world();
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
  const Chosen chosen = choose(found, settings.real("dense_below", 0, 1));
  const std::int64_t budget = settings.integer("budget", 4);
  BenchResult result;
  result.text =
      fmt::format("heads: {}: at most {} blocks of 64 keys a block of queries; {} {}\n", kCriterion,
                  budget, samples.size(), held_out ? "held-out samples" : "samples");
  result.json = {{"benchmark", "heads"},    {"layers", found.layers},
                 {"heads", found.heads},    {"criterion", kCriterion},
                 {"budget_blocks", budget}, {"samples", samples.size()},
                 {"held_out", held_out},    {"rows", settings.integer("rows")},
                 {"seed", settings.seed()}, {"dense_below", settings.real("dense_below", 0, 1)},
                 {"recall", chosen.recall}, {"dense_heads", chosen.dense}};
  result.json["candidates"] = candidate_figures(found, result.text);
  result.json["rules"] = chosen.rules;
  const std::string& out = settings.text("out");
  if (world.rank() == 0) write_head_table(out, result.json);
  result.text +=
      fmt::format("{}  by head: recall {:.4f}, {} of {} heads dense; written to {}\n", chosen.lines,
                  chosen.recall, chosen.dense, found.layers * found.heads, out);
  return result;
}

}  // namespace

Benchmark heads_benchmark() {
  return {"heads",
          "searches the pattern of every head for attention.pattern = \"by_head\", on the host, "
          "and writes the table",
          {{"samples", "8", "of the deck's held-out data, else of its data, from the first on"},
           {"rows", "64", "queries of a segment whose attention is measured"},
           {"budget", "8", "blocks of 64 keys a block of queries, at most; 4 or more"},
           {"dense_below", "0", "recall below which a head stays dense"},
           {"checkpoint", "", "whose weights run; empty: model.weights or initial values"},
           {"out", "heads.json", "file for attention.heads"},
           {"seed", "1", "of the sampled queries"}},
          nullptr,
          run};
}

}  // namespace ballast

// ballast pack: the Batch plans of one epoch over the deck's data, without ranks, and how well they are balanced.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "app/command_line.hpp"
#include "app/json_twin.hpp"
#include "app/text_table.hpp"
#include "core/metrics.hpp"
#include "core/run_options.hpp"
#include "core/sampler.hpp"
#include "io/dataset.hpp"

namespace ballast {
namespace {

/// Metrics of HBP Equations 1 to 3, each a mean over the full global batches of one epoch.
struct PackFacts {
  std::string case_name, method, data;
  int dp = 1, cp = 1;
  std::int64_t samples = 0, tokens = 0, packs = 0, batches = 0, longest = 0;
  std::int64_t tail_packs = 0;  ///< of an epoch's last batch where too few samples are left to fill it; no part of the means
  double dbr = 0;               ///< balance ratio of tokens over data-parallel ranks
  double pr = 0;                ///< padding ratio of packs against their capacity
  double abr = 0;               ///< balance ratio of the attention load (sum of squared lengths) over data-parallel ranks
  double cr = 0;                ///< share of tokens in micro-batches that need communication (cp or sp above 1)
  double ave_t = 0;             ///< tokens of a micro-batch
  double plan_seconds = 0;
};

/// Sum over the micro-batches of a rank, for each rank.
template <class F>
std::vector<double> by_rank(const Batch& batch, F&& of) {
  std::vector<double> sums;
  for (const auto& list : batch.micro_batches) {
    double sum = 0;
    for (const MicroBatch& m : list) sum += of(m);
    sums.push_back(sum);
  }
  return sums;
}

double squared_lengths(const MicroBatch& m) {
  double sum = 0;
  for (const Segment& s : m.segments) sum += static_cast<double>(s.tokens()) * static_cast<double>(s.tokens());
  return sum;
}

PackFacts pack(const Deck& deck) {
  const RunOptions options = RunOptions::from(deck);
  DataOptions data = data_options(deck);
  if (data.vocabulary == 0) data.vocabulary = 1 << 17;  // a deck without a model: only lengths are read here
  const std::unique_ptr<Dataset> dataset = open_dataset(data);
  const bool shuffle = deck.boolean("batching.shuffle");
  Sampler sampler(dataset->samples(), data.seed, deck.real("data.validation_share"), shuffle,
                  [&](std::int64_t s) { return dataset->document(s); });
  require(sampler.training_samples() > 0, "data: no training samples ({}); check the block [data]", dataset->description());

  PackFacts f;
  f.case_name = deck.case_name;
  f.method = options.batching.method;
  f.data = dataset->description();
  f.dp = options.mesh.dp;
  f.cp = options.mesh.cp() * options.mesh.sp;
  const double capacity = static_cast<double>(options.batching.micro_batch_tokens);
  const std::int64_t global_tokens = deck.integer("batching.global_tokens"), global_samples = deck.integer("batching.global_samples");
  double communicating = 0;
  std::int64_t full_batches = 0;
  SamplerPosition position;
  while (position.epoch == 0 && position.index < sampler.training_samples()) {
    // The batch that would reach into the next epoch ends with this one, so that every sample counts once.
    SamplerPosition next = position;
    auto chosen = sampler.next(next, global_tokens, global_samples, [&](std::int64_t s) { return dataset->length(s); });
    if (next.epoch > 0)
      chosen.resize(std::min<std::size_t>(chosen.size(), static_cast<std::size_t>(sampler.training_samples() - position.index)));
    position = next;
    std::vector<SampleLength> lengths;
    for (std::int64_t s : chosen) {
      // Loss tokens do not steer the plan; counting them may mean reading masks.
      lengths.push_back({s, dataset->length(s), 0});
      f.longest = std::max(f.longest, lengths.back().tokens);
    }

    const auto begin = std::chrono::steady_clock::now();
    const Batch batch = plan_batch(f.batches, lengths, options.batching);
    f.plan_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

    const auto tokens = [](const MicroBatch& m) { return static_cast<double>(m.tokens()); };
    std::vector<double> packs;
    for (const auto& list : batch.micro_batches)
      for (const MicroBatch& m : list) {
        packs.push_back(std::min(tokens(m), capacity));  // a sample above the capacity has a pack of its own, without padding
        if (f.cp * m.sp > 1) communicating += tokens(m);
      }
    f.packs += static_cast<std::int64_t>(packs.size());
    f.samples += batch.samples();
    f.tokens += batch.tokens();
    ++f.batches;
    const bool full = global_samples > 0 ? static_cast<std::int64_t>(chosen.size()) == global_samples : batch.tokens() >= global_tokens;
    if (!full && full_batches > 0) {
      f.tail_packs = static_cast<std::int64_t>(packs.size());
      continue;
    }
    ++full_batches;
    f.dbr += balance_ratio(by_rank(batch, tokens));
    f.abr += balance_ratio(by_rank(batch, squared_lengths));
    f.pr += padding_ratio(packs, capacity);
  }
  const double batches = static_cast<double>(std::max<std::int64_t>(1, full_batches));
  f.dbr /= batches;
  f.abr /= batches;
  f.pr /= batches;
  f.cr = f.tokens > 0 ? communicating / static_cast<double>(f.tokens) : 0;
  f.ave_t = f.packs > 0 ? static_cast<double>(f.tokens) / static_cast<double>(f.packs) : 0;
  return f;
}

nlohmann::ordered_json json(const PackFacts& f) {
  nlohmann::ordered_json out;
  if (!f.case_name.empty()) out["name"] = f.case_name;
  out.update({{"method", f.method},
              {"dp", f.dp},
              {"dbr", f.dbr},
              {"pr", f.pr},
              {"abr", f.abr},
              {"cr", f.cr},
              {"ave_t", f.ave_t},
              {"samples", f.samples},
              {"tokens", f.tokens},
              {"longest", f.longest},
              {"packs", f.packs},
              {"tail_packs", f.tail_packs},
              {"batches", f.batches},
              {"plan_seconds", f.plan_seconds},
              {"data", f.data}});
  return out;
}

}  // namespace

int pack_command(const CommandLine& line) {
  std::vector<PackFacts> cases;
  for (const Deck& deck : line.decks({.model = false, .data = true})) cases.push_back(pack(deck));
  for (std::size_t i = 0; i < cases.size(); ++i)
    if (i == 0 || cases[i].data != cases[i - 1].data) fmt::print("data {}\n", cases[i].data);
  const bool named = !cases.front().case_name.empty();
  std::vector<std::string> header{"method", "dp", "dbr", "pr", "abr", "cr", "ave_t", "samples", "packs", "batches", "plan_seconds"};
  if (named) header.insert(header.begin(), "case");
  TextTable table(header);
  auto list = nlohmann::ordered_json::array();
  for (const PackFacts& f : cases) {
    std::vector<std::string> row{f.method,
                                 fmt::to_string(f.dp),
                                 fmt::format("{:.4f}", f.dbr),
                                 fmt::format("{:.4f}", f.pr),
                                 fmt::format("{:.4f}", f.abr),
                                 fmt::format("{:.4f}", f.cr),
                                 fmt::format("{:.1f}", f.ave_t),
                                 fmt::to_string(f.samples),
                                 fmt::to_string(f.packs),
                                 fmt::to_string(f.batches),
                                 fmt::format("{:.6f}", f.plan_seconds)};
    if (named) row.insert(row.begin(), f.case_name);
    table.row(row);
    list.push_back(json(f));
  }
  fmt::print("{}", table.text());
  fmt::print(
      "dbr, abr: sum(max - x) / (max N) over data-parallel ranks, x = tokens, x = sum of squared lengths; pr: sum(capacity - tokens) / "
      "(capacity packs);\n"
      "cr: share of tokens in micro-batches spread over several ranks; ave_t: tokens of a micro-batch; means over the full batches of one "
      "epoch\n");
  write_json(line.json, cases.size() == 1 ? list.front() : nlohmann::ordered_json{{"cases", list}});
  return 0;
}

}  // namespace ballast

// ballast reference DECK: log probabilities of every pair under the model that training begins
// with.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <span>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/plan/reference_file.hpp"
#include "app/train/model_files.hpp"
#include "app/train/pair_objective.hpp"
#include "app/train/pair_reference.hpp"
#include "app/train/step_planner.hpp"
#include "core/config/run_options.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kPairsAtOnce = 1024;  // of one plan

/// Adds the log probabilities of samples [begin, end), each on the rank that speaks for it.
void add_pairs(Session& session, StepPlanner& planner, const PairObjective& objective,
               std::int64_t begin, std::int64_t end, std::vector<PairLogProbabilities>& all) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(end - begin));
  std::iota(samples.begin(), samples.end(), begin);
  const StepPlan plan = planner.evaluation(samples);
  const std::vector<MicroBatch> mine = plan.list(session.mesh.at.dp);
  ChunkStores stores = session.chunk_stores(plan);
  const auto prepare = [&](int m) { return session.prepare(plan, m, 0, stores.at(m)); };
  const auto take = [&](int m, const LocalBatch& local, const StageOutput& output) {
    const auto found = objective.log_probabilities(mine[m], local.segment, output.token_loss);
    if (!objective.speaks(mine[m])) return;
    for (std::size_t s = 0; s + 1 < found.size(); s += 2)
      all.at(static_cast<std::size_t>(mine[m].segments[s].sample)) = {found[s], found[s + 1]};
  };
  run_stage(plan.schedule(session.mesh.at.dp), static_cast<int>(mine.size()), session.model,
            session.links, {prepare, {}, take, nullptr}, nullptr);
}

}  // namespace

int reference_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Config config = line.config(world);
  check_all(world, trains_pairs(config) && !config.dpo.reference_free,
            "reference needs loss.kind = \"dpo\" and dpo.reference, the file to write");
  together(world, [&] {
    if (world.rank() != 0) return;
    require(line.json.empty() || std::filesystem::weakly_canonical(line.json) !=
                                     std::filesystem::weakly_canonical(config.dpo.reference),
            "--json {}: this is dpo.reference; choose another name", line.json);
    check_reference_target(config);
  });
  Session session(world, config);
  session.recorder.enabled = false;
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica, config.optimizer.zero, {},
                             nullptr, muon_options(config));
  load_base(session);
  if (!config.model.weights.empty()) load_weights(session, optimizer);
  StepPlanner planner(session, nullptr);
  const PairObjective objective(config.dpo, session.mesh, {});
  const std::int64_t samples = session.dataset->samples();
  std::vector<PairLogProbabilities> all(static_cast<std::size_t>(samples));
  for (std::int64_t begin = 0; begin < samples; begin += kPairsAtOnce)
    add_pairs(session, planner, objective, begin, std::min(begin + kPairsAtOnce, samples), all);
  world.all_reduce(std::span<double>(&all.data()->chosen, 2 * all.size()));
  write_pair_reference(session, all);
  if (world.rank() == 0) {
    fmt::print("{}: log probabilities of {} pairs\n", config.dpo.reference, samples);
    write_json(line.json, {{"reference", config.dpo.reference}, {"pairs", samples}});
  }
  return 0;
}

}  // namespace ballast

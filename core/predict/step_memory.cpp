#include "core/predict/step_memory.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/hash.hpp"
#include "core/predict/layer_clock.hpp"
#include "core/predict/stage_work.hpp"

namespace ballast {
namespace {

/// What the peak bytes of a lane depend on.
std::uint64_t memory_hash(const StepPlan& plan, const PlannedLane& lane) {
  Hash hash;
  hash.add(lane.schedule);
  std::map<std::int64_t, int> samples;  // in the order of their first chunk
  for (const int id : lane.micro_batches) {
    const PlannedMicroBatch& m = plan.micro_batches[static_cast<std::size_t>(id)];
    hash.add(shape_hash(m)).add(m.chunk);
    if (!m.segments.empty())
      hash.add(samples.try_emplace(m.segments.front().sample, static_cast<int>(samples.size()))
                   .first->second);
  }
  return hash.value();
}

/// [stage] What is replayed of a plan.
const std::vector<StageMemory>& stages_of(const StepPlan& plan, const SimulationOptions& options) {
  require(options.memory.size() == plan.layer_begin.size(), "memory of {} stages for a plan of {}",
          options.memory.size(), plan.layer_begin.size());
  return options.memory;
}

/// [stage] What runs between steps in a lane.
std::vector<std::vector<ForwardPasses>> work_between(const SimulationOptions& options,
                                                     std::size_t lane) {
  std::vector<std::vector<ForwardPasses>> stages(options.memory.size());
  for (const PlannedPasses& passes : options.between) {
    std::vector<StageWork> work =
        lane_work(*passes.plan, static_cast<int>(lane), options.memory.front().index_rules());
    for (std::size_t s = 0; s < stages.size(); ++s)
      stages[s].push_back({std::move(work.at(s)), passes.when});
  }
  return stages;
}

int largest_ring(const std::vector<StepPlan>& steps, std::size_t lane) {
  int ranks = 1;
  for (const StepPlan& plan : steps)
    for (const int id : plan.lanes.at(lane).micro_batches)
      ranks = std::max(ranks, plan.micro_batches.at(static_cast<std::size_t>(id)).split.ring());
  return ranks;
}

/// [rank] Hash of what a lane's ranks hold of every micro-batch by its layout.
std::vector<Hash> shard_hashes(const std::vector<StepPlan>& steps, std::size_t lane, int ring) {
  std::vector<Hash> hashes(static_cast<std::size_t>(ring));
  for (const StepPlan& plan : steps)
    for (const int id : plan.lanes.at(lane).micro_batches) {
      const SequenceLayout layout =
          plan.layout(plan.micro_batches.at(static_cast<std::size_t>(id)));
      for (int rank = 0; rank < ring; ++rank)
        hashes[static_cast<std::size_t>(rank)].add(layout.local_tokens(rank % layout.ranks()));
    }
  return hashes;
}

/// [stage][rank] What each of a lane's ranks has of Muon's work, without repetitions; empty where
/// they do not share it.  Ranks of a lane are neighbours (sp fastest, then cp; lanes are joined
/// along dp), and the Ulysses ranks of one ring rank hold like shards.  `ring_rank` of `ring`: its
/// ranks alone, where the ring is no shorter than the mesh's.
using LaneShares = std::vector<std::vector<MuonShare>>;
LaneShares lane_shares(const std::vector<StageMemory>& stages, const MeshShape& mesh,
                       std::size_t lane, int ring_rank, int ring) {
  const auto in_lane = static_cast<std::size_t>(mesh.cp() * mesh.sp);
  const bool all_ranks = ring < mesh.cp();
  const auto first = static_cast<std::size_t>(all_ranks ? 0 : ring_rank % mesh.cp() * mesh.sp),
             count = all_ranks ? in_lane : static_cast<std::size_t>(mesh.sp);
  LaneShares shares(stages.size());
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const std::vector<MuonShare>& all = stages[s].muon;
    if (all.size() < static_cast<std::size_t>(mesh.replicas())) continue;
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(lane * in_lane + first);
    const std::set<MuonShare> found(begin, begin + static_cast<std::ptrdiff_t>(count));
    shares[s].assign(found.begin(), found.end());
  }
  return shares;
}

bool any_uneven(const std::vector<ForwardPasses>& list) {
  return std::any_of(list.begin(), list.end(),
                     [](const ForwardPasses& passes) { return passes.work.uneven(); });
}
std::vector<ForwardPasses> of_fewest(std::vector<ForwardPasses> list) {
  for (ForwardPasses& passes : list) passes.work.fewest = true;
  return list;
}

/// The stage as ranks with these shares hold it.
std::vector<StageMemory> ranks_of(const StageMemory& stage, const std::vector<MuonShare>& shares) {
  std::vector<StageMemory> ranks(std::max<std::size_t>(1, shares.size()), stage);
  for (std::size_t r = 0; r < shares.size(); ++r) ranks[r].muon = {shares[r]};
  return ranks;
}

}  // namespace

std::vector<MemoryEstimate> step_memory(const StepPlan& plan, const SimulationOptions& options) {
  if (options.memory.empty()) return {};
  const std::vector<StageMemory>& stages = stages_of(plan, options);
  std::vector<MemoryEstimate> peaks(stages.size());
  std::set<std::vector<std::uint64_t>> done;
  for (std::size_t d = 0; d < plan.lanes.size(); ++d) {
    std::vector<std::uint64_t> lane{memory_hash(plan, plan.lanes[d])};
    for (const PlannedPasses& passes : options.between)
      lane.push_back(memory_hash(*passes.plan, passes.plan->lanes.at(d)));
    if (!done.insert(std::move(lane)).second) continue;
    const std::vector<StageWork> step =
        lane_work(plan, static_cast<int>(d), stages.front().index_rules());
    const std::vector<std::vector<ForwardPasses>> before = work_between(options, d);
    for (std::size_t s = 0; s < stages.size(); ++s) {
      StageWork work = step.at(s);
      std::vector<ForwardPasses> between = before.at(s);
      peaks[s].take_larger(replay_memory(stages[s], work, between));
      if (!work.uneven() && !any_uneven(between)) continue;
      work.fewest = true;
      peaks[s].take_larger(replay_memory(stages[s], work, of_fewest(std::move(between))));
    }
  }
  return peaks;
}

MemoryEstimate replay_ranks(const StageMemory& stage, std::vector<StageWork> steps,
                            std::vector<ForwardPasses> between) {
  MemoryEstimate most = replay_run(stage, steps, between);
  if (!any_uneven(between) &&
      std::none_of(steps.begin(), steps.end(), [](const StageWork& w) { return w.uneven(); }))
    return most;
  for (StageWork& step : steps) step.fewest = true;
  most.take_peaks(replay_run(stage, steps, of_fewest(std::move(between))));
  return most;
}

std::vector<MemoryEstimate> run_memory(const std::vector<StepPlan>& steps,
                                       const SimulationOptions& options) {
  if (options.memory.empty() || steps.empty()) return {};
  const std::vector<StageMemory>& stages = stages_of(steps.front(), options);
  std::vector<MemoryEstimate> peaks(stages.size());
  const MeshShape& mesh = steps.front().mesh;
  for (std::size_t d = 0; d < steps.front().lanes.size(); ++d) {
    const std::vector<std::vector<ForwardPasses>> between = work_between(options, d);
    // Ranks with like shards are alike; the work of one takes as long as its ring is large.
    std::set<std::pair<std::uint64_t, LaneShares>> seen;
    const int ring = largest_ring(steps, d);
    const std::vector<Hash> held = shard_hashes(steps, d, ring);
    for (int rank = 0; rank < ring; ++rank) {
      const LaneShares shares = lane_shares(stages, mesh, d, rank, ring);
      if (!seen.emplace(held[static_cast<std::size_t>(rank)].value(), shares).second) continue;
      std::vector<std::vector<StageWork>> work(stages.size());  // [stage][step]
      for (const StepPlan& plan : steps) {
        std::vector<StageWork> step =
            lane_work(plan, static_cast<int>(d), stages.front().index_rules(), rank);
        for (std::size_t s = 0; s < stages.size(); ++s) work[s].push_back(std::move(step.at(s)));
      }
      for (std::size_t s = 0; s < stages.size(); ++s)
        for (const StageMemory& of_rank : ranks_of(stages[s], shares[s]))
          peaks[s].take_peaks(replay_ranks(of_rank, work[s], between.at(s)));
    }
  }
  return peaks;
}

void count_kept_indexes(const StepPlan& drift, std::vector<StageMemory>& stages) {
  for (std::size_t d = 0; d < drift.lanes.size(); ++d) {
    const std::vector<StageWork> work =
        lane_work(drift, static_cast<int>(d), stages.front().index_rules());
    for (std::size_t s = 0; s < stages.size(); ++s) {
      StageMemory& stage = stages[s];
      std::int64_t bytes = 0;
      for (const RankMicroBatch& m : work.at(s).list) {
        bytes += m.gpu_index.micro_batch;
        for (std::int64_t layer = 0; layer < stage.layers; ++layer)
          bytes += m.gpu_index.layer(stage.first_layer + layer);
      }
      stage.kept_index_bytes = std::max(stage.kept_index_bytes, bytes);
    }
  }
}

}  // namespace ballast

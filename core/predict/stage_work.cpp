#include "core/predict/stage_work.hpp"

#include <algorithm>

#include "core/plan/batch/chunk_groups.hpp"

namespace ballast {

std::vector<RankMicroBatch> rank_micro_batches(const StepPlan& plan, int dp,
                                               const IndexRule* index) {
  std::vector<RankMicroBatch> list;
  const std::vector<int>& ids = plan.lanes.at(static_cast<std::size_t>(dp)).micro_batches;
  for (const int id : ids) {
    const PlannedMicroBatch& m = plan.micro_batches.at(static_cast<std::size_t>(id));
    const SequenceLayout layout = plan.layout(m);
    RankMicroBatch& rank = list.emplace_back();
    for (int r = 0; r < layout.ranks(); ++r)
      rank.shard_tokens = std::max(rank.shard_tokens, layout.local_tokens(r));
    rank.tokens = (rank.shard_tokens + m.split.sp - 1) / m.split.sp;
    for (const Segment& segment : m.segments) rank.longest = std::max(rank.longest, segment.end);
    rank.split = m.split;
    rank.recompute_layers = m.recompute_layers;
  }
  int sample = 0;
  for (const std::vector<int>& group : chunk_groups(plan.list(dp))) {
    if (group.size() < 2) continue;
    std::int64_t tokens = 0;
    for (const int place : group) tokens += list[static_cast<std::size_t>(place)].shard_tokens;
    for (std::size_t c = 0; c < group.size(); ++c) {
      RankMicroBatch& rank = list[static_cast<std::size_t>(group[c])];
      rank.sample = sample;
      rank.chunk = static_cast<int>(c), rank.chunks = static_cast<int>(group.size());
      rank.sample_tokens = tokens;
    }
    ++sample;
  }
  for (std::size_t i = 0; index != nullptr && i < list.size(); ++i)
    list[i].index = index_work(*index, plan.micro_batch(dp, static_cast<int>(i)).segments,
                               list[i].split.ring(), list[i].sample >= 0);
  return list;
}

std::vector<StageWork> lane_work(const StepPlan& plan, int dp, const IndexRule* index) {
  const std::vector<RankMicroBatch> list = rank_micro_batches(plan, dp, index);
  std::vector<StageWork> work;
  for (const std::vector<Op>& ops : plan.schedule(dp).stages) work.push_back({ops, list});
  return work;
}

}  // namespace ballast

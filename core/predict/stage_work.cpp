#include "core/predict/stage_work.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/plan/batch/chunk_groups.hpp"

namespace ballast {
namespace {

/// The attention calls of a micro-batch.
std::vector<GpuIndexPart::Calls> calls_of(const RankMicroBatch& m, std::int64_t window_tokens) {
  std::vector<GpuIndexPart::Calls> calls;
  for (int turn = 0; turn < turns(m, window_tokens); ++turn)
    calls.push_back(
        {m.sample < 0 ? m.hop_tokens : turn_tokens(m, turn, window_tokens), m.split.ring()});
  return calls;
}

std::vector<RankMicroBatch> rank_micro_batches(const StepPlan& plan, int dp,
                                               const IndexRules& index, int ring_rank) {
  std::vector<RankMicroBatch> list;
  std::vector<std::int64_t> whole;  // tokens on all ranks of the ring
  const std::vector<int>& ids = plan.lanes.at(static_cast<std::size_t>(dp)).micro_batches;
  for (const int id : ids) {
    const PlannedMicroBatch& m = plan.micro_batches.at(static_cast<std::size_t>(id));
    const SequenceLayout layout = plan.layout(m);
    RankMicroBatch& rank = list.emplace_back();
    whole.push_back(0);
    for (int r = 0; r < layout.ranks(); ++r) {
      rank.shard_tokens = std::max(rank.shard_tokens, layout.local_tokens(r));
      whole.back() += layout.local_tokens(r);
    }
    rank.hop_tokens = rank.shard_tokens;
    for (const Segment& segment : m.segments) rank.longest = std::max(rank.longest, segment.end);
    rank.split = m.split;
    rank.recompute_layers = m.recompute_layers;
  }
  int sample = 0;
  for (const std::vector<int>& group : chunk_groups(plan.list(dp))) {
    if (group.size() < 2) continue;
    std::int64_t tokens = 0, largest = 0;
    for (const int place : group) {
      tokens += list[static_cast<std::size_t>(place)].shard_tokens;
      largest = std::max(largest, whole[static_cast<std::size_t>(place)]);
    }
    for (std::size_t c = 0; c < group.size(); ++c) {
      RankMicroBatch& rank = list[static_cast<std::size_t>(group[c])];
      rank.sample = sample;
      rank.chunk = static_cast<int>(c), rank.chunks = static_cast<int>(group.size());
      rank.sample_tokens = tokens, rank.chunk_tokens = largest;
    }
    ++sample;
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    RankMicroBatch& rank = list[i];
    const PlannedMicroBatch& m = plan.micro_batches.at(static_cast<std::size_t>(ids[i]));
    if (ring_rank != kFullest && rank.sample < 0)
      rank.shard_tokens = plan.layout(m).local_tokens(ring_rank % rank.split.ring());
    rank.tokens = (rank.shard_tokens + m.split.sp - 1) / m.split.sp;
    if (index.host != nullptr)
      rank.index = index_work(*index.host, m.segments, rank.split.ring(), rank.sample >= 0);
    if (index.gpu != nullptr)
      rank.gpu_index = gpu_index_bytes(*index.gpu, m.segments,
                                       {rank.shard_tokens, rank.split.ring(), rank.split.sp,
                                        calls_of(rank, index.window_tokens)});
  }
  return list;
}

/// Every stage's ops where a forward takes one second a token.
SimulatedSchedule timed(const Schedule& schedule, const std::vector<RankMicroBatch>& list) {
  const auto duration = [&](int, const Op& op) {
    if (!computes(op.kind)) return 0.0;
    const auto place = static_cast<std::size_t>(op.micro_batch);
    return (op.kind == OpKind::backward ? 2.0 : 1.0) * static_cast<double>(list.at(place).tokens);
  };
  return simulate(schedule, {duration});
}

/// Place of the first computation behind `at` that ends after `left_s`, or, where transfers are not
/// `queued`, of the first receive or computation.
std::size_t look_after(const std::vector<TimedOp>& ops, std::size_t at, double left_s,
                       bool queued) {
  const auto found = std::find_if(
      ops.begin() + static_cast<std::ptrdiff_t>(at) + 1, ops.end(), [&](const TimedOp& t) {
        return t.end_s > left_s && (computes(t.op.kind) || (!queued && t.op.kind == OpKind::recv));
      });
  return static_cast<std::size_t>(found - ops.begin());
}

}  // namespace

bool StageWork::uneven() const {
  return std::any_of(list.begin(), list.end(), [](const RankMicroBatch& m) {
    return m.shard_tokens % std::max(1, m.split.sp) != 0;
  });
}

std::int64_t window_chunks(const RankMicroBatch& m, std::int64_t window_tokens) {
  return std::max<std::int64_t>(1, window_tokens / std::max<std::int64_t>(1, m.chunk_tokens));
}
int turns(const RankMicroBatch& m, std::int64_t window_tokens) {
  if (window_tokens == 0 || m.sample < 0) return 1;
  const std::int64_t window = window_chunks(m, window_tokens);
  return static_cast<int>(1 + (m.chunk + window - 1) / window);
}
std::int64_t turn_tokens(const RankMicroBatch& m, int turn, std::int64_t window_tokens) {
  const std::int64_t chunk = m.sample_tokens / m.chunks;
  if (window_tokens == 0) return chunk * (m.chunk + 1);
  if (turn == 0) return m.shard_tokens;
  const std::int64_t window = window_chunks(m, window_tokens);
  return chunk * std::min(m.chunk - (turn - 1) * window, window);
}

std::vector<std::vector<std::size_t>> given_back(const Schedule& schedule,
                                                 const std::vector<RankMicroBatch>& list,
                                                 bool queued) {
  const SimulatedSchedule run = timed(schedule, list);
  std::map<std::tuple<int, int, Payload>, double> received_s;  // [sender, micro-batch, payload]
  for (const std::vector<TimedOp>& ops : run.stages)
    for (const auto& [op, begin_s, end_s] : ops)
      if (op.kind == OpKind::recv) received_s[{op.peer, op.micro_batch, op.payload}] = end_s;
  std::vector<std::vector<std::size_t>> places;
  for (std::size_t s = 0; s < run.stages.size(); ++s) {
    const std::vector<TimedOp>& ops = run.stages[s];
    std::vector<std::size_t>& stage = places.emplace_back(ops.size(), 0);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const auto& [op, begin_s, end_s] = ops[i];
      if (op.kind == OpKind::offload)
        stage[i] = look_after(ops, i, end_s, true);  // its copy, between computations alone
      else if (op.kind == OpKind::send)
        stage[i] = look_after(
            ops, i, received_s.at({static_cast<int>(s), op.micro_batch, op.payload}), queued);
    }
  }
  return places;
}

std::vector<StageWork> lane_work(const StepPlan& plan, int dp, const IndexRules& index,
                                 int ring_rank) {
  const std::vector<RankMicroBatch> list = rank_micro_batches(plan, dp, index, ring_rank);
  std::vector<StageWork> work;
  const Schedule& schedule = plan.schedule(dp);
  std::vector<std::vector<std::size_t>> places = given_back(schedule, list, index.gpu != nullptr);
  for (std::size_t s = 0; s < schedule.stages.size(); ++s)
    work.push_back({schedule.stages[s], list, std::move(places[s]), plan.meets_in_backward()});
  return work;
}

}  // namespace ballast

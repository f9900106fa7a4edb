// What the builders of pipeline schedules share: the order of chunks, and a stage's list with its
// transfers.
#pragma once
#include <algorithm>
#include <vector>

#include "core/base/error.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {

/// One chunk in the order of execution.
struct ScheduleItem {
  int micro_batch = 0, chunk = 0, chunks = 1;
  bool last() const { return chunk == chunks - 1; }
};

/// Forward order: groups one after another, chunks ascending.
inline std::vector<ScheduleItem> forward_order(const ChunkGroups& groups) {
  std::vector<ScheduleItem> order;
  for (const auto& group : groups) {
    require(!group.empty(), "pipeline schedule: a group without micro-batches");
    for (int c = 0; c < static_cast<int>(group.size()); ++c)
      order.push_back({group[c], c, static_cast<int>(group.size())});
  }
  return order;
}

/// Backward order: groups in the same order, chunks descending.
inline std::vector<ScheduleItem> backward_order(std::vector<ScheduleItem> order) {
  for (auto begin = order.begin(); begin != order.end();) {
    const auto end = begin + begin->chunks;
    std::reverse(begin, end);
    begin = end;
  }
  return order;
}

/// The list of one stage, with its transfers.
class StageList {
 public:
  StageList(std::vector<Op>& ops, int stage, int stages)
      : ops_(ops), stage_(stage), last_(stages - 1) {}
  void forward(const ScheduleItem& i) {
    if (stage_ > 0)
      ops_.push_back({OpKind::recv, i.micro_batch, i.chunk, stage_ - 1, Payload::activation});
    ops_.push_back({OpKind::forward, i.micro_batch, i.chunk});
    if (stage_ < last_)
      ops_.push_back({OpKind::send, i.micro_batch, i.chunk, stage_ + 1, Payload::activation});
  }
  void weights(const ScheduleItem& i) {
    ops_.push_back({OpKind::backward_weight, i.micro_batch, i.chunk});
  }
  void recompute(const ScheduleItem& i) {
    ops_.push_back({OpKind::recompute, i.micro_batch, i.chunk});
  }
  /// The whole of it, or its input half, which is all that the stage before waits for.
  void backward(const ScheduleItem& i, OpKind kind = OpKind::backward) {
    if (stage_ < last_)
      ops_.push_back({OpKind::recv, i.micro_batch, i.chunk, stage_ + 1, Payload::gradient});
    ops_.push_back({kind, i.micro_batch, i.chunk});
    if (stage_ > 0)
      ops_.push_back({OpKind::send, i.micro_batch, i.chunk, stage_ - 1, Payload::gradient});
  }

 private:
  std::vector<Op>& ops_;
  int stage_, last_;
};

inline Schedule empty_schedule(int stages) {
  require(stages >= 1, "pipeline schedule: {} stages; must be at least 1", stages);
  Schedule schedule;
  schedule.stages.resize(stages);
  return schedule;
}

}  // namespace ballast

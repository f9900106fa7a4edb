// What a stage of a lane does in a step, and over what: its operations and its rank's part of every
// micro-batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/plan/context/context_split.hpp"
#include "core/plan/pipeline/schedule.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/gpu_index.hpp"
#include "core/predict/index_workspace.hpp"

namespace ballast {

/// One rank's part of a micro-batch.
struct RankMicroBatch {
  std::int64_t tokens = 0;        ///< its own
  std::int64_t shard_tokens = 0;  ///< of its ring rank's shard: all Ulysses ranks' parts
  std::int64_t hop_tokens = 0;    ///< of the fullest shard, which buffers of the ring hold
  std::int64_t longest = 0;       ///< keys of its longest segment, on whichever rank
  ContextSplit split;
  int recompute_layers = -1;
  /// Chunks of a sample that is cut into several: their number and this one's place; the tokens of
  /// the ring rank's shards of all of them.
  int sample = -1;  ///< of the list's cut samples; -1: stands alone
  int chunk = 0, chunks = 1;
  std::int64_t sample_tokens = 0;
  std::int64_t chunk_tokens = 0;  ///< of its largest chunk, on all ranks of the ring
  IndexWork index;                ///< where the host chooses its pattern
  GpuIndexBytes gpu_index{};      ///< on a GPU
  bool operator==(const RankMicroBatch&) const = default;
};

/// How stored keys that are away come back to attend to, `window_tokens` of all ranks at once (0:
/// none are away): chunks of a window; turns of a micro-batch, its own keys first; tokens of a ring
/// rank's shard whose keys go round in a turn.
std::int64_t window_chunks(const RankMicroBatch& m, std::int64_t window_tokens);
int turns(const RankMicroBatch& m, std::int64_t window_tokens);
std::int64_t turn_tokens(const RankMicroBatch& m, int turn, std::int64_t window_tokens);

/// What a stage does, and with what: Op::micro_batch is a place in the list.
struct StageWork {
  std::vector<Op> ops;
  std::vector<RankMicroBatch> list;
  /// [op] Of a send or an offload: place of the op by whose end its tensor is given back,
  /// ops.size() where none is.  Empty: there are neither.
  std::vector<std::size_t> given_back{};
  bool meets_in_backward = true;  ///< StepPlan::meets_in_backward
  bool fewest = false;  ///< as ranks with the fewest tokens of a Ulysses group have its blocks
  /// Whether the ranks of a Ulysses group have unlike numbers of tokens.
  bool uneven() const;
  bool operator==(const StageWork&) const = default;
};

/// [stage] StageWork::given_back of a schedule over a list.  A stage that is ahead of its peer
/// keeps what it sends until the peer comes to the receive.  When that is in a run depends on its
/// timing; here a token takes all stages equally long, as it does where they are balanced.  On a
/// GPU (`queued`) transfers are queued, and only between computations does a stage look whether a
/// tensor has left; a host waits in each receive, and looks then too.
std::vector<std::vector<std::size_t>> given_back(const Schedule& schedule,
                                                 const std::vector<RankMicroBatch>& list,
                                                 bool queued);

/// How patterns are chosen, on the host or on a GPU; null: nothing is counted.
struct IndexRules {
  const IndexRule* host = nullptr;
  const GpuIndexRule* gpu = nullptr;
  std::int64_t window_tokens = 0;  ///< of stored keys that come at once; 0: none is away
};

/// [stage] What each does in lane `dp` of a plan.  `ring_rank`: whose shards; kFullest: of each
/// micro-batch the largest, whichever rank's, as chunks of a cut sample always are.
inline constexpr int kFullest = -1;
std::vector<StageWork> lane_work(const StepPlan& plan, int dp, const IndexRules& index = {},
                                 int ring_rank = kFullest);

}  // namespace ballast

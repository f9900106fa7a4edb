// What `ballast check` finds out about a deck, as values: no rank is started.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "app/plan/opened_files.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "core/plan/pipeline/schedule.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/simulate.hpp"

namespace ballast {

/// Tokens of a micro-batch on one context-parallel rank.
struct ShardFacts {
  int cp = 0;
  std::int64_t tokens = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>>
      pieces;        ///< global ranges; empty when there are too many to list
  double pairs = 0;  ///< causal pairs of these queries, the micro-batch taken as one segment
};

/// One pipeline stage.
struct StageFacts {
  std::int64_t layer_begin = 0, layer_end = 0;
  std::int64_t parameters = 0;        ///< elements on each of its ranks
  std::int64_t frozen = 0;            ///< of them, those that are not trained (beside adapters)
  std::int64_t shard_parameters = 0;  ///< elements whose optimizer state a rank owns
  int live_micro_batches = 1;         ///< whose activations live at once
  std::vector<Op> ops;                ///< of one step
  MemoryEstimate memory;   ///< of its fullest rank: `full`, or `planned` where all steps are
  MemoryEstimate full;     ///< of steps of full micro-batches, and of those that are planned
  MemoryEstimate planned;  ///< of the first CheckFacts::planned_steps
};

/// How sure the number of a step's micro-batches is before its samples are known.
enum class MicroBatchCount {
  exact,         ///< of so many samples each, which the ranks take in turn
  at_most,       ///< a bound: where samples share none, and on the rank that has most
  about,         ///< ranks take them by weight, one of them few heavy ones or many light ones
  of_full_packs  ///< a step is given in tokens, and packs are full
};

struct CheckFacts {
  std::string file, case_name;
  RunOptions options;
  DType type = DType::f32;
  bool fp8 = false;  ///< run.precision = "fp8"
  int zero = 0;
  std::string recompute;
  std::int64_t micro_batch_tokens = 0;  ///< the largest micro-batch that the deck allows
  std::int64_t micro_batches = 0;       ///< of a step on the data-parallel rank that has most
  MicroBatchCount micro_batches_are = MicroBatchCount::exact;
  std::vector<ShardFacts> shards;                    ///< by context-parallel rank
  RingPlan ring;                                     ///< of context-parallel rank 0
  std::int64_t kv_hop_bytes = 0, dkv_hop_bytes = 0;  ///< of the largest shard, one layer
  std::vector<StageFacts> stages;
  OpenedFiles files;    ///< that the deck names
  std::string balance;  ///< that is expected of the first step, a sentence; "" where not planned
  std::int64_t planned_steps = 0;  ///< whose memory was counted as their batches are planned
  bool all_planned = false;        ///< they are the whole run
  std::vector<std::string> notes;  ///< what train would refuse or what could not be worked out
  std::string unplannable;         ///< the step at which train would stop on any machine; "": none

  /// `files`: as opened; without them a deck without data.max_tokens has no longest sample.
  static CheckFacts of(const Config& config, OpenedFiles files = {});
  int ranks() const { return options.mesh.size(); }
  /// Node of a rank, -1 where the machine decides.
  int node(int rank) const {
    return options.mesh.ranks_per_node > 0 ? rank / options.mesh.ranks_per_node : -1;
  }
  /// max / mean of the causal pairs over context-parallel ranks.
  double pair_imbalance() const;
  /// Of the fullest rank of all stages.
  std::int64_t fullest_rank(MemoryEstimate StageFacts::*memory) const;
  std::int64_t largest_rank_bytes() const { return fullest_rank(&StageFacts::memory); }
  /// Counts one of the run's steps: its micro-batches, and what they hold at once.
  void add_planned(const StepPlan& plan, const SimulatedStep& simulated);
  /// Takes over StageFacts::planned; `all`: the run has no further steps.
  void take_planned(bool all);
  nlohmann::ordered_json json() const;
};

}  // namespace ballast

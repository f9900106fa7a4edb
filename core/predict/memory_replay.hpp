// Peak memory of one rank: the operations of its stage replayed with the tensors that executors
// allocate, by category, pools and all.  The categories are those of core/base/device.hpp, so that
// the figures stand beside the measured peaks of the trace.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "core/base/device.hpp"
#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/muon_table.hpp"
#include "core/model/parameter_buckets.hpp"
#include "core/model/recompute_options.hpp"
#include "core/predict/index_workspace.hpp"
#include "core/predict/memory_ledger.hpp"
#include "core/predict/stage_work.hpp"

namespace ballast {

/// What one rank of a stage holds whatever it computes, and how it computes.
struct StageMemory {
  ModelShape model;
  std::int64_t layers = 1;  ///< of the stage
  bool first = true, last = true;
  std::int64_t parameters = 0;           ///< trainable elements of the stage
  std::int64_t frozen = 0;               ///< others: values alone
  std::vector<ParameterBucket> buckets;  ///< of the trainable ones; none: all in one
  int replicas = 1;                      ///< ranks that hold the same parameters
  int zero = 0;                          ///< optimizer.zero
  bool bf16_moments = false;             ///< optimizer.moments
  bool bf16_gradients = false;           ///< optimizer.gradients
  DType type = DType::f32;               ///< of parameter values and activations
  bool fp8 = false;                      ///< products of layers' matrices round their operands
  RecomputeOptions recompute;
  std::int64_t head_chunk_tokens = 1024;
  std::int64_t first_layer = 0;  ///< of the stage, as buckets count layers
  bool host = true;              ///< reductions over MPI need receive space, attention its tiles
  /// Sparse patterns choose keys head by head, but micro-batches of no longer segments.
  std::int64_t dense_keys = std::numeric_limits<std::int64_t>::max();
  IndexRule index;         ///< how patterns are chosen on the host
  GpuIndexRule gpu_index;  ///< and on a GPU
  bool weighted = false;   ///< each token's loss has a weight of its own
  bool offload = false;
  std::int64_t window_tokens = 8192;  ///< offload: of stored keys that come at once
  std::vector<MuonShare> muon;        ///< of the ranks that may be meant; empty: AdamW
  std::int64_t overlap_bytes = 0;     ///< of a tied embedding that its other copy's gradient needs
  std::int64_t kept_index_bytes = 0;  ///< of patterns on a GPU whose drift is measured
  /// A token of a batch: itself, target and position; its name for the adapters' dropout; the
  /// weight of its loss, of `number` bytes (0: it has none), which the last stage keeps beside the
  /// loss instead.
  std::int64_t token_bytes(std::int64_t number) const {
    return 3 * 4 + (model.lora.dropout > 0 ? 8 : 0) + (weighted && !last ? number : 0);
  }
  IndexRules index_rules() const {
    return {host ? &index : nullptr, host ? nullptr : &gpu_index, offload ? window_tokens : 0};
  }
};

/// A GPU's memory in use beside Ballast's own tensors: CUDA's context and modules, the workspace of
/// cuBLASLt, kernels' scratch, what pools keep.  Measured on an H200 with CUDA 13 as memory in use
/// less tensors: 1.17 GiB at 0.5B, 1.16 GiB at 3B (docs/performance.md); NCCL adds its buffers.
inline constexpr std::int64_t kContextBytes = std::int64_t{1194} << 20;

/// After which steps of a run, counted from 1, something runs: `first`, first + every, ...
struct AfterSteps {
  std::int64_t first = 1, every = 1;
  bool follows(std::int64_t step) const { return step >= first && (step - first) % every == 0; }
};
/// Forward passes without a backward between steps: an evaluation, texts, a measurement of drift.
struct ForwardPasses {
  StageWork work;
  AfterSteps when;
};

/// Peak bytes of a training step, once pools have grown in a step like it and in all that runs
/// `between` steps.  What sparse patterns are chosen by counts, and on GPUs their lists; the host's
/// lists and copies inside MPI are not in it.
MemoryEstimate replay_memory(const StageMemory& stage, const StageWork& step,
                             const std::vector<ForwardPasses>& between = {});

/// The largest peaks of a run's steps in their order, pools as the steps before them, and what ran
/// `between` these, left them: a run of few steps never holds all of its pools beside all that its
/// largest step keeps.
MemoryEstimate replay_run(const StageMemory& stage, const std::vector<StageWork>& steps,
                          const std::vector<ForwardPasses>& between = {});

}  // namespace ballast

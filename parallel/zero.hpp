// Gradient reduction and sharded optimizer (ZeRO-1, ZeRO-2) over the ranks that hold the same parameters.
#pragma once
#include "core/recorder.hpp"
#include "kernels/optimizer.hpp"
#include "kernels/parameters.hpp"
#include "parallel/comm.hpp"

namespace ballast {

/// stage 0: everything replicated.  1: optimizer state sharded.  2: reduced gradients kept sharded too (gradients of each micro-batch are
/// reduce-scattered into an fp32 shard; the full buffer is only one micro-batch's).
class ShardedOptimizer {
 public:
  ShardedOptimizer(Parameters& parameters, const Communicator& replica, int zero_stage, AdamWOptions options, Recorder* recorder);
  void begin_step();             ///< zeroes accumulators
  void after_micro_batch();      ///< ZeRO-2: reduce-scatter and clear the full gradient buffer.  Collective when zero_stage == 2,
                                 ///< so every rank calls it `rounds` times; see rounds in the train loop
  /// Reduces what is left, returns the global gradient norm (over all parameters of this pipeline stage's replica group; the caller
  /// joins pipeline stages), before clipping.  Collective.
  double reduce_gradients();
  /// AdamW on this rank's shard with gradients scaled by `gradient_scale`, then gathers the new values.  Collective.
  void apply(double gradient_scale, double learning_rate, std::int64_t step);

  /// This rank's shard of the flat buffer: elements [begin, end).
  std::int64_t shard_begin() const;
  std::int64_t shard_end() const;
  AdamWState& state();
  /// Copies master values of the shard from the parameter values (after initialisation or loading values alone).
  void reset_master_from_values();
  /// Writes master values to parameter values and gathers them on all ranks (after a checkpoint load).  Collective.
  void values_from_master();
  /// Full reduced gradient of one parameter, on every rank (tests, gradient dumps).  Collective; valid between
  /// reduce_gradients() and begin_step().
  Tensor full_gradient(const std::string& name);

 private:
  Parameters& parameters_;
  Communicator replica_;
  int zero_stage_;
  AdamWOptions options_;
  Recorder* recorder_;
  AdamWState state_;
  Tensor shard_gradient_;
};

}  // namespace ballast

// Gradient reduction and sharded optimizer (ZeRO-1, ZeRO-2: Rajbhandari et al., SC 2020) over the
// ranks that hold the same parameters.
#pragma once
#include <optional>

#include "core/observe/events.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/adamw.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/optimizer/muon_update.hpp"

namespace ballast {

/// stage 0: everything replicated.  1: optimizer state sharded.  2: reduced gradients kept sharded
/// too (gradients of each micro-batch are reduce-scattered into an fp32 shard; the full buffer is
/// only one micro-batch's).  Gradients are summed over the ranks, never averaged, in rank order:
/// stages 0 and 1 give the same bits, stage 2 differs by the order of summation over micro-batches
/// alone. Frozen parameters have no part in it.  The parameters' flat buffers must be padded to a
/// multiple of the replica size (Parameters' pad_to).
///
/// With Muon the trainable parameters are in order_for_muon's order, and its matrices, which have
/// one moment, are updated by MuonUpdate, the others by AdamW; stage 2 is refused.
class ShardedOptimizer {
 public:
  /// `parameters` must outlive it.  Master weights are undefined until reset_master_from_values()
  /// or a checkpoint fills them; with f32 or f64 parameters they are the values themselves, so that
  /// no second copy exists.
  ShardedOptimizer(Parameters& parameters, const Communicator& replica, int zero_stage,
                   AdamWOptions options, Recorder* recorder,
                   std::optional<MuonOptions> muon = std::nullopt);
  void begin_step();         ///< empties accumulators
  void after_micro_batch();  ///< ZeRO-2: reduce-scatter and clear the full gradient buffer.
                             ///< Collective when zero_stage == 2, so every rank calls it `rounds`
                             ///< times; see rounds in the train loop
  /// Reduces what is left.  Collective.
  void reduce_gradients();
  /// Sum of squares of the reduced gradients of this pipeline stage, before clipping; a tied copy
  /// is left out, since the stage of the embedding counts it.  Collective; the same bits on every
  /// rank and in stages 0 and 1.
  double squared_norm();
  /// AdamW (or Muon) on this rank's shard with gradients scaled by `gradient_scale`, then gathers
  /// the new values.  Collective.
  void apply(double gradient_scale, double learning_rate, std::int64_t step);

  /// This rank's shard of the trainable part of the flat buffer: elements [begin, end), padding
  /// included.
  std::int64_t shard_begin() const { return begin_; }
  std::int64_t shard_end() const { return end_; }
  /// moment2 and decay are those of AdamW's part of the shard, which begins behind Muon's.
  AdamWState& state() { return state_; }
  /// Elements [0, muon_elements()) of the trainable ones are Muon's.
  std::int64_t muon_elements() const { return muon_ ? muon_->elements() : 0; }
  /// Reduced gradient of the shard, valid between reduce_gradients() and begin_step(); with Muon
  /// until apply(), which uses it up.
  const Tensor& shard_gradient() const { return shard_gradient_; }
  /// Copies master values of the shard from the parameter values (after initialisation or loading
  /// values alone).
  void reset_master_from_values();
  /// Writes master values to parameter values and gathers them on all ranks (after a checkpoint
  /// load).  Collective.
  void values_from_master();
  /// Full reduced gradient of one parameter, on every rank (tests, gradient dumps).  Collective;
  /// valid between reduce_gradients() and begin_step().
  Tensor full_gradient(const std::string& name);

 private:
  void gather_values();
  std::int64_t muon_part() const;  ///< first elements of the shard, Muon's
  Parameters& parameters_;
  Communicator replica_;
  int zero_stage_;
  AdamWOptions options_;
  Recorder* recorder_;
  std::int64_t begin_ = 0, end_ = 0;
  std::optional<MuonUpdate> muon_;
  AdamWState state_;
  Tensor shard_gradient_;  ///< [end - begin]; stages 0 and 1: the shard's place in the full buffer
};

}  // namespace ballast

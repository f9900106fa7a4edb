// Gradient reduction and sharded optimizer (ZeRO-1, ZeRO-2: Rajbhandari et al., SC 2020) over the
// ranks that hold the same parameters.
#pragma once
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "core/observe/events.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/adamw.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/optimizer/muon_update.hpp"

namespace ballast {

/// stage 0: everything replicated.  1: optimizer state sharded.  2: gradients sharded too: those of
/// each round of micro-batches are reduce-scattered and added bucket by bucket to a shard of
/// Parameters::sum_type(), and a bucket's own exist only until then (Parameters without whole
/// gradients).  A shard has an equal slice of every bucket of the parameters, which are reduced and
/// gathered one by one. They travel beside computation: a bucket's reduction from when its
/// gradients are final in the last backward, its values from when they are updated until a forward
/// needs them. An update that ranks do not share itself runs beside the next forward
/// (Queue::update) where apply() is told that this lasts long enough, but for the buckets of its
/// first layer. Gradients are summed over the ranks, never averaged, in rank order: stages 0 and 1
/// give the same bits, stage 2 differs by the order of summation over micro-batches alone.  Frozen
/// parameters have no part in it.  Buckets must be padded to a multiple of the replica size
/// (Parameters' pad_to).
///
/// With Muon the trainable parameters are in order_for_muon's order, and its matrices, which have
/// one moment, are updated by MuonUpdate, the others by AdamW; stage 2 is refused.  Matrices are
/// orthogonalised as a whole, so all parameters are one bucket, of which few matrices are cut.
class ShardedOptimizer {
 public:
  /// Collective.  `parameters` must outlive it.  Master weights are undefined until
  /// reset_master_from_values() or a checkpoint fills them; with f32 or f64 parameters they are the
  /// values themselves where the shard is one range of them, so that no second copy exists.
  ShardedOptimizer(Parameters& parameters, const Communicator& replica, int zero_stage,
                   AdamWOptions options, Recorder* recorder,
                   std::optional<MuonOptions> muon = std::nullopt);
  ~ShardedOptimizer();
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;
  void begin_step();  ///< empties accumulators
  /// Inside the last backward before gradients are reduced (GradientsFinal): starts to reduce the
  /// buckets that this makes final, last one first.  Ranks may do this or leave all to end_round()
  /// and reduce_gradients(), each for itself; but they may wait for one another
  /// (StepPlan::meets_in_backward), in stage 2 for each bucket until the next one is final, so that
  /// two exist at a time.
  void gradients_final(std::int64_t layer);
  /// Stage 2: reduces the buckets of a round that are left, all where this rank had no micro-batch.
  /// Collective when the stage is 2, so every rank calls it once a round.
  void end_round();
  /// Reduces what is left, and waits for it.  Collective.
  void reduce_gradients();
  /// Sum of squares of the reduced gradients of this pipeline stage, before clipping; a tied copy
  /// is left out, since the stage of the embedding counts it.  Collective; the same bits on every
  /// rank and in stages 0 and 1.
  double squared_norm();
  /// AdamW (or Muon) on this rank's shard with gradients scaled by `gradient_scale`, and begins to
  /// gather the new values bucket by bucket; Parameters::need_values() and state() wait for what
  /// runs still.  `forward_tokens`: of a micro-batch as this rank computes it; the next step is
  /// taken to begin with such a forward.  Collective.
  void apply(double gradient_scale, double learning_rate, std::int64_t step,
             double forward_tokens = 0);
  /// Tokens of a forward from which on an update that ranks do not share runs beside it.  Both are
  /// linear in the parameters: a forward takes 2 FLOPs a parameter and token, an update 30 bytes a
  /// parameter, beside products at 0.4 of a copy's rate (1.2 TB/s on an H100).
  static constexpr double kTokensBeside = 6000;

  /// This rank's part of a bucket: elements [begin, end) of the trainable part of the flat buffers,
  /// padding included, and where they lie in tensors of the shard.
  struct Slice {
    std::int64_t begin = 0, end = 0, at = 0;
    std::int64_t size() const { return end - begin; }
  };
  /// One of each bucket, in order; together the shard.
  const std::vector<Slice>& slices() const { return slices_; }
  std::int64_t shard_size() const;
  /// The shard's elements of parameters, padding left out, as checkpoints and files count them.
  std::vector<ShardRun> runs() const;
  /// Of the shard; moment2 has AdamW's part alone, which begins behind Muon's.
  AdamWState& state() {
    parameters_.need_values();
    return state_;
  }
  /// AdamWState::decay of a slice, counted from the first element of AdamW's part of it.
  const Tensor& decay(std::size_t bucket) const { return decay_[bucket]; }
  /// Elements [0, muon_elements()) of the trainable ones are Muon's.
  std::int64_t muon_elements() const { return muon_ ? muon_->elements() : 0; }
  /// Reduced gradient of a slice, valid between reduce_gradients() and begin_step(); with Muon
  /// until apply(), which uses it up.
  Tensor shard_gradient(std::size_t bucket) const;
  /// Copies master values of the shard from the parameter values (after initialisation or loading
  /// values alone).
  void reset_master_from_values();
  /// Writes master values to parameter values and gathers them on all ranks (after a checkpoint
  /// load).  Collective.
  void values_from_master();
  /// Full reduced gradient of one parameter in Parameters::sum_type(), on every rank (tests,
  /// gradient dumps).  Collective; valid between reduce_gradients() and begin_step().
  Tensor full_gradient(const std::string& name);
  /// The same of a whole bucket, padding included.
  Tensor bucket_gradient(std::size_t bucket);

 private:
  /// A bucket on its way.
  struct Flight {
    std::size_t bucket = 0;
    Tensor own;  ///< this rank's block of the sum
    Pending pending;
  };
  void start_reduction(std::size_t bucket);
  void finish_reductions();
  void start_gather(std::size_t bucket, const Tensor& values);
  void finish_updates(std::int64_t layer);  ///< with gathers, of all that a layer's forward reads
  std::size_t first_beside(double forward_tokens) const;  ///< bucket updated beside a forward
  std::int64_t muon_part() const;                         ///< first elements of the shard, Muon's
  /// Number of the element at `offset` of the flat buffers, in a bucket, by which its moments are
  /// rounded: padding does not count.  A last stage counts from its copy of a tied embedding, as
  /// the first one does from the embedding, so that both copies stay the same.
  std::int64_t number_of(const StoredBucket& bucket, std::int64_t offset) const;
  bool in_place() const;  ///< whether the shard is one range of the flat buffers
  Parameters& parameters_;
  Communicator replica_;
  Communicator beside_;  ///< the same ranks, for what is on its way
  int zero_stage_;
  AdamWOptions options_;
  Recorder* recorder_;
  std::vector<Slice> slices_;
  std::optional<MuonUpdate> muon_;
  AdamWState state_;
  std::vector<Tensor> decay_;  ///< [bucket]
  std::size_t left_ = 0;       ///< buckets [0, left_) are to be reduced still, last one first
  /// A bucket whose update runs beside computation.
  struct Update {
    std::size_t bucket = 0;
    Fence done;
  };
  std::deque<Flight> reductions_, gathers_;
  std::deque<Update> updates_;
  Tensor shard_gradient_;     ///< [shard_size()] of stage 2; others: in Parameters::gradients()
  std::vector<char> summed_;  ///< [bucket] of stage 2: shard_gradient_ has a sum of this step
};

}  // namespace ballast

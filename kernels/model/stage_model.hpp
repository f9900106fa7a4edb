// The transformer of one pipeline stage: forward, recompute and backward of one micro-batch.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/model/model_shape.hpp"
#include "core/model/recompute_options.hpp"
#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/model/parameters.hpp"

namespace ballast {

/// This rank's tokens of a micro-batch, in the local order of its layout.
struct LocalBatch {
  Tensor tokens;        ///< [T] i32, host or device
  Tensor targets;       ///< [T] i32; -1 where the token carries no loss
  Tensor positions;     ///< [T] i32, position inside the sample (RoPE)
  Tensor loss_weights;  ///< [T] f32 (f64), weight of each token's loss in the objective; undefined:
                        ///< all 1
  std::vector<std::int32_t> segment;  ///< [T] segment index, -1: padding
  Tensor dropout_keys;                ///< [T] i64, names each token for the adapters' dropout
                                      ///< (kernels/ops/dropout); undefined: nothing is dropped
  bool judged = false;  ///< whether forward also says which targets it would have predicted
                        ///< (StageOutput::correct)
  /// Generation: local rows whose next token is wanted.  The last stage then gives their logits
  /// (StageOutput::logits) and no loss.
  std::optional<std::vector<std::int64_t>> next_of;
  int recompute_layers = -1;  ///< layers recomputed in place of the model's options
                              ///< (RecomputeOptions::with); -1: as they say
  /// Where the objective is no sum of token losses (pairs): given the loss of every token [T], the
  /// weights [T] whose weighted sum has its gradient, in place of loss_weights.  Forward for a
  /// backward then runs the head twice.  Collective over the ranks of the micro-batch.
  std::function<Tensor(const Tensor& token_loss)> weigh;
  double loss_scale = 1;  ///< the objective is the sum of loss_scale x weight x loss of its tokens
                          ///< (1 / loss tokens of the global batch for `ave_token`)
  std::int64_t size() const { return tokens.defined() ? tokens.size(0) : 0; }
};

/// Told during a backward that the gradients of this layer and of what lies behind it have all
/// their contributions: first with the layer behind the stage's last, so that the head's are meant,
/// and last with -1, so that the embedding's are too.
using GradientsFinal = std::function<void(std::int64_t layer)>;

/// What forward keeps for backward; opaque outside kernels/.
struct StageActivations;
struct StageActivationsDeleter {
  void operator()(StageActivations*) const;
};
using StageActivationsPtr = std::unique_ptr<StageActivations, StageActivationsDeleter>;

struct StageOutput {
  Tensor hidden;        ///< [T, hidden], not on the last stage
  Tensor token_loss;    ///< [T] f32 (f64), last stage only; 0 where there is no loss
  Tensor loss_weights;  ///< [T], last stage only: those of the batch
  Tensor correct;  ///< [T] u8, last stage of a judged batch only: 1 where the target is the most
                   ///< likely token
  Tensor logits;  ///< [LocalBatch::next_of, vocabulary] in the type of activations, last stage only
  /// Sum over this rank's tokens of weight x loss (fp64); 0 where there is none.  Waits for the
  /// device, so ask late.
  double loss_sum() const;
};

/// On a GPU forward, backward and its halves queue their work on the compute stream and return
/// before it is done: what they return may be passed on to other queued work at once, and the host
/// waits where it reads a value (StageOutput::loss_sum).  On the host they return with the result.
class StageModel {
 public:
  /// Layers [layer_begin, layer_end) of the model; the first stage holds the embedding, the last
  /// the final norm and head.  `parameters` must contain them and outlive the model.  `fp8`: the
  /// layers' matrices multiply in FP8 (kernels/ops/fp8.hpp), the head in the compute type.
  StageModel(const ModelShape& shape, std::int64_t layer_begin, std::int64_t layer_end,
             Parameters& parameters, RecomputeOptions recompute, Recorder* recorder,
             std::int64_t head_chunk_tokens = 1024, bool fp8 = false);
  ~StageModel();

  /// `input`: hidden states of the previous stage, undefined on the first.  Keeps what backward
  /// needs in `saved` (pass nullptr for evaluation).  `head`: whether the last stage computes the
  /// loss; a chunk that is recomputed only the recompute does.  With `saved` the last stage forms
  /// the head's part of backward at once, its parameter gradients included, so that no logits are
  /// formed twice.
  StageOutput forward(const LocalBatch& batch, const Tensor& input, AttentionExecutor& attention,
                      StageActivationsPtr* saved, bool head = true);
  /// `d_output`: gradient of the stage output, undefined on the last stage.  `batch` is the one
  /// that forward had.  Returns the gradient of `input` (undefined on the first stage); parameter
  /// gradients are added.  `gradients_final`: given with the last backward before gradients are
  /// reduced.
  Tensor backward(const LocalBatch& batch, StageActivationsPtr saved, AttentionExecutor& attention,
                  const Tensor& d_output, const GradientsFinal& gradients_final = {});

  /// The same in halves: the first is all that the stage before waits for, and leaves in `saved`
  /// what the second needs, for each layer as much as forward keeps without recomputation
  /// (between_halves_bytes).  Norms and embedding, whose weight gradients are small, are done in
  /// the first.  Halves of several micro-batches may interleave; together they equal backward, bit
  /// for bit where both orders are the same.
  Tensor backward_input(const LocalBatch& batch, StageActivations& saved,
                        AttentionExecutor& attention, const Tensor& d_output);
  void backward_weight(StageActivationsPtr saved, const GradientsFinal& gradients_final = {});

  /// Diagnosis after a NaN or Inf loss: first layer of the stage whose output, on this rank's
  /// tokens, is not finite, or -1, with the stage's output.  Runs forward once more without keeping
  /// anything; collective like forward.
  std::pair<int, StageOutput> first_nonfinite_layer(const LocalBatch& batch, const Tensor& input,
                                                    AttentionExecutor& attention);

  const ModelShape& shape() const;
  bool first() const;
  bool last() const;
  DType type() const;  ///< of activations
  Device& device() const;

 private:
  Tensor run_backward(const LocalBatch& batch, StageActivations& saved,
                      AttentionExecutor& attention, const Tensor& d_output, bool halves,
                      const GradientsFinal& gradients_final);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

// One transformer layer: x2 = x + attention(norm(x)), out = x2 + mlp(norm(x2)).  The last addition
// is left to whoever reads the output (the next layer's norm, or the head's), which fuses it; so a
// layer hands over (residual, branch). Composed of the operations beside it and an
// AttentionExecutor: no backend code of its own.
#pragma once
#include <cstdint>
#include <string>

#include "core/model/fp8_specs.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/tensor_specs.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "kernels/model/linear_layer.hpp"
#include "kernels/ops/qk_norm.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

/// Intermediate results of one layer over T tokens.
struct LayerActivations {
  Tensor input;             ///< [T, H] x
  Tensor rstd1, normed1;    ///< [T], [T, H]
  Tensor qkv;               ///< [T, (Hq + 2 Hkv) D], q and k rotated but with QK-norm
  Tensor turned;            ///< [T, (Hq + Hkv) D], q and k normed and rotated; QK-norm alone
  Tensor attention, lse;    ///< [T, Hq D], [Hq, T]
  Tensor middle;            ///< [T, H] x2
  Tensor rstd2, normed2;    ///< [T], [T, H]
  Tensor gate_up, product;  ///< [T, 2 I], [T, I]
};

/// What the weight half of a layer's backward needs beside the inputs of its matrices: the
/// gradients of their outputs.
struct LayerGradients {
  Tensor qkv, output, gate_up, down;  ///< [T, (Hq + 2 Hkv) D], [T, H], [T, 2 I], [T, H]
};

/// A hidden state as two summands; `branch` is undefined when `residual` is the whole of it.
struct ResidualPair {
  Tensor residual, branch;  ///< [T, H]
};

/// What all layers read of a micro-batch's tokens: their rotation, and which adapter inputs they
/// drop.
struct TokenTables {
  Tensor cos, sin;      ///< [T, D/2] each
  Tensor dropout_keys;  ///< [T] i64 (kernels/ops/dropout); undefined: nothing is dropped
};

class Layer {
 public:
  /// `index`: place in the whole model.  `fp8`: as LinearLayer.  Throws Error when the parameters
  /// of this layer are not all there.
  Layer(const ModelShape& shape, std::int64_t index, const Parameters& parameters, bool fp8);

  std::int64_t index() const { return index_; }
  /// Matrix products of one forward pass over `tokens` tokens, attention not included.
  double flops(std::int64_t tokens) const;
  /// Of one backward pass, input and weight half; frozen weights have none of the latter.
  double input_gradient_flops(std::int64_t tokens) const { return flops(tokens); }
  double weight_gradient_flops(std::int64_t tokens) const {
    return shape_.lora.enabled() ? adapter_flops(tokens) : flops(tokens);
  }
  /// Activations of which those that `keep` names are new, the rest lie in the workspace until the
  /// next layer's pass. `has_branch`: the layer's input comes as two summands, so that their sum
  /// needs a place.
  LayerActivations allocate(std::int64_t tokens, Keep keep, bool has_branch,
                            Workspace& workspace) const;
  /// Forgets the activations that lie in the workspace.
  static void release(Keep keep, LayerActivations& a);
  /// Fills `a` from the hidden state `in`, returns the output.  a.input becomes in.residual where
  /// that is the whole hidden state.  The output's branch lies in the workspace.
  ResidualPair forward(const ResidualPair& in, const TokenTables& tables,
                       AttentionExecutor& attention, LayerActivations& a,
                       Workspace& workspace) const;
  /// Fills what `keep` left out of `a`, bit for bit as forward did.  `halves`: backward_weight
  /// comes later, so that its inputs need memory of their own.
  void restore(Keep keep, bool halves, const TokenTables& tables, AttentionExecutor& attention,
               LayerActivations& a, Workspace& workspace) const;
  /// d [T, H]: gradient of the output, turned into that of the input in place.  Adds the parameter
  /// gradients; with `later` those of the norms alone, and `later` gets what backward_weight needs
  /// for the others.
  void backward(const TokenTables& tables, AttentionExecutor& attention, const LayerActivations& a,
                Tensor& d, Workspace& workspace, LayerGradients* later = nullptr) const;
  /// Forgets all that backward_weight does not need.
  static void keep_weight_inputs(LayerActivations& a);
  /// The second half: adds the gradients of matrices, biases and adapters.  Both halves together
  /// are backward, bit for bit.
  void backward_weight(const TokenTables& tables, const LayerActivations& a,
                       const LayerGradients& gradients, Workspace& workspace) const;

 private:
  /// From the input to gate_up.
  void forward_to_mlp(const ResidualPair& in, const TokenTables& tables,
                      AttentionExecutor& attention, LayerActivations& a,
                      Workspace& workspace) const;
  /// x = the sum of `in` (the residual itself where that is all), its norm with rstd, and `matrix`
  /// of that.  The norm goes to `normed`, or rounded to the product alone.
  void normed_product(const ResidualPair& in, const Tensor& weight, Tensor& x, Tensor& normed,
                      Tensor& rstd, const LinearLayer& matrix, const TokenTables& tables, Tensor& y,
                      Workspace& workspace) const;
  /// Turns q and k by their tokens' angles, normed before where the model has QK-norm.
  void turn(const TokenTables& tables, LayerActivations& a) const;
  /// Whether `spec` is made again, rounded, where backward needs it, and has no memory.
  bool makes_again(const ActivationSpec& spec) const { return rounds_ && fp8_made_again(spec); }
  double adapter_flops(std::int64_t tokens) const;
  /// Backward of attention: gradients of q, k and v after rotation from d_attention [T, Hq D]. They
  /// stay in the type in which attention sums them until they are turned back, so that they are
  /// rounded once.
  struct HeadGradients {
    Tensor q, k, v;  ///< [T, heads, D]
  };
  /// Of qkv, from those: turned back, and through QK-norm, whose weights' gradients are added.
  void qkv_gradient(const TokenTables& tables, const LayerActivations& a, const HeadGradients& d,
                    Tensor& d_qkv) const;
  Fp8Tokens rounded_qkv_gradient(const TokenTables& tables, const LayerActivations& a,
                                 const HeadGradients& d, Workspace& workspace) const;
  HeadGradients attention_backward(AttentionExecutor& attention, const LayerActivations& a,
                                   const Tensor& d_attention, Workspace& workspace) const;
  /// backward where products are FP8 and all weights train: operands are rounded where they are
  /// made.
  void rounded_backward(const TokenTables& tables, AttentionExecutor& attention,
                        const LayerActivations& a, Tensor& d, Workspace& workspace) const;
  Tensor scratch(LayerScratch which, std::int64_t tokens, Workspace& workspace) const;
  AttentionInputs attention_inputs(const LayerActivations& a) const;

  ModelShape shape_;
  std::int64_t index_ = 0;
  DType type_ = DType::f32;
  bool rounds_ = false;   // FP8 without adapters: what products read is rounded where it is made
  Tensor norm1_, norm2_;  // [H]
  ParameterGradient norm1_gradient_, norm2_gradient_;  // undefined where frozen
  QkNormWeights qk_norm_;
  ParameterGradient q_norm_gradient_, k_norm_gradient_;  // undefined where frozen, or none
  LinearLayer qkv_, output_, gate_up_, down_;            // q, k, v and gate, up joined
};

}  // namespace ballast

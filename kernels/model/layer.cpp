#include "kernels/model/layer.hpp"

#include <cmath>
#include <vector>

#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"

namespace ballast {
namespace {

// Columns [begin, begin + heads * D) of a joined buffer [T, width] as [T, heads, D].
Tensor heads_of(const Tensor& joined, std::int64_t begin, std::int64_t heads,
                std::int64_t head_dim) {
  const Tensor by_head = joined.reshape({joined.size(0), joined.size(1) / head_dim, head_dim});
  return by_head.narrow(1, begin / head_dim, begin / head_dim + heads);
}

/// Members of LayerActivations in the order of layer_activations().
constexpr Tensor LayerActivations::*kMembers[] = {
    &LayerActivations::input,   &LayerActivations::rstd1,     &LayerActivations::normed1,
    &LayerActivations::qkv,     &LayerActivations::attention, &LayerActivations::lse,
    &LayerActivations::middle,  &LayerActivations::rstd2,     &LayerActivations::normed2,
    &LayerActivations::gate_up, &LayerActivations::product};

/// Calls f(spec, tensor) for every activation of a layer.
template <class F>
void for_each_activation(const ModelShape& shape, std::int64_t tokens, LayerActivations& a,
                         const F& f) {
  const std::vector<ActivationSpec> specs = layer_activations(shape, tokens);
  require(specs.size() == std::size(kMembers), "{} activations for {} members", specs.size(),
          std::size(kMembers));
  for (std::size_t i = 0; i < specs.size(); ++i) f(specs[i], a.*kMembers[i]);
}

template <class T>
LayerParameters<T> bind(const ModelShape& shape, std::int64_t index, const Parameters& parameters,
                        T (Parameters::*joined)(const std::string&, int) const) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const auto get = [&](const char* name, int count) {
    return (parameters.*joined)(prefix + name, count);
  };
  LayerParameters<T> t;
  t.norm1 = get("input_layernorm.weight", 1);
  t.qkv = get("self_attn.q_proj.weight", 3);
  if (shape.qkv_bias) t.qkv_bias = get("self_attn.q_proj.bias", 3);
  t.output = get("self_attn.o_proj.weight", 1);
  t.norm2 = get("post_attention_layernorm.weight", 1);
  t.gate_up = get("mlp.gate_proj.weight", 2);
  t.down = get("mlp.down_proj.weight", 1);
  return t;
}

}  // namespace

Layer::Layer(const ModelShape& shape, std::int64_t index, const Parameters& parameters)
    : shape_(shape),
      index_(index),
      type_(parameters.dtype()),
      value_(bind(shape, index, parameters, &Parameters::joined_value)),
      gradient_(bind(shape, index, parameters, &Parameters::gradient_of)),
      lora_qkv_(shape.lora),
      lora_output_(shape.lora),
      lora_gate_up_(shape.lora),
      lora_down_(shape.lora) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const std::int64_t q = query_width(shape), kv = kv_width(shape), i = shape.intermediate;
  lora_qkv_.add(parameters, prefix, Projection::q, 0, q);
  lora_qkv_.add(parameters, prefix, Projection::k, q, q + kv);
  lora_qkv_.add(parameters, prefix, Projection::v, q + kv, q + 2 * kv);
  lora_output_.add(parameters, prefix, Projection::o, 0, shape.hidden);
  lora_gate_up_.add(parameters, prefix, Projection::gate, 0, i);
  lora_gate_up_.add(parameters, prefix, Projection::up, i, 2 * i);
  lora_down_.add(parameters, prefix, Projection::down, 0, shape.hidden);
}

double Layer::flops(std::int64_t tokens) const {
  const double t = static_cast<double>(tokens), h = static_cast<double>(shape_.hidden),
               i = static_cast<double>(shape_.intermediate);
  return linear_flops(t, h, static_cast<double>(qkv_width(shape_))) +
         linear_flops(t, static_cast<double>(query_width(shape_)), h) + linear_flops(t, h, 2 * i) +
         linear_flops(t, i, h) + adapter_flops(tokens);
}

double Layer::adapter_flops(std::int64_t tokens) const {
  const double t = static_cast<double>(tokens);
  return lora_qkv_.flops(t) + lora_output_.flops(t) + lora_gate_up_.flops(t) + lora_down_.flops(t);
}

LayerActivations Layer::allocate(std::int64_t tokens, Keep keep, bool has_branch,
                                 Workspace& workspace) const {
  Device& device = device_of(value_.qkv.space());
  LayerActivations a;
  for_each_activation(shape_, tokens, a, [&](const ActivationSpec& spec, Tensor& tensor) {
    if (&tensor == &a.input && !has_branch) return;  // forward takes the residual itself
    const DType type = spec.statistic ? statistics_type(type_) : type_;
    tensor = keep >= spec.kept_from ? Tensor::empty(spec.shape, type, device)
                                    : workspace.take(spec.name, spec.shape, type);
  });
  return a;
}

void Layer::release(Keep keep, LayerActivations& a) {
  for_each_activation({}, 0, a, [&](const ActivationSpec& spec, Tensor& tensor) {
    if (keep < spec.kept_from) tensor = {};
  });
}

void Layer::keep_weight_inputs(LayerActivations& a) {
  for_each_activation({}, 0, a, [](const ActivationSpec& spec, Tensor& tensor) {
    if (!spec.weight_input) tensor = {};
  });
}

AttentionInputs Layer::attention_inputs(const LayerActivations& a) const {
  AttentionInputs in;
  in.layer = static_cast<int>(index_);
  in.q = heads_of(a.qkv, 0, shape_.query_heads, shape_.head_dim);
  in.k = heads_of(a.qkv, query_width(shape_), shape_.kv_heads, shape_.head_dim);
  in.v = heads_of(a.qkv, query_width(shape_) + kv_width(shape_), shape_.kv_heads, shape_.head_dim);
  in.scale = 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
  return in;
}

Tensor Layer::scratch(LayerScratch which, std::int64_t tokens, Workspace& workspace) const {
  const ScratchSpec spec = layer_scratch(shape_, which);
  return workspace.take(spec.name, {tokens, spec.columns},
                        spec.statistic ? statistics_type(type_) : type_);
}

ResidualPair Layer::forward(const ResidualPair& in, const TokenTables& tables,
                            AttentionExecutor& attention, LayerActivations& a,
                            Workspace& workspace) const {
  if (in.branch.defined()) {
    add_rmsnorm_forward(in.residual, in.branch, value_.norm1, shape_.rms_eps, a.input, a.normed1,
                        a.rstd1);
  } else {
    a.input = in.residual;
    rmsnorm_forward(a.input, value_.norm1, shape_.rms_eps, a.normed1, a.rstd1);
  }
  forward_from_input(tables, attention, a, workspace);
  Tensor branch = scratch(LayerScratch::branch, a.input.size(0), workspace);
  linear_forward(a.product, value_.down, {}, branch);
  lora_down_.forward(a.product, tables.dropout_keys, branch, workspace);
  return {a.middle, branch};
}

// From normed1 to the SwiGLU product.
void Layer::forward_from_input(const TokenTables& tables, AttentionExecutor& attention,
                               LayerActivations& a, Workspace& workspace) const {
  linear_forward(a.normed1, value_.qkv, value_.qkv_bias, a.qkv);
  lora_qkv_.forward(a.normed1, tables.dropout_keys, a.qkv, workspace);
  Tensor rotated = heads_of(a.qkv, 0, shape_.query_heads + shape_.kv_heads,
                            shape_.head_dim);  // q and k lie side by side
  rope_apply(rotated, tables.cos, tables.sin, rotated);
  Tensor o = heads_of(a.attention, 0, shape_.query_heads, shape_.head_dim);
  attention.forward(attention_inputs(a), o, a.lse);
  Tensor branch = scratch(LayerScratch::branch, a.input.size(0), workspace);
  linear_forward(a.attention, value_.output, {}, branch);
  lora_output_.forward(a.attention, tables.dropout_keys, branch, workspace);
  add_rmsnorm_forward(a.input, branch, value_.norm2, shape_.rms_eps, a.middle, a.normed2, a.rstd2);
  linear_forward(a.normed2, value_.gate_up, {}, a.gate_up);
  lora_gate_up_.forward(a.normed2, tables.dropout_keys, a.gate_up, workspace);
  swiglu_forward(a.gate_up, a.product);
}

void Layer::restore(Keep keep, bool halves, const TokenTables& tables, AttentionExecutor& attention,
                    LayerActivations& a, Workspace& workspace) const {
  if (keep == Keep::all) return;
  const std::int64_t tokens = a.input.size(0);
  for_each_activation(shape_, tokens, a, [&](const ActivationSpec& spec, Tensor& tensor) {
    if (keep >= spec.kept_from) return;
    const DType type = spec.statistic ? statistics_type(type_) : type_;
    tensor = halves && spec.weight_input
                 ? Tensor::empty(spec.shape, type, device_of(value_.qkv.space()))
                 : workspace.take(spec.name, spec.shape, type);
  });
  if (keep == Keep::input) {
    rmsnorm_forward(a.input, value_.norm1, shape_.rms_eps, a.normed1, a.rstd1);
    forward_from_input(tables, attention, a, workspace);
  } else {
    rmsnorm_recompute(a.input, a.rstd1, value_.norm1, a.normed1);
    rmsnorm_recompute(a.middle, a.rstd2, value_.norm2, a.normed2);
    swiglu_forward(a.gate_up, a.product);
  }
}

void Layer::weight_gradients(const Tensor& x, const Tensor& dy, const ParameterGradient& gradient,
                             const LoraLinear& adapters, const TokenTables& tables,
                             Workspace& workspace) {
  if (gradient.defined()) linear_weight_gradient(x, dy, gradient.next());
  adapters.weight_gradient(x, tables.dropout_keys, dy, workspace);
}

void Layer::qkv_weights(const TokenTables& tables, const LayerActivations& a, const Tensor& d_qkv,
                        Workspace& workspace) const {
  weight_gradients(a.normed1, d_qkv, gradient_.qkv, lora_qkv_, tables, workspace);
  if (gradient_.qkv_bias.defined()) linear_bias_gradient(d_qkv, gradient_.qkv_bias.next());
}

void Layer::backward_weight(const TokenTables& tables, const LayerActivations& a,
                            const LayerGradients& d, Workspace& workspace) const {
  weight_gradients(a.product, d.down, gradient_.down, lora_down_, tables, workspace);
  weight_gradients(a.normed2, d.gate_up, gradient_.gate_up, lora_gate_up_, tables, workspace);
  weight_gradients(a.attention, d.output, gradient_.output, lora_output_, tables, workspace);
  qkv_weights(tables, a, d.qkv, workspace);
}

void Layer::qkv_gradient(const TokenTables& tables, AttentionExecutor& attention,
                         const LayerActivations& a, const Tensor& d_attention, Tensor& d_qkv,
                         Workspace& workspace) const {
  const std::int64_t query = shape_.query_heads, kv = shape_.kv_heads, dim = shape_.head_dim;
  const auto sums = [&](LayerScratch which, std::int64_t heads) {
    return scratch(which, d_attention.size(0), workspace)
        .reshape({d_attention.size(0), heads, dim});
  };
  Tensor dq = sums(LayerScratch::dq, query), dk = sums(LayerScratch::dk, kv),
         dv = sums(LayerScratch::dv, kv);
  attention.backward(attention_inputs(a), heads_of(a.attention, 0, query, dim), a.lse,
                     heads_of(d_attention, 0, query, dim), dq, dk, dv);
  rope_backward(dq, dk, dv, tables.cos, tables.sin, d_qkv);
}

void Layer::backward(const TokenTables& tables, AttentionExecutor& attention,
                     const LayerActivations& a, Tensor& d, Workspace& workspace,
                     LayerGradients* later) const {
  const std::int64_t tokens = d.size(0);
  const auto scratch = [&](LayerScratch which) { return this->scratch(which, tokens, workspace); };
  const LayerParameters<ParameterGradient>& g = gradient_;
  if (later != nullptr) {
    const auto kept = [&](std::int64_t columns) {
      return Tensor::empty({tokens, columns}, type_, device_of(d.space()));
    };
    *later = {kept(qkv_width(shape_)), kept(shape_.hidden), kept(2 * shape_.intermediate),
              kept(shape_.hidden)};
  }

  // MLP: d is the gradient of both summands of the output.
  Tensor d_product = scratch(LayerScratch::d_product), d_normed = scratch(LayerScratch::d_normed);
  Tensor d_gate_up = later != nullptr ? later->gate_up : scratch(LayerScratch::d_gate_up);
  linear_input_gradient(d, value_.down, d_product);
  lora_down_.input_gradient(tables.dropout_keys, d, d_product, workspace);
  if (later != nullptr)
    later->down.copy_from(d);  // d goes on
  else
    weight_gradients(a.product, d, g.down, lora_down_, tables, workspace);
  swiglu_backward(a.gate_up, d_product, d_gate_up);
  linear_input_gradient(d_gate_up, value_.gate_up, d_normed);
  lora_gate_up_.input_gradient(tables.dropout_keys, d_gate_up, d_normed, workspace);
  if (later == nullptr)
    weight_gradients(a.normed2, d_gate_up, g.gate_up, lora_gate_up_, tables, workspace);
  rmsnorm_backward(d_normed, a.middle, a.rstd2, value_.norm2, true, d, g.norm2.next());

  // Attention: d is now the gradient of x2, that is of x and of the attention branch.
  Tensor d_attention = scratch(LayerScratch::d_attention);
  linear_input_gradient(d, value_.output, d_attention);
  lora_output_.input_gradient(tables.dropout_keys, d, d_attention, workspace);
  if (later != nullptr)
    later->output.copy_from(d);
  else
    weight_gradients(a.attention, d, g.output, lora_output_, tables, workspace);
  Tensor d_qkv = later != nullptr ? later->qkv : scratch(LayerScratch::d_qkv);
  qkv_gradient(tables, attention, a, d_attention, d_qkv, workspace);
  linear_input_gradient(d_qkv, value_.qkv, d_normed);
  lora_qkv_.input_gradient(tables.dropout_keys, d_qkv, d_normed, workspace);
  if (later == nullptr) qkv_weights(tables, a, d_qkv, workspace);
  rmsnorm_backward(d_normed, a.input, a.rstd1, value_.norm1, true, d, g.norm1.next());
}

}  // namespace ballast

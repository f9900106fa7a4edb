#include "kernels/model/layer.hpp"

#include <cmath>
#include <vector>

#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"

namespace ballast {
namespace {

std::int64_t query_width(const ModelShape& s) { return s.query_heads * s.head_dim; }
std::int64_t kv_width(const ModelShape& s) { return s.kv_heads * s.head_dim; }
std::int64_t qkv_width(const ModelShape& s) { return query_width(s) + 2 * kv_width(s); }

// Columns [begin, begin + heads * D) of a joined buffer [T, width] as [T, heads, D].
Tensor heads_of(const Tensor& joined, std::int64_t begin, std::int64_t heads,
                std::int64_t head_dim) {
  const Tensor by_head = joined.reshape({joined.size(0), joined.size(1) / head_dim, head_dim});
  return by_head.narrow(1, begin / head_dim, begin / head_dim + heads);
}

struct ActivationSpec {
  const char* name;
  Tensor LayerActivations::*member;
  Keep kept_from;  // the least Keep that keeps it
  Shape shape;
  bool statistic;
  bool weight_input;  // what a weight gradient is formed from
};

// The one list of a layer's activations: allocation and the memory estimate both read it.
std::vector<ActivationSpec> activation_specs(const ModelShape& s, std::int64_t t) {
  using A = LayerActivations;
  return {
      {"layer input", &A::input, Keep::input, {t, s.hidden}, false, false},
      {"layer rstd1", &A::rstd1, Keep::selective, {t}, true, false},
      {"layer normed1", &A::normed1, Keep::all, {t, s.hidden}, false, true},
      {"layer qkv", &A::qkv, Keep::selective, {t, qkv_width(s)}, false, false},
      {"layer attention", &A::attention, Keep::selective, {t, query_width(s)}, false, true},
      {"layer lse", &A::lse, Keep::selective, {s.query_heads, t}, true, false},
      {"layer middle", &A::middle, Keep::selective, {t, s.hidden}, false, false},
      {"layer rstd2", &A::rstd2, Keep::selective, {t}, true, false},
      {"layer normed2", &A::normed2, Keep::all, {t, s.hidden}, false, true},
      {"layer gate_up", &A::gate_up, Keep::selective, {t, 2 * s.intermediate}, false, false},
      {"layer product", &A::product, Keep::all, {t, s.intermediate}, false, true},
  };
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
  for (const ActivationSpec& spec : activation_specs(shape_, tokens)) {
    if (spec.member == &LayerActivations::input && !has_branch)
      continue;  // forward takes the residual itself
    const DType type = spec.statistic ? statistics_type(type_) : type_;
    a.*spec.member = keep >= spec.kept_from ? Tensor::empty(spec.shape, type, device)
                                            : workspace.take(spec.name, spec.shape, type);
  }
  return a;
}

void Layer::release(Keep keep, LayerActivations& a) {
  for (const ActivationSpec& spec : activation_specs({}, 0))
    if (keep < spec.kept_from) a.*spec.member = {};
}

std::int64_t Layer::kept_bytes(const ModelShape& shape, std::int64_t tokens, DType type,
                               Keep keep) {
  std::int64_t bytes = 0;
  for (const ActivationSpec& spec : activation_specs(shape, tokens)) {
    if (keep < spec.kept_from) continue;
    std::int64_t elements = 1;
    for (auto extent : spec.shape) elements *= extent;
    bytes += elements *
             static_cast<std::int64_t>(size_of(spec.statistic ? statistics_type(type) : type));
  }
  return bytes;
}

void Layer::keep_weight_inputs(LayerActivations& a) {
  for (const ActivationSpec& spec : activation_specs({}, 0))
    if (!spec.weight_input) a.*spec.member = {};
}

std::int64_t Layer::between_halves_bytes(const ModelShape& shape, std::int64_t tokens, DType type) {
  std::int64_t elements = tokens * (qkv_width(shape) + 2 * shape.hidden + 2 * shape.intermediate);
  for (const ActivationSpec& spec : activation_specs(shape, tokens))
    if (spec.weight_input) elements += spec.shape[0] * spec.shape[1];
  return elements * static_cast<std::int64_t>(size_of(type));
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
  Tensor branch = workspace.take("layer branch", a.input.shape(), type_);
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
  rope_apply(rotated, tables.cos, tables.sin, false, rotated);
  Tensor o = heads_of(a.attention, 0, shape_.query_heads, shape_.head_dim);
  attention.forward(attention_inputs(a), o, a.lse);
  Tensor branch = workspace.take("layer branch", a.input.shape(), type_);
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
  for (const ActivationSpec& spec : activation_specs(shape_, tokens)) {
    if (keep >= spec.kept_from) continue;
    const DType type = spec.statistic ? statistics_type(type_) : type_;
    a.*spec.member = halves && spec.weight_input
                         ? Tensor::empty(spec.shape, type, device_of(value_.qkv.space()))
                         : workspace.take(spec.name, spec.shape, type);
  }
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
                         const LayerActivations& a, const Tensor& d_attention, const Tensor& d_qkv,
                         Workspace& workspace) const {
  const std::int64_t query = shape_.query_heads, kv = shape_.kv_heads, dim = shape_.head_dim;
  const auto sums = [&](const char* name, std::int64_t heads) {
    return workspace.take(name, {d_attention.size(0), heads, dim}, statistics_type(type_));
  };
  Tensor dq = sums("layer dq", query), dk = sums("layer dk", kv), dv = sums("layer dv", kv);
  attention.backward(attention_inputs(a), heads_of(a.attention, 0, query, dim), a.lse,
                     heads_of(d_attention, 0, query, dim), dq, dk, dv);
  Tensor q = heads_of(d_qkv, 0, query, dim), k = heads_of(d_qkv, query * dim, kv, dim),
         v = heads_of(d_qkv, (query + kv) * dim, kv, dim);
  rope_apply(dq, tables.cos, tables.sin, true, q);
  rope_apply(dk, tables.cos, tables.sin, true, k);
  copy_rows(dv, v);
}

void Layer::backward(const TokenTables& tables, AttentionExecutor& attention,
                     const LayerActivations& a, Tensor& d, Workspace& workspace,
                     LayerGradients* later) const {
  const std::int64_t tokens = d.size(0);
  const auto scratch = [&](const char* name, std::int64_t columns) {
    return workspace.take(name, {tokens, columns}, type_);
  };
  const LayerParameters<ParameterGradient>& g = gradient_;
  if (later != nullptr) {
    const auto kept = [&](std::int64_t columns) {
      return Tensor::empty({tokens, columns}, type_, device_of(d.space()));
    };
    *later = {kept(qkv_width(shape_)), kept(shape_.hidden), kept(2 * shape_.intermediate),
              kept(shape_.hidden)};
  }

  // MLP: d is the gradient of both summands of the output.
  Tensor d_product = scratch("layer d_product", shape_.intermediate),
         d_normed = scratch("layer d_normed", shape_.hidden);
  Tensor d_gate_up =
      later != nullptr ? later->gate_up : scratch("layer d_gate_up", 2 * shape_.intermediate);
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
  Tensor d_attention = scratch("layer d_attention", query_width(shape_));
  linear_input_gradient(d, value_.output, d_attention);
  lora_output_.input_gradient(tables.dropout_keys, d, d_attention, workspace);
  if (later != nullptr)
    later->output.copy_from(d);
  else
    weight_gradients(a.attention, d, g.output, lora_output_, tables, workspace);
  Tensor d_qkv = later != nullptr ? later->qkv : scratch("layer d_qkv", qkv_width(shape_));
  qkv_gradient(tables, attention, a, d_attention, d_qkv, workspace);
  linear_input_gradient(d_qkv, value_.qkv, d_normed);
  lora_qkv_.input_gradient(tables.dropout_keys, d_qkv, d_normed, workspace);
  if (later == nullptr) qkv_weights(tables, a, d_qkv, workspace);
  rmsnorm_backward(d_normed, a.input, a.rstd1, value_.norm1, true, d, g.norm1.next());
}

}  // namespace ballast

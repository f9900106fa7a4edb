#include "kernels/model/layer.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/fp8_made.hpp"
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
    &LayerActivations::input,   &LayerActivations::rstd1,   &LayerActivations::normed1,
    &LayerActivations::qkv,     &LayerActivations::turned,  &LayerActivations::attention,
    &LayerActivations::lse,     &LayerActivations::middle,  &LayerActivations::rstd2,
    &LayerActivations::normed2, &LayerActivations::gate_up, &LayerActivations::product};

/// Calls f(spec, tensor) for every activation of a layer.
template <class F>
void for_each_activation(const ModelShape& shape, std::int64_t tokens, LayerActivations& a,
                         const F& f) {
  const std::vector<ActivationSpec> specs = layer_activations(shape, tokens);
  require(specs.size() == std::size(kMembers), "{} activations for {} members", specs.size(),
          std::size(kMembers));
  for (std::size_t i = 0; i < specs.size(); ++i) f(specs[i], a.*kMembers[i]);
}

}  // namespace

Layer::Layer(const ModelShape& shape, std::int64_t index, const Parameters& parameters, bool fp8)
    : shape_(shape),
      index_(index),
      type_(parameters.dtype()),
      rounds_(fp8 && fp8_makes_again(shape)) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const auto norm = [&](const char* name) { return prefix + name + ".weight"; };
  norm1_ = parameters.value(norm("input_layernorm"));
  norm1_gradient_ = parameters.gradient_of(norm("input_layernorm"));
  norm2_ = parameters.value(norm("post_attention_layernorm"));
  norm2_gradient_ = parameters.gradient_of(norm("post_attention_layernorm"));
  if (shape.qk_norm) {
    qk_norm_ = {parameters.value(norm("self_attn.q_norm")),
                parameters.value(norm("self_attn.k_norm")), shape.rms_eps};
    q_norm_gradient_ = parameters.gradient_of(norm("self_attn.q_norm"));
    k_norm_gradient_ = parameters.gradient_of(norm("self_attn.k_norm"));
  }
  const auto matrix = [&](const char* name, int count, const char* bias = nullptr) {
    return LinearLayer(parameters, prefix + name, bias, count, shape.lora, fp8);
  };
  qkv_ = matrix("self_attn.q_proj", 3, shape.qkv_bias ? ".bias" : nullptr);
  output_ = matrix("self_attn.o_proj", 1);
  gate_up_ = matrix("mlp.gate_proj", 2);
  down_ = matrix("mlp.down_proj", 1);
  const std::int64_t q = query_width(shape), kv = kv_width(shape), i = shape.intermediate;
  qkv_.add_adapter(parameters, prefix, Projection::q, 0, q);
  qkv_.add_adapter(parameters, prefix, Projection::k, q, q + kv);
  qkv_.add_adapter(parameters, prefix, Projection::v, q + kv, q + 2 * kv);
  output_.add_adapter(parameters, prefix, Projection::o, 0, shape.hidden);
  gate_up_.add_adapter(parameters, prefix, Projection::gate, 0, i);
  gate_up_.add_adapter(parameters, prefix, Projection::up, i, 2 * i);
  down_.add_adapter(parameters, prefix, Projection::down, 0, shape.hidden);
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
  return qkv_.adapter_flops(t) + output_.adapter_flops(t) + gate_up_.adapter_flops(t) +
         down_.adapter_flops(t);
}

LayerActivations Layer::allocate(std::int64_t tokens, Keep keep, bool has_branch,
                                 Workspace& workspace) const {
  Device& device = qkv_.device();
  LayerActivations a;
  for_each_activation(shape_, tokens, a, [&](const ActivationSpec& spec, Tensor& tensor) {
    if (&tensor == &a.input && !has_branch) return;  // forward takes the residual itself
    if (makes_again(spec)) return;
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
  const Tensor& turned = shape_.qk_norm ? a.turned : a.qkv;
  in.q = heads_of(turned, 0, shape_.query_heads, shape_.head_dim);
  in.k = heads_of(turned, query_width(shape_), shape_.kv_heads, shape_.head_dim);
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
  forward_to_mlp(in, tables, attention, a, workspace);
  Tensor branch = scratch(LayerScratch::branch, a.input.size(0), workspace);
  if (rounds_) {
    down_.forward(fp8_swiglu_forward(a.gate_up, workspace), branch, workspace);
  } else {
    swiglu_forward(a.gate_up, a.product);
    down_.forward(a.product, tables.dropout_keys, branch, workspace);
  }
  return {a.middle, branch};
}

void Layer::normed_product(const ResidualPair& in, const Tensor& weight, Tensor& x, Tensor& normed,
                           Tensor& rstd, const LinearLayer& matrix, const TokenTables& tables,
                           Tensor& y, Workspace& workspace) const {
  if (!in.branch.defined()) x = in.residual;
  if (rounds_) {
    const Fp8Tokens rounded =
        fp8_rmsnorm_forward(in.residual, in.branch, weight, shape_.rms_eps, x, rstd, workspace);
    matrix.forward(rounded, y, workspace);
    return;
  }
  if (in.branch.defined())
    add_rmsnorm_forward(in.residual, in.branch, weight, shape_.rms_eps, x, normed, rstd);
  else
    rmsnorm_forward(x, weight, shape_.rms_eps, normed, rstd);
  matrix.forward(normed, tables.dropout_keys, y, workspace);
}

void Layer::turn(const TokenTables& tables, LayerActivations& a) const {
  const std::int64_t turned = shape_.query_heads + shape_.kv_heads;  // q and k lie side by side
  Tensor heads = heads_of(a.qkv, 0, turned + shape_.kv_heads, shape_.head_dim);
  if (shape_.qk_norm) {
    Tensor to = heads_of(a.turned, 0, turned, shape_.head_dim);
    qk_norm_rope(heads, shape_.query_heads, qk_norm_, tables.cos, tables.sin, to);
  } else {
    rope_apply(heads, turned, rounds_ ? qkv_.bias() : Tensor(), tables.cos, tables.sin);
  }
}

void Layer::forward_to_mlp(const ResidualPair& in, const TokenTables& tables,
                           AttentionExecutor& attention, LayerActivations& a,
                           Workspace& workspace) const {
  normed_product(in, norm1_, a.input, a.normed1, a.rstd1, qkv_, tables, a.qkv, workspace);
  turn(tables, a);
  Tensor o = heads_of(a.attention, 0, shape_.query_heads, shape_.head_dim);
  attention.forward(attention_inputs(a), o, a.lse);
  Tensor branch = scratch(LayerScratch::branch, a.input.size(0), workspace);
  output_.forward(a.attention, tables.dropout_keys, branch, workspace);
  normed_product({a.input, branch}, norm2_, a.middle, a.normed2, a.rstd2, gate_up_, tables,
                 a.gate_up, workspace);
}

void Layer::restore(Keep keep, bool halves, const TokenTables& tables, AttentionExecutor& attention,
                    LayerActivations& a, Workspace& workspace) const {
  if (rounds_) keep = std::min(keep, Keep::selective);
  if (keep == Keep::all) return;
  const std::int64_t tokens = a.input.size(0);
  for_each_activation(shape_, tokens, a, [&](const ActivationSpec& spec, Tensor& tensor) {
    if (keep >= spec.kept_from || (makes_again(spec) && !halves)) return;
    if (&tensor == &a.product && !halves) return;  // backward makes it beside its gradient
    const DType type = spec.statistic ? statistics_type(type_) : type_;
    tensor = halves && spec.weight_input ? Tensor::empty(spec.shape, type, qkv_.device())
                                         : workspace.take(spec.name, spec.shape, type);
  });
  if (keep == Keep::input)
    forward_to_mlp({a.input, {}}, tables, attention, a, workspace);
  else if (shape_.qk_norm)
    turn(tables, a);
  if (rounds_ && !halves) return;
  if (keep != Keep::input || rounds_) {
    rmsnorm_recompute(a.input, a.rstd1, norm1_, a.normed1);
    rmsnorm_recompute(a.middle, a.rstd2, norm2_, a.normed2);
  }
  if (halves) swiglu_forward(a.gate_up, a.product);
}

void Layer::backward_weight(const TokenTables& tables, const LayerActivations& a,
                            const LayerGradients& d, Workspace& workspace) const {
  const Tensor& keys = tables.dropout_keys;
  down_.weight_gradient(a.product, keys, d.down, workspace);
  gate_up_.weight_gradient(a.normed2, keys, d.gate_up, workspace);
  output_.weight_gradient(a.attention, keys, d.output, workspace);
  qkv_.weight_gradient(a.normed1, keys, d.qkv, workspace);
}

Layer::HeadGradients Layer::attention_backward(AttentionExecutor& attention,
                                               const LayerActivations& a, const Tensor& d_attention,
                                               Workspace& workspace) const {
  const std::int64_t query = shape_.query_heads, kv = shape_.kv_heads, dim = shape_.head_dim;
  const auto sums = [&](LayerScratch which, std::int64_t heads) {
    return scratch(which, d_attention.size(0), workspace)
        .reshape({d_attention.size(0), heads, dim});
  };
  HeadGradients d{sums(LayerScratch::dq, query), sums(LayerScratch::dk, kv),
                  sums(LayerScratch::dv, kv)};
  attention.backward(attention_inputs(a), heads_of(a.attention, 0, query, dim), a.lse,
                     heads_of(d_attention, 0, query, dim), d.q, d.k, d.v);
  return d;
}

void Layer::qkv_gradient(const TokenTables& tables, const LayerActivations& a,
                         const HeadGradients& d, Tensor& d_qkv) const {
  if (!shape_.qk_norm) return rope_backward(d.q, d.k, d.v, tables.cos, tables.sin, d_qkv);
  const Tensor heads = heads_of(a.qkv, 0, shape_.query_heads + shape_.kv_heads, shape_.head_dim);
  qk_norm_rope_backward(d.q, d.k, d.v, heads, qk_norm_, tables.cos, tables.sin, d_qkv,
                        q_norm_gradient_.next(), k_norm_gradient_.next());
}

Fp8Tokens Layer::rounded_qkv_gradient(const TokenTables& tables, const LayerActivations& a,
                                      const HeadGradients& d, Workspace& workspace) const {
  if (!shape_.qk_norm)
    return fp8_rope_backward(d.q, d.k, d.v, tables.cos, tables.sin, qkv_.bias_gradient(),
                             workspace);
  const Tensor heads = heads_of(a.qkv, 0, shape_.query_heads + shape_.kv_heads, shape_.head_dim);
  return fp8_qk_norm_rope_backward(d.q, d.k, d.v, heads, qk_norm_, tables.cos, tables.sin,
                                   q_norm_gradient_.next(), k_norm_gradient_.next(), workspace);
}

void Layer::rounded_backward(const TokenTables& tables, AttentionExecutor& attention,
                             const LayerActivations& a, Tensor& d, Workspace& workspace) const {
  const auto scratch = [&](LayerScratch which) {
    return this->scratch(which, d.size(0), workspace);
  };
  const auto rounded_d = [&] {
    return fp8_round(d, Fp8Sides::both, "fp8 branch gradient", workspace);
  };
  Tensor d_product = scratch(LayerScratch::d_product), d_normed = scratch(LayerScratch::d_normed);
  {  // the attention half asks for the same buffers, wider: held, they could not give way
    const Fp8Tokens d_down = rounded_d();
    down_.input_gradient(d_down, d_product, workspace);
    const Fp8SwigluGradient mlp = fp8_swiglu_backward(a.gate_up, d_product, workspace);
    down_.weight_gradient(mlp.product, d_down);
    gate_up_.backward(fp8_rmsnorm_recompute(a.middle, a.rstd2, norm2_, workspace), mlp.gate_up,
                      d_normed, workspace);
  }
  rmsnorm_backward(d_normed, a.middle, a.rstd2, norm2_, true, d, norm2_gradient_.next());

  Tensor d_attention = scratch(LayerScratch::d_attention);
  output_.backward(fp8_round(a.attention, Fp8Sides::columns, "fp8 input", workspace), rounded_d(),
                   d_attention, workspace);
  const HeadGradients heads = attention_backward(attention, a, d_attention, workspace);
  const Fp8Tokens d_qkv = rounded_qkv_gradient(tables, a, heads, workspace);
  qkv_.backward(fp8_rmsnorm_recompute(a.input, a.rstd1, norm1_, workspace), d_qkv, d_normed,
                workspace);
  rmsnorm_backward(d_normed, a.input, a.rstd1, norm1_, true, d, norm1_gradient_.next());
}

void Layer::backward(const TokenTables& tables, AttentionExecutor& attention,
                     const LayerActivations& a, Tensor& d, Workspace& workspace,
                     LayerGradients* later) const {
  if (rounds_ && later == nullptr) return rounded_backward(tables, attention, a, d, workspace);
  const std::int64_t tokens = d.size(0);
  const auto scratch = [&](LayerScratch which) { return this->scratch(which, tokens, workspace); };
  // Gradient of a matrix's input, and now or later those of what it has.
  const auto pass = [&](const LinearLayer& matrix, const Tensor& x, const Tensor& dy, Tensor& dx) {
    if (later == nullptr)
      matrix.backward(x, tables.dropout_keys, dy, dx, workspace);
    else
      matrix.input_gradient(tables.dropout_keys, dy, dx, workspace);
  };
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
  down_.input_gradient(tables.dropout_keys, d, d_product, workspace);
  const bool again = !a.product.defined();
  const Tensor product = again ? scratch(LayerScratch::product) : a.product;
  swiglu_backward(a.gate_up, d_product, d_gate_up, again ? product : Tensor());
  if (later != nullptr)
    later->down.copy_from(d);  // d goes on
  else
    down_.weight_gradient(product, tables.dropout_keys, d, workspace);
  pass(gate_up_, a.normed2, d_gate_up, d_normed);
  rmsnorm_backward(d_normed, a.middle, a.rstd2, norm2_, true, d, norm2_gradient_.next());

  // Attention: d is now the gradient of x2, that is of x and of the attention branch.
  Tensor d_attention = scratch(LayerScratch::d_attention);
  pass(output_, a.attention, d, d_attention);
  if (later != nullptr) later->output.copy_from(d);
  Tensor d_qkv = later != nullptr ? later->qkv : scratch(LayerScratch::d_qkv);
  const HeadGradients heads = attention_backward(attention, a, d_attention, workspace);
  qkv_gradient(tables, a, heads, d_qkv);
  pass(qkv_, a.normed1, d_qkv, d_normed);
  rmsnorm_backward(d_normed, a.input, a.rstd1, norm1_, true, d, norm1_gradient_.next());
}

}  // namespace ballast

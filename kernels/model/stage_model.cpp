#include "kernels/model/stage_model.hpp"

#include <cmath>
#include <functional>
#include <utility>

#include "kernels/model/layer.hpp"
#include "kernels/model/lm_head.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rope.hpp"

namespace ballast {

struct StageActivations {
  TokenTables tables;
  std::vector<LayerActivations> layers;
  std::vector<LayerGradients> gradients;  // [layer] between the halves of backward
  Tensor d_hidden;                        // last stage: gradient of the last layer's output [T, H]
};

void StageActivationsDeleter::operator()(StageActivations* activations) const {
  delete activations;
}

namespace {

/// Sets the recorder's layer for the events of a scope.
class LayerContext {
 public:
  LayerContext(Recorder* recorder, std::int64_t layer)
      : recorder_(recorder), previous_(recorder ? recorder->context.layer : -1) {
    if (recorder_) recorder_->context.layer = static_cast<std::int32_t>(layer);
  }
  ~LayerContext() {
    if (recorder_) recorder_->context.layer = previous_;
  }
  LayerContext(const LayerContext&) = delete;
  LayerContext& operator=(const LayerContext&) = delete;

 private:
  Recorder* recorder_;
  std::int32_t previous_;
};

}  // namespace

struct StageModel::Impl {
  ModelShape shape;
  const Parameters* parameters;
  std::int64_t layer_begin, layer_end;
  RecomputeOptions recompute;
  Recorder* recorder;
  DType type;
  Device* device;
  Workspace workspace;
  RopeFrequencies frequencies;
  std::vector<Layer> layers;
  Tensor embedding;  // first stage
  ParameterGradient embedding_gradient;
  LmHead head;  // last stage
  std::function<void(std::int64_t layer, const ResidualPair& output)>
      inspect;  // called after each layer while a diagnosis runs

  Impl(const ModelShape& s, std::int64_t begin, std::int64_t end, Parameters& parameters,
       RecomputeOptions r, Recorder* rec, std::int64_t head_chunk, bool fp8)
      : shape(s),
        parameters(&parameters),
        layer_begin(begin),
        layer_end(end),
        recompute(r),
        recorder(rec),
        type(parameters.dtype()),
        device(&device_of(parameters.values().space())),
        workspace(*device),
        frequencies(rope_frequencies(s)) {
    for (std::int64_t l = begin; l < end; ++l) layers.emplace_back(shape, l, parameters, fp8);
    const std::string embedding_name = "model.embed_tokens.weight",
                      head_name = shape.tied_embedding ? embedding_name : "lm_head.weight";
    if (first()) {
      embedding = parameters.value(embedding_name);
      embedding_gradient = parameters.gradient_of(embedding_name);
    }
    if (last())
      head = {parameters.value("model.norm.weight"),
              parameters.value(head_name),
              parameters.gradient_of("model.norm.weight"),
              parameters.gradient_of(head_name),
              shape.rms_eps,
              head_chunk};
  }

  bool first() const { return layer_begin == 0; }
  bool last() const { return layer_end == shape.layers; }

  void check(const LocalBatch& batch, const Tensor& input) const {
    const std::int64_t t = batch.size();
    require(batch.tokens.defined() && batch.positions.defined() && batch.positions.numel() == t,
            "micro-batch: {} tokens but {} positions", t,
            batch.positions.defined() ? batch.positions.numel() : 0);
    if (last())
      require(batch.targets.defined() && batch.targets.numel() == t,
              "micro-batch: the last stage needs a target for each of {} tokens", t);
    if (!first())
      require(input.defined() && input.shape() == Shape({t, shape.hidden}) && input.dtype() == type,
              "stage input must be {} [{}, {}]", name(type), t, shape.hidden);
  }

  /// Loss of the last stage, and with `d_hidden` its gradient.
  void run_head(const LocalBatch& batch, const ResidualPair& hidden, Tensor* d_hidden,
                StageOutput& output) {
    const std::int64_t tokens = batch.size();
    const DType statistics = statistics_type(type);
    LayerContext context(recorder, -1);
    Scope scope(recorder, EventKind::head);
    const bool weighs = d_hidden != nullptr && batch.weigh;
    const double products =
        (d_hidden != nullptr ? (head.weight_gradient.defined() ? 3 : 2) : 1) + (weighs ? 1 : 0);
    scope.flops =
        products * linear_flops(static_cast<double>(tokens), static_cast<double>(shape.hidden),
                                static_cast<double>(shape.vocabulary));
    LossGradient gradient{batch.loss_scale, batch.loss_weights, {}};
    if (d_hidden != nullptr)
      gradient.d_hidden = *d_hidden = Tensor::empty({tokens, shape.hidden}, type, *device);
    output.token_loss = Tensor::empty({tokens}, statistics, *device, MemoryCategory::workspace);
    if (weighs) {
      lm_head(head, hidden.residual, hidden.branch, batch.targets, workspace, output.token_loss);
      gradient.weights = batch.weigh(output.token_loss);
    }
    output.loss_weights = gradient.weights;
    if (batch.judged)
      output.correct = Tensor::empty({tokens}, DType::u8, *device, MemoryCategory::workspace);
    lm_head(head, hidden.residual, hidden.branch, batch.targets, workspace, output.token_loss,
            output.correct, d_hidden != nullptr ? &gradient : nullptr);
  }

  // A tensor that backward needs, or scratch for evaluation.
  Tensor kept(bool keep, const char* name, const Shape& s, DType t) {
    return keep ? Tensor::empty(s, t, *device) : workspace.take(name, s, t);
  }
};

double StageOutput::loss_sum() const {
  return token_loss.defined() ? sum_losses(token_loss, loss_weights) : 0.0;
}

StageModel::StageModel(const ModelShape& shape, std::int64_t layer_begin, std::int64_t layer_end,
                       Parameters& parameters, RecomputeOptions recompute, Recorder* recorder,
                       std::int64_t head_chunk_tokens, bool fp8) {
  const auto list = problems(shape);
  require(list.empty(), "the model's shape is impossible: {}", messages(list, "; "));
  require(0 <= layer_begin && layer_begin < layer_end && layer_end <= shape.layers,
          "stage of layers [{}, {}) in a model of {} layers: a stage needs at least one",
          layer_begin, layer_end, shape.layers);
  impl_ = std::make_unique<Impl>(shape, layer_begin, layer_end, parameters, recompute, recorder,
                                 head_chunk_tokens, fp8);
}

StageModel::~StageModel() = default;
const ModelShape& StageModel::shape() const { return impl_->shape; }
bool StageModel::first() const { return impl_->first(); }
bool StageModel::last() const { return impl_->last(); }
DType StageModel::type() const { return impl_->type; }
Device& StageModel::device() const { return *impl_->device; }

StageOutput StageModel::forward(const LocalBatch& batch, const Tensor& input,
                                AttentionExecutor& attention, StageActivationsPtr* saved,
                                bool head) {
  Impl& m = *impl_;
  m.check(batch, input);
  const std::int64_t tokens = batch.size(), half = m.shape.head_dim / 2;
  const DType statistics = statistics_type(m.type);
  const bool keep = saved != nullptr;
  StageActivationsPtr activations(new StageActivations);
  StageActivations& a = *activations;
  a.tables = {m.kept(keep, "rotary cos", {tokens, half}, statistics),
              m.kept(keep, "rotary sin", {tokens, half}, statistics), batch.dropout_keys};
  rope_table(batch.positions, m.frequencies, a.tables.cos, a.tables.sin);

  ResidualPair hidden{input, {}};
  if (m.first()) {
    m.parameters->need_values(-1);
    hidden.residual = m.kept(keep, "embedded", {tokens, m.shape.hidden}, m.type);
    embedding_forward(batch.tokens, m.embedding, hidden.residual);
  }
  for (std::size_t l = 0; l < m.layers.size(); ++l) {
    const Layer& layer = m.layers[l];
    m.parameters->need_values(layer.index());
    LayerContext context(m.recorder, layer.index());
    Scope scope(m.recorder, EventKind::layer_forward);
    scope.flops = layer.flops(tokens);
    const Keep level =
        keep ? keep_of(m.recompute.with(batch.recompute_layers).of(static_cast<long>(l)))
             : Keep::nothing;
    LayerActivations& intermediate =
        a.layers.emplace_back(layer.allocate(tokens, level, hidden.branch.defined(), m.workspace));
    hidden = layer.forward(hidden, a.tables, attention, intermediate, m.workspace);
    layer.release(level, intermediate);
    if (m.inspect) m.inspect(layer.index(), hidden);
  }

  if (m.last()) m.parameters->need_values();
  StageOutput output;
  require(head || !keep, "a forward that keeps activations needs the head's");
  if (m.last() && head && batch.next_of) {
    require(!keep, "a forward for generation keeps no activations");
    output.logits = lm_logits(m.head, hidden.residual, hidden.branch, *batch.next_of, m.workspace);
  } else if (m.last() && head) {
    m.run_head(batch, hidden, keep ? &a.d_hidden : nullptr, output);
  } else if (!m.last()) {
    output.hidden =
        Tensor::empty({tokens, m.shape.hidden}, m.type, *m.device, MemoryCategory::workspace);
    add(hidden.residual, hidden.branch, output.hidden);
  }
  if (keep) *saved = std::move(activations);
  return output;
}

Tensor StageModel::backward(const LocalBatch& batch, StageActivationsPtr saved,
                            AttentionExecutor& attention, const Tensor& d_output,
                            const GradientsFinal& gradients_final) {
  require(saved != nullptr, "backward needs the activations that forward of the same stage kept");
  return run_backward(batch, *saved, attention, d_output, false, gradients_final);
}

Tensor StageModel::backward_input(const LocalBatch& batch, StageActivations& saved,
                                  AttentionExecutor& attention, const Tensor& d_output) {
  return run_backward(batch, saved, attention, d_output, true, {});
}

void StageModel::backward_weight(StageActivationsPtr saved, const GradientsFinal& gradients_final) {
  Impl& m = *impl_;
  require(saved != nullptr && saved->gradients.size() == m.layers.size(),
          "the weight half of backward needs what the input half left");
  if (gradients_final) gradients_final(m.layer_end);
  for (std::size_t l = m.layers.size(); l-- > 0;) {
    const Layer& layer = m.layers[l];
    {
      LayerContext context(m.recorder, layer.index());
      Scope scope(m.recorder, EventKind::layer_backward);
      scope.flops = layer.weight_gradient_flops(saved->layers[l].normed1.size(0));
      layer.backward_weight(saved->tables, saved->layers[l], saved->gradients[l], m.workspace);
      saved->layers[l] = {};
      saved->gradients[l] = {};
    }
    if (gradients_final) gradients_final(layer.index());
  }
  if (gradients_final) gradients_final(-1);
}

Tensor StageModel::run_backward(const LocalBatch& batch, StageActivations& a,
                                AttentionExecutor& attention, const Tensor& d_output, bool halves,
                                const GradientsFinal& gradients_final) {
  Impl& m = *impl_;
  require(a.layers.size() == m.layers.size() && a.gradients.empty(),
          "backward needs the activations that forward of the same stage kept");
  if (halves) a.gradients.resize(m.layers.size());
  const std::int64_t tokens = batch.size();
  Tensor d = std::exchange(a.d_hidden, {});
  if (!m.last()) {
    d = Tensor::empty({tokens, m.shape.hidden}, m.type, *m.device, MemoryCategory::workspace);
    require(d_output.defined() && d_output.shape() == d.shape() && d_output.dtype() == m.type,
            "gradient of the stage output must be {} [{}, {}]", name(m.type), tokens,
            m.shape.hidden);
    d.copy_from(d_output);
  }
  if (gradients_final) gradients_final(m.layer_end);
  for (std::size_t l = m.layers.size(); l-- > 0;) {
    const Layer& layer = m.layers[l];
    {
      LayerContext context(m.recorder, layer.index());
      Scope scope(m.recorder, EventKind::layer_backward);
      scope.flops =
          layer.input_gradient_flops(tokens) + (halves ? 0 : layer.weight_gradient_flops(tokens));
      layer.restore(keep_of(m.recompute.with(batch.recompute_layers).of(static_cast<long>(l))),
                    halves, a.tables, attention, a.layers[l], m.workspace);
      layer.backward(a.tables, attention, a.layers[l], d, m.workspace,
                     halves ? &a.gradients[l] : nullptr);
      // Frees what is done with.
      if (halves)
        Layer::keep_weight_inputs(a.layers[l]);
      else
        a.layers[l] = {};
    }
    if (gradients_final) gradients_final(layer.index());
  }
  a.tables.cos = a.tables.sin = {};
  if (m.first() && m.embedding_gradient.defined())
    embedding_weight_gradient(batch.tokens, d, m.embedding_gradient.next());
  if (gradients_final) gradients_final(-1);
  return m.first() ? Tensor() : d;
}

namespace {

bool finite(const Tensor& x) {
  const Tensor host = x.to(host_device());
  const auto all = [&](auto&& at) {
    for (std::int64_t i = 0; i < host.numel(); ++i)
      if (!at(i)) return false;
    return true;
  };
  if (host.dtype() == DType::bf16)
    return all(
        [data = host.data<bf16>()](std::int64_t i) { return (data[i].bits & 0x7f80) != 0x7f80; });
  return dispatch_float(host.dtype(), [&]<class T>(T) {
    return all([data = host.data<T>()](std::int64_t i) { return std::isfinite(data[i]); });
  });
}

}  // namespace

std::pair<int, StageOutput> StageModel::first_nonfinite_layer(const LocalBatch& batch,
                                                              const Tensor& input,
                                                              AttentionExecutor& attention) {
  int found = -1;
  StageOutput output;
  impl_->inspect = [&](std::int64_t layer, const ResidualPair& output) {
    if (found < 0 && !(finite(output.residual) && finite(output.branch)))
      found = static_cast<int>(layer);
  };
  try {
    output = forward(batch, input, attention, nullptr);
  } catch (...) {
    impl_->inspect = nullptr;
    throw;
  }
  impl_->inspect = nullptr;
  return {found, std::move(output)};
}

}  // namespace ballast

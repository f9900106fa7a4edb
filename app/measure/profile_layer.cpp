#include "app/measure/profile_layer.hpp"

#include <algorithm>
#include <cmath>

#include "app/measure/attention_sample.hpp"
#include "app/measure/budgeted_attention.hpp"
#include "core/base/random.hpp"
#include "core/model/tensor_specs.hpp"
#include "kernels/model/layer.hpp"
#include "kernels/model/lm_head.hpp"
#include "kernels/model/stage_model.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/rope.hpp"

namespace ballast {
namespace {

/// Stands where attention would be, so that a layer without it can be timed.
class NoAttention : public AttentionExecutor {
 public:
  void forward(const AttentionInputs&, Tensor& o, Tensor& lse) override {
    o.zero();
    lse.zero();
  }
  void backward(const AttentionInputs&, const Tensor& o, const Tensor&, const Tensor&, Tensor& dq,
                Tensor& dk, Tensor& dv) override {
    if (cleared_) return;  // the gradients lie in scratch that nobody else writes
    for (Tensor* t : {&dq, &dk, &dv})
      copy_rows(Tensor::zeros(t->shape(), t->dtype(), device_of(o.space())), *t);
    cleared_ = true;
  }

 private:
  bool cleared_ = false;
};

MeasuredTime summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const std::size_t n = times.size();
  return {times[n / 2], times[(3 * n) / 4] - times[n / 4], 0};
}

}  // namespace

struct LayerProfiler::Impl {
  ModelShape shape;
  Options options;
  RepeatRule rule;
  Device& device;
  Clock& clock;
  DType type;
  Parameters parameters;
  std::vector<Layer> layers;
  std::size_t turn = 0;
  RopeFrequencies frequencies;

  static ModelShape cold(ModelShape s, DType type, std::int64_t most) {
    constexpr double kCacheBytes = 64 << 20;  // no cache of a core or GPU holds more
    const auto elements = [&](std::int64_t count) {
      s.layers = count;
      double sum = 0;
      for (const Parameter& p : parameter_table(s)) sum += static_cast<double>(p.numel());
      return sum;
    };
    const double bytes =
        (elements(2) - elements(1)) *
        static_cast<double>(size_of(type) + size_of(statistics_type(type)));  // gradients too
    s.layers = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(kCacheBytes / bytes)),
                                        1, std::max<std::int64_t>(1, most));
    return s;
  }
  Impl(const ModelShape& s, DType t, Device& d, Clock& c, const Options& o)
      : shape(cold(s, t, o.layers)),
        options(o),
        device(d),
        clock(c),
        type(t),
        parameters(parameter_table(shape), t, d),
        frequencies(rope_frequencies(shape)) {
    for (std::int64_t i = 0; i < shape.layers; ++i)
      layers.emplace_back(shape, i, parameters, options.fp8);
    parameters.initialise(options.seed);
  }

  /// `before` runs ahead of each run of `work`; its own time is taken off.
  MeasuredTime time(const std::function<void()>& work,
                    const std::function<void()>& before = {}) const {
    const std::function<void()> nothing = [] {};
    const auto batch = [&](std::int64_t runs, const std::function<void()>& first,
                           const std::function<void()>& then) {
      device.synchronize();
      const std::int64_t begin = clock.mark();
      for (std::int64_t i = 0; i < runs; ++i) first(), then();
      const std::int64_t end = clock.mark();
      device.synchronize();
      return (clock.seconds(end) - clock.seconds(begin)) / static_cast<double>(runs);
    };
    const std::function<void()>& first = before ? before : nothing;
    double once = batch(1, first, work);  // of the warm-up runs
    const std::int64_t alone =
        std::min<std::int64_t>(rule.warmups(once), std::max<std::int64_t>(1, rule.warmup));
    for (std::int64_t i = 1; i < alone; ++i) once = batch(1, first, work);
    if (const std::int64_t hot = rule.warmups(once) - alone; hot > 0)
      once = batch(hot, first, work);
    const std::int64_t runs = rule.runs(once), batches = rule.batches(once);
    std::vector<double> times, aside(1, 0.0);
    for (std::int64_t i = 0; i < batches; ++i) times.push_back(batch(runs, first, work));
    if (before) {
      aside.clear();
      for (int i = 0; i < 3; ++i) aside.push_back(batch(runs, first, nothing));
      std::sort(aside.begin(), aside.end());
    }
    for (double& t : times) t = std::max(t - aside[aside.size() / 2], t / 2);
    return summary(std::move(times));
  }

  static constexpr std::int64_t kDrawn = 1024;
  /// Random rows, the first `distinct` over and over: what they are costs no time unless they
  /// choose, and drawing each would.
  Tensor values(const char* what, std::int64_t tokens, std::int64_t heads, std::int64_t width,
                std::int64_t distinct = kDrawn) const {
    const Tensor drawn = attention_values(options.seed, what, std::min(tokens, distinct), heads,
                                          width, type, [](std::int64_t i) { return i; });
    Tensor all = Tensor::empty({tokens, heads, width}, type, device, MemoryCategory::data);
    for (std::int64_t begin = 0; begin < tokens; begin += distinct) {
      const std::int64_t count = std::min(distinct, tokens - begin);
      all.rows(begin, begin + count).copy_from(drawn.rows(0, count));
    }
    return all;
  }
  Tensor numbers(std::int64_t tokens, std::int64_t below, const char* what) const {
    Tensor t = Tensor::empty({tokens}, DType::i32, host_device(), MemoryCategory::data);
    for (std::int64_t i = 0; i < tokens; ++i)
      t.data<std::int32_t>()[i] = static_cast<std::int32_t>(
          below == 0 ? static_cast<std::uint64_t>(i)
                     : random_bits(options.seed, stream_of(what), static_cast<std::uint64_t>(i)) %
                           static_cast<std::uint64_t>(below));
    return t.to(device);
  }

  BudgetedAttention budgeted(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                             std::int64_t block_tokens) const {
    return {segments,
            budget,
            block_tokens,
            options.attention,
            static_cast<int>(shape.query_heads),
            options.layers,
            options.seed,
            device.space()};
  }

  /// `next_layer` runs before each forward that is the first of its layer.
  MeasuredPasses run(std::int64_t tokens, Recompute recompute, AttentionExecutor& attention,
                     const std::function<void()>& next_layer = {}) {
    const Keep keep = keep_of(recompute);
    const std::int64_t half = shape.head_dim / 2;
    TokenTables rotary{Tensor::empty({tokens, half}, statistics_type(type), device),
                       Tensor::empty({tokens, half}, statistics_type(type), device),
                       {}};
    rope_table(numbers(tokens, 0, ""), frequencies, rotary.cos, rotary.sin);
    const auto rows = [&](const char* what) {
      return values(what, tokens, 1, shape.hidden).reshape({tokens, shape.hidden});
    };
    const ResidualPair in{rows("profile residual"), rows("profile branch")};
    const Tensor d_output = rows("profile gradient");
    Tensor d = Tensor::empty(d_output.shape(), type, device, MemoryCategory::workspace);
    device.synchronize();
    const std::int64_t before = memory_use().current_total;
    reset_peak_memory();
    Workspace workspace(device);
    std::vector<LayerActivations> kept(layers.size());
    MeasuredPasses measured;
    const auto forward = [&] {
      const std::size_t i = turn++ % layers.size();
      kept[i] = {};
      kept[i] = layers[i].allocate(tokens, keep, true, workspace);
      layers[i].forward(in, rotary, attention, kept[i], workspace);
      layers[i].release(keep, kept[i]);
    };
    measured.forward = time(forward, next_layer);
    for (std::size_t i = 0; i < layers.size(); ++i) forward();
    const std::int64_t with = memory_use().current_total;
    kept[0] = {};
    measured.forward.bytes = with - memory_use().current_total;
    turn = 0;
    forward();
    LayerActivations work;
    measured.backward = time(
        [&] {
          const std::size_t i = turn++ % layers.size();
          work = kept[i];
          layers[i].restore(keep, false, rotary, attention, work, workspace);
          layers[i].backward(rotary, attention, work, d, workspace);
          work = {};
        },
        [&] { d.copy_from(d_output); });
    measured.backward.bytes = memory_use().peak_total - before -
                              static_cast<std::int64_t>(layers.size() - 1) * measured.forward.bytes;
    return measured;
  }
};

LayerProfiler::LayerProfiler(const ModelShape& shape, DType type, Device& device, Clock& clock,
                             const Options& options)
    : impl_(std::make_unique<Impl>(shape, type, device, clock, options)) {}
LayerProfiler::~LayerProfiler() = default;
void LayerProfiler::repeat(const RepeatRule& rule) { impl_->rule = rule; }

MeasuredPasses LayerProfiler::rest(std::int64_t tokens, Recompute recompute) {
  NoAttention nothing;
  return impl_->run(tokens, recompute, nothing);
}

MeasuredPasses LayerProfiler::whole(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                                    std::int64_t block_tokens, Recompute recompute) {
  std::int64_t tokens = 0;
  for (const BudgetSegment& s : segments) tokens += s.query_tokens;
  BudgetedAttention attention = impl_->budgeted(segments, budget, block_tokens);
  std::function<void()> next_layer;
  if (attention.routes()) next_layer = [&] { attention.next_layer(); };
  return impl_->run(tokens, recompute, attention, next_layer);
}

MeasuredPasses LayerProfiler::attention(const std::vector<BudgetSegment>& segments,
                                        std::int64_t budget, std::int64_t block_tokens) {
  Impl& m = *impl_;
  BudgetedAttention attention = m.budgeted(segments, budget, block_tokens);
  std::int64_t n = 0, keys = 0;
  for (const BudgetSegment& s : segments)
    n += s.query_tokens, keys += s.query_tokens + s.prefix_tokens;
  const std::int64_t width = m.shape.head_dim;
  AttentionInputs in;
  in.q = m.values("profile q", n, m.shape.query_heads, width);
  in.k = m.values("profile k", keys, m.shape.kv_heads, width,
                  attention.routes() ? keys : Impl::kDrawn);
  in.v = m.values("profile v", keys, m.shape.kv_heads, width);
  in.scale = 1 / std::sqrt(static_cast<double>(width));
  const Tensor d_o = m.values("profile d_o", n, m.shape.query_heads, width);
  const auto like = [&](const Tensor& t) {
    return Tensor::empty(t.shape(), m.type, m.device, MemoryCategory::workspace);
  };
  Tensor o = like(in.q), dq = like(in.q), dk = like(in.k), dv = like(in.v);
  Tensor lse = Tensor::empty({m.shape.query_heads, n}, statistics_type(m.type), m.device,
                             MemoryCategory::workspace);
  MeasuredPasses measured;
  const auto forward = [&] { attention.forward(in, o, lse); };
  measured.again = measured.forward = m.time(forward);
  if (attention.routes()) measured.forward = m.time(forward, [&] { attention.next_layer(); });
  measured.backward = m.time([&] { attention.backward(in, o, lse, d_o, dq, dk, dv); });
  return measured;
}

MeasuredPasses LayerProfiler::head(std::int64_t tokens) {
  Impl& m = *impl_;
  const std::string embedding = "model.embed_tokens.weight",
                    head_name = m.shape.tied_embedding ? embedding : "lm_head.weight";
  const LmHead head{m.parameters.value("model.norm.weight"),
                    m.parameters.value(head_name),
                    m.parameters.gradient_of("model.norm.weight"),
                    m.parameters.gradient_of(head_name),
                    m.shape.rms_eps,
                    m.options.head_chunk_tokens};
  Workspace workspace(m.device);
  const Tensor ids = m.numbers(tokens, m.shape.vocabulary, "profile tokens"),
               targets = m.numbers(tokens, m.shape.vocabulary, "profile targets");
  const Tensor weights = m.parameters.value(embedding);
  const ParameterGradient gradient = m.parameters.gradient_of(embedding);
  const auto rows = [&] {
    return Tensor::empty({tokens, m.shape.hidden}, m.type, m.device, MemoryCategory::workspace);
  };
  const auto column = [&] {
    return Tensor::empty({tokens}, statistics_type(m.type), m.device, MemoryCategory::workspace);
  };
  Tensor embedded = rows(), loss = column();
  const LossGradient d{1.0 / static_cast<double>(tokens), {}, rows()};
  const Tensor branch =
      Tensor::zeros({tokens, m.shape.hidden}, m.type, m.device, MemoryCategory::workspace);
  MeasuredPasses measured;
  measured.forward = m.time([&] {
    embedding_forward(ids, weights, embedded);
    lm_head(head, embedded, branch, targets, workspace, loss, {}, &d);
  });
  measured.backward = m.time([&] { embedding_weight_gradient(ids, d.d_hidden, gradient.next()); });
  return measured;
}

double LayerProfiler::flops(std::int64_t tokens, double pairs) const {
  return 3 * impl_->layers.front().flops(tokens) +
         14 * static_cast<double>(impl_->shape.head_dim * impl_->shape.query_heads) * pairs;
}

}  // namespace ballast

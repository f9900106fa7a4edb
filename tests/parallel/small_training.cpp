#include "tests/parallel/small_training.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "core/model/muon_table.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/step_problems.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"

namespace ballast::testing {
namespace {

constexpr std::uint64_t kSeed = 20240607;  // parameters; the tokens follow the seed of the run

std::vector<Parameter> stored_table(const SmallOptions& options,
                                    const std::vector<std::int64_t>& layer_begin, int stage) {
  std::vector<Parameter> table = stage_table(options.shape, layer_begin, stage).table;
  if (options.muon) order_for_muon(table);
  return table;
}

}  // namespace

const Mesh& alone() {
  static const Communicator self;
  static const Mesh mesh(self, MeshShape());
  return mesh;
}

std::int32_t token_of(std::int64_t sample, std::int64_t position) {
  return static_cast<std::int32_t>(random_bits(test_seed(), 1000 + sample, position) %
                                   static_cast<std::uint64_t>(small_shape().vocabulary));
}

std::int32_t target_of(std::int64_t sample, std::int64_t position, std::int64_t length) {
  if (sample >= kMaskedSample && position % 23 != 19) return -1;
  if (position + 1 >= length ||
      (sample < kMaskedSample && random_bits(test_seed(), 5000 + sample, position) % 7 == 0))
    return -1;
  return token_of(sample, position + 1);
}

SampleLength sample_of(std::int64_t sample, std::int64_t tokens) {
  SampleLength result{sample, tokens, 0};
  for (std::int64_t i = 0; i < tokens; ++i) result.loss_tokens += target_of(sample, i, tokens) >= 0;
  return result;
}

SmallTraining::SmallTraining(const Mesh& mesh, const SmallOptions& options)
    : layer_begin_(
          balance_stages(options.shape.layers, mesh.shape.pp, part_costs(options.shape, 8))),
      parameters(stored_table(options, layer_begin_, mesh.at.pp), options.type, host_device(),
                 mesh.replica.size(), options.muon ? kOneBucket : options.bucket_bytes,
                 options.zero < 2, options.bf16_gradients),
      model(options.shape, layer_begin_[mesh.at.pp],
            mesh.at.pp + 1 < mesh.shape.pp ? layer_begin_[mesh.at.pp + 1] : options.shape.layers,
            parameters, options.recompute, options.recorder, 16),
      optimizer(parameters, mesh.replica, options.zero, {.bf16_moments = options.bf16_moments},
                options.recorder, options.muon),
      mesh_(mesh),
      options_(options),
      rings_(mesh),
      links_(mesh.pp, host_device()),
      tied_(mesh, parameters, optimizer, options.zero) {
  parameters.initialise(kSeed);
  // Larger weights than a model starts with, so that attention is not nearly uniform; and biases
  // that are not zero.
  dispatch_float(options.type, [&](auto t) {
    for (const Parameter& p : parameters.table()) {
      auto* x = parameters.value(p.name).data<decltype(t)>();
      for (std::int64_t i = 0; i < p.numel(); ++i)
        x[i] = p.shape.size() > 1
                   ? 8 * x[i]
                   : x[i] + static_cast<decltype(t)>(
                                0.1 * random_normal(kSeed, stream_of(p.name.c_str()), 1000000 + i));
    }
  });
  optimizer.reset_master_from_values();
}

MicroBatchWork SmallTraining::prepare(const StepPlan& plan, int place, StoredChunk stored) const {
  const PlannedMicroBatch& planned = plan.micro_batch(mesh_.at.dp, place);
  const MicroBatch micro_batch = planned.micro_batch();
  const SequenceLayout layout = plan.layout(planned);
  MicroBatchWork work;
  const RingGroup& ring = rings_.of(planned);
  auto tokens = local_tokens(micro_batch, layout, ring.plan.rank);
  const auto whole = static_cast<std::int64_t>(tokens.size());
  const Communicator& sequence = mesh_.sequence(micro_batch.sp);
  const auto [begin, end] = even_part(whole, sequence.rank(), sequence.size());
  tokens.assign(tokens.begin() + begin, tokens.begin() + end);
  const auto n = static_cast<std::int64_t>(tokens.size());
  LocalBatch& batch = work.batch;
  batch.tokens = Tensor::empty({n}, DType::i32, host_device(), MemoryCategory::data);
  batch.targets = Tensor::empty({n}, DType::i32, host_device(), MemoryCategory::data);
  batch.positions = Tensor::empty({n}, DType::i32, host_device(), MemoryCategory::data);
  for (std::int64_t i = 0; i < n; ++i) {
    if (tokens[i].segment < 0) {  // padding
      batch.tokens.data<std::int32_t>()[i] = batch.positions.data<std::int32_t>()[i] = 0;
      batch.targets.data<std::int32_t>()[i] = -1;
      batch.segment.push_back(-1);
      continue;
    }
    const Segment& segment = micro_batch.segments[tokens[i].segment];
    const auto length = length_.find(segment.sample);
    batch.tokens.data<std::int32_t>()[i] = token_of(segment.sample, tokens[i].position);
    batch.targets.data<std::int32_t>()[i] = target_of(
        segment.sample, tokens[i].position, length == length_.end() ? segment.end : length->second);
    batch.positions.data<std::int32_t>()[i] = static_cast<std::int32_t>(tokens[i].position);
    batch.segment.push_back(tokens[i].segment);
  }
  AttentionAxes axes = stored.store ? stored.store->axes(stored.chunk)
                                    : attention_axes(micro_batch, layout, ring.plan.rank);
  std::unique_ptr<IndexSource> source =
      pattern_source(ring.cp, std::move(axes), options_.attention, nullptr, options_.recorder,
                     sequence, stored.carry());
  if (options_.wrap_source) source = options_.wrap_source(micro_batch, std::move(source));
  work.attention = std::make_unique<RingAttention>(ring, std::move(source), options_.recorder,
                                                   std::move(stored));
  if (sequence.size() > 1)
    work.attention = std::make_unique<UlyssesAttention>(
        sequence, rings_.buffers(), whole, std::move(work.attention), options_.recorder);
  const std::vector<double> weights = segment_weights(plan.normaliser, micro_batch);
  if (!weights.empty()) {
    batch.loss_weights = Tensor::empty({n}, options_.type);
    dispatch_float(options_.type, [&](auto t) {
      for (std::int64_t i = 0; i < n; ++i)
        batch.loss_weights.data<decltype(t)>()[i] =
            static_cast<decltype(t)>(batch.segment[i] < 0 ? 0.0 : weights[batch.segment[i]]);
    });
  }
  work.batch.recompute_layers = micro_batch.recompute_layers;
  work.batch.loss_scale = planned.loss_weight;
  return work;
}

Batch SmallTraining::plan(const std::vector<SampleLength>& samples) const {
  BatchingOptions batching;
  batching.method = options_.method;
  batching.micro_batch_tokens = options_.micro_batch_tokens;
  batching.dp = mesh_.shape.dp;
  batching.align = options_.attention.align();
  batching.groups = options_.groups;
  batching.splits = options_.splits;
  batching.placement_costs = options_.placement_costs;
  batching.stages = mesh_.shape.pp;
  batching.chunk_k = options_.pipeline.k;
  return plan_batch(0, samples, batching);
}

StepPlan SmallTraining::step_plan(const Batch& batch) const {
  StepOptions options;
  options.mesh = mesh_.shape;
  options.zero = options_.zero;
  options.normaliser = options_.normaliser;
  options.layout.rule = {options_.layout, options_.stripe, options_.attention.align()};
  options.pipeline = options_.pipeline;
  options.pipeline.offload = options_.kv_place.offload;
  options.query_heads = options_.shape.query_heads;
  options.layer_begin = layer_begin_;
  options.stage_elements.assign(layer_begin_.size(), 1);
  return plan_batch_step(batch, options);
}

double SmallTraining::gradients(const std::vector<SampleLength>& samples) {
  for (const SampleLength& s : samples) length_[s.sample] = s.tokens;
  const StepPlan executed = step_plan(plan(samples));
  const std::string wrong = problems(executed);
  require(wrong.empty(), "{}", wrong);
  const int dp = mesh_.at.dp;
  schedule = executed.schedule(dp);
  const std::vector<MicroBatch> mine = executed.list(dp);
  const auto weight = [&](std::size_t m) {
    return executed.micro_batch(dp, static_cast<int>(m)).loss_weight;
  };
  optimizer.begin_step();
  const auto shards = [&](int m) -> ChunkStores::Shards {
    const PlannedMicroBatch& planned = executed.micro_batch(dp, m);
    return {shard_ranges(planned.micro_batch(), executed.layout(planned)),
            rings_.of(planned).plan.rank};
  };
  ChunkStores stores(mine, shards, options_.kv_place);
  StageCallbacks callbacks;
  callbacks.prepare = [&](int m) { return prepare(executed, m, stores.at(m)); };
  callbacks.collective = [&](int) { optimizer.end_round(); };
  callbacks.host = options_.kv_place.host.get();
  if (executed.meets_in_backward() && options_.overlap)
    callbacks.gradients_final = [&](std::int64_t layer) { optimizer.gradients_final(layer); };
  const MicroBatchLosses losses = run_stage(schedule, static_cast<int>(mine.size()), model, links_,
                                            callbacks, options_.recorder);
  optimizer.reduce_gradients();
  tied_.sum_gradients();
  norm = std::sqrt(mesh_.pp.all_reduce(optimizer.squared_norm()));
  double loss = 0;
  for (std::size_t m = 0; m < mine.size(); ++m) loss += losses[m] * weight(m);
  return mesh_.pp.all_reduce(mesh_.replica.all_reduce(loss));
}

int SmallTraining::first_nonfinite_layer(const MicroBatch& micro_batch) {
  Batch batch;
  batch.micro_batches.assign(static_cast<std::size_t>(mesh_.shape.dp), {micro_batch});
  MicroBatchWork work = prepare(step_plan(batch), 0);
  return ballast::first_nonfinite_layer(work, model, links_);
}

void SmallTraining::update(double learning_rate, std::int64_t step) {
  optimizer.apply(norm > 1 ? 1 / norm : 1.0, learning_rate, step, ShardedOptimizer::kTokensBeside);
}

Reference reference_step(const std::vector<SampleLength>& samples, DType type,
                         const ModelShape& shape, const AttentionOptions& attention) {
  SmallOptions options;
  options.attention = attention;
  options.shape = shape;
  options.type = type;
  return reference_step(samples, options);
}

Reference reference_step(const std::vector<SampleLength>& samples, SmallOptions options) {
  options.method = Batching::none;
  SmallTraining training(alone(), options);
  return reference_step(training, samples);
}

Reference reference_step(SmallTraining& training, const std::vector<SampleLength>& samples) {
  Reference reference;
  reference.loss = training.gradients(samples);
  reference.norm = training.norm;
  for (const Parameter& p : training.parameters.table()) {
    reference.names.push_back(p.name);
    reference.gradients.push_back(elements(training.parameters.gradient(p.name)));
  }
  return reference;
}

std::pair<double, std::string> worst_gradient(SmallTraining& training, const Communicator& world,
                                              const Reference& reference) {
  // Each rank compares its shard; the sums of all parameters are joined at once.
  const ShardedOptimizer& optimizer = training.optimizer;
  std::vector<double> sums(2 * reference.names.size(), 0.0);
  std::vector<std::vector<double>> slices;
  for (std::size_t b = 0; b < optimizer.slices().size(); ++b)
    slices.push_back(elements(optimizer.shard_gradient(b)));
  for (std::size_t p = 0; p < reference.names.size(); ++p) {
    if (!training.parameters.contains(reference.names[p])) continue;  // another stage's
    const std::int64_t first = training.parameters.offset(reference.names[p]),
                       last = first + static_cast<std::int64_t>(reference.gradients[p].size());
    for (std::size_t b = 0; b < slices.size(); ++b) {
      const auto& slice = optimizer.slices()[b];
      for (std::int64_t i = std::max(first, slice.begin); i < std::min(last, slice.end); ++i) {
        const double expected = reference.gradients[p][i - first],
                     difference = slices[b][i - slice.begin] - expected;
        sums[2 * p] += difference * difference;
        sums[2 * p + 1] += expected * expected;
      }
    }
  }
  Tensor joined = Tensor::wrap(sums.data(), {static_cast<std::int64_t>(sums.size())}, DType::f64);
  world.all_reduce(joined);
  // A gradient that is zero but for rounding (keys that single-token queries see) has no error of
  // its own.
  const double least = std::max(1e-300, 1e-10 * reference.norm * reference.norm);
  std::pair<double, std::string> worst{0, ""};
  for (std::size_t p = 0; p < reference.names.size(); ++p) {
    const double error = std::isnan(sums[2 * p])
                             ? INFINITY
                             : std::sqrt(sums[2 * p] / std::max(sums[2 * p + 1], least));
    if (error > worst.first) worst = {error, reference.names[p]};
  }
  return worst;
}

}  // namespace ballast::testing

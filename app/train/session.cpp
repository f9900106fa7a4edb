#include "app/train/session.hpp"

#include <exception>
#include <optional>
#include <set>

#include "app/plan/opened_files.hpp"
#include "app/plan/planned_samples.hpp"
#include "app/train/local_batch.hpp"
#include "core/base/random.hpp"
#include "core/config/step_options.hpp"
#include "core/model/muon_table.hpp"
#include "io/trace/recorded_indexes.hpp"
#include "parallel/comm/waits.hpp"
#include "parallel/context/ulysses.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {
namespace {

std::unique_ptr<Dataset> open_together(const Communicator& world, const Config& config) {
  std::unique_ptr<Dataset> dataset;
  together(world, [&] { dataset = open_dataset(data_options(config)); });
  const auto prints = world.all_gather(fmt::format("{:016x}", dataset->fingerprint()));
  for (std::size_t r = 1; r < prints.size(); ++r)
    check_all(world, prints[r] == prints[0],
              fmt::format(
                  "data: rank {} sees other data than rank 0 ({}); every node needs the same files",
                  r, dataset->description()));
  return dataset;
}

Sampler sampler_together(const Communicator& world, const Config& config, const Dataset& dataset) {
  std::optional<Sampler> sampler;
  together(world, [&] {
    sampler = sampler_of(config, dataset);
    refuse_missing_held_out(config, dataset, *sampler);
    sampler->begin_with(curriculum(config), [&](std::int64_t s) { return dataset.length(s); });
  });
  return *std::move(sampler);
}

/// One behind the last layer of a pipeline stage.
std::int64_t stage_end(const RunOptions& options, int stage) {
  const auto next = static_cast<std::size_t>(stage) + 1;
  return next < options.layer_begin.size() ? options.layer_begin[next] : options.model.layers;
}

/// This rank's part of the parameter table, in the order that the optimizer wants.
StageTable stored_stage(const Config& config, const RunOptions& options, int stage) {
  StageTable part = stage_table(options.model, options.layer_begin, stage);
  if (config.optimizer.kind == OptimizerKind::muon) order_for_muon(part.table);
  return part;
}

/// A source whose indexes are passed to `heard` when they are made.
class HeardSource final : public IndexSource {
 public:
  using Heard = decltype(Session::index_made);
  HeardSource(std::unique_ptr<IndexSource> source, Heard heard)
      : IndexSource(source->axes()), source_(std::move(source)), heard_(std::move(heard)) {}
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override {
    const std::vector<AttentionWork>& made = source_->shards(in);
    if (layers_.insert(in.layer).second) heard_(in, axes(), made);
    return made;
  }
  bool reads_keys(int layer) const override { return source_->reads_keys(layer); }

 private:
  std::unique_ptr<IndexSource> source_;
  Heard heard_;
  std::set<int> layers_;
};

}  // namespace

Session::Session(const Communicator& world, const Config& config_)
    : config(config_),
      options(RunOptions::from(config)),
      backend(choose_backend(config, world)),
      recorder(*backend.clock),
      waits(config.run.hang_timeout_s, recorder),
      mesh(world, options.mesh, options.joined_ranks(), options.model.query_heads),
      device(*backend.device),
      dataset(open_together(world, config)),
      sampler(sampler_together(world, config, *dataset)),
      window(options.window),
      stage(stored_stage(config, options, mesh.at.pp)),
      parameters(stage.table, backend.dtype, device, mesh.replica.size(), bucket_bytes(config),
                 config.optimizer.zero < 2, config.optimizer.bf16_gradients()),
      model(options.model, options.layer_begin[mesh.at.pp], stage_end(options, mesh.at.pp),
            parameters, config.recompute, &recorder, config.model.head_chunk_tokens,
            config.run.fp8()),
      rings(mesh),
      links(mesh.pp, device),
      kv_place{config.chunk.offload == Offload::host, config.chunk.window_tokens, &recorder} {
  check_all(world, dataset->vocabulary() <= options.model.vocabulary,
            fmt::format("model.vocabulary = {} is smaller than the data's vocabulary of {}",
                        options.model.vocabulary, dataset->vocabulary()));
  if (options.attention.index == IndexOrigin::recorded)
    together(world, [&] {
      options.attention.recorded =
          std::make_shared<RecordedIndexes>(read_indexes(config.attention.recorded));
    });
  if (options.attention.chosen() && options.attention.pattern == PatternKind::by_head)
    together(world, [&] { options.attention.heads = head_table(config); });
  together(world, [&] {
    refuse_without_loss(*dataset);
    refuse_samples_beyond_groups(config, *dataset);
    refuse_samples_beyond_gpus(config, *dataset, options.attention.heads.get());
  });
  rings.connect_joined(device);
  recorder.context.stage = mesh.at.pp;
  if (predicts_latency(config)) {
    together(world, [&] { tuning = std::make_unique<BudgetTuning>(config, &device); });
  }
  parameters.initialise(config.run.seed, config.model.weights.empty());
}

ChunkStores Session::chunk_stores(const StepPlan& plan) {
  const auto shards = [this, &plan](int place) -> ChunkStores::Shards {
    const PlannedMicroBatch& planned = plan.micro_batch(mesh.at.dp, place);
    return {shard_ranges(planned.micro_batch(), plan.layout(planned)), rings.of(planned).plan.rank};
  };
  return ChunkStores(plan.list(mesh.at.dp), shards, kv_place);
}

MicroBatchWork Session::prepare(const StepPlan& plan, int place, double loss_scale,
                                StoredChunk stored, BudgetPolicy* policy, const Dataset* from) {
  if (policy == nullptr && tuning) policy = tuning->base_policy();
  const PlannedMicroBatch& planned = plan.micro_batch(mesh.at.dp, place);
  const MicroBatch micro_batch = planned.micro_batch();
  const SequenceLayout at = plan.layout(planned);
  const RingGroup& ring = rings.of(planned);
  const std::int64_t tokens = at.local_tokens(ring.plan.rank);
  const Communicator& sequence = mesh.sequence(micro_batch.sp);
  const auto [begin, end] = even_part(tokens, sequence.rank(), sequence.size());
  MicroBatchWork work;
  work.batch = read_local_batch(from != nullptr ? *from : *dataset, micro_batch,
                                at.pieces(ring.plan.rank, begin, end), device);
  work.batch.recompute_layers = micro_batch.recompute_layers;
  const std::shared_ptr<SlashCarry> carry = stored.carry();
  AttentionAxes axes = stored.store ? stored.store->axes(stored.chunk)
                                    : attention_axes(micro_batch, at, ring.plan.rank);
  work.attention = std::make_unique<RingAttention>(
      ring, index_source(std::move(axes), micro_batch, policy, carry), &recorder,
      std::move(stored));
  if (sequence.size() > 1)
    work.attention = std::make_unique<UlyssesAttention>(sequence, rings.buffers(), tokens,
                                                        std::move(work.attention), &recorder);
  work.batch.loss_scale = loss_scale;
  return work;
}

std::unique_ptr<IndexSource> Session::index_source(AttentionAxes axes, const MicroBatch& of,
                                                   BudgetPolicy* policy,
                                                   std::shared_ptr<SlashCarry> carry) {
  std::unique_ptr<IndexSource> source =
      unheard_source(std::move(axes), of, policy, std::move(carry));
  if (index_made) source = std::make_unique<HeardSource>(std::move(source), index_made);
  return source;
}

std::unique_ptr<IndexSource> Session::unheard_source(AttentionAxes axes, const MicroBatch& of,
                                                     BudgetPolicy* policy,
                                                     std::shared_ptr<SlashCarry> carry) {
  AttentionOptions attention = options.attention;
  const Communicator& sequence = mesh.sequence(of.sp);
  GeneratedPattern generator = attention.generator;
  generator.heads /= sequence.size();
  generator.first_head = sequence.rank() * generator.heads;
  if (attention.index == IndexOrigin::recorded)
    return std::make_unique<RecordedSource>(std::move(axes), attention.recorded,
                                            generator.first_head, generator.heads, &recorder);
  if (attention.index == IndexOrigin::generated)
    return std::make_unique<GeneratedSource>(std::move(axes), generator, indexes, &recorder);
  // By what they hold, so that the place in a step or on a mesh does not matter.
  for (const Segment& s : of.segments)
    attention.recall_names.push_back(random_bits(static_cast<std::uint64_t>(s.sample),
                                                 static_cast<std::uint64_t>(s.origin),
                                                 static_cast<std::uint64_t>(s.begin)));
  return pattern_source(mesh.ring(of.sp), std::move(axes), attention, policy, &recorder, sequence,
                        std::move(carry));
}

std::vector<SampleLength> Session::lengths(const std::vector<std::int64_t>& samples) const {
  std::vector<SampleLength> result;
  result.reserve(samples.size());
  for (const std::int64_t s : samples) result.push_back(sample_length(*dataset, s));
  return result;
}

std::vector<Parameter> Session::table() const {
  std::vector<Parameter> all = parameter_table(options.model, options.layer_begin);
  if (config.optimizer.kind == OptimizerKind::muon) order_for_muon(all);
  return all;
}

AdamWOptions adamw_options(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  return {o.beta1, o.beta2, o.eps, o.weight_decay, o.bf16_moments()};
}

std::optional<MuonOptions> muon_options(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  if (o.kind != OptimizerKind::muon) return std::nullopt;
  return MuonOptions{o.momentum, o.nesterov, o.newton_schulz_steps, o.update_rms, o.weight_decay};
}

double Session::training_flops(const StepPlan& plan) const {
  return options.model.training_flops(static_cast<double>(plan.tokens()), plan.attention_pairs());
}

}  // namespace ballast

#include "app/train/session.hpp"

#include <algorithm>
#include <exception>
#include <optional>

#include "app/train/deck_options.hpp"
#include "app/train/local_batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "parallel/comm/waits.hpp"
#include "parallel/context/ulysses.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {
namespace {

std::unique_ptr<Dataset> open_together(const Communicator& world, const Deck& deck) {
  std::unique_ptr<Dataset> dataset;
  together(world, [&] { dataset = open_dataset(deck); });
  const auto prints = world.all_gather(fmt::format("{:016x}", dataset->fingerprint()));
  for (std::size_t r = 1; r < prints.size(); ++r)
    check_all(world, prints[r] == prints[0],
              fmt::format(
                  "data: rank {} sees other data than rank 0 ({}); every node needs the same files",
                  r, dataset->description()));
  return dataset;
}

Sampler sampler_of(const Communicator& world, const Deck& deck, const Dataset& dataset) {
  std::optional<Sampler> sampler;
  together(world, [&] {
    sampler.emplace(
        dataset.samples(), static_cast<std::uint64_t>(deck.integer("run.seed")),
        deck.real("data.validation_share"), deck.boolean("batching.shuffle"),
        [&](std::int64_t s) { return dataset.document(s); }, dataset.held_out());
    sampler->begin_with(RunOptions::from(deck).curriculum,
                        [&](std::int64_t s) { return dataset.length(s); });
  });
  return *std::move(sampler);
}

/// A sample that no packing group holds would end the run at the step that meets it; `ballast pack`
/// shows them too.
void refuse_samples_beyond_groups(const Deck& deck, const Dataset& dataset,
                                  const std::vector<PackGroup>& groups) {
  if (groups.empty() || deck.text("batching.method") != "hbp" ||
      deck.text("batching.long") != "refuse")
    return;
  std::int64_t beyond = 0, longest = 0;
  for (std::int64_t s = 0; s < dataset.samples(); ++s) {
    beyond += dataset.length(s) > groups.back().tokens;
    longest = std::max(longest, dataset.length(s));
  }
  require(beyond == 0,
          "{} of {} samples have more tokens than the longest group's {} (batching.groups), the "
          "longest {}; add a group, or set batching.long = \"split\" or data.max_tokens",
          beyond, dataset.samples(), groups.back().tokens, longest);
}

/// One behind the last layer of a pipeline stage.
std::int64_t stage_end(const RunOptions& options, int stage) {
  const auto next = static_cast<std::size_t>(stage) + 1;
  return next < options.layer_begin.size() ? options.layer_begin[next] : options.model.layers;
}

}  // namespace

void together(const Communicator& comm, const std::function<void()>& work) {
  std::string problem;
  try {
    work();
  } catch (const std::exception& e) {
    problem = e.what();
  }
  check_all(comm, problem.empty(), problem);
}

Session::Session(const Communicator& world, const Deck& deck_)
    : deck(deck_),
      options(RunOptions::from(deck)),
      mesh(world, options.mesh, options.joined_ranks()),
      backend(choose_backend(deck, world)),
      device(*backend.device),
      dataset(open_together(world, deck)),
      sampler(sampler_of(world, deck, *dataset)),
      window(options.window),
      recorder(*backend.clock),
      stage(stage_table(options.model, options.layer_begin, mesh.at.pp)),
      parameters(stage.table, backend.dtype, device, mesh.replica.size()),
      model(options.model, options.layer_begin[mesh.at.pp], stage_end(options, mesh.at.pp),
            parameters, recompute_options(deck), &recorder,
            deck.integer("model.head_chunk_tokens")),
      ring{mesh.cp, plan_ring(mesh.at.cp(mesh.shape), mesh.shape.cp_outer, mesh.shape.cp_inner)},
      links(mesh.pp, device),
      kv_place{deck.text("chunk.offload") == "host", deck.integer("chunk.window_tokens"),
               &recorder} {
  check_all(world, dataset->vocabulary() <= options.model.vocabulary,
            fmt::format("model.vocabulary = {} is smaller than the data's vocabulary of {}",
                        options.model.vocabulary, dataset->vocabulary()));
  together(world, [&] { refuse_samples_beyond_groups(deck, *dataset, options.batching.groups); });
  for (const int degree : options.joined_ranks()) connect(mesh.sequence(degree), device);
  recorder.context.stage = mesh.at.pp;
  if (BudgetTuning::wanted(deck)) {
    together(world, [&] { tuning = std::make_unique<BudgetTuning>(deck, &device); });
    options.batching.sample_cost = [this](std::int64_t tokens) {
      return tuning->sample_cost(tokens);
    };
  }
  parameters.initialise(static_cast<std::uint64_t>(deck.integer("run.seed")));
}

SequenceLayout Session::layout(const MicroBatch& micro_batch) const {
  return options.sequence_layout(micro_batch);
}

ChunkStores Session::chunk_stores(const std::vector<MicroBatch>& list) {
  const auto tokens = [this](const MicroBatch& micro_batch) {
    const SequenceLayout at = layout(micro_batch);
    KvStore::ShardKeys keys;
    for (int r = 0; r < at.ranks(); ++r) keys.push_back(local_tokens(micro_batch, at, r));
    return keys;
  };
  return ChunkStores(list, tokens, ring.plan.rank, kv_place);
}

MicroBatchWork Session::prepare(const MicroBatch& micro_batch, double loss_scale,
                                StoredChunk stored, BudgetPolicy* policy) {
  const SequenceLayout at = layout(micro_batch);
  const std::int64_t tokens = at.local_tokens(ring.plan.rank);
  const Communicator& sequence = mesh.sequence(micro_batch.sp);
  const auto [begin, end] = even_part(tokens, sequence.rank(), sequence.size());
  MicroBatchWork work;
  work.batch =
      read_local_batch(*dataset, micro_batch, at.pieces(ring.plan.rank, begin, end), device);
  work.batch.recompute_layers = micro_batch.recompute_layers;
  AttentionAxes axes = stored.store ? stored.store->axes(stored.chunk)
                                    : attention_axes(micro_batch, at, ring.plan.rank);
  work.attention = std::make_unique<RingAttention>(
      ring, index_source(std::move(axes), sequence, policy), &recorder, std::move(stored));
  if (sequence.size() > 1)
    work.attention = std::make_unique<UlyssesAttention>(sequence, *ring.buffers, tokens,
                                                        std::move(work.attention), &recorder);
  work.loss_scale = loss_scale;
  return work;
}

std::unique_ptr<IndexSource> Session::index_source(AttentionAxes axes, const Communicator& sequence,
                                                   BudgetPolicy* policy) {
  const AttentionOptions& attention = options.attention;
  GeneratedPattern generator = attention.generator;
  generator.heads /= sequence.size();
  generator.first_head = sequence.rank() * generator.heads;
  if (attention.generated)
    return std::make_unique<GeneratedSource>(std::move(axes), generator, indexes, &recorder);
  if (attention.sparse())
    return pattern_source(mesh.cp, std::move(axes), attention, policy, &recorder, sequence);
  return std::make_unique<DenseSource>(std::move(axes), &recorder);
}

std::vector<SampleLength> Session::lengths(const std::vector<std::int64_t>& samples) const {
  std::vector<SampleLength> result;
  result.reserve(samples.size());
  for (std::int64_t s : samples) result.push_back({s, dataset->length(s), dataset->loss_tokens(s)});
  return result;
}

Batch Session::plan(std::int64_t step, const std::vector<std::int64_t>& samples) const {
  Batch batch = plan_batch(step, lengths(samples), options.batching);
  // These two weigh a token by how many its chunk holds, which the plan estimates where a mask
  // leaves some out.
  if (options.normaliser == LossNormaliser::token_mean ||
      options.normaliser == LossNormaliser::sample_mean)
    count_loss_tokens(batch, *dataset);
  return batch;
}

double Session::training_flops(const Batch& batch) const {
  double pairs = 0;
  for (const auto& list : batch.micro_batches)
    for (const auto& mb : list) pairs += mb.attention_pairs();
  return options.model.training_flops(static_cast<double>(batch.tokens()), pairs);
}

}  // namespace ballast

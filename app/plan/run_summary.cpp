#include "app/plan/run_summary.hpp"

#include <algorithm>
#include <memory>

#include "app/plan/planned_run.hpp"
#include "core/base/division.hpp"
#include "core/config/deck_notes.hpp"
#include "core/model/parameter_table.hpp"
#include "core/observe/metrics.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/ulysses_heads.hpp"
#include "core/plan/plan_step.hpp"

namespace ballast {
namespace {

// Beyond these a list helps nobody and would only take memory.
constexpr std::int64_t kListedPieces = 1 << 20;
constexpr int kListedRanks = 1 << 16;
constexpr std::size_t kTwinPieces = 1 << 16;
constexpr int kPlannedRing = 1 << 16;
constexpr std::int64_t kListedMicroBatches = 1 << 12, kPipelinedMicroBatches = 1 << 7;

/// Causal pairs of queries [begin, end) of one segment: each sees itself and all before it.
double causal_pairs(std::int64_t begin, std::int64_t end) {
  const double b = static_cast<double>(begin), e = static_cast<double>(end);
  return (e * (e + 1) - b * (b + 1)) / 2;
}

std::vector<ShardFacts> shard_facts(const RunOptions& options, std::int64_t tokens,
                                    std::vector<std::string>& notes) {
  const SequenceLayout layout = options.sequence_layout(tokens);
  const bool list = !deals_stripes(layout.kind()) || tokens / layout.stripe() <= kListedPieces;
  if (!list)
    notes.push_back(
        fmt::format("pieces: {} stripes are not listed one by one", tokens / layout.stripe()));
  std::vector<ShardFacts> shards(static_cast<std::size_t>(options.mesh.cp()));
  for (std::size_t r = 0; r < shards.size(); ++r) {
    ShardFacts& shard = shards[r];
    shard.cp = static_cast<int>(r);
    shard.tokens = layout.local_tokens(shard.cp);
    if (!list) continue;
    shard.pieces = layout.pieces(shard.cp);
    for (const auto& [begin, end] : shard.pieces) shard.pairs += causal_pairs(begin, end);
  }
  return shards;
}

/// `micro_batches` of a step, all full; with chunks (`longest` above a micro-batch) they are those
/// of samples of `longest` tokens.
std::vector<MicroBatch> full_micro_batches(const CheckFacts& f, std::int64_t micro_batches,
                                           std::int64_t longest) {
  std::vector<MicroBatch> list;
  const std::int64_t sample = std::max(longest, f.micro_batch_tokens);
  for (std::int64_t s = 0; static_cast<std::int64_t>(list.size()) < micro_batches; ++s)
    for (std::int64_t begin = 0; begin < sample; begin += f.micro_batch_tokens)
      list.push_back({{{s, begin, std::min(sample, begin + f.micro_batch_tokens), 0}}});
  return list;
}

/// A step of such lists, as plan_step decides it: of the data-parallel ranks that share a
/// micro-batch, as all others have the same.
StepPlan shown_step(const std::vector<MicroBatch>& list, const PackGroup& group,
                    StepOptions options) {
  options.mesh.dp = group.ranks;
  Batch batch;
  batch.micro_batches.assign(static_cast<std::size_t>(group.ranks), list);
  for (std::size_t d = 0; d < batch.micro_batches.size(); ++d)
    for (MicroBatch& m : batch.micro_batches[d]) {
      m.sp = group.ranks;
      m.recompute_layers = group.recompute_layers;
      m.align = options.layout.rule.align;
      if (d > 0) m.segments.clear();
    }
  return plan_batch_step(batch, options);
}

/// A step of samples like the longest, which may need more ranks than one, or chunks.
std::vector<SampleLength> longest_samples(const Config& config, SampleLength longest) {
  const std::int64_t stated = config.batching.global_samples,
                     samples = stated > 0 ? stated : config.batching.global_tokens / longest.tokens;
  std::vector<SampleLength> list;
  for (std::int64_t s = 0; s < std::clamp<std::int64_t>(samples, 1, kPipelinedMicroBatches); ++s) {
    list.push_back(longest);
    list.back().sample += s;
  }
  return list;
}

nlohmann::ordered_json hop_json(const std::optional<RingHop>& hop) {
  if (!hop) return nullptr;
  return {{"to", hop->to},
          {"from", hop->from},
          {"send_shard", hop->send_shard},
          {"recv_shard", hop->recv_shard},
          {"complete", hop->complete}};
}

nlohmann::ordered_json steps_json(const std::vector<RingStep>& steps) {
  auto list = nlohmann::ordered_json::array();
  for (const RingStep& s : steps)
    list.push_back({{"outer", s.outer},
                    {"inner", s.inner},
                    {"shard", s.shard},
                    {"kv_inner", hop_json(s.kv_inner)},
                    {"kv_outer", hop_json(s.kv_outer)},
                    {"dkv_inner", hop_json(s.dkv_inner)},
                    {"dkv_outer", hop_json(s.dkv_outer)}});
  return list;
}

nlohmann::ordered_json memory_json(const MemoryEstimate& memory) {
  nlohmann::ordered_json out;
  for (int c = 0; c < kMemoryCategories; ++c)
    out[fmt::format("{}_bytes", name(static_cast<MemoryCategory>(c)))] =
        memory.bytes[static_cast<std::size_t>(c)];
  out["context_bytes"] = memory.context_bytes;
  out["total_bytes"] = memory.total();
  return out;
}

/// What the largest micro-batch is, and who shares it.
struct LargestMicroBatch {
  std::int64_t longest = 0;  ///< sample; 0: the deck does not say
  PackGroup group;  ///< hbp: the group whose packs fill a rank most; else the whole micro-batch
  std::int64_t fullest = 0;  ///< tokens of the context-parallel rank that has most
  int sp = 1;                ///< ranks that share its heads
};

/// How sure the number is that largest_micro_batch gives of a step of `micro_batches` in all; 0: of
/// samples that are not counted.
MicroBatchCount sureness(const BatchingOptions& batching, std::int64_t micro_batches) {
  if (micro_batches == 0) return MicroBatchCount::of_full_packs;
  switch (batching.method) {
    case Batching::none:
      return micro_batches % batching.dp == 0 ? MicroBatchCount::exact : MicroBatchCount::at_most;
    case Batching::sab:
    case Batching::lbb:
      if (batching.micro_batch_samples > 0) return MicroBatchCount::at_most;
      [[fallthrough]];
    case Batching::packed:
    case Batching::hbp:
    case Batching::chunkflow:
    case Batching::balanced:
      return batching.dp == 1 ? MicroBatchCount::at_most : MicroBatchCount::about;
    default:
      return MicroBatchCount::at_most;
  }
}

/// Sets micro_batch_tokens and micro_batches.
LargestMicroBatch largest_micro_batch(const Config& config, CheckFacts& f) {
  LargestMicroBatch largest;
  std::int64_t& longest = largest.longest;
  longest = f.files.longest.tokens > 0 ? f.files.longest.tokens : config.data.max_tokens;
  if (config.data.source == DataSource::needle)
    longest = std::ranges::max(config.data.needle_lengths);
  // A sample longer than a pack gets a micro-batch of its own.
  const bool chunked = f.options.batching.method == Batching::chunkflow ||
                       f.options.batching.method == Batching::balanced;  // more ranks, or chunks
  // A micro-batch holds so many samples of any length; 0: as many as its tokens allow.
  const BatchingOptions& batching = f.options.batching;
  const std::int64_t counted =
      batching.method == Batching::none ? std::max(1, batching.micro_batch_samples)
      : batching.method == Batching::sab || batching.method == Batching::lbb
          ? batching.micro_batch_samples
          : 0;
  f.micro_batch_tokens = chunked ? batching.micro_batch_tokens
                         : counted > 0 && longest > 0
                             ? counted * longest
                             : std::max(batching.micro_batch_tokens, longest);
  // A rank's part of a pack is what its group leaves it: the group with the fullest rank is shown.
  PackGroup& shown = largest.group;
  shown = {f.micro_batch_tokens, 1, -1};
  if (f.options.batching.method == Batching::hbp) {
    shown = *std::max_element(f.options.batching.groups.begin(), f.options.batching.groups.end(),
                              [](const PackGroup& a, const PackGroup& b) {
                                return a.tokens * b.ranks < b.tokens * a.ranks;
                              });
    f.micro_batch_tokens = shown.tokens;
    if (shown.ranks > 1)
      f.notes.push_back(fmt::format("a pack of {} tokens is shared by {} data-parallel ranks",
                                    shown.tokens, shown.ranks));
  }
  if (longest == 0)
    f.notes.push_back(
        "the data was not opened and data.max_tokens = 0: a sample longer than the micro-batch "
        "shown here needs more memory");
  const std::int64_t samples = divided_up(config.batching.global_samples,
                                          std::max<std::int64_t>(1, counted)),
                     dp = f.options.mesh.dp,
                     packs = divided_up(config.batching.global_tokens, f.micro_batch_tokens);
  // A sample longer than a chunk makes several.
  const std::int64_t of_sample =
      chunked && samples > 0 ? std::max<std::int64_t>(1, divided_up(longest, f.micro_batch_tokens))
                             : 1;
  f.micro_batches = std::max<std::int64_t>(
      1, divided_up((samples > 0 ? samples : packs) * shown.ranks, dp) * of_sample);
  f.micro_batches_are = sureness(batching, samples);
  if (samples > 0 && counted == 0)
    f.notes.push_back(
        "batching.global_samples: the number of micro-batches depends on the samples, here as if "
        "no two shared one, and no fewer than planned steps have; `ballast pack` counts them");
  largest.sp = joined_split(f.options.mesh, shown.ranks, f.options.model.query_heads).sp;
  return largest;
}

/// The deck's costs; where its profile table lacks what schedules need, those that it states.
std::shared_ptr<const Costs> check_costs(const Config& config, std::vector<std::string>& notes) {
  try {
    return plan_costs(config, notes);
  } catch (const Error& e) {
    notes.push_back(fmt::format("schedules are not built by the table: {}", e.what()));
    Config stated = config;
    stated.profile.table.clear();
    return plan_costs(stated, notes);
  }
}

/// Plans and simulates steps of full micro-batches: what they hold at once, and for how long.
void replay_steps(const Config& config, const LargestMicroBatch& largest, CheckFacts& f) {
  const bool chunked = f.options.batching.method == Batching::chunkflow;
  const std::shared_ptr<const Costs> costs = check_costs(config, f.notes);
  SimulationOptions simulation = simulation_options(config, f.options);
  simulation.tune = false;  // budgets need a run's coverage
  simulation.memory = stage_memories(config, f.options);
  const StepOptions planned = step_options(config, f.options, simulation, *costs);
  const std::int64_t most = f.options.mesh.pp == 1 ? kListedMicroBatches : kPipelinedMicroBatches;
  const auto take = [&](const StepPlan& plan) {
    const SimulatedStep simulated = simulate(plan, simulation, *costs);
    for (std::size_t s = 0; s < f.stages.size(); ++s) {
      StageFacts& stage = f.stages[s];
      stage.live_micro_batches = std::max(stage.live_micro_batches, simulated.live.at(s));
      stage.ops = plan.schedule(0).stages.at(s);
      stage.full.take_larger(simulated.memory.at(s));
      stage.memory = stage.full;
    }
  };
  const auto add = [&](std::int64_t micro_batches) {
    take(shown_step(
        full_micro_batches(f, std::min(micro_batches, most), chunked ? largest.longest : 0),
        largest.group, planned));
  };
  if (f.options.batching.method == Batching::balanced && largest.longest > 0 &&
      (largest.longest > f.micro_batch_tokens || trains_pairs(config))) {
    SampleLength longest = f.files.longest;
    if (longest.tokens == 0) longest = {0, largest.longest, largest.longest - 1};
    take(plan_step(0, longest_samples(config, longest), planned));
  }
  // Fewer micro-batches may keep more weight halves waiting: other forwards and backwards fill the
  // waits of many.
  const std::int64_t chunks = chunked ? (largest.longest + f.micro_batch_tokens - 1) /
                                            f.micro_batch_tokens
                                      : 0,
                     more = f.options.pipeline.k + f.options.mesh.pp;
  for (std::int64_t m = chunks;
       (f.micro_batches_are == MicroBatchCount::at_most ||
        f.micro_batches_are == MicroBatchCount::about) &&
       m < std::min({f.micro_batches, chunks + more, kPipelinedMicroBatches});
       m += (more + 7) / 8)
    add(std::max<std::int64_t>(1, m));
  add(f.micro_batches);
}

}  // namespace

CheckFacts CheckFacts::of(const Config& config, OpenedFiles files) {
  CheckFacts f;
  f.files = std::move(files);
  f.file = config.from.file;
  f.case_name = config.from.case_name;
  f.options = RunOptions::from(config);
  f.options.attention.heads = f.files.heads;
  f.type = config.run.type();
  f.fp8 = config.run.fp8();
  f.zero = config.optimizer.zero;
  f.recompute = name(config.recompute.mode);
  if (config.recompute.mode != Recompute::none && config.recompute.layers >= 0)
    f.recompute += fmt::format(" in the first {} layers of a stage", config.recompute.layers);
  const MeshShape& mesh = f.options.mesh;
  for (const Problem& note : deck_notes(config)) f.notes.push_back(note.message());
  if (const std::string note = precision_note(config, f.type); !note.empty())
    f.notes.push_back(note);
  f.notes.insert(f.notes.end(), f.files.notes.begin(), f.files.notes.end());
  LargestMicroBatch largest = largest_micro_batch(config, f);

  f.shards = shard_facts(f.options, f.micro_batch_tokens, f.notes);
  for (const ShardFacts& shard : f.shards)
    largest.fullest = std::max(largest.fullest, shard.tokens);
  if (largest.fullest == 0 || f.shards.back().tokens == 0)
    f.notes.push_back("some context-parallel ranks hold no token of the micro-batch");
  if (mesh.cp() <= kPlannedRing)
    f.ring = plan_ring(0, mesh.cp_outer, mesh.cp_inner);
  else
    f.notes.push_back(
        fmt::format("ring plan: not worked out above {} context-parallel ranks", kPlannedRing));

  const ModelShape local = tensor_shard(f.options.model, mesh.tp);
  const HeadSplit heads{largest.sp, local.query_heads, local.kv_heads};
  const std::int64_t kv_elements = 2 * largest.fullest * heads.local_kv_heads() * local.head_dim;
  f.kv_hop_bytes = kv_elements * static_cast<std::int64_t>(size_of(f.type));
  f.dkv_hop_bytes = kv_elements * (f.type == DType::f64 ? 8 : 4);

  const std::vector<std::int64_t>& layer_begin = f.options.layer_begin;
  f.stages.resize(static_cast<std::size_t>(mesh.pp));
  for (const Parameter& p : parameter_table(local, layer_begin)) {
    StageFacts& stage = f.stages[static_cast<std::size_t>(p.stage)];
    stage.parameters += p.numel();
    if (!p.trainable) stage.frozen += p.numel();
  }
  for (int stage = 0; stage < mesh.pp; ++stage) {
    StageFacts& facts = f.stages[static_cast<std::size_t>(stage)];
    const auto at = static_cast<std::size_t>(stage);
    facts.layer_begin = layer_begin[at];
    facts.layer_end = stage + 1 < mesh.pp ? layer_begin[at + 1] : local.layers;
    const std::int64_t trained = facts.parameters - facts.frozen,
                       shard = (trained + mesh.replicas() - 1) / mesh.replicas();
    facts.shard_parameters = f.zero == 0 ? trained : shard;
    facts.live_micro_batches = 0;
  }
  replay_steps(config, largest, f);
  return f;
}

double CheckFacts::pair_imbalance() const {
  std::vector<double> pairs;
  for (const ShardFacts& shard : shards) pairs.push_back(shard.pairs);
  return imbalance_degree(pairs);
}

std::int64_t CheckFacts::fullest_rank(MemoryEstimate StageFacts::*memory) const {
  std::int64_t bytes = 0;
  for (const StageFacts& stage : stages) bytes = std::max(bytes, (stage.*memory).total());
  return bytes;
}

void CheckFacts::add_planned(const StepPlan& plan, const SimulatedStep& simulated) {
  ++planned_steps;
  for (const PlannedLane& lane : plan.lanes)
    if (std::ssize(lane.micro_batches) > micro_batches) {
      micro_batches = std::ssize(lane.micro_batches);
      micro_batches_are = MicroBatchCount::about;
    }
  for (std::size_t s = 0; s < stages.size(); ++s) {
    StageFacts& stage = stages[s];
    stage.live_micro_batches = std::max(stage.live_micro_batches, simulated.live.at(s));
  }
}

void CheckFacts::take_planned(bool all) {
  all_planned = all;
  for (StageFacts& stage : stages) {
    stage.full.take_larger(stage.planned);
    stage.memory = all ? stage.planned : stage.full;
  }
}

namespace {

nlohmann::ordered_json mesh_json(const MeshShape& mesh) {
  return {{"dp", mesh.dp},
          {"pp", mesh.pp},
          {"cp_outer", mesh.cp_outer},
          {"cp_inner", mesh.cp_inner},
          {"sp", mesh.sp},
          {"tp", mesh.tp},
          {"ranks_per_node", mesh.ranks_per_node}};
}

nlohmann::ordered_json model_json(const ModelShape& model) {
  return {{"preset", model.preset},
          {"parameters", model.parameters()},
          {"parameters_without_embedding", model.parameters_without_embedding()},
          {"layers", model.layers},
          {"hidden", model.hidden},
          {"intermediate", model.intermediate},
          {"query_heads", model.query_heads},
          {"kv_heads", model.kv_heads},
          {"head_dim", model.head_dim},
          {"vocabulary", model.vocabulary},
          {"qkv_bias", model.qkv_bias},
          {"qk_norm", model.qk_norm},
          {"tied_embedding", model.tied_embedding}};
}

nlohmann::ordered_json ranks_json(const CheckFacts& facts) {
  const MeshShape& mesh = facts.options.mesh;
  auto list = nlohmann::ordered_json::array();
  for (int r = 0; r < std::min(mesh.size(), kListedRanks); ++r) {
    const MeshCoordinates at = coordinates(mesh, r);
    list.push_back({{"rank", r},
                    {"node", facts.node(r)},
                    {"dp", at.dp},
                    {"pp", at.pp},
                    {"cp_outer", at.cp_outer},
                    {"cp_inner", at.cp_inner},
                    {"cp", at.cp(mesh)},
                    {"sp", at.sp},
                    {"tp", at.tp}});
  }
  return list;
}

nlohmann::ordered_json shards_json(const std::vector<ShardFacts>& shards) {
  auto list = nlohmann::ordered_json::array();
  for (const ShardFacts& shard : shards) {
    list.push_back({{"cp", shard.cp},
                    {"tokens", shard.tokens},
                    {"pairs", shard.pairs},
                    {"piece_count", shard.pieces.size()}});
    if (shard.pieces.size() * shards.size() <= kTwinPieces) list.back()["pieces"] = shard.pieces;
  }
  return list;
}

nlohmann::ordered_json stages_json(const std::vector<StageFacts>& stages) {
  auto list = nlohmann::ordered_json::array();
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const StageFacts& stage = stages[s];
    auto ops = nlohmann::ordered_json::array();
    for (const Op& op : stage.ops)
      ops.push_back({{"op", name(op.kind)}, {"micro_batch", op.micro_batch}, {"chunk", op.chunk}});
    list.push_back({{"stage", s},
                    {"layer_begin", stage.layer_begin},
                    {"layer_end", stage.layer_end},
                    {"parameters", stage.parameters},
                    {"frozen_parameters", stage.frozen},
                    {"shard_parameters", stage.shard_parameters},
                    {"live_micro_batches", stage.live_micro_batches},
                    {"memory", memory_json(stage.memory)},
                    {"full_memory", memory_json(stage.full)},
                    {"ops", ops}});
  }
  return list;
}

}  // namespace

nlohmann::ordered_json CheckFacts::json() const {
  nlohmann::ordered_json out;
  if (!case_name.empty()) out["name"] = case_name;
  out["deck"] = file;
  out["ranks"] = options.mesh.size();
  out["mesh"] = mesh_json(options.mesh);
  out["model"] = model_json(options.model);
  out["dtype"] = ballast::name(type);
  out["micro_batch_tokens"] = micro_batch_tokens;
  out["micro_batches"] = micro_batches;
  out["pair_imbalance"] = pair_imbalance();
  out["largest_rank_bytes"] = largest_rank_bytes();
  out["planned_steps"] = planned_steps;
  out["notes"] = notes;
  out["rank_table"] = ranks_json(*this);
  out["rank_table_omitted"] = std::max(0, options.mesh.size() - kListedRanks);
  out["shards"] = shards_json(shards);
  out["ring"] = {{"layout", ballast::name(options.layout.rule.kind)},
                 {"stripe", options.layout.rule.stripe},
                 {"kv_buffers", ring.kv_buffers},
                 {"dkv_buffers", ring.dkv_buffers},
                 {"kv_hop_bytes", kv_hop_bytes},
                 {"dkv_hop_bytes", dkv_hop_bytes},
                 {"forward", steps_json(ring.forward)},
                 {"backward", steps_json(ring.backward)}};
  out["stages"] = stages_json(stages);
  return out;
}

}  // namespace ballast

// The rows: every key of a deck and the member of Config that it fills, which holds the default.
#include "core/config/deck_rows.hpp"

#include "core/config/attention_rows.hpp"
#include "core/config/batching_rows.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_row_builder.hpp"
#include "core/config/training_rows.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/presets.hpp"

namespace ballast {
namespace {

using namespace deck_row;

std::vector<std::string> presets_and_custom() {
  std::vector<std::string> names = model_presets();
  names.insert(names.begin(), "custom");
  return names;
}

void run_rows(Schema& schema) {
  auto run = schema.block("run", &Config::run);
  run.key("backend", &RunConfig::backend,
          "where the computation runs; cuda without a GPU: the host, with a note");
  run.key(
      "precision", &RunConfig::precision,
      "fp32 or fp64 on the host; CUDA takes bf16 with fp32 sums and master weights; fp8: layers' "
      "matrices multiply in E4M3, all else as with bf16 (the host rounds alike)");
  run.key("seed", &RunConfig::seed, "", at_least(0),
          "seed of initial weights, validation split and sample order");
  run.key("steps", &RunConfig::steps, "steps", between(0, kTokens),
          "training steps of the whole run, restarts included");
  run.key("output", &RunConfig::output,
          "run folder; empty: runs/NAME of the deck file (-d on the command line comes first)");
  run.key("deterministic", &RunConfig::deterministic,
          "bit-identical repetition on CUDA too (the host always is), of the same plan: "
          "pipeline.search = 1 keeps the order of micro-batches where costs change");
  run.key("hang_timeout_s", &RunConfig::hang_timeout_s, "s", between(1e-3, kMostSeconds),
          "a rank that waits this long without progress reports its last event and ends the run");
  run.key("log_every", &RunConfig::log_every, "steps", between(1, kTokens),
          "steps between two lines of the step log");
  run.key(
      "json_lines", &RunConfig::json_lines,
      "write steps.jsonl of the run folder: the figures of each step as one JSON object a line; "
      "of a step taken twice (-r) the later line counts");
  run.key("tensorboard", &RunConfig::tensorboard,
          "write the same as TensorBoard event files, folder tensorboard of the run folder");
  run.key("dump_gradients", &RunConfig::dump_gradients,
          "safetensors file for the reduced gradients (fp32, before clipping) of the first step "
          "that this start of the run takes; empty: none");
}

void mesh_rows(Schema& schema) {
  auto mesh = schema.block("mesh", &Config::mesh);
  mesh.key("dp", &MeshShape::dp, "ranks", between(1, kDegree), "data parallel degree");
  mesh.key("pp", &MeshShape::pp, "stages", between(1, kDegree), "pipeline parallel degree");
  mesh.key("cp_outer", &MeshShape::cp_outer, "nodes", between(1, kDegree),
           "context parallel, outer ring (between nodes); 1: one flat ring");
  mesh.key("cp_inner", &MeshShape::cp_inner, "ranks", between(1, kDegree),
           "context parallel, inner ring (inside a node)");
  mesh.key("sp", &MeshShape::sp, "ranks", between(1, kDegree), "Ulysses sequence parallel degree");
  mesh.key("tp", &MeshShape::tp, "ranks", between(1, kDegree), "tensor parallel degree");
  mesh.key("ranks_per_node", &MeshShape::ranks_per_node, "ranks", between(0, kDegree),
           "ranks that count as one node; 0: as the machine says, 8 in plans. Set it to exercise "
           "two-level rings on one machine");
}

void model_rows(Schema& schema) {
  auto model = schema.block("model", &Config::model);
  model
      .key("preset", &ModelConfig::preset,
           "published shape, whose values the keys below replace; custom needs all of layers to "
           "vocabulary, or weights")
      .allow(presets_and_custom());
  model.key("weights", &ModelConfig::weights,
            "Hugging Face folder (config.json, safetensors) that a run starts from; the keys of "
            "the shape come from it. A checkpoint (-r) goes first");
  model.key("layers", &ModelConfig::layers, "layers", between(0, 1 << 16), "transformer layers");
  model.key("hidden", &ModelConfig::hidden, "", between(0, kWidth), "width of the residual stream");
  model.key("intermediate", &ModelConfig::intermediate, "", between(0, kWidth),
            "width of the SwiGLU layer");
  model.key("query_heads", &ModelConfig::query_heads, "heads", between(0, 1 << 16), "query heads");
  model.key("kv_heads", &ModelConfig::kv_heads, "heads", between(0, 1 << 16),
            "key/value heads; divides query_heads");
  model.key("head_dim", &ModelConfig::head_dim, "", between(0, 1 << 16), "width of a head");
  model.key("vocabulary", &ModelConfig::vocabulary, "tokens", between(0, kWidth),
            "token ids; 256 for byte-level data");
  model.key("qkv_bias", &ModelConfig::qkv_bias,
            "bias on the query, key and value projections (Qwen2.5)");
  model.key("qk_norm", &ModelConfig::qk_norm,
            "RMSNorm of every head of queries and keys before rotation (Qwen3)");
  model.key("tied_embedding", &ModelConfig::tied_embedding, "embedding and head share one matrix");
  model.key("rms_eps", &ModelConfig::rms_eps, "", above(0), "epsilon of RMSNorm");
  model.key("initial_std", &ModelConfig::initial_std, "", above(0),
            "standard deviation of the initial matrices (over sqrt(2 layers) where they write to "
            "the residual stream); small models learn sooner with more");
  model.key("rope_theta", &ModelConfig::rope_theta, "", above(1), "base of the rotary embedding");
  model.key("yarn_factor", &ModelConfig::yarn_factor, "", at_least(1),
            "YaRN scaling of the context; 1: plain RoPE");
  model.key("original_context", &ModelConfig::original_context, "tokens", between(1, kTokens),
            "context that the model was trained for (YaRN, llama3; exports state it)");
  model.key("llama3_factor", &ModelConfig::llama3_factor, "", at_least(1),
            "Llama 3.1 scaling of low rotary frequencies; 1: none");
  const auto llama3 = on(&Config::model, &ModelConfig::llama3_factor);
  model
      .key("llama3_low", &ModelConfig::llama3_low, "turns", above(0),
           "llama3: frequencies below this many turns over original_context are divided by the "
           "factor")
      .when(llama3);
  model
      .key("llama3_high", &ModelConfig::llama3_high, "turns", above(0),
           "llama3: frequencies above this many turns stay as they are")
      .when(llama3);
  model.key("head_chunk_tokens", &ModelConfig::head_chunk_tokens, "tokens", between(1, kTokens),
            "tokens whose logits exist at once in the LM head");
}

void data_rows(Schema& schema) {
  const auto source = on(&Config::data, &DataConfig::source);
  auto data = schema.block("data", &Config::data);
  data.key("source", &DataConfig::source,
           "files: text as bytes, one file a sample; megatron: .bin/.idx; hdf5: /tokens, /offsets; "
           "lengths: a length file, tokens made up; distribution: a table of length bins; needle: "
           "key-value pairs hidden in filler and asked for at the end");
  data.key("paths", &DataConfig::paths, "files: files, folders (searched recursively) and globs")
      .when(source, DataSource::files);
  data.key("extensions", &DataConfig::extensions,
           "files: endings to take from folders and globs, such as \".hpp\" (\"\": files without "
           "one); empty list: every file")
      .when(source, DataSource::files);
  data.key("path", &DataConfig::path,
           "megatron: the .bin and .idx files, with or without the ending; hdf5: the file")
      .when(source, DataSource::megatron, DataSource::hdf5);
  data.key("mask_path", &DataConfig::mask_path,
           "megatron: a parallel .bin/.idx pair of bytes, 0 where a token carries no loss; empty: "
           "every token does")
      .when(source, DataSource::megatron);
  data.key("lengths_file", &DataConfig::lengths_file, "lengths: text file with one length a line")
      .when(source, DataSource::lengths);
  data.key("lengths", &DataConfig::lengths, "tokens", between(1, kTokens),
           "lengths: the lengths themselves, in place of a file")
      .when(source, DataSource::lengths);
  data.key("bin_tokens", &DataConfig::bin_tokens, "tokens", between(1, kTokens),
           "distribution: upper edge of each length bin, ascending, inclusive")
      .when(source, DataSource::distribution);
  data.key("bin_share", &DataConfig::bin_share, "", at_least(0),
           "distribution: share of the samples in each bin (not cumulative), in proportion to "
           "their sum")
      .when(source, DataSource::distribution);
  data.key(
      "samples", &DataConfig::samples, "samples", between(0, kTokens),
      "samples to take at most, from the first on; 0: all. distribution, needle: how many to draw");
  data.key("max_tokens", &DataConfig::max_tokens, "tokens", between(0, kTokens),
           "longest sample; 0: no limit");
  data.key("min_tokens", &DataConfig::min_tokens, "tokens", between(0, kTokens),
           "shorter samples are left out");
  data.key("long", &DataConfig::long_samples, "what happens to a sample above max_tokens")
      .when(on(&Config::data, &DataConfig::max_tokens));
  data.key("validation_share", &DataConfig::validation_share, "", up_to(0, 1),
           "share of the samples held out for validation: each document with this chance, all "
           "its samples with it");
  data.key("needle_task", &DataConfig::needle_task,
           "retrieval: the value of a key; values: all values of a key that occurs several times; "
           "variables: the chain of assignments back to a value; common: the most common word")
      .when(source, DataSource::needle);
  data.key("needle_repeats", &DataConfig::needle_repeats, "", between(1, 1 << 20),
           "needle: values of a key, assignments in a chain, or times that the common word occurs: "
           "one number, or one for each length; empty list: 2")
      .when(on(&Config::data, &DataConfig::needle_task), NeedleTask::values, NeedleTask::variables,
            NeedleTask::common);
  data.key("needle_copies", &DataConfig::needle_copies, "", between(1, 1 << 16),
           "needle: times that an item of the context is written, back to back, as a paragraph "
           "about its key: one number, or one for each length; empty list: 1")
      .when(source, DataSource::needle);
  data.key("needle_lengths", &DataConfig::needle_lengths, "tokens", between(1, kTokens),
           "needle: lengths of samples, questions included; each sample has one of them")
      .when(source, DataSource::needle);
  data.key("needle_length_share", &DataConfig::needle_length_share, "", at_least(0),
           "needle: share of the samples of each length, in proportion to their sum; empty list: "
           "alike")
      .when(source, DataSource::needle);
  data.key("needle_pairs", &DataConfig::needle_pairs, "pairs", between(1, 1 << 24),
           "needle: key-value pairs hidden in a sample, of distinct keys: one number, or one for "
           "each length; empty list: 16")
      .when(source, DataSource::needle);
  data.key("needle_questions", &DataConfig::needle_questions, "questions", between(1, 1 << 24),
           "needle: pairs asked for at the end of a sample, whose values carry the loss: one "
           "number, or one for each length; empty list: 16")
      .when(source, DataSource::needle);
  data.key("needle_keys", &DataConfig::needle_keys, "tokens", between(1, kWidth),
           "needle: token ids that are keys")
      .when(source, DataSource::needle);
  data.key("needle_values", &DataConfig::needle_values, "tokens", between(1, kWidth),
           "needle: token ids that form values; the rest of model.vocabulary is filler")
      .when(source, DataSource::needle);
  data.key("needle_value_tokens", &DataConfig::needle_value_tokens, "tokens", between(1, 1 << 16),
           "needle: tokens of a value; an answer is right when all are")
      .when(source, DataSource::needle);
  data.key("needle_closing", &DataConfig::needle_closing,
           "needle: a pair ends with its key again, like a closing tag, which carries loss but "
           "does not count as accuracy; small models learn much sooner")
      .when(source, DataSource::needle);
  data.key("needle_held_out", &DataConfig::needle_held_out, "samples", between(0, kTokens),
           "needle: samples held out, from random streams of their own")
      .when(source, DataSource::needle);
  data.key("needle_held_out_share", &DataConfig::needle_held_out_share, "", at_least(0),
           "needle: share of the held-out samples of each length; empty list: as in training")
      .when(source, DataSource::needle);
}

void chunk_rows(Schema& schema) {
  const auto method = on(&Config::batching, &BatchingConfig::method);
  const auto schedule = on(&Config::pipeline, &PipelineConfig::schedule);
  auto chunk = schema.block("chunk", &Config::chunk);
  chunk
      .key("tokens", &ChunkConfig::tokens, "tokens", between(1, kTokens),
           "chunkflow: longer samples are cut here, shorter ones share a chunk")
      .when(method, Batching::chunkflow);
  chunk
      .key("k", &ChunkConfig::k, "chunks", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: chunks of a sample that keep their activations; earlier "
           "ones are forwarded twice")
      .when(method, Batching::chunkflow, Batching::balanced)
      .when(schedule, ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble,
            ScheduleKind::automatic);
  chunk
      .key("offload", &ChunkConfig::offload,
           "where the stored keys, values, their gradients and chunk inputs lie: none: on the "
           "device; host: in (pinned) host memory, brought back window by window")
      .when(method, Batching::chunkflow, Batching::balanced);
  chunk
      .key("window_tokens", &ChunkConfig::window_tokens, "tokens", between(1, kTokens),
           "chunk.offload = host: stored tokens of a window, two of which are on the device; at "
           "least one chunk")
      .when(on(&Config::chunk, &ChunkConfig::offload));
  chunk.key("search_tokens", &ChunkConfig::search_tokens, "tokens", between(1, kTokens),
            "plan: chunk sizes to search over; empty: no search");
  chunk.key("search_k", &ChunkConfig::search_k, "chunks", between(1, 1 << 20),
            "plan: values of chunk.k to search over; empty: 1, 2, 4, 8 and 16");
  chunk.key("search_steps", &ChunkConfig::search_steps, "steps", between(1, kTokens),
            "plan: global batches that the search averages over");
  chunk.key("search_memory_gib", &ChunkConfig::search_memory_gib, "GiB", at_least(0),
            "plan: memory of a rank that a pair may need, by the estimate of check; 0: no limit");
}

void pipeline_rows(Schema& schema) {
  const auto schedule = on(&Config::pipeline, &PipelineConfig::schedule);
  auto pipeline = schema.block("pipeline", &Config::pipeline);
  pipeline.key(
      "schedule", &PipelineConfig::schedule,
      "gpipe: all forwards, then all backwards; 1f1b: in turn; state_aware_1f1b: list-scheduled, "
      "at most chunk.k + stages - 1 - s live chunks at stage s; zero_bubble: with "
      "backward split into input and weight gradients where that fills waits, at most chunk.k + "
      "stages - 1 at every stage with the waiting halves; auto: state_aware_1f1b for chunkflow and "
      "balanced, else 1f1b");
  pipeline
      .key("search", &PipelineConfig::search, "orders", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: orders of samples to try at most; 1: the batch's order")
      .when(on(&Config::mesh, &MeshShape::pp))
      .when(schedule, ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble,
            ScheduleKind::automatic)
      .when_any({schedule.is_not(ScheduleKind::automatic),
                 on(&Config::batching, &BatchingConfig::method)
                     .is(Batching::chunkflow, Batching::balanced)});
  pipeline.key("plan_steps", &PipelineConfig::plan_steps, "steps", between(1, kTokens),
               "plan: global batches that times are averaged over");
}

void costs_rows(Schema& schema) {
  auto forward = schema.part<RingPassConfig>(
      "costs", [](Config& c) -> RingPassConfig& { return c.costs.forward; }, "forward_");
  auto backward = schema.part<RingPassConfig>(
      "costs", [](Config& c) -> RingPassConfig& { return c.costs.backward; }, "backward_");
  auto costs = schema.block("costs", &Config::costs);
  forward.key("indexing_ms", &RingPassConfig::indexing_ms, "ms", at_least(0),
              "ring attention, forward: sparse index, once a call");
  forward.key("host_ms", &RingPassConfig::host_ms, "ms", at_least(0),
              "ring attention, forward: host work that nothing hides, once a call");
  forward.key("compute_ms", &RingPassConfig::compute_ms, "ms", at_least(0),
              "ring attention, forward: attention of one ring step");
  forward.key("inner_hop_ms", &RingPassConfig::inner_hop_ms, "ms", at_least(0),
              "KV of one shard to the next rank of the inner ring");
  forward.key("outer_hop_ms", &RingPassConfig::outer_hop_ms, "ms", at_least(0),
              "KV of one shard to the next node");
  backward.key("indexing_ms", &RingPassConfig::indexing_ms, "ms", at_least(0),
               "ring attention, backward: work once a call, such as all vertical lines");
  backward.key("host_ms", &RingPassConfig::host_ms, "ms", at_least(0),
               "ring attention, backward: host work that nothing hides, once a call");
  backward.key("compute_ms", &RingPassConfig::compute_ms, "ms", at_least(0),
               "ring attention, backward: attention of one ring step");
  backward.key("inner_hop_ms", &RingPassConfig::inner_hop_ms, "ms", at_least(0),
               "KV and dKV of one shard together to the next rank of the inner ring; dKV alone "
               "takes what exceeds forward's hop");
  backward.key("outer_hop_ms", &RingPassConfig::outer_hop_ms, "ms", at_least(0),
               "KV and dKV of one shard together to the next node; dKV alone takes what exceeds "
               "forward's hop");
  costs.key("forward_token_s", &CostsConfig::forward_token_s, "s", at_least(0),
            "forward of one token on one pipeline stage (packs: the whole model)");
  costs.key(
      "forward_pair_s", &CostsConfig::forward_pair_s, "s", at_least(0),
      "forward of one visible (query, key) pair on one pipeline stage (packs: the whole model)");
  costs.key("backward_over_forward", &CostsConfig::backward_over_forward, "", at_least(0),
            "time of backward in units of forward");
  costs.key("exchange_token_s", &CostsConfig::exchange_token_s, "s", at_least(0),
            "packs: all-to-alls of one token, all layers, forward and backward, if it went whole "
            "to other ranks (Ulysses)");
  costs.key("ring_hop_token_s", &CostsConfig::ring_hop_token_s, "s", at_least(0),
            "packs: one hop of one token's keys and values and of their gradients round a ring, "
            "all layers, forward and backward; attention hides hops that are shorter");
  costs.key("forward_micro_batch_s", &CostsConfig::forward_micro_batch_s, "s", at_least(0),
            "pipeline: forward of a micro-batch on one stage beside its tokens and pairs: "
            "launches, kernels too small to fill the device");
  costs.key("stage_hop_token_s", &CostsConfig::stage_hop_token_s, "s", at_least(0),
            "pipeline: one token's activations or gradients to the neighbour stage");
}

void checkpoint_rows(Schema& schema) {
  auto checkpoint = schema.block("checkpoint", &Config::checkpoint);
  checkpoint.key("every_steps", &CheckpointConfig::every_steps, "steps", between(0, kTokens),
                 "steps between checkpoints; 0: only at the end and on an agreed stop");
  checkpoint.key("at_end", &CheckpointConfig::at_end,
                 "a checkpoint after the last step too; a stopped run always writes one");
  checkpoint.key("keep", &CheckpointConfig::keep, "files", between(1, 1 << 20),
                 "newest checkpoints to keep; one older than the newest always stays");
  checkpoint.key("best", &CheckpointConfig::best,
                 "a checkpoint of each evaluation (eval.every_steps) whose held-out loss is the "
                 "lowest so far, kept until a better one; -r best and checkpoints/best.h5 name it");
  checkpoint.key("snapshot_bytes", &CheckpointConfig::snapshot_bytes, "bytes",
                 between(0, 1ll << 50),
                 "a rank's copy that is written beside training; larger shards make it wait");
  checkpoint.key("max_failures", &CheckpointConfig::max_failures, "", between(1, 1 << 20),
                 "failed checkpoints in a row that end the run");
}

void trace_rows(Schema& schema) {
  auto trace = schema.block("trace", &Config::trace);
  trace.key(
      "enabled", &TraceConfig::enabled,
      "record the events of every rank and write the trace that ballast-report reads; without "
      "them the log has no balance, exposed seconds or times of schedules");
  const auto traced = on(&Config::trace, &TraceConfig::enabled);
  const auto pattern = on(&Config::attention, &AttentionConfig::pattern);
  const auto index = on(&Config::attention, &AttentionConfig::index);
  const auto recall = on(&Config::trace, &TraceConfig::recall_every);
  trace
      .key("plans_every", &TraceConfig::plans_every, "steps", between(0, kTokens),
           "steps between those whose whole plans the trace of rank 0 stores; 0: none")
      .when(traced, true);
  trace
      .key("recall_every", &TraceConfig::recall_every, "steps", between(0, kTokens),
           "steps between measurements of what share of attention a sparse pattern computes; 0: "
           "none")
      .when(traced, true)
      .when(index, IndexOrigin::pattern)
      .when(pattern);
  trace
      .key("recall_rows", &TraceConfig::recall_rows, "queries", between(2, 1 << 20),
           "queries of a layer and segment that recall is measured on")
      .when(index, IndexOrigin::pattern)
      .when_any({recall.is_not(0)});
  trace
      .key(
          "recall_drift", &TraceConfig::recall_drift,
          "at every such step a forward pass of the first held-out sample that is longer than what "
          "the pattern computes whole: what the index of the measurement before holds of the "
          "present attention, against the present index")
      .when(index, IndexOrigin::pattern)
      .when_any({recall.is_not(0)});
  trace
      .key("indexes_every", &TraceConfig::indexes_every, "steps", between(0, kTokens),
           "steps between those whose vertical_slash choices are stored in RUN/indexes, for "
           "attention.index = \"recorded\" (kilobytes a layer, head and sample; samples that are "
           "not cut); 0: none")
      .when(traced, true)
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash);
}

void profile_rows(Schema& schema) {
  auto profile = schema.block("profile", &Config::profile);
  profile.key("table", &ProfileConfig::table,
              "profile table (HDF5) of plans and budgets; empty: profile.h5 of `ballast profile`");
  profile.key("allow_mismatch", &ProfileConfig::allow_mismatch,
              "take a table of other hardware, kernels, layer or dtype, with a note");
  profile.key(
      "repair_limit", &ProfileConfig::repair_limit, "", at_least(0),
      "change up to which falling times are made monotone; beyond, and above 20 us: refused");
  profile.key("lengths", &ProfileConfig::lengths, "tokens", between(1, kTokens),
              "lengths to measure, ascending, multiples of 64 with a sparse attention.pattern; "
              "empty: 256 to 2048, on a GPU 1024 to 65536");
  profile.key("prefixes", &ProfileConfig::prefixes, "tokens", between(64, kTokens),
              "stored keys before a chunk to measure, ascending, multiples of 64 with a sparse "
              "attention.pattern; 0 is always measured");
  profile.key(
      "budgets", &ProfileConfig::budgets, "blocks", between(1, 1 << 20),
      "budgets of attention.pattern (moba, vertical_slash) to measure beside dense attention, by "
      "indexes of that many random blocks, ascending; empty: 2, 4 ... 32, on a GPU 4, 8 ... 128");
  profile.key("recompute", &ProfileConfig::recompute,
              "recompute modes to measure: none, selective, full");
  profile.key("warmup", &ProfileConfig::warmup, "runs", between(0, 1 << 20),
              "runs before timing, of short work; long work runs once before");
  profile.key("repeats", &ProfileConfig::repeats, "batches", between(1, 1 << 20),
              "timed batches of each point at most, whose median counts; short work runs many "
              "times in a batch");
  profile.key("target_s", &ProfileConfig::target_s, "s", above(0),
              "time that all timed runs aim at: points get fewer batches, three at least, where "
              "they would take longer");
  profile.key("sustained_s", &ProfileConfig::sustained_s, "s", at_least(0),
              "seconds for which one layer runs again and again, and whose times all others are "
              "scaled to: at its power limit a device is slower than in short runs; 0: 6 on a GPU, "
              "none on the host");
  profile.key("held_out", &ProfileConfig::held_out, "points", between(0, 1 << 20),
              "layers that the table did not see, timed to judge its predictions");
  profile.key("largest_message", &ProfileConfig::largest_message, "bytes",
              between(1 << 14, 1ll << 32), "largest message of the link measurement");
}

}  // namespace

std::vector<KeySpec> deck_rows() {
  Schema schema;
  for (const auto rows :
       {run_rows,       mesh_rows,  model_rows,    data_rows,       batching_rows,
        attention_rows, chunk_rows, pipeline_rows, ring_rows,       dst_rows,
        sab_rows,       loss_rows,  dpo_rows,      curriculum_rows, optimizer_rows,
        recompute_rows, lora_rows,  costs_rows,    checkpoint_rows, trace_rows,
        profile_rows,   eval_rows})
    rows(schema);
  return std::move(schema.list);
}

}  // namespace ballast

// The rows: every key of a deck and the member of Config that it fills, which holds the default.
#include "core/config/deck_rows.hpp"

#include "core/config/batching_rows.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_row_builder.hpp"
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
          "bit-identical repetition on CUDA too (the host always is)");
  run.key("hang_timeout_s", &RunConfig::hang_timeout_s, "s", above(0),
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
           "ranks that count as one node; 0: as the machine says. Set it to exercise two-level "
           "rings on one machine");
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
  model.key("tied_embedding", &ModelConfig::tied_embedding, "embedding and head share one matrix");
  model.key("rms_eps", &ModelConfig::rms_eps, "", above(0), "epsilon of RMSNorm");
  model.key("initial_std", &ModelConfig::initial_std, "", above(0),
            "standard deviation of the initial matrices (over sqrt(2 layers) where they write to "
            "the residual stream); small models learn sooner with more");
  model.key("rope_theta", &ModelConfig::rope_theta, "", above(1), "base of the rotary embedding");
  model.key("yarn_factor", &ModelConfig::yarn_factor, "", at_least(1),
            "YaRN scaling of the context; 1: plain RoPE");
  model.key("original_context", &ModelConfig::original_context, "tokens", between(1, kTokens),
            "context that the model was trained for (YaRN, llama3)");
  model.key("llama3_factor", &ModelConfig::llama3_factor, "", at_least(1),
            "Llama 3.1 scaling of low rotary frequencies; 1: none");
  model.key(
      "llama3_low", &ModelConfig::llama3_low, "turns", above(0),
      "llama3: frequencies below this many turns over original_context are divided by the factor");
  model.key("llama3_high", &ModelConfig::llama3_high, "turns", above(0),
            "llama3: frequencies above this many turns stay as they are");
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
  data.key("long", &DataConfig::long_samples, "what happens to a sample above max_tokens");
  data.key("validation_share", &DataConfig::validation_share, "", up_to(0, 1),
           "share of the samples held out for validation");
  data.key("needle_task", &DataConfig::needle_task,
           "retrieval: the value of a key; values: all values of a key that occurs several times; "
           "variables: the chain of assignments back to a value; common: the most common word")
      .when(source, DataSource::needle);
  data.key("needle_repeats", &DataConfig::needle_repeats, "", between(1, 1 << 20),
           "needle: values of a key, assignments in a chain, or times that the common word occurs: "
           "one number, or one for each length; empty list: 2")
      .when(on(&Config::data, &DataConfig::needle_task), NeedleTask::values, NeedleTask::variables,
            NeedleTask::common);
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

void attention_rows(Schema& schema) {
  const auto pattern = on(&Config::attention, &AttentionConfig::pattern);
  const auto index = on(&Config::attention, &AttentionConfig::index);
  auto attention = schema.block("attention", &Config::attention);
  attention.key("pattern", &AttentionConfig::pattern,
                "which (query, key) pairs are computed; vertical_slash: columns and block "
                "diagonals that the last queries attend to (MTraining); moba: the best blocks of "
                "keys for each query; xattention: blocks with the heaviest antidiagonals; by_head: "
                "each head as a table says (MInference); flexprefill: each head by blocks or by "
                "columns and slashes, as its last queries tell");
  attention
      .key("vertical_share", &AttentionConfig::vertical_share, "", share(),
           "vertical_slash, p_v: share of the observed attention that the columns hold; 1: dense")
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("slash_share", &AttentionConfig::slash_share, "", share(),
           "vertical_slash, p_s: share of the observed attention that the slashes hold; 1: dense")
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("last_q", &AttentionConfig::last_q, "queries", between(1, 1 << 20),
           "vertical_slash, by_head, flexprefill: queries at a segment's end (causal: before each "
           "stretch) that are observed; segments no longer (causal: than a stretch) are dense")
      .when(pattern, PatternKind::vertical_slash, PatternKind::by_head, PatternKind::flexprefill);
  attention.key(
      "selection", &AttentionConfig::selection,
      "queries that a vertical_slash index is chosen by; last: the last ones of a "
      "segment, for all its queries (MTraining; the choice for the beginning looks at the "
      "end); causal: for each stretch of queries those before it. dense and moba look at "
      "no later token either way");
  attention
      .key("stretch", &AttentionConfig::stretch, "tokens", between(64, 1 << 30),
           "causal: queries that share a choice, a multiple of 64; dense among themselves, the "
           "first stretch altogether")
      .when(on(&Config::attention, &AttentionConfig::selection), IndexSelection::causal);
  attention
      .key("max_columns", &AttentionConfig::max_columns, "keys", between(0, kTokens),
           "vertical_slash: columns of a head at most, the heaviest; 0: no cap")
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("max_slashes", &AttentionConfig::max_slashes, "blocks", between(0, kTokens),
           "vertical_slash: slashes of a head at most, the heaviest; 0: no cap")
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("moba_block", &AttentionConfig::moba_block, "tokens", between(64, 1 << 30),
           "moba: tokens of a block, a multiple of 64")
      .when(pattern, PatternKind::moba);
  attention
      .key("moba_top_k", &AttentionConfig::moba_top_k, "blocks", between(1, kTokens),
           "moba: blocks a query, its own included; more than there are: dense")
      .when(pattern, PatternKind::moba);
  attention
      .key("xattention_block", &AttentionConfig::xattention_block, "tokens", between(64, 1 << 20),
           "xattention: tokens of a block, a multiple of 64")
      .when(pattern, PatternKind::xattention);
  attention
      .key("xattention_stride", &AttentionConfig::xattention_stride, "tokens", between(1, 1 << 20),
           "xattention: tokens between the antidiagonals that are summed; divides 64")
      .when(pattern, PatternKind::xattention);
  attention
      .key("xattention_threshold", &AttentionConfig::xattention_threshold, "", share(),
           "xattention: share of the estimated attention that each row of blocks keeps; 1: dense")
      .when(pattern, PatternKind::xattention);
  attention
      .key("heads", &AttentionConfig::heads,
           "by_head: file with the pattern of every layer and head, as `ballast bench heads` "
           "writes it")
      .when(pattern, PatternKind::by_head);
  attention
      .key("flex_threshold", &AttentionConfig::flex_threshold, "", between(0, 1),
           "flexprefill, tau: a head whose pooled estimate diverges less than this (square root of "
           "Jensen-Shannon) from what its last queries attend to takes blocks for each block of "
           "queries, others columns and slashes; 0: never blocks")
      .when(pattern, PatternKind::flexprefill);
  attention
      .key("flex_share", &AttentionConfig::flex_share, "", share(),
           "flexprefill, gamma: share of the attention, estimated or observed, that blocks, "
           "columns and slashes each hold; 1: dense")
      .when(pattern, PatternKind::flexprefill);
  attention.key("index", &AttentionConfig::index,
                "pattern: from the pattern's own rule; generated: made-up vertical-slash patterns, "
                "for plans and timings (random weights are not sparse); recorded: those that an "
                "earlier run chose");
  attention
      .key("recorded", &AttentionConfig::recorded,
           "recorded: folder of indexes (RUN/indexes of a run with trace.indexes_every); each "
           "segment "
           "takes the sample of the nearest length")
      .when(index, IndexOrigin::recorded);
  attention
      .key("generated_density", &AttentionConfig::generated_density, "", between(1e-6, 1),
           "generated: share of the causal pairs that is computed; 1: dense")
      .when(index, IndexOrigin::generated);
  attention
      .key("generated_band_tokens", &AttentionConfig::generated_band_tokens, "tokens",
           between(1, kTokens), "generated: local band")
      .when(index, IndexOrigin::generated);
  attention
      .key("generated_columns", &AttentionConfig::generated_columns, "keys", between(0, kTokens),
           "generated: single key columns of a head")
      .when(index, IndexOrigin::generated);
}

void chunk_rows(Schema& schema) {
  const auto method = on(&Config::batching, &BatchingConfig::method);
  auto chunk = schema.block("chunk", &Config::chunk);
  chunk
      .key("tokens", &ChunkConfig::tokens, "tokens", between(1, kTokens),
           "chunkflow: longer samples are cut here, shorter ones share a chunk")
      .when(method, Batching::chunkflow);
  chunk
      .key("k", &ChunkConfig::k, "chunks", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: chunks of a sample that keep their activations; earlier "
           "ones are forwarded twice")
      .when(method, Batching::chunkflow);
  chunk
      .key("offload", &ChunkConfig::offload,
           "where the stored keys, values, their gradients and chunk inputs lie: none: on the "
           "device; host: in (pinned) host memory, brought back window by window")
      .when(method, Batching::chunkflow);
  chunk
      .key("window_tokens", &ChunkConfig::window_tokens, "tokens", between(1, kTokens),
           "chunk.offload = host: stored tokens of a window, two of which are on the device; at "
           "least one chunk")
      .when(method, Batching::chunkflow);
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
      "at most chunk.k + stages - 1 - s live chunks at stage s; zero_bubble: the same, with "
      "backward split into input and weight gradients where that fills waits; auto: "
      "state_aware_1f1b for chunkflow, else 1f1b");
  pipeline
      .key("search", &PipelineConfig::search, "orders", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: orders of samples to try at most; 1: the batch's order")
      .when(schedule, ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble,
            ScheduleKind::automatic);
  pipeline.key("plan_steps", &PipelineConfig::plan_steps, "steps", between(1, kTokens),
               "plan: global batches that times are averaged over");
}

void ring_rows(Schema& schema) {
  const auto layout = on(&Config::ring, &RingConfig::layout);
  auto ring = schema.block("ring", &Config::ring);
  ring.key("layout", &RingConfig::layout,
           "how the tokens of a micro-batch lie on the context-parallel ranks; auto: the most even "
           "of contiguous, document_zigzag and striped for each micro-batch (vertical_slash: "
           "striped); shuffled: stripes, each round of them dealt in an order of its own");
  ring.key("stripe", &RingConfig::stripe, "tokens", between(1, 1 << 30),
           "tokens of a stripe (striped and shuffled layouts; auto: rounded up to blocks of a "
           "sparse pattern)")
      .when(layout, LayoutKind::striped, LayoutKind::shuffled, LayoutKind::automatic);
}

void dst_rows(Schema& schema) {
  const auto enabled = on(&Config::dst, &DstConfig::enabled);
  auto dst = schema.block("dst", &Config::dst);
  dst.key("enabled", &DstConfig::enabled,
          "dynamic sparsity tuning: micro-batches predicted above the anchor lose attention "
          "budget, those below gain");
  dst.key("anchor", &DstConfig::anchor,
          "predicted latency that micro-batches are aligned to; path: the mean for those above it, "
          "those below gain budget as far as the simulated step takes no longer")
      .when(enabled, true);
  dst.key("dead_band", &DstConfig::dead_band, "", between(0, 1),
          "micro-batches whose predicted latency is within this share of the anchor keep the base "
          "budget")
      .when(enabled, true);
  dst.key("bound", &DstConfig::bound,
          "what dst.threshold bounds; layer: the drop of every layer; stage: the mean drop over a "
          "stage's layers, so that layers whose coverage is flat give more and others less")
      .when(enabled, true);
  dst.key("threshold", &DstConfig::threshold, "", between(0, 1),
          "p: largest drop of coverage, the share of routing mass that a budget keeps")
      .when(enabled, true);
  dst.key("coverage_rows", &DstConfig::coverage_rows,
          "vertical_slash: queries that coverage is told of and slashes and columns are bought by; "
          "last: the last attention.last_q of a segment; sampled: as many, spread over all of it "
          "(moba takes all)")
      .when(enabled, true);
  dst.key("base_budget", &DstConfig::base_budget, "blocks", between(0, 1 << 20),
          "budget without tuning, in key blocks a query; 0: attention.moba_top_k (moba)")
      .when(enabled, true);
  dst.key("budgets", &DstConfig::budgets, "blocks", between(1, 1 << 20),
          "budgets to choose from, ascending, with the base; empty: four to the octave, from an "
          "eighth of the base to four times it")
      .when(enabled, true);
  dst.key("simulated_coverage", &DstConfig::simulated_coverage, "blocks", between(1, 1 << 20),
          "plan: blocks that cover 90 %, one of these drawn for each sample and layer "
          "(SparseBalance Figure 4); empty: 10, 36, 50");
}

void sab_rows(Schema& schema) {
  const auto method = on(&Config::batching, &BatchingConfig::method);
  auto sab = schema.block("sab", &Config::sab);
  sab.key("decay", &SabConfig::decay, "", up_to(0, 1),
          "weight of the past in the moving average of final budgets of a length bin")
      .when(method, Batching::sab);
}

void loss_rows(Schema& schema) {
  const auto kind = on(&Config::loss, &LossConfig::kind);
  auto loss = schema.block("loss", &Config::loss);
  loss.key("kind", &LossConfig::kind,
           "cross_entropy: of the next token; dpo: sigmoid loss of direct preference optimization "
           "over pairs of a chosen and a rejected answer, mean over the global batch's pairs");
  loss.key("normaliser", &LossConfig::normaliser,
           "ave_token: summed token loss of the global batch over its loss tokens, exact on every "
           "mesh; token_mean: mean over micro-batches of their mean token loss; sample_mean: mean "
           "over micro-batches of the mean over their samples; sequence_mean: mean over the global "
           "batch's samples of their mean token loss, exact on every mesh (LongAlign); sum: of all "
           "token losses")
      .allow({"ave_token", "token_mean", "sample_mean", "sequence_mean", "sum"})
      .when(kind, LossKind::cross_entropy);
}

void dpo_rows(Schema& schema) {
  const auto kind = on(&Config::loss, &LossConfig::kind);
  auto dpo = schema.block("dpo", &Config::dpo);
  dpo.key("beta", &DpoConfig::beta, "", above(0),
          "strength of the pull towards the reference: a reward is beta times the log probability "
          "of an answer over that of the reference")
      .when(kind, LossKind::dpo);
  dpo.key("label_smoothing", &DpoConfig::label_smoothing, "", up_to(0, 0.5),
          "share of the pairs whose preference is taken for wrong (conservative DPO)")
      .when(kind, LossKind::dpo);
  dpo.key("reference", &DpoConfig::reference,
          "HDF5 file with the reference's log probabilities, which `ballast reference` writes")
      .when(kind, LossKind::dpo);
  dpo.key("reference_free", &DpoConfig::reference_free,
          "no reference: its log probabilities count as 0")
      .when(kind, LossKind::dpo);
}

void curriculum_rows(Schema& schema) {
  const auto steps = on(&Config::curriculum, &CurriculumConfig::steps);
  auto curriculum = schema.block("curriculum", &Config::curriculum);
  curriculum.key("steps", &CurriculumConfig::steps, "steps", between(0, kTokens),
                 "first steps of the run that take short samples alone; the long ones follow later "
                 "in the first epoch");
  curriculum
      .key("max_tokens", &CurriculumConfig::max_tokens, "tokens", between(0, kTokens),
           "longest sample of those steps; 0: the first packing group's length (batching.method = "
           "\"hbp\")")
      .when(steps);
}

void optimizer_rows(Schema& schema) {
  auto optimizer = schema.block("optimizer", &Config::optimizer);
  const auto schedule = on(&Config::optimizer, &OptimizerConfig::schedule);
  const auto kind = on(&Config::optimizer, &OptimizerConfig::kind);
  using enum LearningRateSchedule;
  optimizer.key("kind", &OptimizerConfig::kind,
                "adamw; or muon: momentum whose matrices are orthogonalised, for the matrices of "
                "layers, and adamw for embedding, head, norms and biases");
  optimizer.key(
      "schedule", &OptimizerConfig::schedule,
      "learning rate after the warm-up: constant; linear or cosine: falling to the minimum "
      "at decay_steps; wsd (warm-up, stable, decay): constant, then a line to the minimum "
      "over the last wsd_decay_steps");
  optimizer.key("learning_rate", &OptimizerConfig::learning_rate, "", at_least(0),
                "peak learning rate");
  optimizer
      .key("minimum_learning_rate", &OptimizerConfig::minimum_learning_rate, "", at_least(0),
           "learning rate at the end of the decay")
      .when(schedule, linear, cosine, wsd);
  optimizer.key("warmup_steps", &OptimizerConfig::warmup_steps, "steps", between(0, kTokens),
                "linear warm-up");
  optimizer
      .key("decay_steps", &OptimizerConfig::decay_steps, "steps", between(0, kTokens),
           "step at which the decay ends; 0: run.steps")
      .when(schedule, linear, cosine, wsd);
  optimizer
      .key("wsd_decay_steps", &OptimizerConfig::wsd_decay_steps, "steps", between(0, kTokens),
           "wsd: steps that the decay takes; 0: a tenth of all")
      .when(schedule, wsd);
  optimizer.key("beta1", &OptimizerConfig::beta1, "", up_to(0, 1), "decay of the first moment");
  optimizer.key("beta2", &OptimizerConfig::beta2, "", up_to(0, 1), "decay of the second moment");
  optimizer.key("eps", &OptimizerConfig::eps, "", above(0), "epsilon of AdamW");
  optimizer
      .key("momentum", &OptimizerConfig::momentum, "", up_to(0, 1), "muon: decay of the momentum")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("nesterov", &OptimizerConfig::nesterov,
           "muon: the update looks ahead, gradient + momentum * moment in place of the moment")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("newton_schulz_steps", &OptimizerConfig::newton_schulz_steps, "", between(1, 32),
           "muon: steps of the quintic Newton-Schulz iteration")
      .when(kind, OptimizerKind::muon);
  optimizer
      .key("update_rms", &OptimizerConfig::update_rms, "", at_least(0),
           "muon: root mean square of an update of full rank over the learning rate: an "
           "orthogonal matrix times update_rms * sqrt(max(rows, columns)); 0.2 is AdamW's, so that "
           "learning rate and weight decay serve both (Moonlight); 0: sqrt(max(1, rows / columns)) "
           "instead")
      .when(kind, OptimizerKind::muon);
  optimizer.key("weight_decay", &OptimizerConfig::weight_decay, "", at_least(0),
                "decoupled weight decay of the matrices, embedding and head included");
  optimizer.key("clip_norm", &OptimizerConfig::clip_norm, "", at_least(0),
                "limit of the global gradient norm; 0: none");
  optimizer.key("zero", &OptimizerConfig::zero, "", between(0, 2),
                "ZeRO stage over the ranks that hold the same parameters: 0 replicated, 1 "
                "optimizer state, 2 gradients too");
}

void recompute_rows(Schema& schema) {
  const auto mode = on(&Config::recompute, &RecomputeOptions::mode);
  auto recompute = schema.block("recompute", &Config::recompute);
  recompute.key("mode", &RecomputeOptions::mode,
                "what backward recomputes: selective: norms and SwiGLU products; full: whole "
                "layers from their input");
  recompute
      .key("layers", &RecomputeOptions::layers, "layers", between(-1, 1 << 16),
           "full: the first layers of a stage that are recomputed; -1: all")
      .when(mode, Recompute::full);
}

void lora_rows(Schema& schema) {
  const auto rank = on(&Config::lora, &LoraConfig::rank);
  auto lora = schema.block("lora", &Config::lora);
  lora.key(
      "rank", &LoraConfig::rank, "", between(0, 1 << 16),
      "rank of the adapters that are trained in place of the weights; 0: none, the weights are");
  lora.key("alpha", &LoraConfig::alpha, "", above(0),
           "an adapter's output is multiplied by alpha / rank")
      .when(rank);
  lora.key("dropout", &LoraConfig::dropout, "", up_to(0, 1),
           "share of an adapter's inputs dropped in training")
      .when(rank);
  lora.key("projections", &LoraConfig::projections,
           "matrices of a layer that get an adapter: some of q, k, v, o, gate, up, down")
      .when(rank);
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
  trace.key("enabled", &TraceConfig::enabled, "write the event trace that ballast-report reads");
  trace.key("plans_every", &TraceConfig::plans_every, "steps", between(0, kTokens),
            "steps between those whose whole plans the trace of rank 0 stores; 0: none");
  trace.key("recall_every", &TraceConfig::recall_every, "steps", between(0, kTokens),
            "steps between measurements of what share of attention a sparse pattern computes, on "
            "the host backend; 0: none");
  trace.key("recall_rows", &TraceConfig::recall_rows, "queries", between(2, 1 << 20),
            "queries of a layer and segment that recall is measured on");
  trace.key(
      "recall_drift", &TraceConfig::recall_drift,
      "at every such step, a forward pass of the first held-out sample too: what the index of "
      "the measurement before holds of the present attention, against the present index");
  trace.key("indexes_every", &TraceConfig::indexes_every, "steps", between(0, kTokens),
            "steps between those whose vertical_slash choices are stored in RUN/indexes, for "
            "attention.index = \"recorded\" (kilobytes a layer, head and sample; samples that are "
            "not cut, on the host backend); 0: none");
}

void profile_rows(Schema& schema) {
  auto profile = schema.block("profile", &Config::profile);
  profile.key("table", &ProfileConfig::table,
              "profile table (HDF5) of plans and budgets; empty: profile.h5 of `ballast profile`");
  profile.key("allow_mismatch", &ProfileConfig::allow_mismatch,
              "take a table of other hardware, kernels, layer or dtype, with a note");
  profile.key("repair_limit", &ProfileConfig::repair_limit, "", at_least(0),
              "change up to which falling times are made monotone; beyond: refused");
  profile.key("lengths", &ProfileConfig::lengths, "tokens", between(1, kTokens),
              "lengths to measure, ascending, multiples of 64 with a sparse attention.pattern; "
              "empty: 256 to 2048, on a GPU 1024 to 65536");
  profile.key(
      "prefixes", &ProfileConfig::prefixes, "tokens", between(64, kTokens),
      "stored keys before a chunk to measure, ascending multiples of 64; 0 is always measured");
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
  profile.key("held_out", &ProfileConfig::held_out, "points", between(0, 1 << 20),
              "layers that the table did not see, timed to judge its predictions");
  profile.key("largest_message", &ProfileConfig::largest_message, "bytes",
              between(1 << 14, 1ll << 32), "largest message of the link measurement");
}

void eval_rows(Schema& schema) {
  auto eval = schema.block("eval", &Config::eval);
  eval.key("every_steps", &EvalConfig::every_steps, "steps", between(0, kTokens),
           "steps between held-out losses; 0: none while training");
  eval.key("samples", &EvalConfig::samples, "samples", between(0, kTokens),
           "held-out samples to use; 0: all");
  eval.key("depths", &EvalConfig::depths, "parts", between(1, 1 << 10),
           "needle: parts of the context whose accuracy is reported apart");
  const auto generate = schema.part<GenerateConfig>(
      "eval", [](Config& c) -> GenerateConfig& { return c.eval.generate; }, "generate_");
  generate.key("tokens", &GenerateConfig::tokens, "tokens", between(0, 1 << 20),
               "most tokens that each evaluation lets the model write after each prompt; 0: none. "
               "Every token is a forward pass over all prompts");
  const Switch<std::int64_t> tokens{&default_config().eval.generate.tokens};
  generate
      .key("prompts", &GenerateConfig::prompts,
           "texts to continue, for data of bytes (data.source = \"files\")")
      .when(tokens);
  generate
      .key("samples", &GenerateConfig::samples, "samples", between(0, 1 << 16),
           "held-out samples whose beginnings are prompts too")
      .when(tokens);
  generate
      .key("prefix_tokens", &GenerateConfig::prefix_tokens, "tokens", between(0, kTokens),
           "tokens of such a beginning; 0: up to the first token that carries loss, as the prompt "
           "of a conversation, or a quarter of the sample where all do")
      .when(tokens);
  generate
      .key("temperature", &GenerateConfig::temperature, "", at_least(0),
           "logits are divided by it before a token is drawn; 0: the most likely token")
      .when(tokens);
  generate
      .key("seed", &GenerateConfig::seed, "", at_least(0),
           "of the draws, which depend on it, prompt and position alone")
      .when(tokens);
  generate
      .key("stop_token", &GenerateConfig::stop_token, "", between(-1, kTokens),
           "token that ends a text, such as the tokenizer's end of sequence; -1: none does")
      .when(tokens);
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

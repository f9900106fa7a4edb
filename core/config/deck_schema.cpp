// The schema: every block and every key that a deck may hold.  A new key is one row here.
#include <algorithm>

#include "core/config/deck.hpp"
#include "core/model/model_shape.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {
namespace {

using Texts = std::vector<std::string>;

/// Bounds of a number.
struct Range {
  std::optional<double> minimum, maximum;
  bool above = false, below = false;
};
constexpr Range any{};
Range at_least(double minimum) { return {minimum, std::nullopt, false, false}; }
Range above(double minimum) { return {minimum, std::nullopt, true, false}; }
Range between(double minimum, double maximum) { return {minimum, maximum, false, false}; }
/// [minimum, maximum)
Range up_to(double minimum, double maximum) { return {minimum, maximum, false, true}; }

/// (0, 1]
Range share() { return {0.0, 1.0, true, false}; }

constexpr double kDegree = 1 << 20;    // ranks of one mesh dimension
constexpr double kTokens = 1ll << 40;  // tokens, steps, samples
constexpr double kWidth = 1 << 24;     // extent of a model dimension

class Rows {
 public:
  void number(const char* path, std::int64_t value, const char* unit, Range range,
              const char* meaning) {
    add(path, value, unit, range, {}, meaning);
  }
  void real(const char* path, double value, const char* unit, Range range, const char* meaning) {
    add(path, value, unit, range, {}, meaning);
  }
  void flag(const char* path, bool value, const char* meaning) {
    add(path, value, "", any, {}, meaning);
  }
  void text(const char* path, const char* value, Texts allowed, const char* meaning) {
    add(path, std::string(value), "", any, std::move(allowed), meaning);
  }
  void texts(const char* path, Texts value, const char* meaning) {
    add(path, std::move(value), "", any, {}, meaning);
  }
  void numbers(const char* path, const char* unit, Range range, const char* meaning) {
    add(path, std::vector<std::int64_t>(), unit, range, {}, meaning);
  }
  void reals(const char* path, const char* unit, Range range, const char* meaning) {
    add(path, std::vector<double>(), unit, range, {}, meaning);
  }
  std::vector<KeySpec> list;

 private:
  void add(const std::string& path, DeckValue value, const char* unit, Range range, Texts allowed,
           const char* meaning) {
    const auto dot = path.find('.');
    list.push_back({path.substr(0, dot), path.substr(dot + 1), std::move(value), unit, meaning,
                    std::move(allowed), range.minimum, range.maximum, range.above, range.below});
  }
};

Texts presets_and_custom() {
  Texts names = model_presets();
  names.insert(names.begin(), "custom");
  return names;
}

Texts all_batching_methods() {
  Texts names = batching_methods();
  for (const char* name : {"sab", "lbb", "chunkflow"}) names.emplace_back(name);
  return names;
}

std::vector<KeySpec> build() {
  Rows k;
  k.text("run.backend", "host", {"host", "cuda"},
         "where the computation runs; cuda falls back to the host, with a note, where a rank has "
         "no GPU");
  k.text("run.precision", "fp32", {"fp32", "fp64", "bf16"},
         "compute precision on the host (fp32 or fp64); CUDA computes in bf16 with fp32 "
         "accumulation and master weights");
  k.number("run.seed", 1, "", at_least(0),
           "seed of initial weights, validation split and sample order");
  k.number("run.steps", 100, "steps", between(0, kTokens),
           "training steps of the whole run, restarts included");
  k.text("run.output", "", {},
         "run folder; empty: runs/NAME of the deck file (-d on the command line comes first)");
  k.flag("run.deterministic", false, "bit-identical repetition on CUDA too (the host always is)");
  k.real("run.hang_timeout_s", 600, "s", above(0),
         "a rank that waits this long without progress reports its last event and ends the run");
  k.number("run.log_every", 1, "steps", between(1, kTokens),
           "steps between two lines of the step log");
  k.text("run.dump_gradients", "", {},
         "safetensors file for the reduced gradients (fp32, before clipping) of the first step "
         "that this start of the run takes; empty: none");

  k.number("mesh.dp", 1, "ranks", between(1, kDegree), "data parallel degree");
  k.number("mesh.pp", 1, "stages", between(1, kDegree), "pipeline parallel degree");
  k.number("mesh.cp_outer", 1, "nodes", between(1, kDegree),
           "context parallel, outer ring (between nodes); 1: one flat ring");
  k.number("mesh.cp_inner", 1, "ranks", between(1, kDegree),
           "context parallel, inner ring (inside a node)");
  k.number("mesh.sp", 1, "ranks", between(1, kDegree), "Ulysses sequence parallel degree");
  k.number("mesh.tp", 1, "ranks", between(1, kDegree), "tensor parallel degree");
  k.number("mesh.ranks_per_node", 0, "ranks", between(0, kDegree),
           "ranks that count as one node; 0: as the machine says. Set it to exercise two-level "
           "rings on one machine");

  k.text("model.preset", "custom", presets_and_custom(),
         "published shape, whose values the keys below replace; custom needs all of layers to "
         "vocabulary, or weights");
  k.text("model.weights", "", {},
         "Hugging Face folder (config.json, safetensors) that a run starts from; the keys of the "
         "shape come from it. A checkpoint (-r) goes first");
  k.number("model.layers", 0, "layers", between(0, 1 << 16), "transformer layers");
  k.number("model.hidden", 0, "", between(0, kWidth), "width of the residual stream");
  k.number("model.intermediate", 0, "", between(0, kWidth), "width of the SwiGLU layer");
  k.number("model.query_heads", 0, "heads", between(0, 1 << 16), "query heads");
  k.number("model.kv_heads", 0, "heads", between(0, 1 << 16),
           "key/value heads; divides query_heads");
  k.number("model.head_dim", 0, "", between(0, 1 << 16), "width of a head");
  k.number("model.vocabulary", 0, "tokens", between(0, kWidth),
           "token ids; 256 for byte-level data");
  k.flag("model.qkv_bias", false, "bias on the query, key and value projections (Qwen2.5)");
  k.flag("model.tied_embedding", false, "embedding and head share one matrix");
  k.real("model.rms_eps", 1e-6, "", above(0), "epsilon of RMSNorm");
  k.real("model.initial_std", 0.02, "", above(0),
         "standard deviation of the initial matrices (over sqrt(2 layers) where they write to the "
         "residual stream); small models learn sooner with more");
  k.real("model.rope_theta", 1e6, "", above(1), "base of the rotary embedding");
  k.real("model.yarn_factor", 1, "", at_least(1), "YaRN scaling of the context; 1: plain RoPE");
  k.number("model.original_context", 32768, "tokens", between(1, kTokens),
           "context that the model was trained for (YaRN, llama3)");
  k.real("model.llama3_factor", 1, "", at_least(1),
         "Llama 3.1 scaling of low rotary frequencies; 1: none");
  k.real(
      "model.llama3_low", 1, "turns", above(0),
      "llama3: frequencies below this many turns over original_context are divided by the factor");
  k.real("model.llama3_high", 4, "turns", above(0),
         "llama3: frequencies above this many turns stay as they are");
  k.number("model.head_chunk_tokens", 1024, "tokens", between(1, kTokens),
           "tokens whose logits exist at once in the LM head");

  k.text("data.source", "files", {"files", "megatron", "hdf5", "lengths", "distribution", "needle"},
         "files: text as bytes, one file a sample; megatron: .bin/.idx; hdf5: /tokens, /offsets; "
         "lengths: a length file, tokens made up; "
         "distribution: a table of length bins; needle: key-value pairs hidden in filler and asked "
         "for at the end");
  k.texts("data.paths", {}, "files: files, folders (searched recursively) and globs");
  k.texts("data.extensions", {},
          "files: endings to take from folders and globs, such as \".hpp\" (\"\": files without "
          "one); empty list: every file");
  k.text("data.path", "", {},
         "megatron: the .bin and .idx files, with or without the ending; hdf5: the file");
  k.text("data.mask_path", "", {},
         "megatron: a parallel .bin/.idx pair of bytes, 0 where a token carries no loss; empty: "
         "every token does");
  k.text("data.lengths_file", "", {}, "lengths: text file with one length a line");
  k.numbers("data.lengths", "tokens", between(1, kTokens),
            "lengths: the lengths themselves, in place of a file");
  k.numbers("data.bin_tokens", "tokens", between(1, kTokens),
            "distribution: upper edge of each length bin, ascending, inclusive");
  k.reals("data.bin_share", "", at_least(0),
          "distribution: share of the samples in each bin (not cumulative), in proportion to their "
          "sum");
  k.number(
      "data.samples", 0, "samples", between(0, kTokens),
      "samples to take at most, from the first on; 0: all. distribution, needle: how many to draw");
  k.number("data.max_tokens", 0, "tokens", between(0, kTokens), "longest sample; 0: no limit");
  k.number("data.min_tokens", 1, "tokens", between(0, kTokens), "shorter samples are left out");
  k.text("data.long", "truncate", {"truncate", "split", "drop"},
         "what happens to a sample above max_tokens");
  k.real("data.validation_share", 0, "", up_to(0, 1),
         "share of the samples held out for validation");

  k.numbers("data.needle_lengths", "tokens", between(1, kTokens),
            "needle: lengths of samples, questions included; each sample has one of them");
  k.reals(
      "data.needle_length_share", "", at_least(0),
      "needle: share of the samples of each length, in proportion to their sum; empty list: alike");
  k.numbers("data.needle_pairs", "pairs", between(1, 1 << 24),
            "needle: key-value pairs hidden in a sample, of distinct keys: one number, or one for "
            "each length; empty list: 16");
  k.numbers("data.needle_questions", "questions", between(1, 1 << 24),
            "needle: pairs asked for at the end of a sample, whose values carry the loss: one "
            "number, or one for each length; empty list: 16");
  k.number("data.needle_keys", 64, "tokens", between(1, kWidth), "needle: token ids that are keys");
  k.number("data.needle_values", 64, "tokens", between(1, kWidth),
           "needle: token ids that form values; the rest of model.vocabulary is filler");
  k.number("data.needle_value_tokens", 1, "tokens", between(1, 1 << 16),
           "needle: tokens of a value; an answer is right when all are");
  k.flag("data.needle_closing", true,
         "needle: a pair ends with its key again, like a closing tag, which carries loss but does "
         "not count as accuracy; small models learn much sooner");
  k.number("data.needle_held_out", 0, "samples", between(0, kTokens),
           "needle: samples held out, from random streams of their own");
  k.reals("data.needle_held_out_share", "", at_least(0),
          "needle: share of the held-out samples of each length; empty list: as in training");

  k.text("batching.method", "packed", all_batching_methods(),
         "none: one sample a micro-batch; packed: best-fit packs, heaviest first to the least "
         "loaded rank; hbp: packing groups; sab: ranks, then micro-batches, balanced by "
         "predicted latency (SparseBalance), lbb: by tokens; others: packing baselines");
  k.number("batching.micro_batch_tokens", 4096, "tokens", between(1, kTokens),
           "capacity of a pack; a longer sample gets a micro-batch of its own");
  k.number("batching.global_tokens", 65536, "tokens", between(1, kTokens),
           "tokens of a global batch: samples are taken in order until they reach it");
  k.number("batching.global_samples", 0, "samples", between(0, kTokens),
           "samples of a global batch, in place of global_tokens; 0: global_tokens decides");
  k.number("batching.micro_batch_samples", 0, "samples", between(0, 1 << 20),
           "none, sab, lbb: samples of a micro-batch (none: that many in order; sab, lbb: on "
           "average); 0: one (none), as micro_batch_tokens allows (sab, lbb)");
  k.flag("batching.shuffle", true, "a new sample order each epoch, the same on every mesh");
  k.text("batching.scope", "step", {"step", "epoch"},
         "what is packed at once: each global batch, or the whole epoch, cut into batches of one "
         "micro-batch a rank (pack only)");
  k.numbers("batching.groups", "tokens", between(1, kTokens),
            "hbp: pack length of each group, ascending");
  k.numbers(
      "batching.group_ranks", "ranks", between(1, kDegree),
      "hbp: ranks that share a pack of each group, its sequence parallel degree; empty list: 1");
  k.numbers("batching.group_recompute", "layers", between(-1, 1 << 16),
            "hbp: first layers of a stage formed again in backward in each group, as "
            "recompute.mode = \"full\" does; -1 or an empty list: as block recompute says");
  k.text("batching.groups_from", "deck", {"deck", "profile"},
         "hbp: where the packing groups stand; profile: those that `ballast profile` or `ballast "
         "plan` selected (select_lengths) and stored in profile.table, in place of groups, "
         "group_ranks and group_recompute");
  k.numbers("batching.select_lengths", "tokens", between(1, kTokens),
            "hbp: pack lengths that `ballast plan` and `ballast profile` try when they select "
            "packing groups, ascending; empty: no selection");
  k.numbers(
      "batching.select_ranks", "ranks", between(1, kDegree),
      "ranks a pack to try; empty list: powers of two that divide mesh.dp and the query heads");
  k.real("batching.select_memory_gib", 0, "GiB", at_least(0),
         "memory of a rank that selected groups keep within by recomputing layers; 0: no limit");
  k.flag("batching.balance", true,
         "hbp: packs and batches of like attention; false: random packs of each group in random "
         "order");
  k.text("batching.long", "refuse", {"refuse", "split"},
         "hbp: what happens to a sample above the longest group; split: pieces of its length, each "
         "a sample");

  k.text("attention.pattern", "dense", {"dense", "vertical_slash", "moba", "xattention"},
         "which (query, key) pairs are computed; vertical_slash: columns and block diagonals that "
         "the last queries attend to (MTraining); moba: the "
         "best blocks of keys for each query; xattention: blocks with the heaviest antidiagonals");
  k.real("attention.vertical_share", 0.9, "", share(),
         "vertical_slash, p_v: share of the observed attention that the columns hold; 1: dense");
  k.real("attention.slash_share", 0.9, "", share(),
         "vertical_slash, p_s: share of the observed attention that the slashes hold; 1: dense");
  k.number(
      "attention.last_q", 64, "queries", between(1, 1 << 20),
      "vertical_slash: queries at a segment's end that are observed; segments no longer are dense");
  k.number("attention.max_columns", 4096, "keys", between(0, kTokens),
           "vertical_slash: columns of a head at most, the heaviest; 0: no cap");
  k.number("attention.max_slashes", 1024, "blocks", between(0, kTokens),
           "vertical_slash: slashes of a head at most, the heaviest; 0: no cap");
  k.number("attention.moba_block", 256, "tokens", between(64, 1 << 30),
           "moba: tokens of a block, a multiple of 64");
  k.number("attention.moba_top_k", 32, "blocks", between(1, kTokens),
           "moba: blocks a query, its own included; more than there are: dense");
  k.number("attention.xattention_block", 128, "tokens", between(64, 1 << 20),
           "xattention: tokens of a block, a multiple of 64");
  k.number("attention.xattention_stride", 16, "tokens", between(1, 1 << 20),
           "xattention: tokens between the antidiagonals that are summed; divides 64");
  k.real("attention.xattention_threshold", 0.9, "", share(),
         "xattention: share of the estimated attention that each row of blocks keeps; 1: dense");

  k.number("chunk.tokens", 8192, "tokens", between(1, kTokens),
           "chunkflow: longer samples are cut here, shorter ones share a chunk");
  k.number("chunk.k", 1, "chunks", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: chunks of a sample that keep their activations; earlier "
           "ones are forwarded twice");

  k.text("chunk.offload", "none", {"none", "host"},
         "where the stored keys, values, their gradients and chunk inputs lie: none: on the "
         "device; host: in (pinned) host memory, brought back window by window");
  k.number("chunk.window_tokens", 8192, "tokens", between(1, kTokens),
           "chunk.offload = host: stored tokens of a window, two of which are on the device; at "
           "least one chunk");

  k.numbers("chunk.search_tokens", "tokens", between(1, kTokens),
            "plan: chunk sizes to search over; empty: no search");
  k.numbers("chunk.search_k", "chunks", between(1, 1 << 20),
            "plan: values of chunk.k to search over; empty: 1, 2, 4, 8 and 16");
  k.number("chunk.search_steps", 4, "steps", between(1, kTokens),
           "plan: global batches that the search averages over");
  k.real("chunk.search_memory_gib", 0, "GiB", at_least(0),
         "plan: memory of a rank that a pair may need, by the estimate of check; 0: no limit");

  k.text("pipeline.schedule", "1f1b", {"gpipe", "1f1b", "state_aware_1f1b", "zero_bubble"},
         "gpipe: all forwards, then all backwards; 1f1b: in turn; state_aware_1f1b: "
         "list-scheduled, at most chunk.k + stages - 1 - s live "
         "chunks at stage s; zero_bubble: the same, with backward split into input and weight "
         "gradients where that fills waits");
  k.number("pipeline.search", 64, "orders", between(1, 1 << 20),
           "state_aware_1f1b, zero_bubble: orders of samples to try at most; 1: the batch's order");
  k.number("pipeline.plan_steps", 1, "steps", between(1, kTokens),
           "plan: global batches that times are averaged over");

  k.text("attention.index", "pattern", {"pattern", "generated"},
         "pattern: from the pattern's own rule; generated: made-up vertical-slash patterns, for "
         "plans and timings (random weights are not sparse)");
  k.real("attention.generated_density", 0.05, "", between(1e-6, 1),
         "generated: share of the causal pairs that is computed; 1: dense");
  k.number("attention.generated_band_tokens", 1024, "tokens", between(1, kTokens),
           "generated: local band");
  k.number("attention.generated_columns", 1024, "keys", between(0, kTokens),
           "generated: single key columns of a head");

  k.text("ring.layout", "zigzag", {"contiguous", "zigzag", "striped", "shuffled"},
         "how the tokens of a micro-batch lie on the context-parallel ranks; shuffled: stripes, "
         "each round of them dealt in an order of its own");
  k.number("ring.stripe", 64, "tokens", between(1, 1 << 30),
           "tokens of a stripe (striped and shuffled layouts)");

  k.flag("dst.enabled", false,
         "dynamic sparsity tuning: micro-batches predicted above the anchor lose attention budget, "
         "those below gain");
  k.text("dst.anchor", "mean", {"mean", "min", "max"},
         "predicted latency that micro-batches are aligned to");
  k.real("dst.threshold", 0.1, "", between(0, 1),
         "p: largest drop of coverage, the share of routing mass that a budget keeps");
  k.number("dst.base_budget", 0, "blocks", between(0, 1 << 20),
           "budget without tuning, in key blocks a query; 0: attention.moba_top_k (moba)");
  k.numbers("dst.budgets", "blocks", between(1, 1 << 20),
            "budgets to choose from, ascending, with the base; empty: four to the octave, from an "
            "eighth of the base to four times it");
  k.numbers("dst.simulated_coverage", "blocks", between(1, 1 << 20),
            "plan: blocks that cover 90 %, one of these drawn for each sample and layer "
            "(SparseBalance Figure 4); empty: 10, 36, 50");

  k.real("sab.decay", 0.9, "", up_to(0, 1),
         "weight of the past in the moving average of final budgets of a length bin");

  k.text("loss.normaliser", "ave_token", {"ave_token", "token_mean", "sample_mean", "sum"},
         "ave_token: summed token loss of the global batch over its loss tokens, exact on every "
         "mesh; token_mean: mean over micro-batches of "
         "their mean token loss; sample_mean: mean over micro-batches of the mean over their "
         "samples; sum: of all token losses");

  k.number("curriculum.steps", 0, "steps", between(0, kTokens),
           "first steps of the run that take short samples alone; the long ones follow later in "
           "the first epoch");
  k.number("curriculum.max_tokens", 0, "tokens", between(0, kTokens),
           "longest sample of those steps; 0: the first packing group's length (batching.method = "
           "\"hbp\")");

  k.real("optimizer.learning_rate", 3e-4, "", at_least(0), "peak learning rate of AdamW");
  k.real("optimizer.minimum_learning_rate", 0, "", at_least(0),
         "learning rate at the end of the cosine");
  k.number("optimizer.warmup_steps", 0, "steps", between(0, kTokens), "linear warm-up");
  k.number("optimizer.decay_steps", 0, "steps", between(0, kTokens),
           "step at which the cosine ends; 0: run.steps");
  k.real("optimizer.beta1", 0.9, "", up_to(0, 1), "decay of the first moment");
  k.real("optimizer.beta2", 0.95, "", up_to(0, 1), "decay of the second moment");
  k.real("optimizer.eps", 1e-8, "", above(0), "epsilon of AdamW");
  k.real("optimizer.weight_decay", 0.1, "", at_least(0), "decoupled weight decay of the matrices");
  k.real("optimizer.clip_norm", 1, "", at_least(0), "limit of the global gradient norm; 0: none");
  k.number("optimizer.zero", 1, "", between(0, 2),
           "ZeRO stage over the ranks that hold the same parameters: 0 replicated, 1 optimizer "
           "state, 2 gradients too");

  k.text("recompute.mode", "none", {"none", "selective", "full"},
         "what backward forms again: selective: norms and SwiGLU products; full: whole layers from "
         "their input");
  k.number("recompute.layers", -1, "layers", between(-1, 1 << 16),
           "full: the first layers of a stage that are formed again; -1: all");

  k.number(
      "lora.rank", 0, "", between(0, 1 << 16),
      "rank of the adapters that are trained in place of the weights; 0: none, the weights are");
  k.real("lora.alpha", 16, "", above(0), "an adapter's output is multiplied by alpha / rank");
  k.real("lora.dropout", 0, "", up_to(0, 1), "share of an adapter's inputs dropped in training");
  k.texts("lora.projections", {"q", "k", "v", "o"},
          "matrices of a layer that get an adapter: some of q, k, v, o, gate, up, down");

  k.real("costs.forward_indexing_ms", 0, "ms", at_least(0),
         "ring attention, forward: sparse index, once a call");
  k.real("costs.forward_host_ms", 0, "ms", at_least(0),
         "ring attention, forward: host work that nothing hides, once a call");
  k.real("costs.forward_compute_ms", 0, "ms", at_least(0),
         "ring attention, forward: attention of one ring step");
  k.real("costs.forward_inner_hop_ms", 0, "ms", at_least(0),
         "KV of one shard to the next rank of the inner ring");
  k.real("costs.forward_outer_hop_ms", 0, "ms", at_least(0), "KV of one shard to the next node");
  k.real("costs.backward_indexing_ms", 0, "ms", at_least(0),
         "ring attention, backward: work once a call, such as all vertical lines");
  k.real("costs.backward_host_ms", 0, "ms", at_least(0),
         "ring attention, backward: host work that nothing hides, once a call");
  k.real("costs.backward_compute_ms", 0, "ms", at_least(0),
         "ring attention, backward: attention of one ring step");
  k.real("costs.backward_inner_hop_ms", 0, "ms", at_least(0),
         "KV and dKV of one shard together to the next rank of the inner ring; dKV alone takes "
         "what exceeds forward's hop");
  k.real("costs.backward_outer_hop_ms", 0, "ms", at_least(0),
         "KV and dKV of one shard together to the next node; dKV alone takes what exceeds "
         "forward's hop");

  k.real("costs.forward_token_s", 1e-6, "s", at_least(0),
         "forward of one token on one pipeline stage (packs: the whole model)");
  k.real("costs.forward_pair_s", 0, "s", at_least(0),
         "forward of one visible (query, key) pair on one pipeline stage (packs: the whole model)");
  k.real("costs.backward_over_forward", 2, "", at_least(0), "time of backward in units of forward");
  k.real("costs.exchange_token_s", 0, "s", at_least(0),
         "packs: all-to-alls of one token, all layers, forward and backward, if it went whole to "
         "other ranks (Ulysses)");
  k.real("costs.forward_micro_batch_s", 0, "s", at_least(0),
         "pipeline: forward of a micro-batch on one stage beside its tokens and pairs: launches, "
         "kernels too small to fill the device");
  k.real("costs.stage_hop_token_s", 0, "s", at_least(0),
         "pipeline: one token's activations or gradients to the neighbour stage");

  k.number("checkpoint.every_steps", 0, "steps", between(0, kTokens),
           "steps between checkpoints; 0: only at the end and on an agreed stop");
  k.flag("checkpoint.at_end", true,
         "a checkpoint after the last step; a run that is stopped before writes one in any case");
  k.number("checkpoint.keep", 2, "files", between(1, 1 << 20), "newest checkpoints to keep");

  k.flag("trace.enabled", true, "write the event trace that ballast-report reads");

  k.text("profile.table", "", {},
         "profile table (HDF5) that plans and budgets read; `ballast profile` writes it (empty: "
         "profile.h5 of its run folder)");
  k.flag("profile.allow_mismatch", false,
         "use a table of other hardware, kernels, layer or dtype all the same, with a note");
  k.real("profile.repair_limit", 0.25, "", at_least(0),
         "relative change of a time up to which falling times are made monotone; beyond: refused");
  k.numbers("profile.lengths", "tokens", between(1, kTokens),
            "lengths to measure, ascending, multiples of 64 with a sparse attention.pattern; "
            "empty: 256 to 2048, on a GPU 1024 to 65536");
  k.numbers(
      "profile.prefixes", "tokens", between(64, kTokens),
      "stored keys before a chunk to measure, ascending multiples of 64; 0 is always measured");
  k.numbers(
      "profile.budgets", "blocks", between(1, 1 << 20),
      "budgets of attention.pattern (moba, vertical_slash) to measure beside dense attention, by "
      "indexes of that many random blocks, ascending; empty: 2, 4 ... 32, on a GPU 4, 8 ... 128");
  k.texts("profile.recompute", {"none"}, "recompute modes to measure: none, selective, full");
  k.number("profile.warmup", 2, "runs", between(0, 1 << 20),
           "runs before timing, of short work; long work runs once before");
  k.number("profile.repeats", 9, "batches", between(1, 1 << 20),
           "timed batches of each point at most, whose median counts; short work runs many times "
           "in a batch");
  k.real("profile.target_s", 40, "s", above(0),
         "time that all timed runs aim at: points get fewer batches, three at least, where they "
         "would take longer");
  k.number("profile.held_out", 24, "points", between(0, 1 << 20),
           "layers that the table did not see, timed to judge its predictions");
  k.number("profile.largest_message", 1 << 24, "bytes", between(1 << 14, 1ll << 32),
           "largest message of the link measurement");

  k.number("eval.every_steps", 0, "steps", between(0, kTokens),
           "steps between held-out losses; 0: none while training");
  k.number("eval.samples", 0, "samples", between(0, kTokens), "held-out samples to use; 0: all");
  k.number("eval.depths", 8, "parts", between(1, 1 << 10),
           "needle: parts of the context whose accuracy is reported apart");
  return k.list;
}

}  // namespace

std::span<const BlockSpec> deck_blocks() {
  static const std::vector<BlockSpec> blocks = {
      {"run", "the run as a whole"},
      {"mesh", "degrees of the rank mesh; their product is the number of ranks"},
      {"model", "decoder-only Transformer as in Qwen2.5 and Llama 3"},
      {"data", "samples"},
      {"batching", "which samples form a step, and how they share micro-batches"},
      {"chunk", "dependent chunks of long samples (batching.method = \"chunkflow\")"},
      {"pipeline", "pipeline schedules (mesh.pp stages)"},
      {"attention", "attention pattern"},
      {"ring", "ring attention over context-parallel ranks"},
      {"dst", "dynamic sparsity tuning (SparseBalance)"},
      {"sab", "sparsity-aware batching (batching.method = \"sab\")"},
      {"loss", "training objective"},
      {"curriculum", "order of packing groups over the run"},
      {"optimizer", "AdamW, learning-rate schedule and ZeRO"},
      {"recompute", "activations formed again in backward instead of kept"},
      {"lora", "low-rank adapters (LoRA) in place of full fine-tuning"},
      {"costs", "component times that the planner takes as given"},
      {"checkpoint", "checkpoints and restart"},
      {"trace", "event trace"},
      {"profile", "profile tables of layer latency and link speed"},
      {"eval", "held-out loss and needle accuracy"},
  };
  return blocks;
}

std::span<const KeySpec> deck_schema() {
  static const std::vector<KeySpec> keys = build();
  return keys;
}

}  // namespace ballast

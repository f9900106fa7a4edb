// Config: what a run was told, complete and typed, one struct a block of the deck; and where each
// value came from.  Every member is filled by one row of the schema (core/config/deck_schema.cpp),
// and its initial value here is the key's default.  What a value means to a part of the program, as
// that part's options, is core/config/run_options.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/precision.hpp"
#include "core/base/problem.hpp"
#include "core/config/learning_rate.hpp"
#include "core/config/optimizer_kind.hpp"
#include "core/data/data_options.hpp"
#include "core/data/sampler_window.hpp"
#include "core/model/lora_options.hpp"
#include "core/model/recompute_options.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/budget_policy.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/loss_weights.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {

using Integers = std::vector<std::int64_t>;
using Reals = std::vector<double>;
using Texts = std::vector<std::string>;

/// The longest limit in seconds: clocks count nanoseconds in 64 bits.
inline constexpr double kMostSeconds = 1e8;

struct RunConfig {
  Backend backend = Backend::host;
  Precision precision = Precision::fp32;
  std::uint64_t seed = 1;
  std::int64_t steps = 100;
  std::string output;
  bool deterministic = false;
  double hang_timeout_s = 600;
  std::int64_t log_every = 1;
  bool json_lines = true, tensorboard = true;
  std::string dump_gradients;
  /// Type of parameter values and activations where the backend is there.
  DType type() const { return compute_type(backend, precision); }
  bool fp8() const { return precision == Precision::fp8; }
};

/// Keys of a model's shape, and beside it; model_shape() is the shape.
struct ModelConfig {
  std::string preset = "custom", weights;
  std::int64_t layers = 0, hidden = 0, intermediate = 0, query_heads = 0, kv_heads = 0,
               head_dim = 0, vocabulary = 0;
  bool qkv_bias = false, qk_norm = false, tied_embedding = false;
  double rms_eps = 1e-6, initial_std = 0.02, rope_theta = 1e6, yarn_factor = 1;
  std::int64_t original_context = 32768;
  double llama3_factor = 1, llama3_low = 1, llama3_high = 4;
  std::int64_t head_chunk_tokens = 1024;
};

struct DataConfig {
  DataSource source = DataSource::files;
  Texts paths, extensions;
  std::string path, mask_path, lengths_file;
  Integers lengths, bin_tokens;
  Reals bin_share;
  std::int64_t samples = 0, max_tokens = 0, min_tokens = 1;
  LongDocuments long_samples = LongDocuments::truncate;
  double validation_share = 0;
  NeedleTask needle_task = NeedleTask::retrieval;
  Integers needle_repeats, needle_copies;
  Integers needle_lengths;
  Reals needle_length_share;
  Integers needle_pairs, needle_questions;
  std::int64_t needle_keys = 64, needle_values = 64, needle_value_tokens = 1;
  bool needle_closing = true;
  std::int64_t needle_held_out = 0;
  Reals needle_held_out_share;
};

struct BatchingConfig {
  Batching method = Batching::balanced;
  std::int64_t micro_batch_tokens = 4096, global_tokens = 65536, global_samples = 0;
  int micro_batch_samples = 0;
  std::int64_t window = 1;
  WindowRule window_rule = WindowRule::balanced;
  bool shuffle = true;
  BatchScope scope = BatchScope::step;
  Integers groups, group_ranks, group_recompute;
  GroupSource groups_from = GroupSource::deck;
  Integers select_lengths, select_ranks;
  double select_memory_gib = 0;
  bool select_refine = true;
  GroupPacking packing = GroupPacking::alike;
  bool balance = true;
  LongSamples long_samples = LongSamples::refuse;
};

struct ChunkConfig {
  std::int64_t tokens = 8192, k = 1;
  Offload offload = Offload::none;
  std::int64_t window_tokens = 8192;
  Integers search_tokens, search_k;
  std::int64_t search_steps = 4;
  double search_memory_gib = 0;
};

struct PipelineConfig {
  ScheduleKind schedule = ScheduleKind::automatic;
  int search = 64;
  std::int64_t plan_steps = 1;
};

struct AttentionConfig {
  PatternKind pattern = PatternKind::dense;
  double vertical_share = 0.9, slash_share = 0.9;
  std::int64_t last_q = 64, max_columns = 4096, max_slashes = 1024;
  IndexSelection selection = IndexSelection::last;
  std::int64_t stretch = 1024;
  std::int64_t moba_block = 256, moba_top_k = 32;
  std::int64_t xattention_block = 128, xattention_stride = 16;
  double xattention_threshold = 0.9;
  std::string heads;
  double flex_threshold = 0.1, flex_share = 0.95;
  IndexOrigin index = IndexOrigin::pattern;
  std::string recorded;
  double expected_sparsity = 0, generated_density = 0.05;
  std::int64_t generated_band_tokens = 1024, generated_columns = 1024;
};

struct RingConfig {
  LayoutKind layout = LayoutKind::automatic;
  std::int64_t stripe = 64;
};

struct DstConfig {
  bool enabled = false;
  Anchor anchor = Anchor::mean;
  double threshold = 0.1;
  CoverageBound bound = CoverageBound::layer;
  double dead_band = 0;
  CoverageRows coverage_rows = CoverageRows::last;
  std::int64_t base_budget = 0;
  Integers budgets, simulated_coverage;
};

struct SabConfig {
  double decay = 0.9;
};

struct LossConfig {
  LossKind kind = LossKind::cross_entropy;
  LossNormaliser normaliser = LossNormaliser::ave_token;
};

/// Direct preference optimization (loss.kind = "dpo").
struct DpoConfig {
  double beta = 0.1, label_smoothing = 0;
  std::string reference;
  bool reference_free = false;
};

struct CurriculumConfig {
  std::int64_t steps = 0, max_tokens = 0;
};

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::adamw;
  LearningRateSchedule schedule = LearningRateSchedule::cosine;
  double learning_rate = 3e-4, minimum_learning_rate = 0;
  std::int64_t warmup_steps = 0, decay_steps = 0, wsd_decay_steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip_norm = 1;
  double momentum = 0.95, update_rms = 0.2;
  bool nesterov = true;
  int newton_schulz_steps = 5;
  StatePrecision moments = StatePrecision::full, gradients = StatePrecision::full;
  int zero = 1;
  std::int64_t bucket_bytes = std::int64_t{128} << 20;
  bool bf16_moments() const {
    return kind == OptimizerKind::adamw && moments == StatePrecision::bf16;
  }
  bool bf16_gradients() const {
    return kind == OptimizerKind::adamw && gradients == StatePrecision::bf16;
  }
};

struct LoraConfig {
  std::int64_t rank = 0;
  double alpha = 16, dropout = 0;
  std::vector<Projection> projections = {Projection::q, Projection::k, Projection::v,
                                         Projection::o};
};

/// Stated times of one pass of ring attention.
struct RingPassConfig {
  double indexing_ms = 0, host_ms = 0, compute_ms = 0, inner_hop_ms = 0, outer_hop_ms = 0;
};

struct CostsConfig {
  RingPassConfig forward, backward;
  double forward_token_s = 1e-6, forward_pair_s = 0, backward_over_forward = 2,
         exchange_token_s = 0, ring_hop_token_s = 0, forward_micro_batch_s = 0,
         stage_hop_token_s = 0;
};

struct CheckpointConfig {
  std::int64_t every_steps = 0;
  bool at_end = true;
  std::int64_t keep = 2;
  bool best = false;
  std::int64_t snapshot_bytes = std::int64_t{16} << 30;
  std::int64_t max_failures = 3;
};

struct TraceConfig {
  bool enabled = true;
  std::int64_t plans_every = 1;
  std::int64_t recall_every = 5, recall_rows = 16;
  bool recall_drift = false;
  bool measures_drift() const { return enabled && recall_drift && recall_every > 0; }
  std::int64_t indexes_every = 0;
};

struct ProfileConfig {
  std::string table;
  bool allow_mismatch = false;
  double repair_limit = 0.25;
  Integers lengths, prefixes, budgets;
  std::vector<Recompute> recompute = {Recompute::none};
  std::int64_t warmup = 2, repeats = 9;
  double target_s = 40;
  double sustained_s = 0;
  std::int64_t held_out = 24, largest_message = 1 << 24;
};

/// Texts that evaluations let the model continue.
struct GenerateConfig {
  std::int64_t tokens = 0, samples = 0, prefix_tokens = 0, stop_token = -1;
  Texts prompts;
  double temperature = 0;
  std::uint64_t seed = 1;
};

struct EvalConfig {
  std::int64_t every_steps = 0, samples = 0, depths = 8;
  GenerateConfig generate;
};

/// Who set a value.
enum class Origin { unset, file, command_line, preset, weights, profile_table, search };

/// Which keys were set, by whom and where.
struct Provenance {
  struct Setting {
    Origin origin = Origin::unset;
    std::string place;  ///< "deck.toml:12", "command line: mesh.dp=3", "preset qwen2.5-7b" ...
  };
  std::string file;                         ///< path of the deck as given, for messages
  std::string case_name;                    ///< chosen case, or ""
  std::map<std::string, Setting> settings;  ///< by "block.key"; keys at their default are absent

  /// Origin and place of a key; {unset, "default"} where nothing set it.
  Setting of(const Key& key) const {
    const auto found = settings.find(key.path);
    return found == settings.end() ? Setting{Origin::unset, "default"} : found->second;
  }
};

struct Config {
  RunConfig run;
  MeshShape mesh;
  ModelConfig model;
  DataConfig data;
  BatchingConfig batching;
  ChunkConfig chunk;
  PipelineConfig pipeline;
  AttentionConfig attention;
  RingConfig ring;
  DstConfig dst;
  SabConfig sab;
  LossConfig loss;
  DpoConfig dpo;
  CurriculumConfig curriculum;
  OptimizerConfig optimizer;
  RecomputeOptions recompute;
  LoraConfig lora;
  CostsConfig costs;
  CheckpointConfig checkpoint;
  TraceConfig trace;
  ProfileConfig profile;
  EvalConfig eval;
  Provenance from;

  /// Whether the deck or the command line sets a key of this member, a block or a single value:
  /// is_set(&Config::costs), is_set(&Config::costs, &CostsConfig::forward_token_s).
  template <class... Members>
  bool is_set(Members... members) const {
    const auto& part = follow(*this, members...);
    return any_set(&part, sizeof part);
  }
  /// The whole effective deck as TOML: every key with its value, unit and meaning; defaults are
  /// commented as such.  Reading it again gives the same values, stated where they were
  /// (counts_when_stated).
  std::string effective_deck() const;

 private:
  template <class T>
  static const T& follow(const T& object) {
    return object;
  }
  template <class T, class M, class... Rest>
  static const auto& follow(const T& object, M T::*member, Rest... rest) {
    return follow(object.*member, rest...);
  }
  bool any_set(const void* part, std::size_t bytes) const;
};

}  // namespace ballast

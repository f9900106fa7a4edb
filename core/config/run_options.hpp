// What a Config means to the parts of the program: their options, as pure functions of it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/config/config.hpp"
#include "core/data/data_options.hpp"
#include "core/data/needle_task.hpp"
#include "core/data/sampler.hpp"
#include "core/data/sampler_window.hpp"
#include "core/model/model_shape.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/loss_weights.hpp"
#include "core/plan/context/layout_balance.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {

/// The model's shape; all zero where nothing is said of a model.
ModelShape model_shape(const Config& config);
/// Block lora, with run.seed.
LoraOptions lora_options(const Config& config);
/// The needle task of block data (data.source = "needle"), with the model's vocabulary and
/// run.seed.
NeedleOptions needle_options(const Config& config);
/// Whether samples are pairs of answers (loss.kind = "dpo").
bool trains_pairs(const Config& config);
/// Whether budgets are tuned (dst.enabled) or samples weighed (batching.method = "sab") by
/// predicted latency, which needs a profile table or stated costs.
bool predicts_latency(const Config& config);
/// Whether block costs says what a token or a pair takes: plans are timed by it then, and by the
/// block's other times beside them.
bool states_times(const Config& config);
/// Block data, and what it needs of others.
DataOptions data_options(const Config& config);
/// Short samples first, up to the first packing group's length where block curriculum states none.
Curriculum curriculum(const Config& config);
/// The stated packing groups.
std::vector<PackGroup> pack_groups(const Config& config);
/// Whether data-parallel ranks share packs of some stated group (batching.method = "hbp").
bool ranks_share_packs(const Config& config);
/// States `groups`, which come from `place`.
void set_groups(Config& config, const std::vector<PackGroup>& groups, const std::string& place,
                Origin origin = Origin::profile_table);
/// The values alone.
void set_groups(BatchingConfig& batching, const std::vector<PackGroup>& groups);
/// With dp of the mesh and the pair cost of the model; balanced with its groups, and without what
/// it places by.
BatchingOptions batching_options(const Config& config);
/// Numbers of data-parallel ranks, above 1, that may share a micro-batch (adaptive sequence
/// parallelism: groups of hbp, splits of balanced), ascending.
std::vector<int> joined_ranks(const BatchingOptions& batching);
/// Windows of steps, of the size of a step.
WindowOptions window_options(const Config& config);
AttentionOptions attention_options(const Config& config);
/// Block optimizer's schedule, over run.steps where it states no end.
LearningRate learning_rate(const Config& config);
/// With the stages of the mesh; a pair's cost follows the model where no costs are stated.
PipelineOptions pipeline_options(const Config& config);
/// First layer of every pipeline stage.
std::vector<std::int64_t> layer_begin(const Config& config);

/// Whether a pattern has budgets, which tuning moves.
bool has_budgets(PatternKind pattern);
/// Patterns that may compute block diagonals, which stripes alone spread over ranks.
bool has_slashes(PatternKind pattern);
/// The pattern whose budgets count, attention.pattern where it has budgets, else dense; and the
/// tokens of the key blocks that its budgets count.
PatternKind budget_pattern(const Config& config);
std::int64_t budget_block_tokens(const Config& config);

/// Whether packing groups come from the profile table (batching.groups_from = "profile" with
/// batching.method = "hbp"); whether none are stated and none come from it, so that they are to be
/// selected yet.
bool takes_stored_groups(const Config& config);
bool lacks_groups(const Config& config);
/// Cost of one visible (query, key) pair in units of one token's matrix products, forward: 4 D per
/// query head and layer against 2 FLOPs a weight.  0 for a shape without layers.
double pair_cost_tokens(const ModelShape& shape);

/// The options that every step needs, made once.
struct RunOptions {
  MeshShape mesh;
  ModelShape model;
  LossNormaliser normaliser = LossNormaliser::ave_token;
  Curriculum curriculum;
  WindowOptions window;  ///< with the size of a step
  BatchingOptions batching;
  LayoutChoice layout;
  AttentionOptions attention;
  PipelineOptions pipeline;
  std::vector<std::int64_t> layer_begin{0};

  /// Of one sample over the context-parallel ranks.
  SequenceLayout sequence_layout(std::int64_t tokens) const;
  /// A Config that has no problems() gives options without problems.
  static RunOptions from(const Config& config);
  /// joined_ranks() of `batching`.
  std::vector<int> joined_ranks() const { return ballast::joined_ranks(batching); }
};

}  // namespace ballast

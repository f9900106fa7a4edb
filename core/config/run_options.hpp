// RunOptions: the deck's values as the typed options that plans and executors take.  The one place
// where deck keys become options.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/config/deck.hpp"
#include "core/data/needle_task.hpp"
#include "core/data/sampler.hpp"
#include "core/data/sampler_window.hpp"
#include "core/model/model_shape.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/loss_weights.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {

struct RunOptions {
  MeshShape mesh;
  ModelShape model;
  LossNormaliser normaliser = LossNormaliser::ave_token;
  Curriculum curriculum;
  WindowOptions window;      ///< with the size of a step
  BatchingOptions batching;  ///< with dp of the mesh and the pair cost of the model
  LayoutKind layout = LayoutKind::zigzag;
  std::int64_t stripe = 64;  ///< tokens of a stripe (striped and shuffled layouts)
  AttentionOptions attention;

  /// Layout of a packed axis over the context-parallel ranks.
  SequenceLayout sequence_layout(std::int64_t axis_tokens) const {
    return SequenceLayout(layout, axis_tokens, mesh.cp(), stripe, attention.align());
  }
  SequenceLayout sequence_layout(const MicroBatch& micro_batch) const {
    return SequenceLayout(layout, micro_batch, mesh.cp(), stripe, attention.align());
  }
  PipelineOptions pipeline;  ///< with the stages of the mesh; a pair's cost follows the model where
                             ///< the deck states none
  std::vector<std::int64_t> layer_begin{0};  ///< first layer of every pipeline stage

  /// A deck that has no deck_problems() gives options without problems.
  static RunOptions from(const Deck& deck);
  /// Numbers of data-parallel ranks, above 1, that may share a micro-batch (adaptive sequence
  /// parallelism: groups of hbp, splits of balanced), ascending.
  std::vector<int> joined_ranks() const;
};

MeshShape mesh_shape(const Deck& deck);
/// What `train` refuses of a deck that plans can be made for: one sentence each.  Empty: it can
/// run.
std::vector<std::string> not_executable(const Deck& deck);
/// The preset's shape with the deck's explicit keys on top; all zero where the deck says nothing of
/// a model.
ModelShape model_shape(const Deck& deck);
/// Block lora, with run.seed.
LoraOptions lora_options(const Deck& deck);
/// The needle task of block data (data.source = "needle"), with the model's vocabulary and
/// run.seed.
NeedleOptions needle_options(const Deck& deck);

/// Cost of one visible (query, key) pair in units of one token's matrix products, forward: 4 D per
/// query head and layer against 2 FLOPs a weight.  0 for a shape without layers.
double pair_cost_tokens(const ModelShape& shape);

}  // namespace ballast

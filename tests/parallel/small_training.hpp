// One training step of a small model on a mesh, from plan to reduced gradients: what the train loop
// does, without files.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/loss_weights.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/plan/plan_step.hpp"
#include "kernels/model/stage_model.hpp"
#include "parallel/context/mesh_rings.hpp"
#include "parallel/context/ulysses.hpp"
#include "parallel/optimizer/zero.hpp"
#include "parallel/pipeline/stage_executor.hpp"
#include "parallel/pipeline/tied_embedding.hpp"
#include "tests/parallel/support.hpp"

namespace ballast::testing {

inline ModelShape small_shape() {
  ModelShape shape;
  shape.layers = 2;
  shape.hidden = 16;
  shape.intermediate = 24;
  shape.query_heads = 4;
  shape.kv_heads = 2;
  shape.head_dim = 4;
  shape.vocabulary = 19;
  shape.qkv_bias = true;
  shape.rope_theta = 1e4;
  return shape;
}

struct SmallOptions {
  DType type = DType::f64;
  LayoutKind layout = LayoutKind::zigzag;
  std::int64_t stripe = 64;
  Batching method = Batching::packed;
  std::int64_t micro_batch_tokens = 48;
  std::vector<PackGroup> groups;           ///< of method hbp
  std::vector<PlacementSplit> splits{{}};  ///< of method balanced
  std::shared_ptr<const PlacementCosts> placement_costs;
  int zero = 0;
  std::int64_t bucket_bytes = 4096;  ///< a layer or two
  bool overlap = true;               ///< reduces buckets inside backwards, where plans allow it
  std::optional<MuonOptions> muon;
  bool bf16_moments = false, bf16_gradients = false;
  LossNormaliser normaliser = LossNormaliser::ave_token;
  ModelShape shape = small_shape();
  PipelineOptions pipeline;  ///< stages follow the mesh
  KvPlace kv_place;          ///< of dependent chunks (method "chunkflow")
  AttentionOptions attention;
  /// Indexes in place of those of `attention`; `source` is what would be used.
  std::function<std::unique_ptr<IndexSource>(const MicroBatch& micro_batch,
                                             std::unique_ptr<IndexSource> source)>
      wrap_source;
  RecomputeOptions recompute;
  Recorder* recorder = nullptr;
};

/// Token at a position of a sample; about one target in seven carries no loss, the last of a sample
/// never does.
std::int32_t token_of(std::int64_t sample, std::int64_t position);
std::int32_t target_of(std::int64_t sample, std::int64_t position, std::int64_t length);
/// Samples from this number on carry loss on one token in 23.
inline constexpr std::int64_t kMaskedSample = 100000;
SampleLength sample_of(std::int64_t sample, std::int64_t tokens);

/// A model on this rank of a mesh.
class SmallTraining {
 public:
  SmallTraining(const Mesh& mesh, const SmallOptions& options);
  /// The batch of these samples, and the plan of the step over it.
  Batch plan(const std::vector<SampleLength>& samples) const;
  StepPlan step_plan(const Batch& batch) const;
  /// Forward, backward and reduction over these samples; returns the objective.  Collective.
  double gradients(const std::vector<SampleLength>& samples);
  /// Diagnosis of one micro-batch.  Collective over stages and ring.
  int first_nonfinite_layer(const MicroBatch& micro_batch);
  /// Continues gradients() with clipping at 1 and AdamW.
  void update(double learning_rate, std::int64_t step);

 private:
  std::vector<std::int64_t> layer_begin_;

 public:
  Parameters parameters;
  StageModel model;
  ShardedOptimizer optimizer;
  double norm = 0;
  Schedule schedule;  ///< that gradients() executed

 private:
  /// The micro-batch at `place` of this rank's lane.
  MicroBatchWork prepare(const StepPlan& plan, int place, StoredChunk stored = {}) const;
  const Mesh& mesh_;
  SmallOptions options_;
  MeshRings rings_;
  PipelineLinks links_;
  std::map<std::int64_t, std::int64_t> length_;  ///< tokens of each sample
  TiedEmbedding tied_;
};

/// The mesh of this rank alone.
const Mesh& alone();

/// The same step on one rank with every sample in a micro-batch of its own, kept per parameter;
/// computed without any communication.
struct Reference {
  double loss = 0, norm = 0;
  std::vector<std::string> names;
  std::vector<std::vector<double>> gradients;
};
/// `training` on alone() with method "none"; its parameters stay as they are.
Reference reference_step(SmallTraining& training, const std::vector<SampleLength>& samples);
Reference reference_step(const std::vector<SampleLength>& samples, DType type,
                         const ModelShape& shape = small_shape(),
                         const AttentionOptions& attention = {});
Reference reference_step(const std::vector<SampleLength>& samples, SmallOptions options);

/// Largest relative L2 error of a parameter's gradient (relative to 1e-5 of the whole gradient
/// where it is smaller), and which.  Collective over the whole mesh.
std::pair<double, std::string> worst_gradient(SmallTraining& training, const Communicator& world,
                                              const Reference& reference);

}  // namespace ballast::testing

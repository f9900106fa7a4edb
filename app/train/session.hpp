// Session: what training and evaluation share on one rank: mesh, data, model and how a micro-batch
// is prepared.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "app/train/backend.hpp"
#include "app/train/budget_tuning.hpp"
#include "app/train/pair_objective.hpp"
#include "core/config/config.hpp"
#include "core/config/run_options.hpp"
#include "core/data/sampler.hpp"
#include "core/data/sampler_window.hpp"
#include "core/observe/events.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/plan/step_plan.hpp"
#include "io/data/dataset.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/model/stage_model.hpp"
#include "kernels/ops/adamw.hpp"
#include "kernels/ops/muon.hpp"
#include "parallel/comm/mesh.hpp"
#include "parallel/comm/waits.hpp"
#include "parallel/context/kv_store.hpp"
#include "parallel/context/mesh_rings.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "parallel/pipeline/pipeline_links.hpp"
#include "parallel/pipeline/stage_executor.hpp"

namespace ballast {

class Session {
 public:
  /// Collective.  Opens the mesh, the dataset and the model of the deck; parameters hold their
  /// initial values.  Errors reach every rank.
  Session(const Communicator& world, const Config& config);

  /// What the dependent chunks of this rank's lane share; session and plan must outlive it.
  ChunkStores chunk_stores(const StepPlan& plan);
  /// Tokens and attention of the micro-batch at `place` of this rank's lane.
  /// `policy`: who chooses the budgets of its layers; null: they are DST's base budget, without DST
  /// as block attention says.
  /// `from`: the dataset whose samples the plan names; null: the session's.
  MicroBatchWork prepare(const StepPlan& plan, int place, double loss_scale,
                         StoredChunk stored = {}, BudgetPolicy* policy = nullptr,
                         const Dataset* from = nullptr);
  /// Length of each sample, as batching sees it.
  std::vector<SampleLength> lengths(const std::vector<std::int64_t>& samples) const;
  /// The parameters of all stages, in the order in which stages store them.
  std::vector<Parameter> table() const;
  /// Model FLOPs of a step, forward and backward, all ranks together.
  double training_flops(const StepPlan& plan) const;

  Config config;
  RunOptions options;
  BackendChoice backend;
  Recorder recorder;
  WaitWatch waits;  ///< run.hang_timeout_s, from here on
  Mesh mesh;
  Device& device;
  std::unique_ptr<Dataset> dataset;
  Sampler sampler;
  SamplerWindow window;  ///< takes steps out of sampler
  StageTable stage;      ///< this rank's part of the parameter table
  Parameters parameters;
  std::uint64_t base_fingerprint = 0;  ///< of the frozen weights beside adapters, once load_base
                                       ///< has read them; 0: initial values
  std::uint64_t tokens_mark = 0;  ///< huggingface_tokens_mark of model.weights when training began
  std::uint64_t reference_model = 0;  ///< mark of the model that dpo.reference was computed with,
                                      ///< once load_pairs has read it
  std::string reference_note;         ///< ReferenceValues::note, on rank 0
  StageModel model;
  MeshRings rings;
  IndexCache indexes;
  PipelineLinks links;
  KvPlace kv_place;
  std::unique_ptr<PairObjective> pairs;  ///< null but for loss.kind = "dpo", and until load_pairs
  /// Told of every index that the sources of micro-batches make from now on.
  std::function<void(const AttentionInputs&, const AttentionAxes&,
                     const std::vector<AttentionWork>&)>
      index_made;
  std::unique_ptr<BudgetTuning>
      tuning;  ///< null unless the deck tunes budgets or batches by predicted latency

 private:
  /// The attention indexes of micro-batch `of` with these axes, as block attention says, for this
  /// rank's heads.
  std::unique_ptr<IndexSource> index_source(AttentionAxes axes, const MicroBatch& of,
                                            BudgetPolicy* policy,
                                            std::shared_ptr<SlashCarry> carry);
  std::unique_ptr<IndexSource> unheard_source(AttentionAxes axes, const MicroBatch& of,
                                              BudgetPolicy* policy,
                                              std::shared_ptr<SlashCarry> carry);
};

AdamWOptions adamw_options(const Config& config);
/// Nothing where the deck's optimizer is another.
std::optional<MuonOptions> muon_options(const Config& config);

}  // namespace ballast

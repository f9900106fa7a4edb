// The train loop: sample, plan, execute, reduce, update, observe; checkpoints and agreed stops
// between steps.
#pragma once
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "app/observe/overheads.hpp"
#include "app/observe/prediction_warning.hpp"
#include "app/observe/step_log.hpp"
#include "app/observe/step_sinks.hpp"
#include "app/observe/trace_observer.hpp"
#include "app/train/checkpoints.hpp"
#include "app/train/evaluation.hpp"
#include "app/train/generation.hpp"
#include "app/train/index_drift.hpp"
#include "app/train/run_folder.hpp"
#include "app/train/session.hpp"
#include "app/train/step_planner.hpp"
#include "app/train/train_step.hpp"
#include "parallel/comm/signals.hpp"
#include "parallel/comm/waits.hpp"
#include "parallel/optimizer/zero.hpp"

namespace ballast {

/// What a run takes beside its deck.
struct TrainOptions {
  std::string folder;        ///< of the run
  std::string restart;       ///< a checkpoint file, "latest", "best", or ""
  bool force_model = false;  ///< continue a checkpoint of another block model
  double wall_time_s = 0;    ///< of the whole process; 0: no limit
  std::string json;          ///< file for the run's last step and held-out loss, or ""
};

class Trainer {
 public:
  /// Collective.  Locks the run folder, restores when asked, opens log and trace.
  Trainer(const TrainOptions& options, const Communicator& world, const Config& config);
  /// Runs to run.steps, a signal or the wall-time limit.  Returns the exit status: 0, or 75 when it
  /// stopped early (requeue me).
  int run();
  /// Leaves word of an error that ends the run.
  void note_failure(const std::string& why);

 private:
  /// What of the constructor is refused with the run folder open.  Collective.
  void prepare(const Communicator& world, const Config& config);
  /// While it lives, a rank that ends the run alone says so in status.json.
  LastWords leaves_word();
  Checkpoints::Options checkpoint_options();
  void open_trace();
  void open_sinks();
  void write_header(const Restored& restored, const std::vector<std::string>& table_notes);
  /// Its part on the model and the weights that training begins with.
  void write_model(const Restored& restored);
  void step();
  /// Comments on what balance is expected of the session's first step.
  void tell_balance(const StepPlan& plan);
  /// Hands the plan to the trace of rank 0.
  void store(const PlannedStep& planned);
  /// Names the first micro-batch and layer with a NaN or Inf and stops all ranks; nothing is
  /// written.
  [[noreturn]] void stop_at_nonfinite(const StepPlan& plan, const TrainStep::Gradients& found);
  /// Completes the outcome, measures the step and hands it to every sink.  Collective.
  void observe(const StepPlan& plan, StepOutcome outcome);
  /// Writes the step's recall and coverage, and forgets them; the sums that this rank adds.
  RecallSums store_recall(const StepPlan& plan);
  /// Measures drift where the deck asks for it at this step, and writes it.  Collective.
  std::vector<DriftRow> measure_drift(std::int64_t step);
  /// Simulated seconds of the step's schedules over the times of profile.table, the slowest
  /// data-parallel rank's; the trace gets the ops of this stage.  Collective.
  double predict(const StepPlan& plan);
  /// The held-out loss.  Collective.
  double validate();
  /// Whether an evaluation follows the step with this number.
  bool validates_after(std::int64_t step) const;
  /// Whether the time until -t holds no more than one step, one evaluation and one checkpoint.
  bool past_deadline() const;
  /// Collective.  Errors: the run folder is another one's.
  void require_folder();
  /// status.json follows checkpoints at once, steps every few seconds.
  void tell_status();
  int finish(StopReason stop);

  TrainOptions options_;
  Session session_;
  ShardedOptimizer optimizer_;
  TrainStep train_step_;
  StepPlanner planner_;
  RunFolder folder_;  ///< opened where status.json says what comes of the rest of the start
  std::optional<IndexDrift> drift_;
  std::optional<Generator> generator_;
  StepLog log_;
  TraceObserver trace_;
  CheckpointState state_;
  nlohmann::ordered_json summary_;  ///< --json: the run's last step and held-out loss
  bool balance_told_ = false;
  std::string gradient_file_;                 ///< run.dump_gradients until it is written
  std::vector<DeckDifference> deck_changes_;  ///< against the checkpoint that is continued
  double peak_flops_, longest_step_s_ = 0, longest_evaluation_s_ = 0, last_token_s_ = 0;
  std::string told_checkpoint_;  ///< by status.json
  double told_s_ = -std::numeric_limits<double>::infinity();
  Overheads overheads_;
  PredictionWarning prediction_warning_;
  StepTerms predicted_terms_;  ///< of the step that was predicted last
  StepSinks sinks_;
  std::optional<Checkpoints> checkpoints_;
};

}  // namespace ballast

// A trial of `ballast tune`: one candidate, planned by plan_step and timed by simulate, with what
// saves memory added until it fits.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/simulate.hpp"
#include "core/search/tune_space.hpp"

namespace ballast {

struct TuneLimits {
  int ranks = 1;
  double memory_bytes = 0;  ///< of a rank; 0: no limit
  /// Least mean coverage of a sparse pattern's budgets, of the base one and of those that tuning
  /// gives; 0: the deck's budget stays.
  double coverage = 0;
};

/// What all trials of a search share.
struct TuneInput {
  Config base;
  TuneLimits limits;
  std::vector<std::vector<SampleLength>> steps;  ///< samples of the first steps, at least one
  SampleLength longest;                          ///< sample of the whole data set
  std::int64_t longest_document = 0;             ///< tokens of what attends to itself alone
  std::vector<SampleLength> drifting;            ///< whose drift is measured; empty: none is
  /// What passes forward alone between steps beside it: samples of an evaluation, texts.
  std::vector<std::vector<SampleLength>> evaluated;
  std::shared_ptr<const HeadTable> heads;  ///< of attention.pattern = "by_head"; may be null
  /// Costs of a deck; called by one thread at a time.
  std::function<std::shared_ptr<const Costs>(const Config&)> costs;
};

enum class TrialState { fits, over_memory, refused };

struct Trial {
  Candidate candidate;
  TrialState state = TrialState::refused;
  std::string words;  ///< refused: the rule's, or the planner's
  std::int64_t steps = 0;
  double step_s = 0;        ///< mean
  double first_step_s = 0;  ///< of the first step alone, which every trial simulates
  StepTerms terms;          ///< of the first step
  double load_balance = 0, idle_ranks = 0;  ///< means
  PipelineSeconds pipelines;                ///< sums
  double tokens = 0;                        ///< of a step, mean
  std::int64_t bytes = 0;  ///< of the fullest rank, with the longest sample in the first step
  /// Of tuned budgets, where a coverage is asked for: the sum of that of all tokens and layers of
  /// the steps, what it is a sum over, and whether it was refused for the mean.
  double covered = 0, covered_of = 0;
  bool uncovered = false;
  std::int64_t planned = 0;  ///< steps that were planned for it, also with more or less recompute
  double tokens_per_s() const { return step_s > 0 ? tokens / step_s : 0; }
};

/// Plans and times candidates.  Not for several threads at once; each takes its own.
class TuneTrials {
 public:
  /// `input` must outlive it.
  explicit TuneTrials(const TuneInput& input) : input_(input) {}

  /// The first step of a candidate as it is; no time where it is over the memory limit.
  Trial run(const Candidate& candidate);
  /// The same with further steps, `steps` in all.
  Trial more(Trial trial, std::int64_t steps);
  /// The trial with the bytes of all steps that it ran, one after another, evaluations and drift
  /// between them: pools stay as what ran before left them, which may be more than any step alone
  /// needs.
  Trial in_turn(Trial trial);
  /// One step of it with the lightest of recompute and ZeRO that fit the limit: over_memory where
  /// none does, with the bytes of the smallest.  Full recompute of a part of a stage's layers is
  /// tried where all of them are more than needed.
  Trial lightest(const Candidate& candidate);

  /// One step of a plan as it is where it fits and `lightest` of the same choices does not, or
  /// takes longer; else that.
  Trial better_as_it_is(Trial lightest, const Candidate& plan);

  /// The trial with further steps, `steps` in all, and where `in_turn` is set as that says; where
  /// it is over the memory limit then, with the next of recompute, offload and ZeRO that fits.
  Trial longer(const Trial& trial, std::int64_t steps, bool in_turn);

  /// Bytes that a candidate holds whatever it computes.
  std::int64_t standing_bytes(const Candidate& candidate);
  /// Seconds of sums, optimizer and gathers of a step without micro-batches.
  double end_s(const Candidate& candidate);
  /// Of the candidate's stages.
  const Costs& costs(const Candidate& candidate);

 private:
  struct Standing {
    std::int64_t bytes = 0;
    double end_s = 0;
  };
  const Standing& standing(const Candidate& candidate);
  std::int64_t bytes_in_turn(const Trial& trial);
  /// Counts the coverage of a step's tuned budgets.  Error: the mean is below the limit.
  void hold_coverage(Trial& trial, const StepPlan& plan, const SimulationOptions& simulation) const;
  /// Of a trial that recomputes all layers: as many as the limit asks for, where they are faster.
  Trial fewer_layers(const Trial& all, const Trial& none);
  std::vector<Candidate> memory_choices(const Candidate& candidate);
  Trial lightest_of(const std::vector<Candidate>& choices);

  const TuneInput& input_;
  std::map<int, std::shared_ptr<const Costs>> costs_;  ///< by mesh.pp, where costs are stated
  std::map<std::vector<std::int64_t>, Standing> standing_;
  std::int64_t planned_ = 0;  ///< steps
};

}  // namespace ballast

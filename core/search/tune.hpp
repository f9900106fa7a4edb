// The search of `ballast tune`: trials are spent on the candidates that promise most, and none on
// those whose lower bound is above what was found.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/search/tune_trial.hpp"

namespace ballast {

struct TuneOptions {
  std::int64_t list = 10;   ///< best plans to find
  std::int64_t steps = 4;   ///< that the best are simulated over; TuneInput::steps may have fewer
  std::int64_t trials = 0;  ///< at most of one step; 0: as many as `seconds` on two cores allow
  double seconds = 27;      ///< without `trials`: a search that takes longer is cut short
  int threads = 2;          ///< the result is the same with any number
};

/// What the search saw of all candidates with one choice, such as method hbp.
struct ChoiceFacts {
  std::vector<Trial> best;  ///< the fastest that fits; empty without one
  std::int64_t candidates = 0, trials = 0;
  std::int64_t least_bytes = 0;  ///< where none fits: of the smallest; 0: none was too large
  double least_bound_s = 0;      ///< of those without a trial; 0: all had one
  double least_estimate_s = 0;
  std::string refused;  ///< why one was; "" where none was
};

struct TuneResult {
  std::vector<Trial> best;  ///< that fit, the fastest first
  std::map<std::pair<std::string, std::string>, ChoiceFacts> choices;  ///< by facets()
  std::int64_t candidates = 0;  ///< that the table of combinations allows
  std::int64_t refused = 0;     ///< by that table, or by the deck's rules or the planner in a trial
  std::int64_t too_large = 0;   ///< whose standing bytes exceed the limit
  std::int64_t trials = 0;      ///< simulated
  std::int64_t bounded = 0;     ///< whose lower bound is above the last of `best`
  std::int64_t left = 0;        ///< neither: the trials were used up
  double left_bound_s = 0;      ///< least lower bound of those
  bool cut_short = false;       ///< by TuneOptions::seconds: on another machine there may be more
};

/// Deterministic in its arguments but `threads`, unless it was cut short.  Errors: no candidate at
/// all, no step.
TuneResult tune(const TuneInput& input, const TuneOptions& options = {});

/// Budgets of the deck's sparse pattern whose mean coverage of the samples, by the coverage that
/// the simulator draws (dst.simulated_coverage), is at least `coverage`, ascending; {0} for 0 or a
/// pattern without budgets.  Error: none reaches it.
std::vector<std::int64_t> covering_budgets(const Config& base,
                                           const std::vector<SampleLength>& samples,
                                           double coverage);

}  // namespace ballast

// What no plan of a candidate can undercut, and what it may take: cheap figures that say which
// candidates are worth a trial.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/search/tune_trial.hpp"

namespace ballast {

class TuneBounds {
 public:
  /// Both must outlive it.
  TuneBounds(const TuneInput& input, TuneTrials& trials);

  struct Figures {
    double bound_s = 0;      ///< of the first step: below any simulated time, recompute or not
    double estimate_s = 0;   ///< what it may take
    std::int64_t bytes = 0;  ///< of the fullest rank at least, all layers recomputed
  };
  Figures of(const Candidate& candidate);

 private:
  /// Seconds that the ranks of a split spend on the step's samples, all layers, recomputing none.
  struct Work {
    double lane_s = 0;     ///< of one data-parallel rank, if it did all, at least
    double usual_s = 0;    ///< the same with samples whole and budgets that nothing tunes
    double longest_s = 0;  ///< of the sample that takes longest, at least
    double head_s = 0;     ///< of all tokens
    double ring_s = 0;     ///< hops of the step's tokens that no attention hides, an estimate
  };
  /// Seconds of one layer's attention, at least; `usual_s`: of all, untuned and whole.
  struct Attention {
    double all_s = 0, usual_s = 0;
    std::vector<std::pair<std::int64_t, double>> samples;  ///< tokens and seconds of each
  };
  const Attention& attention(const Candidate& candidate, const ContextSplit& split);
  /// Of a micro-batch, as many as products may gain from.
  std::int64_t most_tokens(const Candidate& candidate) const;
  const Work& work(const Candidate& candidate, int joined);
  Work measure(const Candidate& candidate, int joined);
  std::vector<int> joined(const Candidate& candidate) const;

  const TuneInput& input_;
  TuneTrials& trials_;
  double tokens_ = 0;
  std::int64_t longest_ = 0;  ///< of the first step
  std::map<std::vector<std::int64_t>, Work> work_;
  std::map<std::vector<std::int64_t>, Attention> attention_;
};

}  // namespace ballast

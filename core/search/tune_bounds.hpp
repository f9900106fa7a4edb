// What no plan of a candidate can undercut, and what it may take: cheap figures that say which
// candidates are worth a trial.
#pragma once
#include <cstdint>
#include <map>
#include <tuple>
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
    double lane_s = 0;     ///< of one data-parallel rank, if it did all
    double longest_s = 0;  ///< of the longest sample
    double head_s = 0;     ///< of all tokens
    double ring_s = 0;     ///< hops of the step's tokens that no attention hides, an estimate
    double token_s = 0;    ///< of one token's products
  };
  /// Seconds of one layer's attention.
  struct Attention {
    double all_s = 0, longest_s = 0;
  };
  const Attention& attention(const Candidate& candidate, const ContextSplit& split);
  const Work& work(const Candidate& candidate, int joined);
  Work measure(const Candidate& candidate, int joined);
  std::vector<int> joined(const Candidate& candidate) const;

  const TuneInput& input_;
  TuneTrials& trials_;
  double tokens_ = 0;
  std::int64_t longest_ = 0;  ///< of the first step
  std::map<std::tuple<int, int, int, int, std::int64_t>, Work> work_;
  std::map<std::tuple<int, int, int, int, std::int64_t>, Attention> attention_;
};

}  // namespace ballast

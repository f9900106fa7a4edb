// What a sparse pattern whose pairs no budget counts computes of the visible pairs, and how evenly
// the ranks of a ring share that: for the clock.  Source: MTraining Section 3.2 and Table 5 (layout
// decides how sparse work lies on ring steps).
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "core/plan/attention/vertical_slash.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

class PatternWork {
 public:
  /// Some heads of the pattern over a sequence of so many tokens, a multiple of 64.
  using Heads = std::function<std::vector<VerticalSlash>(std::int64_t tokens)>;
  explicit PatternWork(Heads heads) : heads_(std::move(heads)) {}
  /// The same share of every sequence, evenly spread; which pairs they are is not known.
  explicit PatternWork(double density) : stated_(density) {}

  /// Computed / visible pairs of a segment of `tokens` keys; of known heads that of a length within
  /// a tenth of it.
  double density(std::int64_t tokens) const;
  /// Time of attention over a ring of outer x inner ranks that wait for their neighbours alone,
  /// over an even share of the computed pairs (RingBalance::critical_path).  1 where the pattern is
  /// not known and for chunks after stored keys.
  double uneven(const MicroBatch& micro_batch, const SequenceLayout& layout, int outer,
                int inner) const;

 private:
  double critical_path(const MicroBatch& micro_batch, const SequenceLayout& layout, int outer,
                       int inner) const;
  double stated_ = 1;
  Heads heads_;
  mutable std::mutex mutex_;  ///< of what was found so far
  mutable std::map<std::int64_t, double> densities_;
  mutable std::map<std::uint64_t, double> uneven_;
};

}  // namespace ballast

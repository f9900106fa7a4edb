// Recorded vertical-slash patterns: choices that a trained model made, replayed over any mesh,
// layout and length.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/attention/vertical_slash.hpp"

namespace ballast {

/// One head of a layer over one sample.
struct RecordedHead {
  std::int64_t tokens = 0;  ///< of the sample
  struct Stretch {
    std::int64_t first = 0;  ///< as SlashStretch
    bool local = false;
    VerticalSlash choice;
  };
  std::vector<Stretch> stretches;  ///< ascending
};

class RecordedIndexes {
 public:
  /// Recordings of a layer and head are told apart by their order: the n-th of each head belong to
  /// one sample.
  void add(int layer, int head, RecordedHead recorded);
  bool empty() const { return of_.empty(); }
  int layers() const { return layers_; }  ///< one behind the last
  int heads() const { return heads_; }
  /// Whether some choice is by stretches (attention.selection = "causal").
  bool by_stretches() const { return by_stretches_; }
  /// The recording whose length is nearest (in proportion; of equal ones the first), of layer and
  /// head counted round where a model has more.  Error: a layer and head that nothing was recorded
  /// of.
  const RecordedHead& at(int layer, int head, std::int64_t tokens) const;
  /// Heads [first_head, first_head + heads) of a layer over `tokens` keys of a segment.  Error:
  /// heads whose stretches differ.
  std::vector<SlashStretch> stretches(int layer, int first_head, int heads,
                                      std::int64_t tokens) const;

 private:
  std::map<std::pair<int, int>, std::vector<RecordedHead>> of_;  ///< by layer and head
  int layers_ = 0, heads_ = 0;
  bool by_stretches_ = false;
};

/// Recorded heads of a layer over the whole key axis, every segment by its own number of keys; keys
/// behind its end are left out.
AttentionPattern recorded_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                  const RecordedIndexes& recorded, int layer, int first_head,
                                  int heads);

/// All heads of all layers over one sequence of `tokens`, for balance (for_each_work): the sink
/// block as columns.  Error: a choice by stretches, which plans do not balance.
std::vector<VerticalSlash> recorded_heads(const RecordedIndexes& recorded, std::int64_t tokens);

}  // namespace ballast

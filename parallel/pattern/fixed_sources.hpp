// Sources of patterns that do not look at Q and K: dense, and generated for benchmarks.
#pragma once
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/attention/index_source.hpp"
#include "core/plan/attention/recorded_pattern.hpp"
#include "kernels/attention/placed_patterns.hpp"

namespace ballast {

/// Every visible pair; one set of patterns for all layers, planned at once under an `indexing`
/// event.
class DenseSource final : public IndexSource {
 public:
  DenseSource(AttentionAxes axes, Recorder* recorder);
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override {
    return patterns_.at(in.q, in.k);
  }

 private:
  PlacedPatterns patterns_;
};
std::unique_ptr<IndexSource> dense_source(const MicroBatch& batch, const SequenceLayout& layout,
                                          int rank, Recorder* recorder);

/// Patterns that depend on the axes alone, kept over micro-batches and steps with their device
/// twins.
class IndexCache {
 public:
  using Shards = std::shared_ptr<PlacedPatterns>;
  /// The patterns of `heads` heads from `first_head` on over these axes; `build` makes them the
  /// first time.  The kCachedIndexes latest shapes are kept.
  template <class Build>
  Shards get(const AttentionAxes& axes, int first_head, int heads, Build&& build) {
    Shape shape{axes, first_head, heads};
    if (Shards found = find(shape)) return found;
    auto made = std::make_shared<PlacedPatterns>(build());
    kept_.emplace_front(std::move(shape), made);
    if (kept_.size() > kCachedIndexes) kept_.pop_back();
    return made;
  }

 private:
  struct Shape {
    AttentionAxes axes;
    int first_head = 0, heads = 1;
    bool operator==(const Shape&) const = default;
  };
  Shards find(const Shape& shape);
  std::list<std::pair<Shape, Shards>> kept_;  ///< latest use first
};

/// Recorded choices: every layer has its own.
class RecordedSource final : public IndexSource {
 public:
  /// Heads [first_head, first_head + heads) of every layer.
  RecordedSource(AttentionAxes axes, std::shared_ptr<const RecordedIndexes> recorded,
                 int first_head, int heads, Recorder* recorder);
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override;

 private:
  const std::shared_ptr<const RecordedIndexes> recorded_;
  const int first_head_, heads_;
  Recorder* const recorder_;
  const KeyAxis axis_;
  std::map<int, PlacedPatterns> layers_;
};

class GeneratedSource final : public IndexSource {
 public:
  /// Takes them from `cache` where it has this shape.
  GeneratedSource(AttentionAxes axes, const GeneratedPattern& pattern, IndexCache& cache,
                  Recorder* recorder);
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override {
    return shards_->at(in.q, in.k);
  }

 private:
  IndexCache::Shards shards_;
};

}  // namespace ballast

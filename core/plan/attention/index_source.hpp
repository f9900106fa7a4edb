// IndexSource: where attention over context-parallel ranks takes its indexes from.  One per
// micro-batch; builders that look at Q and K (parallel/pattern/pattern_source) and those that do
// not (here) look alike to it.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

class IndexSource {
 public:
  explicit IndexSource(AttentionAxes axes) : axes_(std::move(axes)) {}
  virtual ~IndexSource() = default;
  /// [shard] (or [turn * shards + shard], as axes().calls()): this rank's queries against those
  /// keys, for layer `in.layer`.  Made at the layer's first forward of the micro-batch; the same
  /// objects at every later call (recomputation, backward).  Collective over the ring where the
  /// pattern depends on Q and K.
  virtual const std::vector<AttentionPattern>& shards(const AttentionInputs& in) = 0;
  /// Whether shards() of this layer will look at `in.k`, which then holds all keys of
  /// axes().keys[rank].
  virtual bool reads_keys(int /*layer*/) const { return false; }
  const AttentionAxes& axes() const { return axes_; }

 private:
  AttentionAxes axes_;
};

/// Every visible pair; one set of indexes for all layers, built at once under an `indexing` event.
class DenseSource final : public IndexSource {
 public:
  DenseSource(AttentionAxes axes, Recorder* recorder);
  const std::vector<AttentionPattern>& shards(const AttentionInputs&) override { return shards_; }

 private:
  std::vector<AttentionPattern> shards_;
};
std::unique_ptr<IndexSource> dense_source(const MicroBatch& batch, const SequenceLayout& layout,
                                          int rank, Recorder* recorder);

/// Generated vertical-slash patterns over the whole key axis, one per head: every segment has the
/// pattern of its own number of keys (GeneratedPattern::tokens is not read), with at most one
/// column in 16 keys.  Errors: those of generate and query_blocks.
AttentionPattern generated_pattern(const std::vector<AxisToken>& queries, const KeyAxis& axis,
                                   const GeneratedPattern& pattern);

/// Hands the recorder a row for each head: what `shards` compute of the `visible` pairs, and the
/// budget and overflow that budget_of(head) names.
template <class BudgetOf>
void record_budgets(Recorder* recorder, int layer, const std::vector<AttentionPattern>& shards,
                    double visible, BudgetOf&& budget_of) {
  if (recorder == nullptr || !recorder->enabled || shards.empty()) return;
  for (int h = 0; h < shards.front().index_heads; ++h) {
    BudgetRow row;
    row.layer = layer;
    row.head = h;
    row.visible_pairs = visible;
    for (const AttentionPattern& shard : shards) row.computed_pairs += shard.head_pairs(h);
    std::tie(row.budget, row.overflow) = budget_of(h);
    recorder->budget(row);
  }
}

/// Indexes that depend on the axes alone, kept over micro-batches and steps with what a backend
/// keeps beside them.
class IndexCache {
 public:
  using Shards = std::shared_ptr<const std::vector<AttentionPattern>>;
  /// The indexes of `heads` heads from `first_head` on over these axes; `build` makes them the
  /// first time.  The 8 latest shapes are kept.
  template <class Build>
  Shards get(const AttentionAxes& axes, int first_head, int heads, Build&& build) {
    std::vector<std::int64_t> key = shape_key(axes);
    key.insert(key.end(), {first_head, heads});
    if (Shards found = find(key)) return found;
    auto made = std::make_shared<const std::vector<AttentionPattern>>(build());
    kept_.emplace_front(std::move(key), made);
    if (kept_.size() > 8) kept_.pop_back();
    return made;
  }

 private:
  static std::vector<std::int64_t> shape_key(const AttentionAxes& axes);
  Shards find(const std::vector<std::int64_t>& key);
  std::list<std::pair<std::vector<std::int64_t>, Shards>> kept_;  ///< latest use first
};

class GeneratedSource final : public IndexSource {
 public:
  /// Takes them from `cache` where it has this shape.
  GeneratedSource(AttentionAxes axes, const GeneratedPattern& pattern, IndexCache& cache,
                  Recorder* recorder);
  const std::vector<AttentionPattern>& shards(const AttentionInputs&) override { return *shards_; }

 private:
  IndexCache::Shards shards_;
};

}  // namespace ballast

// Recall and coverage of a step as trace and log show them.
#pragma once
#include <span>
#include <string>

#include "core/observe/events.hpp"

namespace ballast {

/// Sums that give the mean recall of many rows, and its error, once they are added over ranks.
struct RecallSums {
  double queries = 0, mean = 0, squares = 0;  ///< weights; weighted means; squared weighted errors
};
/// Of a model whose layers have `heads` query heads.  These are measured on the same queries, so
/// their errors count as equal ones that move together; those of layers and micro-batches do not.
RecallSums sum_recall(std::span<const RecallRow> rows, std::int64_t heads);

/// Mean of the weighted rows, and half the width of its 95 % interval.
struct RecallFacts {
  double mean = 0, interval = 0;
};
RecallFacts recall_facts(const RecallSums& sums);

/// Recall of one head of a layer on a held-out sample: of the index that the present weights
/// choose, and of the one that those of an earlier step chose.
struct DriftRow {
  std::int32_t layer = 0, head = 0;
  double queries = 0;  ///< that were sampled for
  double now = 0, before = 0;
};
/// [[step, layer, head, queries, now, before]], the trace's plan "drift".
std::string drift_json(std::int64_t step, std::span<const DriftRow> rows);

/// JSON of the trace's plans "recall" ([[step, micro-batch, chunk, layer, head, rows, queries,
/// mean, error, 10th percentile, sink, own block, blocks, columns]]) and "coverage" ([[step,
/// micro-batch, chunk, layer, budget, C(budget), 1 where it was chosen]]), to six decimals.
std::string recall_json(std::span<const RecallRow> rows);
std::string coverage_json(std::span<const CoverageRow> rows);

}  // namespace ballast

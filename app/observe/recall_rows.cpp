#include "app/observe/recall_rows.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

namespace ballast {
namespace {

double shown(double x) { return std::round(x * 1e6) * 1e-6; }

}  // namespace

RecallSums sum_recall(std::span<const RecallRow> rows, std::int64_t heads) {
  RecallSums sums;
  for (const RecallRow& row : rows) {
    sums.queries += row.queries;
    sums.mean += row.queries * row.mean;
    sums.squares += static_cast<double>(heads) * row.queries * row.error * row.queries * row.error;
  }
  return sums;
}

RecallFacts recall_facts(const RecallSums& sums) {
  return {sums.mean / sums.queries, 1.96 * std::sqrt(sums.squares) / sums.queries};
}

std::string recall_json(std::span<const RecallRow> rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const RecallRow& r : rows)
    all.push_back({r.step + 1, r.micro_batch, r.chunk, r.layer, r.head, r.rows, r.queries,
                   shown(r.mean), shown(r.error), shown(r.low), shown(r.sink), shown(r.own),
                   shown(r.blocks), shown(r.columns)});
  return all.dump();
}

std::string coverage_json(std::span<const CoverageRow> rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const CoverageRow& r : rows)
    all.push_back({r.step + 1, r.micro_batch, r.chunk, r.layer, r.budget, shown(r.coverage),
                   r.chosen ? 1 : 0});
  return all.dump();
}

std::string drift_json(std::int64_t step, std::span<const DriftRow> rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const DriftRow& r : rows)
    all.push_back({step + 1, r.layer, r.head, r.queries, shown(r.now), shown(r.before)});
  return all.dump();
}

}  // namespace ballast

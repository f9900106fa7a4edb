#include "core/plan/attention/slash_purchases.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "core/plan/attention/coverage.hpp"

namespace ballast {
namespace {

/// Mass that is not computed yet, by slash and by column.  A column lies on one slash under each
/// block of observed queries, so that what one of them takes the other loses.
class OpenMass {
 public:
  OpenMass(const HeadMass& mass, std::int64_t most_columns)
      : blocks_(std::ssize(mass.slashes)),
        windows_(std::ssize(mass.columns)),
        query_block_(mass.query_block),
        room_(most_columns > 0 ? most_columns : std::numeric_limits<std::int64_t>::max()),
        part_(static_cast<std::size_t>(windows_ * keys()), 0),
        column_(static_cast<std::size_t>(keys()), 0),
        slash_(mass.slashes) {
    for (std::int64_t w = 0; w < windows_; ++w)
      for (const MassItem& item : mass.columns[w]) part_[w * keys() + item.index] = item.mass;
    for (std::int64_t w = 0; w < windows_; ++w) {
      take_block(w, 0);
      take_block(w, query_block(w));
      for (std::int64_t j = 0; j < keys(); ++j) column_[j] += part_[w * keys() + j];
    }
    slash_[0] = kTaken;
  }
  std::int64_t held() const { return held_; }

  /// The slash that holds most; -1 where all are taken.
  std::int64_t best_slash() const {
    const auto best = std::max_element(slash_.begin(), slash_.end());
    return *best == kTaken ? -1 : best - slash_.begin();
  }
  std::int64_t slash(std::int64_t d) const { return slash_[d]; }
  /// The heaviest columns, at most 64 and what the cap leaves.
  const std::vector<MassItem>& best_columns() {
    if (!stale_) return group_;
    stale_ = false;
    group_.clear();
    for (std::int64_t j = 0; j < keys(); ++j)
      if (column_[j] > 0) group_.push_back({j, column_[j]});
    group_ = heaviest(std::move(group_), std::min<std::int64_t>(kBlock, room_));
    return group_;
  }
  void take_slash(std::int64_t d) {
    for (std::int64_t w = 0; w < windows_; ++w)
      if (const std::int64_t b = query_block(w) - d; b >= 0)
        for (std::int64_t j = b * kBlock; j < (b + 1) * kBlock; ++j) {
          stale_ |= part_[w * keys() + j] > 0;
          column_[j] -= take(w, j);
        }
    slash_[d] = kTaken;
  }
  void take_columns(const std::vector<MassItem>& columns) {
    for (const MassItem& column : columns) {
      for (std::int64_t w = 0; w < windows_; ++w)
        if (const std::int64_t mass = take(w, column.index); mass > 0)
          slash_[query_block(w) - column.index / kBlock] -= mass;
      column_[column.index] = 0;
    }
    room_ -= std::ssize(columns);
    stale_ = true;
  }

 private:
  static constexpr std::int64_t kTaken = -1;
  std::int64_t keys() const { return blocks_ * kBlock; }
  /// Block of the segment that observed queries w lie in.
  std::int64_t query_block(std::int64_t w) const { return query_block_[w]; }
  std::int64_t take(std::int64_t w, std::int64_t key) {
    const std::int64_t mass = std::exchange(part_[w * keys() + key], 0);
    held_ += mass;
    return mass;
  }
  void take_block(std::int64_t w, std::int64_t block) {
    for (std::int64_t j = block * kBlock; j < (block + 1) * kBlock; ++j)
      slash_[query_block(w) - block] -= take(w, j);
  }

  std::int64_t blocks_, windows_;
  std::vector<std::int64_t> query_block_;
  std::int64_t room_, held_ = 0;
  std::vector<std::int64_t> part_;    ///< [block of observed queries][key]
  std::vector<std::int64_t> column_;  ///< [key] their sum
  std::vector<std::int64_t> slash_;   ///< [offset]
  std::vector<MassItem> group_;
  bool stale_ = true;
};

std::int64_t sum_of(const std::vector<MassItem>& items) {
  std::int64_t sum = 0;
  for (const MassItem& item : items) sum += item.mass;
  return sum;
}

}  // namespace

SlashPurchases::SlashPurchases(const HeadMass& mass, const std::vector<std::int64_t>& budgets,
                               const AttentionOptions& options) {
  OpenMass open(mass, options.max_columns);
  slashes_.push_back(0);
  for (std::int64_t units = 2; bought_.size() < budgets.size(); ++units) {
    const std::int64_t slash = open.best_slash();
    const std::vector<MassItem> columns = open.best_columns();
    const bool all = slash < 0 && columns.empty();
    while (bought_.size() < budgets.size() && (all || budgets[bought_.size()] <= units)) {
      bought_.push_back({slashes_.size(), columns_.size()});
      const double share =
          mass.total > 0 ? static_cast<double>(open.held()) / static_cast<double>(mass.total) : 1.0;
      coverage_.push_back(std::llrint(share * kCoverageUnit));
    }
    if (slash >= 0 && open.slash(slash) >= sum_of(columns)) {
      open.take_slash(slash);
      slashes_.push_back(static_cast<std::int32_t>(slash));
    } else {
      open.take_columns(columns);
      for (const MassItem& column : columns) columns_.push_back(column.index);
    }
  }
}

VerticalSlash SlashPurchases::choice(std::size_t i) const {
  VerticalSlash head;
  head.slashes.assign(slashes_.begin(),
                      slashes_.begin() + static_cast<std::ptrdiff_t>(bought_[i].slashes));
  head.columns.assign(columns_.begin(),
                      columns_.begin() + static_cast<std::ptrdiff_t>(bought_[i].columns));
  std::sort(head.slashes.begin(), head.slashes.end());
  std::sort(head.columns.begin(), head.columns.end());
  return head;
}

}  // namespace ballast

// Which keys each query row of a call may see, by range of rows.  Header only, so that nvcc alone
// can build what uses it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace ballast {

/// Keys [begin, end).
struct KeyInterval {
  std::int32_t begin = 0, end = 0;
  bool operator==(const KeyInterval&) const = default;
};

/// Rows from `row` up to the next range's: row + i sees keys [begin, end + grow * i).
struct VisibleRange {
  std::int32_t row = 0;
  std::int32_t begin = 0, end = 0;
  std::int32_t grow = 0;  ///< 0 or 1
  KeyInterval at(std::int64_t i) const {
    return {begin, end + grow * static_cast<std::int32_t>(i - row)};
  }
  bool operator==(const VisibleRange&) const = default;
};

/// The visible keys of all rows of a call.  Bounds never decrease from row to row.  A row with
/// begin = end sees nothing: its output is 0 and its LSE is -inf.
class VisibleKeys {
 public:
  /// Adds `rows` rows behind the last one; as in VisibleRange.
  void add(std::int64_t rows, std::int64_t begin, std::int64_t end, int grow) {
    if (rows <= 0) return;
    VisibleRange next{rows_, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end),
                      grow};
    if (ranges_.empty() || !joins(ranges_.back(), next, rows)) ranges_.push_back(next);
    rows_ += static_cast<std::int32_t>(rows);
  }
  std::int64_t rows() const { return rows_; }
  const std::vector<VisibleRange>& ranges() const { return ranges_; }
  /// Rows of a range.
  std::int64_t count(std::size_t range) const {
    return (range + 1 < ranges_.size() ? ranges_[range + 1].row : rows_) - ranges_[range].row;
  }
  KeyInterval row(std::int64_t i) const { return find(i)->at(i); }
  /// Calls visit(row, its keys) for rows [first, last).
  template <class Visit>
  void for_rows(std::int64_t first, std::int64_t last, Visit&& visit) const {
    if (first >= last) return;
    for (auto range = find(first); first < last; ++range) {
      const std::int64_t end =
          std::next(range) == ranges_.end() ? last : std::min<std::int64_t>(last, (range + 1)->row);
      for (; first < end; ++first) visit(first, range->at(first));
    }
  }
  /// One interval a row.
  std::vector<KeyInterval> expand() const {
    std::vector<KeyInterval> all(static_cast<std::size_t>(rows_));
    for_rows(0, rows_,
             [&](std::int64_t i, KeyInterval keys) { all[static_cast<std::size_t>(i)] = keys; });
    return all;
  }
  /// (row, key) pairs.
  double pairs() const {
    double sum = 0;
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      const double n = static_cast<double>(count(r));
      sum += n * (ranges_[r].end - ranges_[r].begin) + ranges_[r].grow * (0.5 * n * (n - 1));
    }
    return sum;
  }

 private:
  std::vector<VisibleRange>::const_iterator find(std::int64_t i) const {
    return std::prev(std::upper_bound(
        ranges_.begin(), ranges_.end(), i,
        [](std::int64_t row, const VisibleRange& range) { return row < range.row; }));
  }
  /// Whether `next`, of `rows` rows, continues the last range; a single row may grow either way.
  bool joins(VisibleRange& last, const VisibleRange& next, std::int64_t rows) const {
    const std::int32_t step = next.end - last.at(rows_ - 1).end;
    const bool one = rows_ - last.row == 1;
    if (next.begin != last.begin || step < 0 || step > 1 || (!one && step != last.grow) ||
        (rows > 1 && step != next.grow))
      return false;
    last.grow = step;
    return true;
  }

  std::vector<VisibleRange> ranges_;
  std::int32_t rows_ = 0;
};

}  // namespace ballast

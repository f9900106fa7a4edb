// Aligned tables for the terminal.
#pragma once
#include <string>
#include <vector>

namespace ballast {

/// Columns are as wide as their widest cell; numbers (and dashes) to the right, words to the left.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : header_(std::move(header)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// At most `limit` rows are shown: the first ones, a line that says how many are left out, and
  /// the last ones.  0: all.  `total` rows are meant where that is more than were added (rows of a
  /// long middle need not be made).
  std::string text(std::size_t limit = 0, std::size_t total = 0) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ballast

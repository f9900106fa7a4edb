#include "app/observe/text_table.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ballast {
namespace {

/// Digits first (12.0 MiB, -1, 0.5) or a lone dash.
bool numeric(const std::string& cell) {
  if (cell.empty() || cell == "-") return true;
  const std::size_t first = cell[0] == '-' || cell[0] == '+' ? 1 : 0;
  return cell.size() > first && cell[first] >= '0' && cell[first] <= '9';
}

}  // namespace

std::string TextTable::text(std::size_t limit, std::size_t total) const {
  const std::size_t columns = header_.size();
  const bool cut = limit > 0 && rows_.size() > limit;
  const std::size_t tail = cut ? limit / 3 : 0, head = cut ? limit - tail : rows_.size();
  std::vector<std::size_t> shown;
  for (std::size_t r = 0; r < head; ++r) shown.push_back(r);
  for (std::size_t r = rows_.size() - tail; cut && r < rows_.size(); ++r) shown.push_back(r);

  std::vector<std::size_t> width(columns);
  std::vector<bool> right(columns, true);
  for (std::size_t c = 0; c < columns; ++c) {
    width[c] = header_[c].size();
    for (std::size_t r : shown) {
      width[c] = std::max(width[c], rows_[r].at(c).size());
      right[c] = right[c] && numeric(rows_[r][c]);
    }
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (std::size_t c = 0; c < columns; ++c)
      out += right[c] ? fmt::format("  {:>{}}", cells[c], width[c])
                      : fmt::format("  {:<{}}", cells[c], width[c]);
    out.erase(out.find_last_not_of(' ') + 1);
    return out + '\n';
  };
  std::string out = line(header_);
  for (std::size_t i = 0; i < shown.size(); ++i) {
    if (cut && i == head)
      out += fmt::format("  ... {} more\n", std::max(total, rows_.size()) - limit);
    out += line(rows_[shown[i]]);
  }
  return out;
}

}  // namespace ballast

#include "kernels/attention/attention_host_tiles.hpp"

#include <algorithm>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast::host {

void TileWalker::start(int index_head, std::int64_t block) {
  ranges_.clear();
  columns_.clear();
  range_ = 0;
  row_ = block * kBlock;
  rows_ = std::min<std::int64_t>(kBlock, index_.q_tokens() - row_);
  index_.visible.for_rows(row_, row_ + rows_, [&](std::int64_t i, KeyInterval keys) {
    seen_[static_cast<std::size_t>(i - row_)] = keys;
  });
  // Keys that any row of the block may see.
  std::int64_t low = 0, high = 0;
  for (std::int64_t i = 0; i < rows_; ++i) {
    if (seen_[i].begin >= seen_[i].end) continue;
    if (high == 0) low = seen_[i].begin;
    high = seen_[i].end;
  }
  if (high == 0) return;

  const std::int64_t list = index_head * index_.q_blocks() + block;
  for (const BlockRun& run : runs_of(index_, index_head, block)) {
    const std::int64_t first = std::max<std::int64_t>(std::int64_t{run.first} * kBlock, low);
    const std::int64_t last = std::min<std::int64_t>(std::int64_t{run.last} * kBlock, high);
    const std::uint64_t rows =
        run.row_mask < 0 ? ~std::uint64_t{0} : index_.row_masks[run.row_mask];
    if (first >= last || rows == 0) continue;
    if (!ranges_.empty() && ranges_.back().last == first && ranges_.back().rows == rows)
      ranges_.back().last = last;
    else
      ranges_.push_back({first, last, rows, false});
  }

  if (!index_.has_columns()) return;
  const std::int64_t column_list =
      std::int64_t{index_head} * index_.segments + index_.block_segment[block];
  const std::int32_t* columns = index_.columns.data() + index_.column_offset[column_list];
  const std::int64_t count =
      index_.column_offset[column_list + 1] - index_.column_offset[column_list];
  const std::uint64_t* cover = index_.cover.data() + index_.cover_offset[list];
  const std::int64_t first = std::lower_bound(columns, columns + count, low) - columns,
                     last = std::lower_bound(columns, columns + count, high) - columns;
  for (std::int64_t j = first; j < last; ++j)
    if (!(cover[j / 64] >> (j % 64) & 1)) columns_.push_back(columns[j]);
  if (!columns_.empty())
    ranges_.push_back({0, static_cast<std::int64_t>(columns_.size()), ~std::uint64_t{0}, true});
}

KeyPiece TileWalker::make_piece(const Range& range, std::int64_t column, std::int64_t keys) const {
  KeyPiece piece;
  piece.column = column;
  piece.keys = keys;
  piece.first = range.first;
  if (range.columns) piece.list = columns_.data() + range.first;
  for (std::int64_t i = 0; i < rows_; ++i) {
    if (!(range.rows >> i & 1)) continue;
    const auto [begin, end] = seen_[i];
    if (begin >= end) continue;
    if (range.columns) {
      piece.begin[i] = static_cast<std::int32_t>(
          std::lower_bound(piece.list, piece.list + keys, begin) - piece.list);
      piece.end[i] = static_cast<std::int32_t>(
          std::lower_bound(piece.list, piece.list + keys, end) - piece.list);
    } else {
      piece.begin[i] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(begin - range.first, 0, keys));
      piece.end[i] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(end - range.first, 0, keys));
    }
  }
  return piece;
}

const std::vector<KeyPiece>* TileWalker::next() {
  pieces_.clear();
  std::int64_t column = 0;
  while (range_ < ranges_.size() && column < max_columns_) {
    Range& range = ranges_[range_];
    const std::int64_t keys = std::min(range.last - range.first, max_columns_ - column);
    pieces_.push_back(make_piece(range, column, keys));
    column += (keys + kColumnAlign - 1) / kColumnAlign * kColumnAlign;
    range.first += keys;
    if (range.first == range.last) ++range_;
  }
  return pieces_.empty() ? nullptr : &pieces_;
}

}  // namespace ballast::host

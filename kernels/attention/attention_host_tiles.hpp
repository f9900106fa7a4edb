// Key tiles of host attention: how one query block walks the keys that a pattern gives
// it.
//
// A tile is as many key columns as the score buffer holds.  It is made of pieces: key ranges out of
// the block's runs, or gathered columns.  In every piece a query row sees one interval of columns;
// that interval carries causality, segments, row masks and cover words at once, so the kernels know
// no other mask.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast::host {

/// Columns of a piece start at multiples of this in the score buffer, so that rows can be read in
/// whole vectors.
inline constexpr std::int64_t kColumnAlign = 16;

struct KeyPiece {
  std::int64_t column = 0;             ///< first column in the tile, a multiple of kColumnAlign
  std::int64_t keys = 0;               ///< columns in use
  std::int64_t first = 0;              ///< first key of a range; unused when `list` is set
  const std::int32_t* list = nullptr;  ///< keys of gathered columns, ascending
  std::int32_t begin[kBlock] =
      {};  ///< row i of the query block sees columns [begin[i], end[i]) of the piece
  std::int32_t end[kBlock] = {};
};

/// Cuts the work of one (index head, query block) into tiles.  Reused for block after block, to
/// keep its memory.
class TileWalker {
 public:
  /// `max_columns`: columns of the score buffer, a multiple of kColumnAlign.
  TileWalker(const PatternArrays& index, std::int64_t max_columns)
      : index_(index), max_columns_(max_columns) {}

  /// Starts at a query block.
  void start(int index_head, std::int64_t block);
  /// The next tile, or nullptr when the block is done.  Valid until the next call.
  const std::vector<KeyPiece>* next();

 private:
  struct Range {
    std::int64_t first, last;  ///< keys, or entries of columns_
    std::uint64_t rows;
    bool columns;
  };
  KeyPiece make_piece(const Range& range, std::int64_t column, std::int64_t keys) const;

  const PatternArrays& index_;
  const std::int64_t max_columns_;
  std::int64_t row_ = 0, rows_ = 0;
  std::array<KeyInterval, kBlock> seen_;  ///< by the rows of the block
  std::vector<Range> ranges_;             ///< what is left of the block
  std::size_t range_ = 0;
  std::vector<std::int32_t>
      columns_;  ///< columns of the block that no run covers and some row may see
  std::vector<KeyPiece> pieces_;
};

}  // namespace ballast::host

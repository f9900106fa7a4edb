// What a GPU holds of a pattern, as plain pointers: the arrays of attention_pattern.hpp, and what
// the kernels derive from them.  The one list of those arrays; kernels/cuda/index fills them, and
// core/predict counts them.
//
// Sizes in IndexShape are capacities: kernels read true counts from the offset arrays, so no count
// ever returns to the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/base/host_device.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast::cuda {

inline constexpr int kKeyTile = 2 * kBlock;  ///< keys of one backward work unit
inline constexpr int kColumnTile = kKeyTile;

struct IndexShape {
  std::int64_t q_tokens = 0, k_tokens = 0;
  int q_heads = 0, kv_heads = 0;  ///< heads of the attention calls that will use this index
  int head_dim = 128;             ///< and their head dim, by which dense work in turns is ordered
  int index_heads = 1;            ///< 1 or q_heads
  /// Every query block has one run that holds all its visible keys, and there are no columns: the
  /// run arrays are not read and need not be filled.
  bool dense = false;
  /// Of a dense index, (query, key) pairs a head; unknown: as many as there may be.
  double pairs = std::numeric_limits<double>::infinity();
  std::int64_t runs = 0, row_masks = 0;
  std::int64_t block_pairs = 0;  ///< (query block, key block, mask) triples over all index heads:
                                 ///< size of the transpose; 0 when dense
  int segments = 1;
  std::int64_t columns = 0,
               cover_words = 0;  ///< columns = 0: no columns, and the arrays for them are absent

  BALLAST_HOST_DEVICE std::int64_t q_blocks() const { return (q_tokens + kBlock - 1) / kBlock; }
  BALLAST_HOST_DEVICE std::int64_t k_blocks() const { return (k_tokens + kBlock - 1) / kBlock; }
};

/// First and last row of a query block decide whether a tile is empty, whole or masked, because
/// bounds never decrease.
struct BlockBounds {
  std::int32_t begin_first, begin_last, end_first, end_last;
};
struct Interval {
  std::int32_t begin, end;
};

// A backward work unit is 128 keys of one key head, or 128 gathered columns (kColumnUnit).  Long
// units of keys are cut by query heads: a piece names its unit, which of `parts` shares of the
// group's query heads it takes, and `parts`.
inline constexpr int kColumnUnit = 1 << 30,
                     kPieceShift = 22;  ///< a unit has 22 bits, part and parts - 1 have 4 each
BALLAST_HOST_DEVICE constexpr int backward_piece(int unit, int part, int parts) {
  return unit | part << kPieceShift | (parts - 1) << (kPieceShift + 4);
}
/// The first query head of its group that part `part` of `parts` takes; the next part's is its end.
BALLAST_HOST_DEVICE constexpr int first_share(int group, int part, int parts) {
  return part * group / parts;
}

struct DeviceIndex {
  IndexShape shape;
  // --- as in PatternArrays, visible keys by row; filled by upload_index() or by a GPU builder
  // -------------------------------------------
  std::int32_t* key_begin = nullptr;
  std::int32_t* key_end = nullptr;
  std::int64_t* run_offset = nullptr;
  BlockRun* runs = nullptr;
  std::uint64_t* row_masks = nullptr;
  std::int32_t* block_segment = nullptr;
  std::int64_t* column_offset = nullptr;
  std::int32_t* columns = nullptr;
  std::int64_t* cover_offset = nullptr;
  std::uint64_t* cover = nullptr;
  // --- derived
  // -----------------------------------------------------------------------------------------------
  Interval* rows = nullptr;  ///< [64 q_blocks] visible keys of a row; rows past q_tokens see none
  BlockBounds* bounds = nullptr;              ///< [q_blocks]
  Interval* query_range = nullptr;            ///< [k_blocks] query blocks that can see a key block
  Interval* key_queries = nullptr;            ///< [key_rows()] query rows that see a key
  std::int32_t* transposed_offset = nullptr;  ///< [index_heads * k_blocks + 1]
  BlockRun* transposed = nullptr;             ///< query blocks of a key block, ascending
  std::int32_t* forward_order = nullptr;      ///< forward work units, longest first
  std::int32_t* backward_order =
      nullptr;  ///< backward work units as pieces of one part, longest first
  /// The same with long units cut, for kernels that may add into dK and dV; with several packed
  /// segments one after another; a dense index of one long segment has turn_pieces here.
  std::int32_t* backward_pieces = nullptr;
  /// The same for a dense index whose dQ is added in turns: key tiles of a query head ascend (or
  /// descend: backward_units[3]), and parts of a tile ascend.
  std::int32_t* turn_pieces = nullptr;
  /// Dense: [triple_units()] threes of (query block, head of the group), for kernels with
  /// three consumers; longest first.
  std::int32_t* triple_order = nullptr;
  std::int32_t* triple_cost = nullptr;
  std::int32_t* forward_cost = nullptr;
  std::int32_t* backward_cost = nullptr;
  std::int32_t* backward_units =
      nullptr;  ///< [4] how many there are in backward_order, backward_pieces and turn_pieces;
                ///< whether key tiles descend in turn_pieces
  std::int32_t* order_buckets = nullptr;  ///< [segment_places() + 1024] scratch of the sort
  // Columns gathered into a dense buffer, lists padded to kColumnTile rows.
  std::int32_t* column_row_offset =
      nullptr;  ///< [index_heads * segments + 1] first gathered row of a list
  std::int32_t* column_row_key = nullptr;  ///< [column_rows] key of a gathered row, -1 for padding
  Interval* column_row_queries = nullptr;  ///< [column_rows] query rows that see a gathered row
  std::int32_t* column_tile_list =
      nullptr;  ///< [column_rows / kColumnTile] list (index head * segments + segment) of a tile
  Interval* column_tile_queries =
      nullptr;  ///< [column_rows / kColumnTile] query blocks that can see the tile
  Interval* column_bounds =
      nullptr;  ///< [index_heads, 64 q_blocks] visible columns of a row, counted in its list
  // --- only while it is derived (building_bytes()); dangling afterwards
  // -----------------------------------------------------------------------------------------------
  std::uint64_t* scratch = nullptr;  ///< unsorted transpose
  std::int32_t* scratch_count = nullptr;

  /// Two query heads that share a key head and a list fill one CTA; otherwise two neighbouring
  /// query blocks do.
  BALLAST_HOST_DEVICE bool pairs_heads() const {
    return shape.index_heads == 1 && (shape.q_heads / shape.kv_heads) % 2 == 0;
  }
  /// Keys, padded to whole backward units.
  BALLAST_HOST_DEVICE std::int64_t key_rows() const {
    return (shape.k_tokens + kKeyTile - 1) / kKeyTile * kKeyTile;
  }
  BALLAST_HOST_DEVICE bool has_columns() const { return shape.columns > 0; }
  /// Capacity of the gathered buffer.
  BALLAST_HOST_DEVICE std::int64_t column_rows() const {
    if (shape.columns == 0) return 0;
    return (shape.columns / kColumnTile +
            static_cast<std::int64_t>(shape.index_heads) * shape.segments) *
           kColumnTile;
  }
  /// Key heads one after another rather than together: when all keys and values exceed the L2 cache
  /// and one head alone fills the machine many times over.
  BALLAST_HOST_DEVICE bool key_heads_in_turn(int head_dim = 128) const {
    return shape.kv_heads > 1 && shape.k_tokens * shape.kv_heads * head_dim * 4 > (48 << 20) &&
           shape.q_blocks() * (shape.q_heads / shape.kv_heads) * head_dim > 4096 * 128;
  }
  /// Places for the backward pieces of a dense index, one a key tile and query head.
  BALLAST_HOST_DEVICE int segment_places() const {
    return shape.dense ? static_cast<int>(key_rows() / kKeyTile) * shape.q_heads : 0;
  }
  BALLAST_HOST_DEVICE int column_heads() const {
    return shape.index_heads == 1 ? shape.kv_heads : 1;
  }  ///< heads of the gathered buffer
  std::int64_t forward_units() const;
  BALLAST_HOST_DEVICE std::int64_t triple_units() const {
    if (!shape.dense) return 0;
    return (shape.q_blocks() * (shape.q_heads / shape.kv_heads) + 2) / 3;
  }
  std::int64_t backward_unit_capacity() const;
};

/// Bytes of a layer's indexes of slashes and columns up to which their memory does not follow what
/// was chosen.
inline constexpr std::int64_t kSmallIndex = std::int64_t{32} << 20;
/// Bytes that an index holds, and those it needs beside them while it is derived.
std::size_t held_bytes(const IndexShape& shape);
std::size_t building_bytes(const IndexShape& shape);
/// The pointers laid out in device memory (256-byte aligned) of so many bytes.  Without `building`
/// its arrays follow those in `buffer`, which has index_bytes().
DeviceIndex bind_index(const IndexShape& shape, void* buffer, void* building = nullptr);
inline std::size_t index_bytes(const IndexShape& shape) {
  return held_bytes(shape) + building_bytes(shape);
}

}  // namespace ballast::cuda

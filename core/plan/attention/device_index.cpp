#include "core/plan/attention/device_index.hpp"

#include <algorithm>

namespace ballast::cuda {
namespace {

/// Lays arrays one after another, 256-byte aligned; with a null base it only counts.
struct Carver {
  char* base;
  std::size_t bytes = 0;
  template <class T>
  void take(T*& pointer, std::int64_t n) {
    pointer = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<std::size_t>(std::max<std::int64_t>(n, 0)) * sizeof(T) + 255) / 256 * 256;
  }
};

std::size_t carve(DeviceIndex& x, void* base) {
  const IndexShape& s = x.shape;
  Carver c{static_cast<char*>(base)};
  const std::int64_t q_lists = s.index_heads * s.q_blocks(), k_lists = s.index_heads * s.k_blocks();
  const std::int64_t column_lists = static_cast<std::int64_t>(s.index_heads) * s.segments;
  c.take(x.key_begin, s.q_tokens);
  c.take(x.key_end, s.q_tokens);
  c.take(x.rows, s.q_blocks() * kBlock);
  c.take(x.bounds, s.q_blocks());
  c.take(x.query_range, s.k_blocks());
  c.take(x.key_queries, x.key_rows());
  c.take(x.forward_order, x.forward_units());
  c.take(x.forward_cost, x.forward_units());
  c.take(x.triple_order, x.triple_units());
  c.take(x.triple_cost, x.triple_units());
  c.take(x.backward_order, x.backward_unit_capacity());
  c.take(x.backward_cost, x.backward_unit_capacity());
  c.take(x.backward_pieces, x.backward_unit_capacity() * (s.q_heads / std::max(s.kv_heads, 1)));
  c.take(x.turn_pieces, x.segment_places());
  c.take(x.backward_units, 4);
  c.take(x.order_buckets, x.segment_places() + 1024);
  if (!s.dense) {
    c.take(x.run_offset, q_lists + 1);
    c.take(x.runs, s.runs);
    c.take(x.row_masks, s.row_masks);
    c.take(x.transposed_offset, k_lists + 1);
    c.take(x.transposed, s.block_pairs);
  }
  if (s.columns > 0) {
    c.take(x.block_segment, s.q_blocks());
    c.take(x.column_offset, column_lists + 1);
    c.take(x.columns, s.columns);
    c.take(x.cover_offset, q_lists + 1);
    c.take(x.cover, s.cover_words);
    c.take(x.column_row_offset, column_lists + 1);
    c.take(x.column_row_key, x.column_rows());
    c.take(x.column_row_queries, x.column_rows());
    c.take(x.column_tile_list, x.column_rows() / kColumnTile);
    c.take(x.column_tile_queries, x.column_rows() / kColumnTile);
    c.take(x.column_bounds, q_lists * kBlock);
  }
  return c.bytes;
}

std::size_t carve_building(DeviceIndex& x, void* base) {
  const IndexShape& s = x.shape;
  Carver c{static_cast<char*>(base)};
  if (s.dense) return 0;
  c.take(x.scratch, s.block_pairs);
  c.take(x.scratch_count, s.index_heads * s.k_blocks());
  return c.bytes;
}

}  // namespace

std::int64_t DeviceIndex::forward_units() const {
  return pairs_heads() ? shape.q_blocks() : shape.index_heads * ((shape.q_blocks() + 1) / 2);
}
std::int64_t DeviceIndex::backward_unit_capacity() const {
  return (shape.k_blocks() + 1) / 2 * shape.kv_heads + column_rows() / kColumnTile * column_heads();
}

std::size_t held_bytes(const IndexShape& shape) {
  DeviceIndex x;
  x.shape = shape;
  return carve(x, nullptr);
}

std::size_t building_bytes(const IndexShape& shape) {
  DeviceIndex x;
  x.shape = shape;
  return carve_building(x, nullptr);
}

DeviceIndex bind_index(const IndexShape& shape, void* buffer, void* building) {
  DeviceIndex x;
  x.shape = shape;
  const std::size_t held = carve(x, buffer);
  carve_building(x, building != nullptr ? building : static_cast<char*>(buffer) + held);
  return x;
}

}  // namespace ballast::cuda

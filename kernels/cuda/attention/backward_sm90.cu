// Attention backward on Hopper: which kernels run on what.  The kernels are in backward_sm90.cuh,
// and in backward_d256_sm90.cu.
#include "kernels/cuda/attention/backward_tiles.cuh"

namespace ballast::cuda {

QueryGradient query_gradient_mode(const AttentionBackwardArgs& a) {
  const bool dense = a.index->shape.dense;
  if (!dense && (a.deterministic || !a.index->has_columns())) return QueryGradient::apart;
  if (a.deterministic) return QueryGradient::turns;
  return dense && has_firsts(a.head_dim) &&
                 a.index->shape.pairs <= kFewKeys * static_cast<double>(a.index->shape.q_tokens)
             ? QueryGradient::firsts
             : QueryGradient::adds;
}

bool cuts_units(const AttentionBackwardArgs& a) {
  return !a.deterministic && a.q_heads > a.kv_heads;
}

namespace {

BackwardParams backward_params(const AttentionBackwardArgs& a, const AttentionScratch& scratch) {
  const DeviceIndex& index = *a.index;
  BackwardParams p;
  p.index = index;
  p.group = a.q_heads / a.kv_heads;
  p.reversed = index.backward_units + 3;
  if (query_gradient_mode(a) == QueryGradient::turns) {
    p.pieces = index.turn_pieces;
    p.piece_count = index.backward_units + 2;
  } else {
    // Of a dense index also where nothing is cut: segments come one after another.
    const bool pieces = cuts_units(a) || index.shape.dense;
    p.pieces = pieces ? index.backward_pieces : index.backward_order;
    p.piece_count = index.backward_units + (pieces ? 1 : 0);
  }
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.statistics = scratch.statistics;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dk_stride = a.dk_stride;
  p.dv_stride = a.dv_stride;
  p.column_dk = scratch.column_dk;
  p.column_dv = scratch.column_dv;
  p.add = a.accumulate_dkv;
  p.counter = scratch.counters;
  p.places = scratch.counters + kCounters - kPlaces;
  p.turns = scratch.turns;
  p.part_turns = scratch.part_turns;
  return p;
}

cudaError_t backward_maps(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                          BackwardMaps& maps) {
  const DeviceIndex& index = *a.index;
  using hopper::make_tensor_map;
  const std::int64_t q_tokens = index.shape.q_tokens, k_tokens = index.shape.k_tokens;
  cudaError_t e = make_tensor_map(&maps.q, a.q, false, a.head_dim, a.q_heads, q_tokens, a.q_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.dout, a.dout, false, a.head_dim, a.q_heads, q_tokens, a.dout_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, k_tokens, a.k_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, k_tokens, a.v_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.dq, a.dq, true, a.head_dim, a.q_heads, q_tokens, a.dq_stride);
  maps.column_k = maps.k;
  maps.column_v = maps.v;
  if (e == cudaSuccess && index.has_columns()) {
    const int heads = index.column_heads();
    e = make_tensor_map(&maps.column_k, scratch.column_k, false, a.head_dim, heads,
                        index.column_rows(), heads * a.head_dim);
    if (e == cudaSuccess) {
      e = make_tensor_map(&maps.column_v, scratch.column_v, false, a.head_dim, heads,
                          index.column_rows(), heads * a.head_dim);
    }
  }
  return e;
}

}  // namespace

cudaError_t backward_sm90(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                          cudaStream_t stream) {
  const BackwardParams p = backward_params(a, scratch);
  const QueryGradient dq = query_gradient_mode(a);
  BackwardMaps maps;
  cudaError_t e = backward_maps(a, scratch, maps);
  if (e == cudaSuccess && dq == QueryGradient::apart) e = query_gradient_sm90(a, scratch, stream);
  if (e != cudaSuccess) return e;
  switch (a.head_dim) {
    case 64:
      return backward_d64(maps, p, dq, stream);
    case 96:
      return backward_d96(maps, p, dq, stream);
    case 128:
      return backward_d128(maps, p, dq, stream);
    default:
      return backward_d256(maps, p, dq, stream);
  }
}

}  // namespace ballast::cuda

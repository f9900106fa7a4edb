// Between the dispatcher and the two families of attention kernels; not part of the public
// interface.
#pragma once
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/routed_index.hpp"

namespace ballast::cuda {

/// Heads of work queues, and behind them the places of query heads (BackwardParams::places).
inline constexpr int kPlaces = 64, kCounters = 64 + kPlaces;

/// Workspace of one call, carved by the dispatcher; sizes follow DeviceIndex.
struct AttentionScratch {
  int* counters = nullptr;   ///< [kCounters], zeroed by the dispatcher
  void* column_k = nullptr;  ///< gathered bf16 [column_rows, column_heads, head_dim]
  void* column_v = nullptr;
  float* column_dk = nullptr;  ///< fp32, backward only
  float* column_dv = nullptr;
  /// [q_heads, q_blocks, 2, 64], backward only: lse * log2(e) (+inf for rows without keys, so that
  /// P becomes 0), then delta = rowsum(dout * o).
  float* statistics = nullptr;
  /// Of dense indexes: how far the additions to dQ have come, [q_heads, q_blocks,
  /// backward_slices()], for QueryGradient::turns as the key unit whose turn it is (and kFirstTurn
  /// where that one stores), for `firsts` as kHoldsNothing and so on; and for `turns` which part of
  /// the units over the same 64 keys may add, [key_rows / 64, kv_heads, 2].
  int* turns = nullptr;
  int* part_turns = nullptr;
  /// Of routed lists, forward only: bf16 [routed_partials(), head_dim], fp32 [routed_partials()].
  void* partial_o = nullptr;
  float* partial_lse = nullptr;
};
/// Rows whose partial outputs lie in the workspace at a time (kRoutedPartialBytes).
std::int64_t routed_partials(const RoutedWork& work, int head_dim);

/// How the sm_90 backward comes to dQ.
enum class QueryGradient {
  apart,   ///< a query-stationary kernel computes it: one order, but 7 matrix products instead of 5
  adds,    ///< the key-stationary kernel adds to it, in whatever order its units come
  turns,   ///< it adds in the order of the keys: each unit waits for its turn (dense indexes)
  firsts,  ///< as `adds`, but who comes first to a query block stores (dense indexes)
  rows,    ///< it adds row by row: tiles are gathered queries (routed lists)
};
/// For the deterministic option `turns` or, with lists, `apart`; for block lists always `apart`,
/// since the key-stationary kernel would spend its dQ product on the union of two key blocks'
/// lists.  Of dense indexes `firsts` where queries see few keys, as of short segments, and zeros
/// would be much of what is written.
QueryGradient query_gradient_mode(const AttentionBackwardArgs& args);
/// Parts in which a unit's 64 rows of dQ leave, each with a turn of its own; 64-key blocks a unit.
constexpr int backward_slices(int head_dim, QueryGradient dq) {
  return head_dim > 128 ? 4 : dq == QueryGradient::firsts && head_dim > 64 ? 2 : 1;
}
constexpr int backward_unit_blocks(int head_dim) { return head_dim > 128 ? 1 : 2; }
/// Where `firsts` pays: at most so many keys a query on average (beyond, up to 1.3 % slower than
/// `adds`), at this head dim (others: 3 to 20 % slower).
inline constexpr double kFewKeys = 6000;
constexpr bool has_firsts(int head_dim) { return head_dim == 128; }
/// Whether the first addition to a block of dQ is a store, so that nobody need write zeros (in
/// turns at head dim 256: 7 to 15 % slower).
constexpr bool stores_first(QueryGradient dq, int head_dim) {
  return dq == QueryGradient::firsts || (dq == QueryGradient::turns && head_dim <= 128);
}
/// A query block of a head as one number, head << kBlockBits | block, of 67 million rows.
inline constexpr int kBlockBits = 20;
/// Whether warps beside the producer send a tile's dQ.
constexpr bool sends_jobs(QueryGradient dq) {
  return dq == QueryGradient::turns || dq == QueryGradient::firsts;
}
/// AttentionScratch::turns: a mark beside the turn, and the states of QueryGradient::firsts.
inline constexpr int kFirstTurn = 1 << 30, kHoldsNothing = 0, kIsStored = 1, kHolds = 2;

cudaError_t forward_sm90(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                         cudaStream_t stream);
/// The same at one head dim (forward_d*_sm90.cu).
cudaError_t forward_d64(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                        cudaStream_t stream);
cudaError_t forward_d96(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                        cudaStream_t stream);
cudaError_t forward_d128(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                         cudaStream_t stream);
cudaError_t forward_d256(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                         cudaStream_t stream);
/// The dispatcher has zeroed the counters and dq, dk, dv where additions overwrite them (not dq
/// whose first addition is a store), and set `turns` and `part_turns` for the mode.
cudaError_t backward_sm90(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                          cudaStream_t stream);
/// Whether the sm_90 backward cuts long units by query heads (DeviceIndex::backward_pieces), and so
/// adds into dk and dv.
bool cuts_units(const AttentionBackwardArgs& args);
cudaError_t forward_plain(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                          cudaStream_t stream);
cudaError_t backward_plain(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                           cudaStream_t stream);
/// The pairs of args.routed, onto what the calls for args.index have left: o and lse merged; dq, dk
/// and dv added.
cudaError_t routed_forward_sm90(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                                cudaStream_t stream);
cudaError_t routed_backward_sm90(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                                 cudaStream_t stream);
/// dQ alone, query-stationary, so always in the same order.
cudaError_t query_gradient_sm90(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                                cudaStream_t stream);
cudaError_t query_gradient_plain(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                                 cudaStream_t stream);

/// The last part of derive_index(): forward_order, backward_order and backward_pieces.
cudaError_t order_work(const DeviceIndex& index, cudaStream_t stream);
/// Gathered rows of k and v (index/device_index.cu), and the addition of their gradients back to dk
/// and dv.
cudaError_t gather_columns(const DeviceIndex& index, const void* k, std::int64_t k_stride,
                           const void* v, std::int64_t v_stride, int head_dim, void* column_k,
                           void* column_v, cudaStream_t stream);
cudaError_t scatter_column_gradients(const DeviceIndex& index, const float* column_dk,
                                     const float* column_dv, int head_dim, float* dk,
                                     std::int64_t dk_stride, float* dv, std::int64_t dv_stride,
                                     cudaStream_t stream);

}  // namespace ballast::cuda

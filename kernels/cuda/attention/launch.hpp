// Between the dispatcher and the two families of attention kernels; not part of the public
// interface.
#pragma once
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/index/device_index.hpp"

namespace ballast::cuda {

/// Workspace of one call, carved by the dispatcher; sizes follow DeviceIndex.
struct AttentionScratch {
  int* counters = nullptr;   ///< work queue heads, zeroed by the dispatcher
  void* column_k = nullptr;  ///< gathered bf16 [column_rows, column_heads, head_dim]
  void* column_v = nullptr;
  float* column_dk = nullptr;  ///< fp32, backward only
  float* column_dv = nullptr;
  /// [q_heads, q_blocks, 2, 64], backward only: lse * log2(e) (+inf for rows without keys, so that
  /// P becomes 0), then delta = rowsum(dout * o).
  float* statistics = nullptr;
};

cudaError_t forward_sm90(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                         cudaStream_t stream);
/// dq, dk, dv are already zeroed where they are to be overwritten by additions, and the counters.
cudaError_t backward_sm90(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                          cudaStream_t stream);
/// Whether the sm_90 backward cuts long units by query heads (DeviceIndex::backward_pieces), and so
/// adds into dk and dv.
bool cuts_units(const AttentionBackwardArgs& args);
/// Whether the sm_90 backward computes dQ in a kernel of its own: for the deterministic option, and
/// for block lists, where the key-stationary kernel would spend its dQ product on the union of two
/// key blocks' lists.  Else dQ is added to.
bool separate_query_gradient(const AttentionBackwardArgs& args);
cudaError_t forward_plain(const AttentionForwardArgs& args, const AttentionScratch& scratch,
                          cudaStream_t stream);
cudaError_t backward_plain(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                           cudaStream_t stream);
/// dQ alone, query-stationary, so always in the same order.
cudaError_t query_gradient_sm90(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                                cudaStream_t stream);
cudaError_t query_gradient_plain(const AttentionBackwardArgs& args, const AttentionScratch& scratch,
                                 cudaStream_t stream);

/// The last part of derive_index(): forward_order, backward_order and backward_pieces.
cudaError_t order_work(const DeviceIndex& index, cudaStream_t stream);
/// Gathered rows of k and v (attention_index.cu), and the addition of their gradients back to dk
/// and dv.
cudaError_t gather_columns(const DeviceIndex& index, const void* k, std::int64_t k_stride,
                           const void* v, std::int64_t v_stride, int head_dim, void* column_k,
                           void* column_v, cudaStream_t stream);
cudaError_t scatter_column_gradients(const DeviceIndex& index, const float* column_dk,
                                     const float* column_dv, int head_dim, float* dk,
                                     std::int64_t dk_stride, float* dv, std::int64_t dv_stride,
                                     cudaStream_t stream);

}  // namespace ballast::cuda

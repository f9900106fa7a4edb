// CUDA attention: launch interface.  Plain structs of device pointers and a stream; no Tensor, no
// Kokkos, no MPI.
//
// Shapes (row-major, elements; T_q = index.q_tokens, T_k = index.k_tokens):
//   q        [T_q, q_heads, head_dim]   bf16, q_stride elements between tokens (may be a slice of a
//   fused QKV buffer) k, v     [T_k, kv_heads, head_dim]  bf16, k_stride / v_stride elements
//   between tokens o        [T_q, q_heads, head_dim]   bf16 or fp32 (fp32 for the partial outputs
//   of a ring), o_stride lse      [q_heads, T_q]             fp32, NATURAL logarithm of the sum of
//   exp(scale * q.k) over the computed pairs dq       [T_q, q_heads, head_dim]   fp32, dq_stride;
//   dk, dv  [T_k, kv_heads, head_dim]  fp32, dk_stride / dv_stride
// head_dim is 64, 96, 128 or 256; q_heads % kv_heads == 0 with a group of 1 to 16.  A row that
// computes no pair has o = 0 and lse = -inf, and contributes zero gradient.  scale must be
// positive.
//
// Which pairs are computed is told by a DeviceIndex (core/plan/attention/device_index.hpp) on which
// derive_index() has run. All functions enqueue on `stream`, never allocate, never synchronise, and
// return the first CUDA error (cudaErrorInvalidValue for shapes that break the rules above or a
// workspace that is too small).
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime/head_dims.hpp"

namespace ballast::cuda {

struct DeviceIndex;
struct RoutedWork;

/// Which kernels run.  `automatic`: wgmma and TMA on compute capability 9.0 when strides and
/// pointers allow TMA (16-byte multiples), else plain.  `sm90` and `plain` force one (for tests; an
/// impossible choice is cudaErrorNotSupported).
enum class AttentionPath { automatic, sm90, plain };

struct AttentionForwardArgs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
  void* o = nullptr;
  std::int64_t o_stride = 0;
  bool o_fp32 = false;
  float* lse = nullptr;
  const DeviceIndex* index = nullptr;  ///< host struct of device pointers
  /// Further pairs, of gathered queries (MoBA): `index` then holds each row's own block, and all of
  /// rows that are not listed.  Where routed_fits().
  const RoutedWork* routed = nullptr;
  void* workspace = nullptr;  ///< device, 256-byte aligned, attention_forward_workspace() bytes
  std::size_t workspace_bytes = 0;
  AttentionPath path = AttentionPath::automatic;
};

struct AttentionBackwardArgs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;  ///< gradient of the final o, bf16 [T_q, q_heads, head_dim]
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, dout_stride = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
  const void* o =
      nullptr;  ///< FINAL output (after all ring steps), bf16 or fp32; unused when `delta` is given
  std::int64_t o_stride = 0;
  bool o_fp32 = false;
  const float* delta =
      nullptr;                 ///< optional rowsum(dout * o), [q_heads, T_q]; see attention_delta()
  const float* lse = nullptr;  ///< FINAL lse, [q_heads, T_q], natural log
  float* dq = nullptr;
  float* dk = nullptr;
  float* dv = nullptr;
  std::int64_t dq_stride = 0, dk_stride = 0, dv_stride = 0;
  bool accumulate_dq = false;   ///< true: dq += ; false: dq =
  bool accumulate_dkv = false;  ///< likewise for dk and dv
  /// true: bit-identical from run to run (additions to dQ, dK and dV of a dense index in a fixed
  /// order; with lists dQ by a query-stationary kernel, 7 matrix products instead of 5, and no unit
  /// of work shared by processors).  false: fp32 additions whose order varies, except of dQ with
  /// block lists without gathered columns, which comes as with true.
  bool deterministic = false;
  const DeviceIndex* index = nullptr;
  const RoutedWork* routed = nullptr;  ///< as forward's; not deterministic
  void* workspace = nullptr;  ///< device, 256-byte aligned, attention_backward_workspace() bytes
  std::size_t workspace_bytes = 0;
  AttentionPath path = AttentionPath::automatic;
};

/// Bytes of workspace that a call needs; only heads, head_dim and index are read.
std::size_t attention_forward_workspace(const AttentionForwardArgs& args);
std::size_t attention_backward_workspace(const AttentionBackwardArgs& args);

cudaError_t attention_forward(const AttentionForwardArgs& args, cudaStream_t stream);
cudaError_t attention_backward(const AttentionBackwardArgs& args, cudaStream_t stream);

/// delta[h, i] = sum_d dout[i, h, d] * o[i, h, d].
cudaError_t attention_delta(const void* dout, std::int64_t dout_stride, const void* o,
                            std::int64_t o_stride, bool o_fp32, float* delta, std::int64_t tokens,
                            int heads, int head_dim, cudaStream_t stream);

/// Joins the partial (o_part, lse_part) of a ring step into the running (o, lse), both fp32
/// [tokens, heads, head_dim] and [heads, tokens], contiguous.  -inf on either or both sides is
/// handled (Online softmax, Milakov and Gimelshein 2018).
cudaError_t attention_merge(float* o, float* lse, const float* o_part, const float* lse_part,
                            std::int64_t tokens, int heads, int head_dim, cudaStream_t stream);

}  // namespace ballast::cuda

// Attention of one call: blocked, over an AttentionWork, with partial results that merge (rings,
// prefixes). Host implementation: attention_host*.cpp (BLAS for the products).  CUDA:
// kernels/cuda/attention/attention.hpp.
#pragma once
#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"

namespace ballast {

/// A pattern as attention on q's device takes it, for calls with the heads of q [., Hq, D] and k
/// [., Hkv, D]: itself on the host; on a GPU its device twin, which is uploaded here.
AttentionWork place_pattern(const AttentionPattern& pattern, const Tensor& q, const Tensor& k);

/// `work` lies where q does.  o [q_tokens, Hq, D], lse [Hq, q_tokens] (natural log): overwritten.
/// q [q_tokens, Hq, D]; k, v [k_tokens, Hkv, D]; rows may be strided.  Hq is a multiple of Hkv;
/// query head h reads key/value head h / (Hq / Hkv). Rows without keys: o = 0, lse = -inf.
void attention_forward(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, Tensor& o, Tensor& lse);

/// Merges a partial result into a running one, in place: both are softmax averages over disjoint
/// key sets. o in fp32 (fp64 for fp64 inputs); guards lse of -inf on either side.
void attention_merge(Tensor& o, Tensor& lse, const Tensor& o_part, const Tensor& lse_part);

/// delta [Hq, q_tokens] = rowsum(o * d_o), with o the final (merged) output.
void attention_delta(const Tensor& o, const Tensor& d_o, Tensor& delta);

/// Which gradients a call of attention_backward adds to.  It overwrites the others (which lie
/// dense), so that nobody has to zero them before the first of several calls.
struct AttentionAdds {
  bool dq = true, dkv = true;
};

/// Adds this call's contribution to dq, dk, dv (fp32 or fp64 accumulators, shapes of q, k, v), or
/// overwrites them (`adds`).  lse and delta belong to the final output, so one call per ring step
/// adds up to the whole gradient.
void attention_backward(const AttentionWork& work, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const Tensor& lse, const Tensor& delta,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv,
                        const AttentionAdds& adds = {});

}  // namespace ballast

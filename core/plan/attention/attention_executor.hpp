// The attention of one micro-batch, as a transformer layer sees it.  Implemented by kernels/ (one
// rank) and by parallel/ (rings, Ulysses); a layer neither knows nor asks which.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"

namespace ballast {

/// Local tensors of one layer's attention.  T: local tokens of the micro-batch under its layout,
/// ascending.
///   q [T, Hq, D], k and v [T, Hkv, D], rotated already; rows may be strided, the last two
///   dimensions are dense.
struct AttentionInputs {
  int layer = 0;  ///< index in the whole model
  Tensor q, k, v;
  double scale = 1.0;  ///< usually 1 / sqrt(D)
};

class AttentionExecutor {
 public:
  virtual ~AttentionExecutor() = default;
  /// o [T, Hq, D] in the compute dtype, lse [Hq, T] natural log (fp32, or fp64 when the inputs are
  /// fp64). A row that sees no key gets o = 0 and lse = -inf.  Collective over the context-parallel
  /// ranks.
  virtual void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) = 0;
  /// Overwrites dq, dk, dv (shapes of q, k, v; in the compute dtype or that of lse).  Collective
  /// like forward.
  virtual void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) = 0;
};

}  // namespace ballast

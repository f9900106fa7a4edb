#include "kernels/attention/local_attention.hpp"

#include "kernels/attention/attention.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {

void LocalAttention::forward(const AttentionInputs& in, Tensor& o, Tensor& lse) {
  Scope scope(recorder_, EventKind::attention_forward);
  const AttentionWork& work = pattern_.at(in.q, in.k).front();
  scope.flops = 4.0 * static_cast<double>(in.q.size(1) * in.q.size(2)) * work.pairs_per_head();
  attention_forward(work, in.q, in.k, in.v, in.scale, o, lse);
}

void LocalAttention::backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse,
                              const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) {
  Scope scope(recorder_, EventKind::attention_backward);
  const AttentionWork& work = pattern_.at(in.q, in.k).front();
  scope.flops = 10.0 * static_cast<double>(in.q.size(1) * in.q.size(2)) * work.pairs_per_head();
  Device& device = device_of(in.q.space());
  const DType sums = lse.dtype();
  Tensor delta = Tensor::empty(lse.shape(), sums, device, MemoryCategory::workspace);
  attention_delta(o, d_o, delta);
  // Sums are kept in f32 (f64): where the gradients have that type and lie dense they are summed in
  // place.
  const auto accumulator = [&](const Tensor& gradient) {
    return gradient.dtype() == sums && gradient.contiguous()
               ? gradient
               : Tensor::empty(gradient.shape(), sums, device, MemoryCategory::workspace);
  };
  Tensor q_sum = accumulator(dq), k_sum = accumulator(dk), v_sum = accumulator(dv);
  attention_backward(work, in.q, in.k, in.v, in.scale, lse, delta, d_o, q_sum, k_sum, v_sum,
                     {.dq = false, .dkv = false});
  if (q_sum.raw() != dq.raw()) copy_rows(q_sum, dq);
  if (k_sum.raw() != dk.raw()) copy_rows(k_sum, dk);
  if (v_sum.raw() != dv.raw()) copy_rows(v_sum, dv);
}

}  // namespace ballast

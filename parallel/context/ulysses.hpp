// Ulysses sequence parallelism: exchanges heads for sequence by all-to-all around an inner
// attention executor (DeepSpeed-Ulysses, Jacobs et al. 2023).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/context/ulysses_heads.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/context/ring_attention.hpp"

namespace ballast {

/// Connects every pair of ranks of a group on `device`, so that its first exchange in training
/// costs no more than a later one.  Collective.
void connect(const Communicator& group, Device& device);

/// Attention of one micro-batch over the ranks of `sequence`.  Rank r holds even_part(tokens, r,
/// ranks) of the `tokens` tokens that `inner` computes on; it gathers its heads
/// (core/plan/context/ulysses_heads.hpp) of all of them, runs `inner`, and scatters the results.
/// Repeated key/value heads' gradients are summed in the type of the LSE, in rank order.  `inner`
/// sees the local heads and may be a ring over other ranks, one for each rank of `sequence`.
/// Nothing is kept between calls: backward gathers q, k, v, o, LSE and d_o.  Buffers come from
/// `buffers`. Records one sequence_exchange event an exchange, with the bytes that this rank sent.
class UlyssesAttention final : public AttentionExecutor {
 public:
  /// `buffers` must outlive it.  forward and backward throw Error for inputs of other sizes, and
  /// for heads that do not divide.
  UlyssesAttention(const Communicator& sequence, RingBuffers& buffers, std::int64_t tokens,
                   std::unique_ptr<AttentionExecutor> inner, Recorder* recorder);
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override;

 private:
  struct Part;
  HeadSplit split(const AttentionInputs& in) const;
  std::int64_t begin(int rank) const { return even_part(tokens_, rank, sequence_.size()).first; }
  std::int64_t tokens_of(int rank) const { return begin(rank + 1) - begin(rank); }
  std::int64_t own() const { return tokens_of(sequence_.rank()); }
  RingBuffers::Lease gather(const std::vector<Part>& parts, const HeadSplit& heads,
                            const Tensor* lse, RingBuffers::Lease* whole_lse);
  void exchange(const std::vector<Transfer>& transfers);
  /// Gradients of this rank's tokens from those of all tokens' local heads, both ways of sharing.
  void scatter_gradients(const HeadSplit& heads, const Tensor& whole_q, const Tensor& whole_kv,
                         Tensor& dq, Tensor& dk, Tensor& dv);
  /// Sums key/value gradients of `blocks` [rank]: [own tokens, K and V heads of that rank, D].
  void sum_key_values(const HeadSplit& heads, const std::vector<Tensor>& blocks, Tensor& dk,
                      Tensor& dv);

  Communicator sequence_;
  RingBuffers& buffers_;
  std::int64_t tokens_;
  std::unique_ptr<AttentionExecutor> inner_;
  Recorder* recorder_;
};

}  // namespace ballast

// Attention without context parallelism.
#pragma once
#include <utility>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_pattern.hpp"

namespace ballast {

/// Attention over one rank's whole micro-batch with the given index (no context parallelism).
class LocalAttention final : public AttentionExecutor {
 public:
  explicit LocalAttention(AttentionPattern index, Recorder* recorder = nullptr)
      : index_(std::move(index)), recorder_(recorder) {}
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override;

 private:
  AttentionPattern index_;
  Recorder* recorder_;
};

}  // namespace ballast

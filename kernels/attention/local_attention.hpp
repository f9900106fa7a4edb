// Attention without context parallelism.
#pragma once
#include <utility>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/attention/placed_patterns.hpp"

namespace ballast {

/// Attention over one rank's whole micro-batch with the given pattern (no context parallelism).
class LocalAttention final : public AttentionExecutor {
 public:
  explicit LocalAttention(AttentionPattern pattern, Recorder* recorder = nullptr)
      : pattern_({std::move(pattern)}), recorder_(recorder) {}
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override;

 private:
  PlacedPatterns pattern_;
  Recorder* recorder_;
};

}  // namespace ballast

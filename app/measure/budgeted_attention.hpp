// Attention under a given budget, as `ballast profile` times it.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/device.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/budgeted_pattern.hpp"
#include "parallel/context/ring_attention.hpp"

namespace ballast {

/// MoBA on a GPU runs as it trains: every query routes itself by q and the mean keys, and the
/// kernels are those that such a choice gets.  Elsewhere, where time follows the blocks of keys
/// that neighbouring queries have in common, each 64 queries of a head share random blocks
/// (budgeted_pattern()), because random operands route every query apart.
class BudgetedAttention final : public AttentionExecutor {
 public:
  /// `options`: of the deck; `budget` in pattern blocks of `block_tokens`, 0: dense.
  /// `layers`: of a micro-batch on this rank; what is prepared for all of them counts as their
  /// share.
  BudgetedAttention(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                    std::int64_t block_tokens, const AttentionOptions& options, int heads,
                    std::int64_t layers, std::uint64_t seed, Space space);

  BudgetedAttention(const BudgetedAttention&) = delete;  // the executor refers to its members

  /// Whether the first forward of a layer chooses, which its time then holds.
  bool routes() const { return routes_; }
  /// The next forward is the first of another layer, or of another micro-batch's first layer.
  void next_layer();
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override {
    executor_->forward(at_layer(in), o, lse);
  }
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override {
    executor_->backward(at_layer(in), o, lse, d_o, dq, dk, dv);
  }

 private:
  AttentionInputs at_layer(AttentionInputs in) const {
    if (routes_) in.layer = layer_;
    return in;
  }

  bool routes_ = false;
  int layer_ = 0, layers_ = 1;
  AttentionOptions options_;
  AttentionAxes axes_;
  RingGroup alone_;
  std::unique_ptr<AttentionExecutor> executor_;
};

}  // namespace ballast

// RecallScores on the GPU: uploads where queries and keys lie, and launches the passes.
#pragma once
#include <vector>

#include "kernels/attention/recall_scores.hpp"
#include "kernels/cuda/index/recall_launch.hpp"

namespace ballast::cuda {

class RecallBuilder final : public RecallScores {
 public:
  /// As recall_scores().  Error: so many queries and keys that 32 bits do not count their blocks.
  RecallBuilder(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& rows);
  Tensor queries(const Tensor& q) const override;
  Tensor computed(const std::vector<AttentionWork>& calls) const override;
  Tensor maximum(const Tensor& queries, const Tensor& k, double scale) override;
  Tensor sums(const Tensor& maximum, const Tensor& computed) override;

 private:
  std::int64_t rows() const { return static_cast<std::int64_t>(at_.rows.size()); }
  RecallRows launch_rows() const;

  Device& device_;
  const RecallPlaces at_;
  Tensor local_, first_word_, base_, own_, key_block_, visible_;
  std::vector<Tensor> call_block_;  ///< by call of the axes
  Tensor queries_, k_;              ///< of maximum()
  RecallScan scan_;
};

}  // namespace ballast::cuda

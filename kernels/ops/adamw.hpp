// Optimizer arithmetic: AdamW on one shard of the flat parameter buffer, and the norm that clipping
// needs.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"

namespace ballast {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  bool bf16_moments = false;  ///< how a run keeps them; a step goes by the tensors
};

/// Optimizer state of `n` consecutive elements of the flat buffer: fp32 (fp64) master weights, and
/// moments in the same or in bf16.
struct AdamWState {
  Tensor master, moment1, moment2;  ///< [n] each
  /// [2 R] i64, ascending: weight decay applies to elements [decay[0], decay[1]), [decay[2], ...
  Tensor decay;
  std::int64_t first = 0;  ///< number of the first element, by which bf16 moments are rounded
};

/// One AdamW step (decoupled weight decay, bias correction with `step` counted from 1); `gradient`
/// [n], as master weights are or in bf16, is multiplied by `gradient_scale` (clipping) first; the
/// new master values are also written to `values` [n] in its dtype.  It is computed with moments as
/// they are before they are rounded to bf16, which is by chance (stochastic_rounding.hpp): bits
/// depend on step and element number alone, not on how elements are cut into calls.  On a GPU's
/// Queue::update it takes a third of the multiprocessors, for as long as it needs, and leaves the
/// others to what runs beside it.
void adamw_step(AdamWState& state, const Tensor& gradient, double gradient_scale,
                double learning_rate, std::int64_t step, const AdamWOptions& options,
                Tensor& values, Queue queue = Queue::compute);

/// Sum of squares of a flat tensor, accumulated in fp64 in fixed order.
double sum_of_squares(const Tensor& x);
/// Of each tensor; a GPU is waited for once.
std::vector<double> sums_of_squares(const std::vector<Tensor>& list);

}  // namespace ballast

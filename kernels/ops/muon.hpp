// Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; scale of the
// update: Liu et al. 2025, "Muon is scalable for LLM training", arXiv 2502.16982): momentum, whose
// matrices are orthogonalised by a Newton-Schulz iteration.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  int steps = 5;            ///< of the Newton-Schulz iteration
  double update_rms = 0.2;  ///< see muon_scale
  double weight_decay = 0.1;
};

/// The quintic a + b s^2 + c s^4 of Jordan, which lifts small singular values s fast and leaves all
/// of them near 1; what is added to the norm that a matrix is divided by.
inline constexpr double kMuonA = 3.4445, kMuonB = -4.7750, kMuonC = 2.0315, kMuonNormEps = 1e-7;

/// What an orthogonalised [rows, columns] matrix is multiplied by, times the learning rate:
/// update_rms * sqrt(max(rows, columns)), so that an update of full rank has the root mean square
/// update_rms (0.2: AdamW's); with update_rms = 0 sqrt(max(1, rows / columns)).
double muon_scale(const MuonOptions& options, std::int64_t rows, std::int64_t columns);

/// moment = momentum * moment + gradient_scale * gradient; `gradient` becomes the direction:
/// gradient_scale * gradient + momentum * moment (nesterov), or the moment.  All [n], fp32 (fp64).
void muon_momentum(Tensor& moment, Tensor& gradient, double gradient_scale,
                   const MuonOptions& options);

/// In place, `matrix` [m, n] in fp32 (fp64): X = matrix / (its Frobenius norm + eps), then `steps`
/// times X = a X + (b A + c A A) X with A = X X^T (from the left, or from the right with X^T X,
/// whichever Gram matrix is smaller).  On the host in the matrix's precision, on
/// a GPU in bf16 with fp32 accumulation.  Takes MuonWork::workspace_bytes of `workspace`.
void orthogonalise(Tensor& matrix, int steps, Workspace& workspace);

/// master = (1 - shrink) master - step_size * direction; the new master values are also written to
/// `values` in its dtype.  All [n].
void muon_update(Tensor& master, const Tensor& direction, double step_size, double shrink,
                 Tensor& values);

}  // namespace ballast

// Low-rank adapters of one joined matrix (core/model/lora_options): what they add to its product,
// forward and backward.  Composed of linear and dropout, so it has no backend code of its own;
// backward recomputes A x instead of keeping it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/model/lora_options.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

class LoraLinear {
 public:
  LoraLinear() = default;
  explicit LoraLinear(const LoraOptions& options) : options_(options) {}
  /// The adapter of `projection` in layer `prefix` ("model.layers.N."), whose outputs are columns
  /// [begin, end) of the joined matrix; none where the options do not list it.
  void add(const Parameters& parameters, const std::string& prefix, Projection projection,
           std::int64_t begin, std::int64_t end);
  /// y [T, joined out] += alpha / rank B A dropout(x), x [T, in].  `keys` as in
  /// kernels/ops/dropout; undefined: no dropout (evaluation).
  void forward(const Tensor& x, const Tensor& keys, Tensor& y, Workspace& workspace) const;
  /// Both halves.
  void backward(const Tensor& x, const Tensor& keys, const Tensor& dy, Tensor& dx,
                Workspace& workspace) const;
  /// dx [T, in] += gradient through the adapters.
  void input_gradient(const Tensor& keys, const Tensor& dy, Tensor& dx, Workspace& workspace) const;
  /// Adds the adapters' own gradients.
  void weight_gradient(const Tensor& x, const Tensor& keys, const Tensor& dy,
                       Workspace& workspace) const;
  /// Floating-point operations of forward over `tokens`.
  double flops(double tokens) const;

 private:
  struct Adapter {
    Tensor a, b;  // [rank, in], [out, rank]
    ParameterGradient a_gradient, b_gradient;
    std::int64_t begin = 0, end = 0;
    std::uint64_t stream = 0;  // of its dropout
  };
  Tensor dropped(const Adapter& adapter, const Tensor& x, const Tensor& keys,
                 Workspace& workspace) const;
  Tensor projected_gradient(const Adapter& adapter, const Tensor& dy,
                            Workspace& workspace) const;  // alpha / rank B^T dy
  Tensor projected(const Adapter& adapter, const Tensor& dropped_x,
                   Workspace& workspace) const;  // alpha / rank A x
  // Of one adapter, dh [T, rank] being its projected gradient.
  void add_input_gradient(const Adapter& adapter, const Tensor& keys, const Tensor& dh, Tensor& dx,
                          Workspace& workspace) const;
  void add_own_gradients(const Adapter& adapter, const Tensor& x, const Tensor& keys,
                         const Tensor& dy, const Tensor& dh, Workspace& workspace) const;

  LoraOptions options_;
  std::vector<Adapter> adapters_;
};

}  // namespace ballast

// One matrix of a layer with all that belongs to it: bias, gradients, adapters, and the type in
// which its products are made (the compute type, or FP8).
#pragma once
#include <cstdint>
#include <memory>

#include "kernels/model/lora.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/fp8.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

/// y [T, out] = x [T, in] w^T + bias + adapters.
class LinearLayer {
 public:
  LinearLayer() = default;
  /// `weight`: first of `count` neighbours joined along dimension 0, with `bias` likewise (null:
  /// none).  `fp8`: products with rounded operands; the adapters' and the bias's stay in the
  /// compute type.  `parameters` must outlive the layer.
  LinearLayer(const Parameters& parameters, const std::string& weight, const char* bias, int count,
              const LoraOptions& lora, bool fp8);
  LinearLayer(LinearLayer&&) = default;
  LinearLayer& operator=(LinearLayer&&) = default;

  /// Adapters of outputs [begin, end); see LoraLinear::add.
  void add_adapter(const Parameters& parameters, const std::string& prefix, Projection projection,
                   std::int64_t begin, std::int64_t end) {
    adapters_.add(parameters, prefix, projection, begin, end);
  }
  Device& device() const { return device_of(weight_.space()); }
  double adapter_flops(double tokens) const { return adapters_.flops(tokens); }

  /// `keys`: TokenTables::dropout_keys, here and below.
  void forward(const Tensor& x, const Tensor& keys, Tensor& y, Workspace& workspace) const;
  /// Both halves.
  void backward(const Tensor& x, const Tensor& keys, const Tensor& dy, Tensor& dx,
                Workspace& workspace) const;
  /// Overwrites dx.
  void input_gradient(const Tensor& keys, const Tensor& dy, Tensor& dx, Workspace& workspace) const;
  /// Adds the gradients of weight, bias and adapters.
  void weight_gradient(const Tensor& x, const Tensor& keys, const Tensor& dy,
                       Workspace& workspace) const;

  /// Products of FP8 alone, for a caller who rounds, and who sees to the bias and its gradient.
  void forward(const Fp8Tokens& x, Tensor& y, Workspace& workspace) const;
  void backward(const Fp8Tokens& x, const Fp8Tokens& dy, Tensor& dx, Workspace& workspace) const;
  void input_gradient(const Fp8Tokens& dy, Tensor& dx, Workspace& workspace) const;
  void weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy) const;
  const Tensor& bias() const { return bias_; }
  GradientTarget bias_gradient() const { return bias_gradient_.next(); }

 private:
  struct Rounded {
    Fp8Weight weight;
    std::uint64_t version = 0;  ///< of the parameters that were rounded; 0: none yet
  };
  /// Of the matrix and its bias alone, without adapters.
  void product_input_gradient(const Tensor& dy, Tensor& dx, Workspace& workspace) const;
  void product_weight_gradient(const Tensor& x, const Tensor& dy, Workspace& workspace) const;
  /// Rounded anew where the parameters changed.
  const Fp8Weight& rounded() const;

  Tensor weight_, bias_;
  ParameterGradient weight_gradient_, bias_gradient_;
  LoraLinear adapters_;
  std::shared_ptr<const std::uint64_t> version_;  ///< Parameters::version
  std::unique_ptr<Rounded> rounded_;              ///< null: no FP8
};

}  // namespace ballast

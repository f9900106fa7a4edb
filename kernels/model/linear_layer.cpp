#include "kernels/model/linear_layer.hpp"

#include "kernels/ops/linear.hpp"

namespace ballast {

LinearLayer::LinearLayer(const Parameters& parameters, const std::string& weight, const char* bias,
                         int count, const LoraOptions& lora, bool fp8)
    : weight_(parameters.joined_value(weight + ".weight", count)),
      weight_gradient_(parameters.gradient_of(weight + ".weight", count)),
      adapters_(lora),
      version_(parameters.version()) {
  if (bias != nullptr) {
    bias_ = parameters.joined_value(weight + bias, count);
    bias_gradient_ = parameters.gradient_of(weight + bias, count);
  }
  if (fp8)
    rounded_ = std::make_unique<Rounded>(
        Rounded{fp8_weight_memory(weight_.size(0), weight_.size(1), weight_.dtype(), device()), 0});
}

const Fp8Weight& LinearLayer::rounded() const {
  if (rounded_->version != *version_) {
    fp8_round_weight(weight_, rounded_->weight);
    rounded_->version = *version_;
  }
  return rounded_->weight;
}

void LinearLayer::forward(const Tensor& x, const Tensor& keys, Tensor& y,
                          Workspace& workspace) const {
  if (rounded_)
    fp8_linear_forward(fp8_round(x, Fp8Sides::rows, "fp8 input", workspace), rounded(), bias_, y,
                       workspace);
  else
    linear_forward(x, weight_, bias_, y);
  adapters_.forward(x, keys, y, workspace);
}

void LinearLayer::forward(const Fp8Tokens& x, Tensor& y, Workspace& workspace) const {
  fp8_linear_forward(x, rounded(), {}, y, workspace);
}

void LinearLayer::backward(const Fp8Tokens& x, const Fp8Tokens& dy, Tensor& dx,
                           Workspace& workspace) const {
  input_gradient(dy, dx, workspace);
  weight_gradient(x, dy);
}

void LinearLayer::input_gradient(const Fp8Tokens& dy, Tensor& dx, Workspace& workspace) const {
  fp8_linear_input_gradient(dy, rounded(), dx, workspace);
}

void LinearLayer::weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy) const {
  fp8_linear_weight_gradient(x, dy, weight_gradient_.next());
}

void LinearLayer::backward(const Tensor& x, const Tensor& keys, const Tensor& dy, Tensor& dx,
                           Workspace& workspace) const {
  product_input_gradient(dy, dx, workspace);
  product_weight_gradient(x, dy, workspace);
  adapters_.backward(x, keys, dy, dx, workspace);
}

void LinearLayer::input_gradient(const Tensor& keys, const Tensor& dy, Tensor& dx,
                                 Workspace& workspace) const {
  product_input_gradient(dy, dx, workspace);
  adapters_.input_gradient(keys, dy, dx, workspace);
}

void LinearLayer::weight_gradient(const Tensor& x, const Tensor& keys, const Tensor& dy,
                                  Workspace& workspace) const {
  product_weight_gradient(x, dy, workspace);
  adapters_.weight_gradient(x, keys, dy, workspace);
}

void LinearLayer::product_input_gradient(const Tensor& dy, Tensor& dx, Workspace& workspace) const {
  if (rounded_)
    fp8_linear_input_gradient(fp8_round(dy, Fp8Sides::rows, "fp8 gradient", workspace), rounded(),
                              dx, workspace);
  else
    linear_input_gradient(dy, weight_, dx);
}

void LinearLayer::product_weight_gradient(const Tensor& x, const Tensor& dy,
                                          Workspace& workspace) const {
  if (weight_gradient_.defined() && rounded_)
    fp8_linear_weight_gradient(fp8_round(x, Fp8Sides::columns, "fp8 input", workspace),
                               fp8_round(dy, Fp8Sides::columns, "fp8 gradient", workspace),
                               weight_gradient_.next());
  else if (weight_gradient_.defined())
    linear_weight_gradient(x, dy, weight_gradient_.next());
  if (bias_gradient_.defined()) linear_bias_gradient(dy, bias_gradient_.next());
}

}  // namespace ballast

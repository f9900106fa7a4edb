#include "kernels/model/lora.hpp"

#include <algorithm>

#include "core/base/random.hpp"
#include "kernels/ops/dropout.hpp"
#include "kernels/ops/linear.hpp"

namespace ballast {

void LoraLinear::add(const Parameters& parameters, const std::string& prefix, Projection projection,
                     std::int64_t begin, std::int64_t end) {
  const auto& listed = options_.projections;
  if (!options_.enabled() || std::find(listed.begin(), listed.end(), projection) == listed.end())
    return;
  const std::string module = prefix + lora_module(projection), a = module + ".lora_A.weight",
                    b = module + ".lora_B.weight";
  const std::uint64_t stream =
      random_bits(options_.seed, stream_of("lora.dropout"), stream_of(module.c_str()));
  adapters_.push_back({parameters.value(a), parameters.value(b), parameters.gradient_of(a),
                       parameters.gradient_of(b), begin, end, stream});
}

Tensor LoraLinear::dropped(const Adapter& adapter, const Tensor& x, const Tensor& keys,
                           Workspace& workspace) const {
  if (options_.dropout == 0 || !keys.defined()) return x;
  Tensor y = workspace.take("lora dropped", x.shape(), x.dtype());
  dropout(x, keys, adapter.stream, options_.dropout, 1 / dropout_kept(options_.dropout), y);
  return y;
}

Tensor LoraLinear::projected(const Adapter& adapter, const Tensor& dropped_x,
                             Workspace& workspace) const {
  Tensor h =
      workspace.take("lora projected", {dropped_x.size(0), options_.rank}, dropped_x.dtype());
  linear_forward(dropped_x, adapter.a, {}, h, {.scale = options_.scale()});
  return h;
}

void LoraLinear::forward(const Tensor& x, const Tensor& keys, Tensor& y,
                         Workspace& workspace) const {
  for (const Adapter& adapter : adapters_) {
    const Tensor h = projected(adapter, dropped(adapter, x, keys, workspace), workspace);
    Tensor part = y.narrow(1, adapter.begin, adapter.end);
    linear_forward(h, adapter.b, {}, part, {.accumulate = true});
  }
}

Tensor LoraLinear::projected_gradient(const Adapter& adapter, const Tensor& dy,
                                      Workspace& workspace) const {
  Tensor dh = workspace.take("lora d_projected", {dy.size(0), options_.rank}, dy.dtype());
  linear_input_gradient(dy.narrow(1, adapter.begin, adapter.end), adapter.b, dh,
                        {.scale = options_.scale()});
  return dh;
}

void LoraLinear::add_input_gradient(const Adapter& adapter, const Tensor& keys, const Tensor& dh,
                                    Tensor& dx, Workspace& workspace) const {
  if (options_.dropout == 0 || !keys.defined()) {
    linear_input_gradient(dh, adapter.a, dx, {.accumulate = true});
    return;
  }
  Tensor through = workspace.take("lora d_input", dx.shape(), dx.dtype());
  linear_input_gradient(dh, adapter.a, through);
  dropout(through, keys, adapter.stream, options_.dropout, 1 / dropout_kept(options_.dropout), dx,
          true);
}

void LoraLinear::add_own_gradients(const Adapter& adapter, const Tensor& x, const Tensor& keys,
                                   const Tensor& dy, const Tensor& dh, Workspace& workspace) const {
  const Tensor x_dropped = dropped(adapter, x, keys, workspace);
  linear_weight_gradient(projected(adapter, x_dropped, workspace),
                         dy.narrow(1, adapter.begin, adapter.end), adapter.b_gradient.next());
  linear_weight_gradient(x_dropped, dh, adapter.a_gradient.next());
}

void LoraLinear::backward(const Tensor& x, const Tensor& keys, const Tensor& dy, Tensor& dx,
                          Workspace& workspace) const {
  for (const Adapter& adapter : adapters_) {
    const Tensor dh = projected_gradient(adapter, dy, workspace);
    add_input_gradient(adapter, keys, dh, dx, workspace);
    add_own_gradients(adapter, x, keys, dy, dh, workspace);
  }
}

void LoraLinear::input_gradient(const Tensor& keys, const Tensor& dy, Tensor& dx,
                                Workspace& workspace) const {
  for (const Adapter& adapter : adapters_)
    add_input_gradient(adapter, keys, projected_gradient(adapter, dy, workspace), dx, workspace);
}

void LoraLinear::weight_gradient(const Tensor& x, const Tensor& keys, const Tensor& dy,
                                 Workspace& workspace) const {
  for (const Adapter& adapter : adapters_)
    add_own_gradients(adapter, x, keys, dy, projected_gradient(adapter, dy, workspace), workspace);
}

double LoraLinear::flops(double tokens) const {
  double sum = 0;
  for (const Adapter& adapter : adapters_)
    sum += linear_flops(tokens, static_cast<double>(adapter.a.size(1)),
                        static_cast<double>(options_.rank)) +
           linear_flops(tokens, static_cast<double>(options_.rank),
                        static_cast<double>(adapter.b.size(0)));
  return sum;
}

}  // namespace ballast

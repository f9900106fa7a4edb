// The whole transformer in fp64 with plain loops, written from the papers and Hugging Face's config
// semantics and sharing no code with kernels/; and attention by the definition, as an
// AttentionExecutor.  Slow on purpose.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/model/model_shape.hpp"
#include "core/plan/attention/attention_executor.hpp"

namespace ballast::reference {

/// Two layers, small and of odd sizes, so that the plain loops take milliseconds.
inline ModelShape small_shape() {
  ModelShape s;
  s.layers = 2;
  s.hidden = 12;
  s.query_heads = 4;
  s.kv_heads = 2;
  s.head_dim = 6;
  s.intermediate = 10;
  s.vocabulary = 17;
  s.rope_theta = 100;
  s.original_context = 64;
  return s;
}

struct Tokens {
  std::vector<std::int32_t> token, target, position, segment;
};

/// Parameter values by Hugging Face name.
using Lookup = std::function<std::vector<double>(const std::string&)>;

/// Loss of every token, 0 where the target is -1.
std::vector<double> token_losses(const ModelShape& shape, const Lookup& parameter,
                                 const Tokens& tokens);

/// Rotation angle per token of pair i, and the amplitude.
double rope_frequency(const ModelShape& shape, std::int64_t pair);
double rope_amplitude(const ModelShape& shape);

/// Query i sees key j when both lie in one segment and position[j] <= position[i].  f32 and f64
/// tensors; sums in fp64.
class NaiveAttention final : public AttentionExecutor {
 public:
  NaiveAttention(std::vector<std::int32_t> segment, std::vector<std::int32_t> position)
      : segment_(std::move(segment)), position_(std::move(position)) {}
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override;
  int forwards = 0;

 private:
  bool visible(std::int64_t query, std::int64_t key) const;
  std::vector<std::int32_t> segment_, position_;
};

}  // namespace ballast::reference

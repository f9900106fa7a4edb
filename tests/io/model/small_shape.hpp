// A model small enough to write whole, for tests of Hugging Face folders.
#pragma once
#include "core/model/model_shape.hpp"

namespace ballast {

inline ModelShape small_shape() {
  ModelShape shape;
  shape.layers = 2, shape.hidden = 16, shape.intermediate = 24, shape.query_heads = 4,
  shape.kv_heads = 2, shape.head_dim = 4, shape.vocabulary = 40;
  shape.qkv_bias = true;
  return shape;
}

}  // namespace ballast

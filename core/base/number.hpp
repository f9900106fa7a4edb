// Elements of host tensors as numbers and back, bf16 among them.
#pragma once
#include <type_traits>

#include "core/base/bf16.hpp"
#include "core/base/tensor.hpp"

namespace ballast {

template <class T>
constexpr T number(T element) {
  return element;
}
constexpr float number(bf16 element) { return from_bf16_bits(element.bits); }

/// The element of type T that a number becomes; bf16 by way of fp32, to nearest.
template <class T, class Number>
constexpr T element_of(Number x) {
  if constexpr (std::is_same_v<T, bf16>)
    return {to_bf16_bits(static_cast<float>(x))};
  else
    return static_cast<T>(x);
}

}  // namespace ballast

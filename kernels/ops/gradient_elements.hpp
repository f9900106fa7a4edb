// A parameter's gradient as host loops write it, in whatever type it is kept.
#pragma once
#include "core/base/bf16.hpp"
#include "kernels/ops/gradient_target.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast::host {

/// The elements of a dense target of T or bf16.
template <class T>
class GradientElements {
 public:
  explicit GradientElements(const GradientTarget& target) : accumulate_(target.accumulate) {
    if (target.tensor.dtype() == DType::bf16)
      rounded_ = vector<bf16>(target.tensor).data();
    else
      full_ = vector<T>(target.tensor).data();
  }
  /// `sum` becomes element i or is added to it.
  void put(std::int64_t i, T sum) const {
    if (full_ != nullptr) {
      full_[i] = (accumulate_ ? full_[i] : T(0)) + sum;
      return;
    }
    const T before = accumulate_ ? static_cast<T>(from_bf16_bits(rounded_[i].bits)) : T(0);
    rounded_[i].bits = to_bf16_bits(static_cast<float>(before + sum));
  }

 private:
  T* full_ = nullptr;
  bf16* rounded_ = nullptr;
  bool accumulate_;
};

}  // namespace ballast::host

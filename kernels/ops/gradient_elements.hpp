// A parameter's gradient as host loops write it, in whatever type it is kept.
#pragma once
#include "core/base/number.hpp"
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
    const auto put_in = [&]<class To>(To& to) {
      to = element_of<To>((accumulate_ ? static_cast<T>(number(to)) : T(0)) + sum);
    };
    full_ != nullptr ? put_in(full_[i]) : put_in(rounded_[i]);
  }

 private:
  T* full_ = nullptr;
  bf16* rounded_ = nullptr;
  bool accumulate_;
};

}  // namespace ballast::host

// Tensor: a small handle on typed storage.  Not a template: kernels open it as a Kokkos::View
// (kernels/ops/host_view.hpp) or as a device span; dtype and backend are dispatched once, at an
// operation's entry.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/device.hpp"
#include "core/base/error.hpp"

namespace ballast {

enum class DType { f32, f64, bf16, i32, i64, u8 };
std::size_t size_of(DType type);
const char* name(DType type);

/// bf16 on the host: storage only, converted where it is used.
struct bf16 {
  std::uint16_t bits = 0;
};

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<std::uint8_t> {
  static constexpr DType value = DType::u8;
};

using Shape = std::vector<std::int64_t>;
std::string to_string(const Shape& shape);

class Tensor {
 public:
  Tensor() = default;

  /// Uninitialised (on the host: NaN-poisoned in debug builds), row-major.
  static Tensor empty(Shape shape, DType type, Device& device = host_device(),
                      MemoryCategory category = MemoryCategory::activations);
  static Tensor zeros(Shape shape, DType type, Device& device = host_device(),
                      MemoryCategory category = MemoryCategory::activations);
  /// A view of memory that somebody else owns and keeps alive.
  static Tensor wrap(void* data, Shape shape, DType type, Space space = Space::host);

  bool defined() const { return data_ != nullptr || numel_zero_; }
  DType dtype() const { return type_; }
  Space space() const { return space_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }  ///< in elements
  int rank() const { return static_cast<int>(shape_.size()); }
  std::int64_t size(int dim) const { return shape_.at(dim < 0 ? dim + rank() : dim); }
  std::int64_t numel() const;
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(type_); }
  bool contiguous() const;

  /// Rows [begin, end) of dimension 0, columns of any dimension, or the same elements under another
  /// shape (contiguous tensors only).  All share storage with this tensor.
  Tensor rows(std::int64_t begin, std::int64_t end) const { return narrow(0, begin, end); }
  Tensor narrow(int dim, std::int64_t begin, std::int64_t end) const;
  Tensor reshape(Shape shape) const;

  /// Typed pointer to the first element; throws when T is not the tensor's dtype.
  template <class T>
  T* data() const {
    require(type_ == dtype_of<T>::value, "tensor of {} opened as {}", name(type_),
            name(dtype_of<T>::value));
    return static_cast<T*>(data_);
  }
  void* raw() const { return data_; }

  void zero();                           ///< contiguous tensors only
  void copy_from(const Tensor& source);  ///< same shape and dtype, any spaces, both contiguous
  Tensor clone() const;
  Tensor to(Device& device) const;  ///< contiguous copy there (itself when already there)

 private:
  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  bool numel_zero_ = false;
  DType type_ = DType::f32;
  Space space_ = Space::host;
  Shape shape_, strides_;
};

/// Calls `f` with a value of the matching C++ type (float or double); throws for others.
template <class F>
decltype(auto) dispatch_float(DType type, F&& f) {
  if (type == DType::f32) return f(float{});
  if (type == DType::f64) return f(double{});
  fail("this host operation needs f32 or f64, got {}", name(type));
}

}  // namespace ballast

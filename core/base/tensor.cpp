#include "core/base/tensor.hpp"

#include <features.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <Kokkos_Core.hpp>
#include <cstring>
#include <numeric>

namespace ballast {
namespace {

MemoryUse g_memory;

void account(MemoryCategory category, std::int64_t bytes) {
  const int c = static_cast<int>(category);
  g_memory.current[c] += bytes;
  if (category != MemoryCategory::offloaded) g_memory.current_total += bytes;
  g_memory.peak[c] = std::max(g_memory.peak[c], g_memory.current[c]);
  g_memory.peak_total = std::max(g_memory.peak_total, g_memory.current_total);
}

constexpr std::int64_t kMostElements = std::int64_t{1} << 59;  // of eight bytes each

Shape row_major(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    require(!__builtin_mul_overflow(stride, shape[i], &stride) && stride < kMostElements,
            "a tensor of shape {} has more elements than can be counted", to_string(shape));
  }
  return strides;
}

std::int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

class HostDevice final : public Device {
 public:
  HostDevice() {
#ifdef __GLIBC__
    // Activations come and go in every step: keep their pages instead of returning them to the
    // system and faulting them in anew.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 2047 << 20);
#endif
  }
  Space space() const override { return Space::host; }
  std::string description() const override {
    return "host (Kokkos " + std::string(Kokkos::DefaultHostExecutionSpace::name()) + ")";
  }
  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    try {
      return Kokkos::kokkos_malloc<Kokkos::HostSpace>("ballast", bytes);
    } catch (const std::exception& e) {
      fail(
          "host memory: {} bytes could not be allocated ({}); use fewer tokens per micro-batch or "
          "more ranks",
          bytes, e.what());
    }
  }
  void deallocate(void* pointer, std::size_t) noexcept override {
    if (pointer && Kokkos::is_initialized()) Kokkos::kokkos_free<Kokkos::HostSpace>(pointer);
  }
  void zero(void* pointer, std::size_t bytes) override {
    if (bytes) std::memset(pointer, 0, bytes);
  }
  void copy(void* to, Space to_space, const void* from, Space from_space,
            std::size_t bytes) override {
    require(to_space == Space::host && from_space == Space::host,
            "the host device cannot copy device memory");
    if (bytes) std::memmove(to, from, bytes);
  }
  void synchronize() override {}
};

Device* g_host_device = nullptr;
Device* g_cuda_device = nullptr;
Device* g_pinned_device = nullptr;

}  // namespace

const char* name(MemoryCategory category) {
  static const char* names[] = {"parameters",  "gradients",     "optimizer",
                                "activations", "communication", "kv_store",
                                "workspace",   "data",          "offloaded"};
  return names[static_cast<int>(category)];
}

Device& host_device() {
  static HostDevice device;
  return g_host_device != nullptr ? *g_host_device : device;
}
void set_host_device(Device* device) { g_host_device = device; }
Device* cuda_device() { return g_cuda_device; }
void set_cuda_device(Device* device) { g_cuda_device = device; }
Device& pinned_device() { return g_pinned_device != nullptr ? *g_pinned_device : host_device(); }
void set_pinned_device(Device* device) { g_pinned_device = device; }
Device& device_of(Space space) {
  if (space == Space::host) return host_device();
  require(g_cuda_device != nullptr, "no CUDA device was set up in this process");
  return *g_cuda_device;
}

const MemoryUse& memory_use() { return g_memory; }
void reset_peak_memory() {
  for (int c = 0; c < kMemoryCategories; ++c) g_memory.peak[c] = g_memory.current[c];
  g_memory.peak_total = g_memory.current_total;
}

std::size_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

const char* name(DType type) {
  static const char* names[] = {"f32", "f64", "bf16", "i32", "i64", "u8"};
  return names[static_cast<int>(type)];
}

std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Tensor Tensor::empty(Shape shape, DType type, Device& device, MemoryCategory category) {
  for (auto extent : shape)
    require(extent >= 0, "tensor with a negative extent: {}", to_string(shape));
  Tensor t;
  t.type_ = type;
  t.space_ = device.space();
  t.strides_ = row_major(shape);
  t.shape_ = std::move(shape);
  const std::size_t bytes = t.bytes();
  t.data_ = device.allocate(bytes);
  t.numel_zero_ = bytes == 0;
  account(category, static_cast<std::int64_t>(bytes));
  Device* owner = &device;
  t.owner_ = std::shared_ptr<void>(t.data_, [owner, bytes, category](void* p) {
    account(category, -static_cast<std::int64_t>(bytes));
    owner->deallocate(p, bytes);
  });
#ifndef NDEBUG
  if (t.space_ == Space::host && bytes &&
      (type == DType::f32 || type == DType::f64 || type == DType::bf16))
    std::memset(t.data_, 0xff, bytes);
#endif
  return t;
}

Tensor Tensor::zeros(Shape shape, DType type, Device& device, MemoryCategory category) {
  Tensor t = empty(std::move(shape), type, device, category);
  t.zero();
  return t;
}

Tensor Tensor::wrap(void* data, Shape shape, DType type, Space space) {
  Tensor t;
  t.data_ = data;
  t.type_ = type;
  t.space_ = space;
  t.strides_ = row_major(shape);
  t.shape_ = std::move(shape);
  t.numel_zero_ = t.numel() == 0;
  return t;
}

std::int64_t Tensor::numel() const { return product(shape_); }

bool Tensor::contiguous() const {
  std::int64_t stride = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != stride) return false;
    stride *= shape_[i];
  }
  return true;
}

Tensor Tensor::narrow(int dim, std::int64_t begin, std::int64_t end) const {
  if (dim < 0) dim += rank();
  require(dim >= 0 && dim < rank() && 0 <= begin && begin <= end && end <= shape_[dim],
          "slice [{}, {}) of dimension {} lies outside a tensor of shape {}", begin, end, dim,
          to_string(shape_));
  Tensor t = *this;
  t.shape_[dim] = end - begin;
  t.numel_zero_ = t.numel() == 0;
  if (data_)
    t.data_ = static_cast<char*>(data_) +
              begin * strides_[dim] * static_cast<std::int64_t>(size_of(type_));
  return t;
}

Tensor Tensor::reshape(Shape shape) const {
  require(contiguous(),
          "only a contiguous tensor can be reshaped; this one has shape {} and strides {}",
          to_string(shape_), to_string(strides_));
  require(product(shape) == numel(), "cannot reshape {} to {}", to_string(shape_),
          to_string(shape));
  Tensor t = *this;
  t.strides_ = row_major(shape);
  t.shape_ = std::move(shape);
  return t;
}

void Tensor::zero() {
  require(contiguous(), "zero() needs a contiguous tensor");
  device_of(space_).zero(data_, bytes());
}

void Tensor::copy_from(const Tensor& source) {
  require(shape_ == source.shape_ && type_ == source.type_, "copy from {} {} to {} {}",
          name(source.type_), to_string(source.shape_), name(type_), to_string(shape_));
  require(contiguous() && source.contiguous(), "copy_from() needs contiguous tensors");
  Device& device = device_of(space_ == Space::cuda ? space_ : source.space_);
  device.copy(data_, space_, source.data_, source.space_, bytes());
}

Tensor Tensor::clone() const {
  Tensor t = empty(shape_, type_, device_of(space_));
  t.copy_from(*this);
  return t;
}

Tensor Tensor::to(Device& device) const {
  if (device.space() == space_) return *this;
  Tensor t = empty(shape_, type_, device);
  t.copy_from(*this);
  return t;
}

}  // namespace ballast

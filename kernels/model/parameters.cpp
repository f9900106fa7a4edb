#include "kernels/model/parameters.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/bf16.hpp"
#include "core/base/random.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/random_fill.hpp"

namespace ballast {
namespace {

Shape joined_shape(const std::vector<Parameter>& table, std::size_t first, int count) {
  require(count >= 1 && first + static_cast<std::size_t>(count) <= table.size(),
          "{} parameters from {} reach past the table", count, table[first].name);
  Shape shape = table[first].shape;
  for (std::size_t i = first + 1; i < first + static_cast<std::size_t>(count); ++i) {
    const Shape& next = table[i].shape;
    require(
        next.size() == shape.size() && std::equal(next.begin() + 1, next.end(), shape.begin() + 1),
        "{} {} cannot be joined to {}", table[i].name, to_string(next), table[first].name);
    shape[0] += next[0];
  }
  return shape;
}

void fill_ones(Tensor& target) {
  Tensor ones = Tensor::empty(target.shape(), target.dtype(), host_device());
  if (target.dtype() == DType::bf16) {
    const bf16 one{to_bf16_bits(1.0f)};
    std::fill_n(ones.data<bf16>(), ones.numel(), one);
  } else {
    dispatch_float(target.dtype(), [&](auto t) {
      std::fill_n(ones.data<decltype(t)>(), ones.numel(), decltype(t){1});
    });
  }
  target.copy_from(ones);
}

}  // namespace

/// What contributions share.
struct GradientStore {
  std::vector<char> written;    ///< [trainable parameter] whether a contribution lies there
  std::vector<Tensor> buckets;  ///< where there is no buffer of all: those that exist
  std::vector<std::int64_t> sizes;
  DType type = DType::f32;
  Device* device = nullptr;

  Tensor& bucket(std::size_t b) {
    Tensor& gradients = buckets.at(b);
    if (!gradients.defined())
      gradients = Tensor::empty({sizes[b]}, type, *device, MemoryCategory::gradients);
    return gradients;
  }
};

Parameters::Parameters(std::vector<Parameter> table, DType type, Device& device,
                       std::int64_t pad_to, std::int64_t bucket_bytes, bool whole_gradients,
                       bool bf16_gradients)
    : table_(std::move(table)) {
  require(pad_to >= 1, "parameters cannot be padded to a multiple of {}", pad_to);
  // Kernels and cuBLASLt take a GPU's tensors to begin at multiples of 256 bytes, whatever number
  // of ranks shares a bucket.
  if (device.space() == Space::cuda) pad_to = std::lcm(pad_to, std::int64_t{128});
  require(type == DType::f32 || type == DType::f64 ||
              (type == DType::bf16 && device.space() == Space::cuda),
          "parameters in {} need a GPU; on the host use f32 or f64", name(type));
  for (std::size_t i = 0; i < table_.size(); ++i) {
    require(position_.emplace(table_[i].name, i).second,
            "parameter {} is listed twice for one rank", table_[i].name);
    require(table_[i].trainable || trainable_table_.empty(),
            "frozen parameter {} comes after trainable ones", table_[i].name);
    (table_[i].trainable ? trainable_table_ : frozen_table_).push_back(table_[i]);
    numel_ += table_[i].numel();
    if (table_[i].trainable) continue;
    offset_.push_back(frozen_);
    frozen_ = numel_;
  }
  std::int64_t padded = 0, dense = 0;
  for (const ParameterBucket& bucket : parameter_buckets(trainable_table_, bucket_bytes)) {
    std::int64_t at = padded;
    for (std::size_t i = bucket.first; i < bucket.last; ++i) {
      offset_.push_back(frozen_ + at);
      at += trainable_table_[i].numel();
    }
    const std::int64_t end = padded + (bucket.elements + pad_to - 1) / pad_to * pad_to;
    buckets_.push_back(
        {padded, end, dense, dense + bucket.elements, bucket.first, bucket.last, bucket.final_at});
    padded = end;
    dense += bucket.elements;
  }
  values_ = Tensor::zeros({frozen_ + padded}, type, device, MemoryCategory::parameters);
  gradient_type_ = bf16_gradients ? DType::bf16 : sum_type();
  if (whole_gradients)
    gradients_ = Tensor::zeros({padded}, gradient_type(), device, MemoryCategory::gradients);
  store_ = std::make_shared<GradientStore>();
  store_->written.assign(trainable_table_.size(), 1);
  store_->buckets.resize(buckets_.size());
  for (const StoredBucket& bucket : buckets_) store_->sizes.push_back(bucket.size());
  store_->type = gradient_type();
  store_->device = &device;
}

ParameterGradient::ParameterGradient(Tensor sum)
    : tensor_(std::move(sum)), store_(std::make_shared<GradientStore>()), count_(1) {
  store_->written.assign(1, 1);
}

GradientTarget ParameterGradient::next() const {
  if (!defined()) return {Tensor()};
  const auto begin = store_->written.begin() + static_cast<std::ptrdiff_t>(first_),
             end = begin + static_cast<std::ptrdiff_t>(count_);
  const bool accumulate = *begin != 0;
  require(std::all_of(begin, end, [&](char w) { return (w != 0) == accumulate; }),
          "gradients of neighbours were written apart and are now joined");
  std::fill(begin, end, char{1});
  if (tensor_.defined()) return {tensor_, accumulate};
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape_) elements *= extent;
  return {store_->bucket(bucket_).rows(begin_, begin_ + elements).reshape(shape_), accumulate};
}

const Parameter& Parameters::info(const std::string& name) const {
  const auto found = position_.find(name);
  require(found != position_.end(), "parameter {} is not on this rank", name);
  return table_[found->second];
}

std::int64_t Parameters::offset(const std::string& name) const {
  return offset_[static_cast<std::size_t>(&info(name) - table_.data())];
}

std::int64_t Parameters::trainable_offset(const std::string& name) const {
  return offset(name) - frozen_;
}

Tensor Parameters::value(const std::string& name) const { return joined_value(name, 1); }
Tensor Parameters::gradient(const std::string& name) const { return joined_gradient(name, 1); }

Tensor Parameters::joined_value(const std::string& name, int count) const {
  need_values();
  const auto first = static_cast<std::size_t>(&info(name) - table_.data());
  const Shape shape = joined_shape(table_, first, count);
  const std::size_t last = first + static_cast<std::size_t>(count) - 1;
  return values_.rows(offset_[first], offset_[last] + table_[last].numel()).reshape(shape);
}

Tensor Parameters::joined_gradient(const std::string& name, int count) const {
  const auto first = static_cast<std::size_t>(&info(name) - table_.data());
  const Shape shape = joined_shape(table_, first, count);
  const std::size_t last = first + static_cast<std::size_t>(count) - 1;
  require(table_[first].trainable == table_[last].trainable,
          "{} is frozen, its neighbour {} is not: they cannot be joined", table_[first].name,
          table_[last].name);
  if (!table_[first].trainable || !gradients_.defined()) return {};
  return gradients_.rows(offset_[first] - frozen_, offset_[last] + table_[last].numel() - frozen_)
      .reshape(shape);
}

ParameterGradient Parameters::gradient_of(const std::string& name, int count) const {
  ParameterGradient g;
  g.tensor_ = joined_gradient(name, count);
  if (!info(name).trainable) return g;
  const auto place = static_cast<std::size_t>(&info(name) - table_.data());
  g.store_ = store_;
  g.first_ = place - frozen_table_.size();
  g.count_ = static_cast<std::size_t>(count);
  while (buckets_[g.bucket_].last_parameter <= g.first_) ++g.bucket_;
  g.begin_ = trainable_offset(name) - buckets_[g.bucket_].begin;
  g.shape_ = joined_shape(table_, place, count);
  return g;
}

void Parameters::clear_gradients() {
  for (std::size_t b = 0; b < buckets_.size(); ++b) release_gradients(b);
}

void Parameters::settle_gradients() {
  for (std::size_t b = 0; b < buckets_.size(); ++b) settle_gradients(b);
}

Tensor Parameters::settle_gradients(std::size_t bucket) {
  const StoredBucket& b = buckets_.at(bucket);
  const bool fresh = !gradients_.defined();  // with padding that nobody has zeroed
  Tensor gradients = fresh ? store_->bucket(bucket) : gradients_.rows(b.begin, b.end);
  std::vector<char>& written = store_->written;
  const std::size_t frozen = frozen_table_.size();
  const auto begin_of = [&](std::size_t i) { return offset_[frozen + i] - frozen_ - b.begin; };
  for (std::size_t first = b.first_parameter; first < b.last_parameter; ++first) {
    if (written[first] != 0) continue;
    std::size_t last = first;  // neighbours in one go
    while (last + 1 < b.last_parameter && written[last + 1] == 0) ++last;
    gradients.rows(begin_of(first), begin_of(last) + trainable_table_[last].numel()).zero();
    first = last;
  }
  if (fresh && b.last - b.first < b.size()) gradients.rows(b.last - b.first, b.size()).zero();
  std::fill(written.begin() + static_cast<std::ptrdiff_t>(b.first_parameter),
            written.begin() + static_cast<std::ptrdiff_t>(b.last_parameter), char{1});
  return gradients;
}

void Parameters::release_gradients(std::size_t bucket) {
  const StoredBucket& b = buckets_.at(bucket);
  std::fill(store_->written.begin() + static_cast<std::ptrdiff_t>(b.first_parameter),
            store_->written.begin() + static_cast<std::ptrdiff_t>(b.last_parameter), char{0});
  store_->buckets[bucket] = {};
}

void Parameters::initialise(std::uint64_t seed, bool base) {
  values_changed();
  for (const Parameter& p : table_) {
    if (!base && (frozen_ == 0 || !p.trainable)) continue;
    Tensor target = value(p.name);
    switch (p.initialiser) {
      case Initialiser::zeros:
        target.zero();
        break;
      case Initialiser::ones:
        fill_ones(target);
        break;
      case Initialiser::normal:
        fill_normal(target, p.initial_std, seed, stream_of(p.name.c_str()));
        break;
    }
  }
}

}  // namespace ballast

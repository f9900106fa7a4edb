// Parameters of this rank: one flat buffer of values and one of gradients, addressed through the
// parameter table.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/parameter_buckets.hpp"
#include "core/model/parameter_table.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast {

struct GradientStore;  ///< private to Parameters

/// The gradient of one parameter or of neighbours, as backward passes add to it.
class ParameterGradient {
 public:
  ParameterGradient() = default;  ///< frozen
  /// A gradient apart from Parameters, which every contribution is added to.
  explicit ParameterGradient(Tensor sum);
  bool defined() const { return count_ > 0; }
  /// Where the next contribution goes: the first since Parameters::clear_gradients() overwrites,
  /// the others add.  Whoever asks writes.
  GradientTarget next() const;

 private:
  friend class Parameters;
  Tensor tensor_;  ///< undefined where gradients exist bucket by bucket
  std::shared_ptr<GradientStore> store_;
  std::size_t bucket_ = 0;
  std::int64_t begin_ = 0;  ///< first element in the bucket
  Shape shape_;
  std::size_t first_ = 0, count_ = 0;  ///< of the trainable parameters
};

/// A bucket (core/model/parameter_buckets) as it is stored.
struct StoredBucket {
  std::int64_t begin = 0, end = 0;   ///< in trainable_values() and gradients(), padding included
  std::int64_t first = 0, last = 0;  ///< its parameters' elements, where padding is not counted
  std::size_t first_parameter = 0, last_parameter = 0;  ///< of the trainable ones
  std::int64_t final_at = -1;                           ///< as ParameterBucket::final_at
  std::int64_t size() const { return end - begin; }
};

/// Values in the compute dtype (f32 or f64 on the host, bf16 on CUDA), gradients in sum_type() or
/// in bf16.  Parameters lie back to back in table order, so neighbours such as q, k, v form one
/// matrix; the end of every bucket is padded with zeros to a multiple of `pad_to` elements, so that
/// each divides over optimizer shards, on a GPU of 128 elements too.  Frozen parameters
/// (Parameter::trainable) come first and have values alone: gradients, optimizer and checkpoints
/// know only what follows them, the trainable part, and count its elements from 0.
class Parameters {
 public:
  Parameters() = default;
  /// `bucket_bytes`: of parameter_buckets().  `whole_gradients` false: there is no buffer of all
  /// gradients; a bucket's exist from the first contribution until release_gradients() (ZeRO 2).
  /// `bf16_gradients`: every contribution's sum is rounded to bf16.
  Parameters(std::vector<Parameter> table, DType type, Device& device, std::int64_t pad_to = 1,
             std::int64_t bucket_bytes = kOneBucket, bool whole_gradients = true,
             bool bf16_gradients = false);

  /// Errors: a frozen parameter after a trainable one, a name listed twice.
  const std::vector<Parameter>& table() const { return table_; }
  const std::vector<Parameter>& frozen_table() const { return frozen_table_; }
  const std::vector<Parameter>& trainable_table() const { return trainable_table_; }
  /// In order, tiling the trainable part.
  const std::vector<StoredBucket>& buckets() const { return buckets_; }
  const Parameter& info(const std::string& name) const;
  bool contains(const std::string& name) const { return position_.count(name) != 0; }
  std::int64_t offset(const std::string& name) const;  ///< first element in values()
  std::int64_t trainable_offset(const std::string& name)
      const;  ///< first element in trainable_values() and gradients(); negative when frozen
  /// Somebody still fetches values: told of a layer before its values are read (-1: the
  /// embedding's, kHeadLayer: all of them), it lets those arrive.  value(), values() and
  /// trainable_values() ask for all; who keeps such a tensor asks again with need_values().
  void on_values_needed(std::function<void(std::int64_t layer)> arrive) {
    *arrive_ = std::move(arrive);
  }
  void need_values(std::int64_t layer = kHeadLayer) const {
    if (*arrive_) (*arrive_)(layer);
  }
  Tensor value(const std::string& name) const;
  Tensor gradient(const std::string& name) const;  ///< undefined when frozen
  /// `count` neighbours starting at `name`, joined along dimension 0; all frozen or none.
  Tensor joined_value(const std::string& name, int count) const;
  Tensor joined_gradient(const std::string& name, int count) const;
  /// What layers hold; undefined when frozen.
  ParameterGradient gradient_of(const std::string& name, int count = 1) const;
  /// Begins a step: gradients count as zero, but nothing is written; each is overwritten by its
  /// first contribution.
  void clear_gradients();
  /// Zeroes what no contribution has reached since clear_gradients(), so that gradients() and
  /// gradient() hold what they should.
  void settle_gradients();
  /// The same for one bucket, whose gradients are returned, padding included.
  Tensor settle_gradients(std::size_t bucket);
  /// The bucket's gradients count as zero from here on, and take no memory where they need not.
  void release_gradients(std::size_t bucket);
  Tensor& values() {
    need_values();
    return values_;
  }  ///< [padded numel]
  Tensor trainable_values() const {
    need_values();
    return values_.rows(frozen_, values_.numel());
  }  ///< [padded trainable numel]
  /// [padded trainable numel]; between clear_gradients() and settle_gradients() undefined in parts.
  /// Undefined where gradients exist bucket by bucket, as gradient() and joined_gradient() are.
  Tensor& gradients() { return gradients_; }
  DType gradient_type() const { return gradient_type_; }
  /// Of master weights and of what sums up: f32, f64 where values are f64.
  DType sum_type() const { return dtype() == DType::f64 ? DType::f64 : DType::f32; }
  std::int64_t numel() const { return numel_; }  ///< without padding
  std::int64_t frozen_numel() const { return frozen_; }
  std::int64_t trainable_numel() const { return numel_ - frozen_; }  ///< without padding
  DType dtype() const { return values_.dtype(); }
  Space space() const { return values_.space(); }

  /// Whoever writes values says so, for those who hold them in another form (FP8).
  void values_changed() { ++*version_; }
  /// Counts values_changed(), from 1.
  std::shared_ptr<const std::uint64_t> version() const { return version_; }

  /// Counter-based initial values: depend on (seed, parameter name, element) alone.  `base` false:
  /// of adapters alone, where a folder's weights come in place of all others.
  void initialise(std::uint64_t seed, bool base = true);

 private:
  std::vector<Parameter> table_, frozen_table_, trainable_table_;
  std::map<std::string, std::size_t> position_;
  std::vector<std::int64_t> offset_;
  std::vector<StoredBucket> buckets_;
  std::int64_t numel_ = 0, frozen_ = 0;
  Tensor values_, gradients_;
  DType gradient_type_ = DType::f32;
  std::shared_ptr<GradientStore> store_;  ///< shared with those who add
  std::shared_ptr<std::function<void(std::int64_t)>> arrive_ =
      std::make_shared<std::function<void(std::int64_t)>>();
  std::shared_ptr<std::uint64_t> version_ = std::make_shared<std::uint64_t>(1);
};

}  // namespace ballast

#include "kernels/cuda/index/recall_builder.hpp"

#include <limits>

#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/index/uploads.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"

namespace ballast::cuda {
namespace {

constexpr std::int64_t kSums = 1 + kRecallParts;

Tensor upload_narrow(const std::vector<std::int64_t>& values, Device& device) {
  std::vector<std::int32_t> narrow;
  for (const std::int64_t value : values) {
    require(value <= std::numeric_limits<std::int32_t>::max(),
            "recall of so many keys is not measured on a GPU; set trace.recall_rows lower");
    narrow.push_back(static_cast<std::int32_t>(value));
  }
  return upload(narrow, device);
}

std::int64_t token_stride(const Tensor& t, const char* what) {
  require(t.rank() == 3 && t.dtype() == DType::bf16 &&
              (t.numel() == 0 || (t.strides()[2] == 1 && t.strides()[1] == t.size(2))),
          "recall on CUDA: {} of shape {} has no dense heads of bf16", what, to_string(t.shape()));
  return t.strides()[0];
}

}  // namespace

RecallBuilder::RecallBuilder(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& rows)
    : device_(device_of(Space::cuda)),
      at_(axes, axis, rows),
      local_(upload_narrow(at_.local, device_)),
      first_word_(upload_narrow(at_.first_word, device_)),
      base_(upload_narrow(at_.base, device_)),
      own_(upload_narrow(at_.own, device_)),
      key_block_(upload(at_.key_block, device_)) {
  std::vector<std::int32_t> ends;
  for (const KeyInterval& keys : at_.visible) ends.insert(ends.end(), {keys.begin, keys.end});
  visible_ = upload(ends, device_);
  const AxisShards& calls = axes.calls();
  for (std::size_t c = 0; c < calls.size(); ++c)
    call_block_.push_back(upload(global_blocks(axis, calls[c]), device_));
}

RecallRows RecallBuilder::launch_rows() const {
  return {static_cast<int>(rows()),
          local_.data<std::int32_t>(),
          first_word_.data<std::int32_t>(),
          base_.data<std::int32_t>(),
          own_.data<std::int32_t>(),
          reinterpret_cast<const Interval*>(visible_.data<std::int32_t>())};
}

Tensor RecallBuilder::queries(const Tensor& q) const {
  Tensor all = workspace({rows(), q.size(1), q.size(2)}, DType::f32, device_);
  check(recall_queries(launch_rows(), q.raw(), token_stride(q, "q"),
                       static_cast<int>(q.size(1) * q.size(2)), all.data<float>(), stream()),
        "queries of recall");
  return all;
}

Tensor RecallBuilder::computed(const std::vector<AttentionWork>& calls) const {
  const std::int64_t heads = calls.front().index_heads(), words = at_.first_word.back();
  Tensor bits = Tensor::zeros({heads * words}, DType::i64, device_, MemoryCategory::workspace);
  for (std::size_t c = 0; c < calls.size(); ++c) {
    // Of a pattern that the host made the heads of the calls do not matter here.
    const AttentionWork placed =
        calls[c].host() != nullptr
            ? place_pattern(*calls[c].host(), static_cast<int>(heads), static_cast<int>(heads))
            : calls[c];
    const PlacedIndex& at = dynamic_cast<const PatternTwin&>(*placed.device()).placed();
    check(recall_computed(launch_rows(), at.index, at.routed ? &at.routed->index : nullptr,
                          call_block_[c].data<std::int32_t>(), static_cast<int>(heads), words,
                          words_of(bits), stream()),
          "computed pairs of recall");
  }
  return bits;
}

Tensor RecallBuilder::maximum(const Tensor& queries, const Tensor& k, double scale) {
  queries_ = queries;
  k_ = k;
  scan_ = {queries_.data<float>(),
           k_.raw(),
           token_stride(k_, "k"),
           k_.size(0),
           static_cast<int>(queries_.size(1)),
           static_cast<int>(k_.size(1)),
           static_cast<int>(k_.size(2)),
           static_cast<float>(scale)};
  Tensor most = workspace({queries_.size(1), rows()}, DType::f32, device_);
  check(cudaMemsetAsync(most.raw(), kBelowScores, most.bytes(), stream()), "cudaMemsetAsync");
  check(recall_maximum(launch_rows(), scan_, most.data<float>(), stream()), "maximum of recall");
  return most;
}

Tensor RecallBuilder::sums(const Tensor& maximum, const Tensor& computed) {
  const std::int64_t words = at_.first_word.back();
  Tensor sums = Tensor::zeros({queries_.size(1), rows(), kSums}, DType::i64, device_,
                              MemoryCategory::workspace);
  check(recall_sums(launch_rows(), scan_, maximum.data<float>(), key_block_.data<std::int32_t>(),
                    words_of(computed), static_cast<int>(computed.numel() / words), words,
                    sums.data<std::int64_t>(), stream()),
        "sums of recall");
  return sums;
}

std::unique_ptr<RecallScores> recall_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                            const AxisRanges& rows) {
  return std::make_unique<RecallBuilder>(axes, axis, rows);
}

}  // namespace ballast::cuda

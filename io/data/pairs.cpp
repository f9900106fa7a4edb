#include "io/data/pairs.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "io/data/dataset_source.hpp"

namespace ballast {
namespace {

class PairDataset final : public Dataset {
 public:
  explicit PairDataset(std::unique_ptr<Dataset> documents) : documents_(std::move(documents)) {
    require(documents_->samples() % 2 == 0,
            "{}: {} documents make no pairs of a chosen and a rejected answer (loss.kind = "
            "\"dpo\"); give an even number, each chosen one before its rejected one",
            documents_->description(), documents_->samples());
  }

  std::int64_t samples() const override { return documents_->samples() / 2; }
  std::int64_t length(std::int64_t sample) const override {
    return chosen_tokens(sample) + documents_->length(2 * sample + 1);
  }
  std::int64_t loss_tokens(std::int64_t sample) const override {
    return chosen_loss_tokens(sample) + documents_->loss_tokens(2 * sample + 1);
  }
  std::int64_t chosen_tokens(std::int64_t sample) const override {
    return documents_->length(2 * sample);
  }
  std::int64_t chosen_loss_tokens(std::int64_t sample) const override {
    return documents_->loss_tokens(2 * sample);
  }
  void tokens(std::int64_t sample, std::int64_t begin, std::int64_t end,
              std::span<std::int32_t> out) const override {
    each_answer(sample, begin, end, out, [&](auto... part) { documents_->tokens(part...); });
  }
  void targets(std::int64_t sample, std::int64_t begin, std::int64_t end,
               std::span<std::int32_t> out) const override {
    each_answer(sample, begin, end, out, [&](auto... part) { documents_->targets(part...); });
  }
  std::int64_t vocabulary() const override { return documents_->vocabulary(); }
  std::string description() const override {
    return fmt::format("{}; {} pairs", documents_->description(), samples());
  }
  std::uint64_t fingerprint() const override {
    return Fingerprint()
        .add("pairs")
        .add(static_cast<std::int64_t>(documents_->fingerprint()))
        .value();
  }
  std::int64_t document(std::int64_t sample) const override {
    return documents_->document(2 * sample);
  }

 private:
  /// Calls read(document, begin, end, out) for the parts of [begin, end) in each answer.
  template <class Read>
  void each_answer(std::int64_t sample, std::int64_t begin, std::int64_t end,
                   std::span<std::int32_t> out, Read&& read) const {
    const std::int64_t middle = std::clamp(chosen_tokens(sample), begin, end);
    const auto first = static_cast<std::size_t>(middle - begin);
    if (begin < middle) read(2 * sample, begin, middle, out.first(first));
    const std::int64_t origin = chosen_tokens(sample);
    if (middle < end) read(2 * sample + 1, middle - origin, end - origin, out.subspan(first));
  }

  std::unique_ptr<Dataset> documents_;
};

}  // namespace

std::unique_ptr<Dataset> pair_up(std::unique_ptr<Dataset> documents) {
  return std::make_unique<PairDataset>(std::move(documents));
}

}  // namespace ballast

// data.source = "needle": samples of the needle task (core/data/needle_task), training samples
// first, then the held-out ones.
#include <algorithm>
#include <optional>

#include "core/base/error.hpp"
#include "io/data/dataset_source.hpp"

namespace ballast {

namespace {

class NeedleDataset final : public Dataset {
 public:
  explicit NeedleDataset(const DataOptions& options)
      : task_(options.needle), training_(options.samples), held_out_(options.needle_held_out) {
    task_.vocabulary = options.vocabulary;
    task_.seed = options.seed;
    require(training_ > 0, "data.source = \"needle\" needs data.samples above 0");
    const auto list = problems(task_);
    require(list.empty(), "{}", messages(list, "; "));
    require(task_.vocabulary > 0,
            "data.source = \"needle\": filler is made up below model.vocabulary, which is {}",
            task_.vocabulary);
    require(options.max_tokens == 0 || options.max_tokens >= longest(),
            "data.source = \"needle\": a sample has {} tokens and is never cut; the deck's limit "
            "is {} (data.max_tokens, or the longest of batching.groups)",
            longest(), options.max_tokens);
  }

  std::int64_t samples() const override { return training_ + held_out_; }
  std::int64_t held_out() const override { return held_out_; }
  std::int64_t length(std::int64_t sample) const override { return task_.lengths[kind(sample)]; }
  std::int64_t loss_tokens(std::int64_t sample) const override {
    return task_.loss_tokens(kind(sample));
  }
  void tokens(std::int64_t sample, std::int64_t begin, std::int64_t end,
              std::span<std::int32_t> out) const override {
    checked(sample, begin, end, out.size()).tokens(begin, out);
  }
  void targets(std::int64_t sample, std::int64_t begin, std::int64_t end,
               std::span<std::int32_t> out) const override {
    checked(sample, begin, end, out.size()).targets(begin, out);
  }
  std::vector<NeedleQuestion> questions(std::int64_t sample) const override {
    return at(sample).questions();
  }
  std::int64_t vocabulary() const override { return task_.vocabulary; }
  std::string description() const override {
    return fmt::format("needle: {} samples of {} tokens, {} pairs, {} questions{}", samples(),
                       fmt::join(task_.lengths, ", "), fmt::join(task_.pairs, ", "),
                       fmt::join(task_.questions, ", "),
                       task_.repeated() ? fmt::format(", task {}, repeats {}", name(task_.task),
                                                      fmt::join(task_.repeats, ", "))
                                        : "");
  }
  std::uint64_t fingerprint() const override {
    Fingerprint print;
    for (const auto* list : {&task_.lengths, &task_.pairs, &task_.questions})
      print.add(list->data(), list->size() * sizeof(std::int64_t));
    for (const auto* share : {&task_.length_share, &task_.held_out_share})
      print.add(share->data(), share->size() * sizeof(double));
    for (const std::int64_t n :
         {std::int64_t{task_.closing}, task_.keys, task_.values, task_.value_tokens,
          task_.vocabulary, static_cast<std::int64_t>(task_.seed), training_, held_out_})
      print.add(n);
    if (task_.repeated()) {
      print.add(static_cast<std::int64_t>(task_.task));
      print.add(task_.repeats.data(), task_.repeats.size() * sizeof(std::int64_t));
    }
    return print.value();
  }

 private:
  bool is_held_out(std::int64_t sample) const {
    require(sample >= 0 && sample < samples(), "sample {} of a dataset that has {}", sample,
            samples());
    return sample >= training_;
  }
  std::size_t kind(std::int64_t sample) const {
    return task_.kind(is_held_out(sample), index(sample));
  }
  std::int64_t index(std::int64_t sample) const {
    return is_held_out(sample) ? sample - training_ : sample;
  }
  std::int64_t longest() const {
    return *std::max_element(task_.lengths.begin(), task_.lengths.end());
  }

  /// A sample is read in many ranges, one after another: the last one stays.
  const NeedleSample& at(std::int64_t sample) const {
    if (!last_ || last_sample_ != sample) {
      last_.emplace(task_, is_held_out(sample), index(sample));
      last_sample_ = sample;
    }
    return *last_;
  }
  const NeedleSample& checked(std::int64_t sample, std::int64_t begin, std::int64_t end,
                              std::size_t room) const {
    const NeedleSample& found = at(sample);
    require(0 <= begin && begin <= end && end <= found.length() &&
                room == static_cast<std::size_t>(end - begin),
            "tokens [{}, {}) into {} places of sample {} (needle), which has {} tokens", begin, end,
            room, sample, found.length());
    return found;
  }

  NeedleOptions task_;
  std::int64_t training_, held_out_;
  mutable std::optional<NeedleSample> last_;
  mutable std::int64_t last_sample_ = -1;
};

}  // namespace

std::unique_ptr<Dataset> open_needle(const DataOptions& options) {
  return std::make_unique<NeedleDataset>(options);
}

}  // namespace ballast

#include "app/plan/planned_samples.hpp"

#include "core/base/error.hpp"
#include "core/config/run_options.hpp"

namespace ballast {

std::unique_ptr<Dataset> open_planned_data(const Deck& deck) {
  DataOptions data = data_options(deck);
  if (data.vocabulary == 0) data.vocabulary = 1 << 17;
  return open_dataset(data);
}

PlannedSamples::PlannedSamples(const Deck& deck)
    : deck_(deck),
      dataset_(open_planned_data(deck)),
      sampler_(
          dataset_->samples(), static_cast<std::uint64_t>(deck.integer("run.seed")),
          deck.real("data.validation_share"), deck.boolean("batching.shuffle"),
          [this](std::int64_t s) { return dataset_->document(s); }, dataset_->held_out()),
      window_(RunOptions::from(deck).window) {
  require(training_samples() > 0, "data: no training samples ({}); check the block [data]",
          dataset_->description());
}

void PlannedSamples::begin_with_curriculum() {
  sampler_.begin_with(RunOptions::from(deck_).curriculum,
                      [this](std::int64_t s) { return dataset_->length(s); });
}

std::vector<SampleLength> PlannedSamples::next(SamplerPosition& position) {
  return lengths(
      window_.next(sampler_, position, [this](std::int64_t s) { return dataset_->length(s); }));
}

std::vector<SampleLength> PlannedSamples::first(std::int64_t count) {
  SamplerPosition position;
  return lengths(sampler_.next(position, 0, count, {}));
}

std::vector<SampleLength> PlannedSamples::lengths(const std::vector<std::int64_t>& samples) const {
  std::vector<SampleLength> list;
  list.reserve(samples.size());
  // Loss tokens do not steer plans; counting them may mean reading masks.
  for (const std::int64_t s : samples) list.push_back({s, dataset_->length(s), 0});
  return list;
}

}  // namespace ballast

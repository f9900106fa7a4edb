#include "app/plan/planned_samples.hpp"

#include "app/plan/drift_sample.hpp"
#include "app/plan/prompts.hpp"
#include "core/base/error.hpp"
#include "core/config/run_options.hpp"

namespace ballast {

std::unique_ptr<Dataset> open_planned_data(const Config& config) {
  DataOptions data = data_options(config);
  if (data.vocabulary == 0) data.vocabulary = 1 << 17;
  return open_dataset(data);
}

Sampler sampler_of(const Config& config, const Dataset& dataset) {
  return Sampler(
      dataset.samples(), config.run.seed, config.data.validation_share, config.batching.shuffle,
      [&](std::int64_t s) { return dataset.document(s); }, dataset.held_out());
}

std::string short_curriculum(const Config& config, const Sampler& sampler) {
  const Curriculum asked = curriculum(config);
  const std::int64_t filled = sampler.short_steps();
  return filled < asked.steps ? curriculum_text(asked, filled) : "";
}

PlannedSamples::PlannedSamples(const Config& config)
    : config_(config),
      dataset_(open_planned_data(config)),
      sampler_(sampler_of(config, *dataset_)),
      window_(window_options(config)) {
  require(training_samples() > 0, "data: no training samples ({}); check the block [data]",
          dataset_->description());
}

void PlannedSamples::begin_with_curriculum() {
  sampler_.begin_with(curriculum(config_), [this](std::int64_t s) { return dataset_->length(s); });
}

std::vector<SampleLength> PlannedSamples::next(SamplerPosition& position) {
  std::vector<SampleLength> list;
  for (const std::int64_t s :
       window_.next(sampler_, position, [this](std::int64_t i) { return dataset_->length(i); }))
    list.push_back(sample_length(*dataset_, s));
  return list;
}

std::vector<SampleLength> PlannedSamples::first(std::int64_t count) {
  SamplerPosition position;
  return lengths(sampler_.next(position, 0, count, {}));
}

std::vector<SampleLength> PlannedSamples::evaluated() const {
  return lengths(sampler_.evaluated(config_.eval.samples));
}

std::vector<SampleLength> PlannedSamples::drifting() const {
  const std::optional<std::int64_t> sample =
      drift_sample(config_, *dataset_, sampler_, attention_options(config_));
  return sample ? lengths({*sample}) : std::vector<SampleLength>{};
}

std::vector<SampleLength> PlannedSamples::written() const {
  std::vector<SampleLength> list;
  for (const std::int64_t tokens :
       prompt_lengths(config_, sample_prompts(config_, *dataset_, sampler_)))
    list.push_back(
        {static_cast<std::int64_t>(list.size()), tokens + config_.eval.generate.tokens - 1, 1});
  return list;
}

std::vector<SampleLength> PlannedSamples::lengths(const std::vector<std::int64_t>& samples) const {
  std::vector<SampleLength> list;
  list.reserve(samples.size());
  // Loss tokens do not steer packing; counting those of a whole epoch may mean reading its masks.
  for (const std::int64_t s : samples) list.push_back(sample_length(*dataset_, s, false));
  return list;
}

}  // namespace ballast

// The deck's samples as plans see them: lengths alone, in the order that training takes them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"
#include "core/data/sampler_window.hpp"
#include "core/plan/batch/batch.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

/// The deck's dataset; a deck without a model will do, since no token is read.
std::unique_ptr<Dataset> open_planned_data(const Config& config);

/// Their order, and which of them are held out.
Sampler sampler_of(const Config& config, const Dataset& dataset);
/// The deck's curriculum in words, where the epoch has too few short samples for all of its steps;
/// "" elsewhere.
std::string short_curriculum(const Config& config, const Sampler& sampler);

class PlannedSamples {
 public:
  /// Errors: those of open_dataset, no training sample.
  explicit PlannedSamples(const Config& config);
  PlannedSamples(const PlannedSamples&) = delete;
  PlannedSamples& operator=(const PlannedSamples&) = delete;

  /// The deck's curriculum: its short samples come first.
  void begin_with_curriculum();
  /// The next global batch (batching.global_tokens, global_samples) from `position` on, which
  /// moves.
  std::vector<SampleLength> next(SamplerPosition& position);
  /// The first `count` samples of the epoch, however many batches they make.
  std::vector<SampleLength> first(std::int64_t count);

  /// What the deck's evaluations take; empty where nothing is held out.
  std::vector<SampleLength> evaluated() const;
  /// That whose drift is measured (drift_sample()); none: there is none.
  std::vector<SampleLength> drifting() const;
  /// The texts that evaluations write (eval.generate_*), at their longest.
  std::vector<SampleLength> written() const;

  const Dataset& dataset() const { return *dataset_; }
  const Sampler& sampler() const { return sampler_; }
  std::int64_t training_samples() const { return sampler_.training_samples(); }

 private:
  std::vector<SampleLength> lengths(const std::vector<std::int64_t>& samples) const;

  const Config& config_;
  std::unique_ptr<Dataset> dataset_;
  Sampler sampler_;
  SamplerWindow window_;
};

}  // namespace ballast

#include "core/data/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"

namespace ballast {

std::string curriculum_text(const Curriculum& curriculum, std::int64_t filled) {
  if (curriculum.steps <= 0) return "";
  std::string text = fmt::format("curriculum: {} samples of at most {} tokens alone",
                                 filled == 0   ? "no step takes"
                                 : filled == 1 ? "the first step takes"
                                               : fmt::format("the first {} steps take", filled),
                                 curriculum.max_tokens);
  if (filled < curriculum.steps)
    text += fmt::format(" (curriculum.steps = {}: the epoch has too few)", curriculum.steps);
  return text;
}

Sampler::Sampler(std::int64_t samples, std::uint64_t seed, double validation_share, bool shuffle,
                 const std::function<std::int64_t(std::int64_t)>& document, std::int64_t held_out)
    : seed_(seed), shuffle_(shuffle) {
  const std::int64_t all = samples;
  samples -= held_out;
  require(held_out >= 0 && samples > 0,
          "the dataset has no samples for training: {}, of which {} are held out", all, held_out);
  require(validation_share >= 0 && validation_share < 1,
          "data.validation_share = {} is outside [0, 1)", validation_share);
  const auto document_of = [&](std::int64_t sample) {
    return document ? document(sample) : sample;
  };
  const auto draw = [&](std::int64_t of_document) {
    return random_uniform(seed, stream_of("sampler.validation"),
                          static_cast<std::uint64_t>(of_document));
  };
  double lowest = 2, highest = -1;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const double value = draw(document_of(sample));
    lowest = std::min(lowest, value);
    highest = std::max(highest, value);
  }
  // Few samples may all fall on one side: the extreme ones then decide, so that both sides have
  // one.  A single document is trained on.
  double threshold = validation_share;
  if (threshold > 0)
    threshold = lowest < highest ? std::clamp(threshold, std::nextafter(lowest, 2.0), highest) : 0;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    (draw(document_of(sample)) < threshold ? validation_ : training_).push_back(sample);
  }
  for (std::int64_t sample = samples; sample < all; ++sample) validation_.push_back(sample);
}

void Sampler::begin_with(const Curriculum& curriculum,
                         const std::function<std::int64_t(std::int64_t)>& length) {
  if (curriculum.steps <= 0) return;
  std::vector<std::int64_t> first, rest;
  std::int64_t tokens = 0, samples = 0;
  for (const std::int64_t sample : order(0)) {
    const std::int64_t n = length(sample);
    if (short_steps_ == curriculum.steps || n > curriculum.max_tokens) {
      rest.push_back(sample);
      continue;
    }
    first.push_back(sample);
    tokens += n;
    ++samples;
    if (curriculum.global_samples > 0 ? samples == curriculum.global_samples
                                      : tokens >= curriculum.global_tokens) {
      ++short_steps_;
      short_samples_ = static_cast<std::int64_t>(first.size());
      tokens = samples = 0;
    }
  }
  first.insert(first.end(), rest.begin(), rest.end());
  first_order_ = std::move(first);
}

const std::vector<std::int64_t>& Sampler::order(std::int64_t epoch) {
  if (epoch == 0 && !first_order_.empty()) return first_order_;
  if (!shuffle_) return training_;
  if (order_epoch_ != epoch) {
    order_ = training_;
    const std::uint64_t stream = stream_of("sampler.order") + static_cast<std::uint64_t>(epoch);
    for (std::size_t i = order_.size(); i > 1; --i)
      std::swap(order_[i - 1], order_[random_bits(seed_, stream, i) % i]);  // Fisher-Yates
    order_epoch_ = epoch;
  }
  return order_;
}

std::vector<std::int64_t> Sampler::next(SamplerPosition& position, std::int64_t global_tokens,
                                        std::int64_t global_samples,
                                        const std::function<std::int64_t(std::int64_t)>& length) {
  require(global_tokens > 0 || global_samples > 0,
          "a step needs batching.global_tokens or batching.global_samples above 0");
  require(position.epoch >= 0 && position.index >= 0 && position.index < training_samples(),
          "sampler position {} of epoch {} does not exist: an epoch has {} training samples; was "
          "the checkpoint written with another dataset?",
          position.index, position.epoch, training_samples());
  SamplerPosition next = position;
  std::vector<std::int64_t> samples;
  std::int64_t tokens = 0;
  const auto enough = [&] {
    return global_samples > 0 ? static_cast<std::int64_t>(samples.size()) == global_samples
                              : tokens >= global_tokens;
  };
  do {
    require(global_samples > 0 || static_cast<std::int64_t>(samples.size()) < kMostStepSamples,
            "batching.global_tokens = {} takes more than {} samples a step, the most that are "
            "planned: so many hold {} tokens here; lower it to that at most",
            global_tokens, kMostStepSamples, tokens);
    const std::int64_t sample = order(next.epoch)[static_cast<std::size_t>(next.index)];
    samples.push_back(sample);
    if (global_samples <= 0) tokens += length(sample);
    if (++next.index == training_samples()) next = {next.epoch + 1, 0};
    require(global_samples > 0 || tokens > 0 ||
                static_cast<std::int64_t>(samples.size()) < 2 * training_samples(),
            "the {} training samples hold no token", training_samples());
  } while (!enough());
  position = next;
  return samples;
}

}  // namespace ballast

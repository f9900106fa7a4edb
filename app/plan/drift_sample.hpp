// The held-out sample on which the drift of a sparse pattern is measured (trace.recall_drift).
#pragma once
#include <cstdint>
#include <optional>

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

/// Whether drift is measured: trace.recall_drift, and a pattern that chooses by its own rule.
bool measures_drift(const Config& config, const AttentionOptions& attention);
/// The first held-out sample of which the pattern may leave anything out, as far as its length
/// tells.
std::optional<std::int64_t> drift_sample(const Config& config, const Dataset& data,
                                         const Sampler& sampler, const AttentionOptions& attention);
/// Throws Error where drift is to be measured and no sample is held out for it.
void refuse_missing_drift_sample(const Config& config, const Dataset& data, const Sampler& sampler);

}  // namespace ballast

// The texts that evaluations continue (eval.generate_*): which samples begin one, and whether the
// batching method has room for what is written after them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

/// A held-out sample whose first tokens are a prompt: eval.generate_prefix_tokens of them; where
/// that is 0 those before its first target, else a quarter of it.
struct SamplePrompt {
  std::int64_t sample = 0, tokens = 0;
};
std::vector<SamplePrompt> sample_prompts(const Config& config, const Dataset& data,
                                         const Sampler& sampler);

/// Tokens of every prompt of the deck: its texts', then its samples'.
std::vector<std::int64_t> prompt_lengths(const Config& config,
                                         std::span<const SamplePrompt> samples);

/// Throws Error where a prompt with eval.generate_tokens behind it is longer than the longest group
/// of Hierarchical Balance Packing: the evaluation could not be planned.
void refuse_prompts_beyond_groups(const Config& config, std::span<const std::int64_t> lengths);

}  // namespace ballast

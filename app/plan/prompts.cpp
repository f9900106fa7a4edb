#include "app/plan/prompts.hpp"

#include <algorithm>

#include "core/base/error.hpp"

namespace ballast {

std::vector<SamplePrompt> sample_prompts(const Config& config, const Dataset& data,
                                         const Sampler& sampler) {
  const GenerateConfig& generate = config.eval.generate;
  std::vector<std::int64_t> held_out = sampler.validation();
  held_out.resize(std::min(held_out.size(), static_cast<std::size_t>(generate.samples)));
  std::vector<SamplePrompt> prompts;
  for (const std::int64_t sample : held_out) {
    const std::int64_t chosen = data.chosen_tokens(sample),  // of a pair its chosen document alone
        length = chosen > 0 ? chosen : data.length(sample);
    std::int64_t tokens = std::min(generate.prefix_tokens, length);
    if (tokens == 0) {
      std::vector<std::int32_t> targets(static_cast<std::size_t>(length));
      data.targets(sample, 0, length, targets);
      const auto first =
          std::find_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
      tokens = first == targets.begin() || first == targets.end()
                   ? std::max<std::int64_t>(1, length / 4)
                   : first - targets.begin() + 1;
    }
    prompts.push_back({sample, tokens});
  }
  return prompts;
}

std::vector<std::int64_t> prompt_lengths(const Config& config,
                                         std::span<const SamplePrompt> samples) {
  std::vector<std::int64_t> lengths;
  for (const std::string& text : config.eval.generate.prompts)  // data of bytes
    lengths.push_back(static_cast<std::int64_t>(text.size()));
  for (const SamplePrompt& prompt : samples) lengths.push_back(prompt.tokens);
  return lengths;
}

void refuse_prompts_beyond_groups(const Config& config, std::span<const std::int64_t> lengths) {
  const std::vector<std::int64_t>& groups = config.batching.groups;
  if (groups.empty() || config.batching.method != Batching::hbp || lengths.empty()) return;
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end()),
                     written = config.eval.generate.tokens;
  require(
      longest + written - 1 <= groups.back(),
      "eval.generate_tokens = {}: with the longest prompt, of {} tokens, that is more than the "
      "longest group's {} (batching.groups) hold; generate fewer, shorten the prompts, or add a "
      "group",
      written, longest, groups.back());
}

}  // namespace ballast

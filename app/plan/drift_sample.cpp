#include "app/plan/drift_sample.hpp"

#include "core/base/error.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/attention/block_budget.hpp"

namespace ballast {
namespace {

/// Segments of no more tokens are computed whole, whatever the pattern chooses.
std::int64_t whole_tokens(const AttentionOptions& attention) {
  if (attention.pattern == PatternKind::moba)
    return keys_taken(attention.moba_top_k, attention.moba_block);
  if (attention.pattern == PatternKind::xattention)
    return 2 * attention.xattention_block;  // the first block and the own one
  return attention.whole_tokens();
}

}  // namespace

bool measures_drift(const Config& config, const AttentionOptions& attention) {
  return config.trace.measures_drift() && attention.chosen() &&
         attention.pattern != PatternKind::dense;
}

std::optional<std::int64_t> drift_sample(const Dataset& data, const Sampler& sampler,
                                         const AttentionOptions& attention) {
  for (const std::int64_t sample : sampler.validation())
    if (data.length(sample) > whole_tokens(attention)) return sample;
  return std::nullopt;
}

void refuse_missing_drift_sample(const Config& config, const Dataset& data,
                                 const Sampler& sampler) {
  const AttentionOptions attention = attention_options(config);
  require(!measures_drift(config, attention) || drift_sample(data, sampler, attention),
          "trace.recall_drift needs a held-out sample of more than {} tokens; set "
          "data.validation_share above 0, or trace.recall_drift = false",
          whole_tokens(attention));
}

}  // namespace ballast

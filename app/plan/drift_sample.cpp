#include "app/plan/drift_sample.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/attention/block_budget.hpp"

namespace ballast {
namespace {

/// Segments of no more tokens are computed whole, whatever the pattern chooses, or too short for
/// recall.
std::int64_t whole_tokens(const Config& config, const AttentionOptions& attention) {
  const std::int64_t budget = config.dst.enabled ? config.dst.base_budget : 0;
  std::int64_t taken = 0;
  if (attention.pattern == PatternKind::moba)
    taken = keys_taken(budget > 0 ? budget : attention.moba_top_k, attention.moba_block);
  else if (attention.pattern == PatternKind::xattention)
    taken = 2 * attention.xattention_block;  // the first block and the own one
  else if (attention.pattern == PatternKind::vertical_slash)
    taken = std::max<std::int64_t>(2, budget) * kBlock;  // likewise
  else if (attention.pattern == PatternKind::by_head ||
           attention.pattern == PatternKind::flexprefill)
    taken = 2 * kBlock;
  return std::max(attention.whole_tokens(), taken);
}

}  // namespace

bool measures_drift(const Config& config, const AttentionOptions& attention) {
  return config.trace.measures_drift() && attention.chosen() &&
         attention.pattern != PatternKind::dense;
}

std::optional<std::int64_t> drift_sample(const Config& config, const Dataset& data,
                                         const Sampler& sampler,
                                         const AttentionOptions& attention) {
  const std::int64_t whole = whole_tokens(config, attention);
  for (const std::int64_t sample : sampler.validation())
    if (data.length(sample) > whole) return sample;
  return std::nullopt;
}

void refuse_missing_drift_sample(const Config& config, const Dataset& data,
                                 const Sampler& sampler) {
  const AttentionOptions attention = attention_options(config);
  require(!measures_drift(config, attention) || drift_sample(config, data, sampler, attention),
          "trace.recall_drift needs a held-out sample of more than {} tokens; set "
          "data.validation_share above 0, or trace.recall_drift = false",
          whole_tokens(config, attention));
}

}  // namespace ballast

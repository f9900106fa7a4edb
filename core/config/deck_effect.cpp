#include "core/config/deck_effect.hpp"

#include <algorithm>

namespace ballast {
namespace {

/// `keys` (one that ends in "_" or "." stands for all that begin so) are read where `switch_key`
/// has one of `values`.
struct Reads {
  std::vector<std::string> keys;
  std::string switch_key;
  std::vector<std::string> values;  ///< as TOML; empty: anything but the default
};

const std::vector<Reads>& rules() {
  static const std::vector<Reads> list = {
      {{"chunk.tokens", "chunk.k", "chunk.offload", "chunk.window_tokens"},
       "batching.method",
       {"\"chunkflow\""}},
      {{"attention.vertical_share", "attention.slash_share", "attention.last_q", "attention.max_"},
       "attention.pattern",
       {"\"vertical_slash\""}},
      {{"attention.moba_"}, "attention.pattern", {"\"moba\""}},
      {{"attention.xattention_"}, "attention.pattern", {"\"xattention\""}},
      {{"attention.generated_"}, "attention.index", {"\"generated\""}},
      {{"ring.stripe"}, "ring.layout", {"\"striped\"", "\"shuffled\""}},
      {{"dst.anchor", "dst.threshold", "dst.base_budget", "dst.budgets"}, "dst.enabled", {"true"}},
      {{"sab."}, "batching.method", {"\"sab\""}},
      {{"batching.groups", "batching.groups_from", "batching.group_", "batching.balance",
        "batching.long"},
       "batching.method",
       {"\"hbp\""}},
      {{"batching.micro_batch_samples"}, "batching.method", {"\"none\"", "\"sab\"", "\"lbb\""}},
      {{"pipeline.search"}, "pipeline.schedule", {"\"state_aware_1f1b\"", "\"zero_bubble\""}},
      {{"curriculum.max_tokens"}, "curriculum.steps", {}},
      {{"lora.alpha", "lora.dropout", "lora.projections"}, "lora.rank", {}},
      {{"recompute.layers"}, "recompute.mode", {"\"full\""}},
      {{"data.paths", "data.extensions"}, "data.source", {"\"files\""}},
      {{"data.path"}, "data.source", {"\"megatron\"", "\"hdf5\""}},
      {{"data.mask_path"}, "data.source", {"\"megatron\""}},
      {{"data.lengths", "data.lengths_file"}, "data.source", {"\"lengths\""}},
      {{"data.bin_"}, "data.source", {"\"distribution\""}},
      {{"data.needle_"}, "data.source", {"\"needle\""}},
  };
  return list;
}

bool names(const std::string& key, const std::string& path) {
  return key.ends_with('_') || key.ends_with('.') ? path.starts_with(key) : path == key;
}

bool read_with(const Deck& deck, const Reads& rule) {
  const DeckValue& value = deck.value(rule.switch_key);
  if (rule.values.empty()) return value != find_key(rule.switch_key)->default_value;
  return std::find(rule.values.begin(), rule.values.end(), to_text(value)) != rule.values.end();
}

}  // namespace

std::vector<std::string> without_effect(const Deck& deck) {
  std::vector<std::string> list;
  for (const KeySpec& spec : deck_schema()) {
    const std::string path = spec.path();
    if (!deck.place(path).starts_with("command line")) continue;
    for (const Reads& rule : rules()) {
      const bool ours = std::any_of(rule.keys.begin(), rule.keys.end(),
                                    [&](const std::string& key) { return names(key, path); });
      if (!ours || read_with(deck, rule)) continue;
      std::string needs;
      for (const std::string& value : rule.values) needs += (needs.empty() ? "" : " or ") + value;
      list.push_back(path + " has no effect with " + rule.switch_key + " = " +
                     to_text(deck.value(rule.switch_key)) +
                     (needs.empty() ? "" : "; it is read with " + needs));
      break;
    }
  }
  return list;
}

}  // namespace ballast

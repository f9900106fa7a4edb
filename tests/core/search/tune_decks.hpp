// Small decks for tests of `ballast tune`, and what it searches by.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "core/config/step_options.hpp"
#include "core/search/tune.hpp"

namespace ballast {

/// A deck that states what a token and a pair take, of a model with 4 layers and 4 heads.
inline Config deck() {
  Config c;
  c.model.layers = 4, c.model.hidden = 64, c.model.intermediate = 192;
  c.model.query_heads = 4, c.model.kv_heads = 2, c.model.head_dim = 16;
  c.model.vocabulary = 256;
  c.data.source = DataSource::lengths;
  c.data.lengths = {64, 2048};
  c.batching.micro_batch_tokens = 512;
  c.costs.forward_token_s = 1e-5, c.costs.forward_pair_s = 1e-8;
  c.costs.exchange_token_s = 1e-6, c.costs.ring_hop_token_s = 1e-6;
  for (const char* key : {"costs.forward_token_s", "costs.forward_pair_s"})
    c.from.settings[key] = {Origin::file, "deck.toml:1"};
  return c;
}

inline void hold(Config& c, std::initializer_list<const char*> keys) {
  for (const char* key : keys) c.from.settings[key] = {Origin::command_line, key};
}

inline TuneInput input(const Config& base, int ranks, std::vector<std::int64_t> lengths) {
  TuneInput in;
  in.base = base;
  in.limits.ranks = ranks;
  in.steps.resize(2);
  for (auto& step : in.steps)
    for (std::size_t i = 0; i < lengths.size(); ++i)
      step.push_back({static_cast<std::int64_t>(i), lengths[i], lengths[i]});
  in.longest = {0, *std::max_element(lengths.begin(), lengths.end()), 0};
  in.costs = [](const Config& config) { return stated_costs(config, pattern_work(config)); };
  return in;
}

inline const std::vector<std::int64_t> kMixed{2048, 700, 512, 300, 256, 130, 128, 64, 64, 40};

}  // namespace ballast

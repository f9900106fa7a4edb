#include "app/plan/stored_groups.hpp"

#include <algorithm>

#include "app/plan/deck_profile.hpp"
#include "app/plan/planned_samples.hpp"
#include "core/base/hash.hpp"
#include "core/config/deck_value.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "io/profile/profile_file.hpp"

namespace ballast {
namespace {

std::string data_text(const Config& config) {
  const std::unique_ptr<Dataset> dataset = open_planned_data(config);
  std::int64_t tokens = 0, longest = 0;
  Hash hash;
  for (std::int64_t s = 0; s < dataset->samples(); ++s) {
    const std::int64_t length = dataset->length(s);
    tokens += length;
    longest = std::max(longest, length);
    hash.add(length);
  }
  return fmt::format("{} samples of {} tokens, the longest {}, lengths {:016x}", dataset->samples(),
                     tokens, longest, hash.value());
}

/// What the third stage plans whole steps by; stages 1 and 2 look at single packs.
std::string planned_steps_text(const Config& config) {
  const BatchingConfig& b = config.batching;
  if (!b.select_refine) return "batching.select_refine off";
  const std::string size = b.global_samples > 0 ? fmt::format("global_samples {}", b.global_samples)
                                                : fmt::format("global_tokens {}", b.global_tokens);
  return fmt::format("batching.{}, packing {}, balance {}, scope {}", size, name(b.packing),
                     b.balance, name(b.scope));
}

using Uses = std::map<std::string, std::string>;

std::size_t differences(const Uses& a, const Uses& b) {
  return static_cast<std::size_t>(std::count_if(b.begin(), b.end(), [&](const auto& use) {
    const auto at = a.find(use.first);
    return at == a.end() || at->second != use.second;
  }));
}

/// What attention costs and keeps by.
std::string attention_text(const Config& config) {
  std::string text = name(config.attention.pattern);
  const DstOptions dst = dst_options(config);
  if (dst.base_budget > 0)
    text += fmt::format(", budget {} of blocks of {} tokens", dst.base_budget,
                        budget_block_tokens(config));
  if (config.dst.enabled) text += fmt::format(", dst.budgets {}", to_text(dst.candidates));
  if (config.attention.expected_sparsity > 0)
    text += fmt::format(", attention.expected_sparsity {}", config.attention.expected_sparsity);
  return text;
}

std::string memory_text(const Config& config) {
  const double limit = config.batching.select_memory_gib;
  const OptimizerConfig& optimizer = config.optimizer;
  std::string text = fmt::format("batching.select_memory_gib {}, optimizer.zero {}",
                                 limit > 0 ? fmt::format("{}", limit) : "none", optimizer.zero);
  if (optimizer.kind != OptimizerKind::adamw)
    text += fmt::format(", optimizer.kind {}", name(optimizer.kind));
  if (optimizer.bf16_moments()) text += ", optimizer.moments bf16";
  if (optimizer.bf16_gradients()) text += ", optimizer.gradients bf16";
  return text;
}

}  // namespace

std::map<std::string, std::string> groups_made_for(const Config& config) {
  const ModelShape model = model_shape(config);
  const MeshShape mesh = config.mesh;
  return {{"model",
           fmt::format(
               "{} layers, vocabulary {}{}", model.layers, model.vocabulary,
               model.lora.rank > 0 ? fmt::format(", adapters of rank {}", model.lora.rank) : "")},
          {"data", data_text(config)},
          {"ranks", fmt::format("mesh.dp {}, mesh.cp {}", mesh.dp, mesh.cp())},
          {"memory", memory_text(config)},
          {"attention", attention_text(config)},
          {"steps", planned_steps_text(config)},
          {"tried", fmt::format("batching.select_lengths {}, select_ranks {}",
                                to_text(config.batching.select_lengths),
                                to_text(config.batching.select_ranks))}};
}

void store_groups(const Config& config, const std::vector<PackGroup>& groups) {
  const std::string& path = config.profile.table;
  ProfileTable table = read_profile(path);
  const Uses uses = groups_made_for(config);
  std::erase_if(table.groups, [&](const StoredGroups& g) { return g.made_for == uses; });
  table.groups.push_back({uses, groups});
  write_profile(path, table);
}

std::vector<PackGroup> stored_groups(const Config& config, std::vector<std::string>& notes) {
  const std::string& path = config.profile.table;
  const ProfileTable table = read_profile(path);
  const bool allowed = config.profile.allow_mismatch;
  compare_identity(config, table, planned_identity(config), notes);
  require(!table.groups.empty(),
          "profile table {} holds no packing groups, which batching.groups_from = \"profile\" asks "
          "for; select them with `ballast plan {}`",
          path, config.from.file);
  const Uses here = groups_made_for(config);
  const StoredGroups& nearest = *std::min_element(
      table.groups.begin(), table.groups.end(), [&](const StoredGroups& a, const StoredGroups& b) {
        return differences(a.made_for, here) < differences(b.made_for, here);
      });
  std::vector<std::string> list;
  for (const auto& [key, value] : here) {
    const auto there = nearest.made_for.find(key);
    const std::string stated = there == nearest.made_for.end() ? "not stated" : there->second;
    if (stated != value)
      list.push_back(fmt::format("{} of the selection: {}; here: {}", key, stated, value));
  }
  require(list.empty() || allowed,
          "the packing groups in profile table {} were selected for something else:\n  {}\nselect "
          "them for this deck with `ballast plan {}`, or set profile.allow_mismatch = true",
          path, fmt::join(list, "\n  "), config.from.file);
  notes.insert(notes.end(), list.begin(), list.end());
  return nearest.groups;
}

void use_groups(Config& config, const std::vector<PackGroup>& groups, DeckNeeds needs) {
  Config with = config;  // as it was where these are refused
  set_groups(with, groups, "profile table " + config.profile.table);
  std::string all;
  for (const Problem& problem : problems(with, needs))
    all += (all.empty() ? "" : "\n") + placed(problem, with.from);
  require(all.empty(), "{}", all);
  config = std::move(with);
}

void take_stored_groups(Config& config, DeckNeeds needs, std::vector<std::string>& notes) {
  use_groups(config, stored_groups(config, notes), needs);
}

}  // namespace ballast

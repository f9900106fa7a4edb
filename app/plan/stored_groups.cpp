#include "app/plan/stored_groups.hpp"

#include <algorithm>

#include "app/plan/latency.hpp"
#include "app/plan/planned_samples.hpp"
#include "core/base/hash.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "io/profile/profile_file.hpp"

namespace ballast {
namespace {

std::string data_text(const Deck& deck) {
  const std::unique_ptr<Dataset> dataset = open_planned_data(deck);
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

using Uses = std::map<std::string, std::string>;

std::size_t differences(const Uses& a, const Uses& b) {
  return static_cast<std::size_t>(std::count_if(b.begin(), b.end(), [&](const auto& use) {
    const auto at = a.find(use.first);
    return at == a.end() || at->second != use.second;
  }));
}

}  // namespace

bool takes_stored_groups(const Deck& deck) {
  return deck.text("batching.method") == "hbp" && deck.text("batching.groups_from") == "profile";
}

bool lacks_groups(const Deck& deck) {
  return deck.text("batching.method") == "hbp" && !takes_stored_groups(deck) &&
         deck.get<std::vector<std::int64_t>>("batching.groups").empty();
}

std::map<std::string, std::string> groups_made_for(const Deck& deck) {
  const ModelShape model = model_shape(deck);
  const MeshShape mesh = mesh_shape(deck);
  const double limit = deck.real("batching.select_memory_gib");
  return {{"model",
           fmt::format(
               "{} layers, vocabulary {}{}", model.layers, model.vocabulary,
               model.lora.rank > 0 ? fmt::format(", adapters of rank {}", model.lora.rank) : "")},
          {"data", data_text(deck)},
          {"ranks", fmt::format("mesh.dp {}, mesh.cp {}", mesh.dp, mesh.cp())},
          {"memory", fmt::format("batching.select_memory_gib {}, optimizer.zero {}",
                                 limit > 0 ? fmt::format("{}", limit) : "none",
                                 deck.integer("optimizer.zero"))},
          {"attention", deck.text("attention.pattern")},
          {"tried", fmt::format("batching.select_lengths {}, select_ranks {}",
                                to_text(deck.value("batching.select_lengths")),
                                to_text(deck.value("batching.select_ranks")))}};
}

void store_groups(const Deck& deck, const std::vector<PackGroup>& groups) {
  const std::string& path = deck.text("profile.table");
  ProfileTable table = read_profile(path);
  const Uses uses = groups_made_for(deck);
  std::erase_if(table.groups, [&](const StoredGroups& g) { return g.made_for == uses; });
  table.groups.push_back({uses, groups});
  write_profile(path, table);
}

std::vector<PackGroup> stored_groups(const Deck& deck, std::vector<std::string>& notes) {
  const std::string& path = deck.text("profile.table");
  const ProfileTable table = read_profile(path);
  const bool allowed = deck.boolean("profile.allow_mismatch");
  const auto mismatch = identity_differences(path, table, planned_identity(deck), allowed);
  notes.insert(notes.end(), mismatch.begin(), mismatch.end());
  require(!table.groups.empty(),
          "profile table {} holds no packing groups, which batching.groups_from = \"profile\" asks "
          "for; select them with `ballast plan {}`",
          path, deck.file);
  const Uses here = groups_made_for(deck);
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
          path, fmt::join(list, "\n  "), deck.file);
  notes.insert(notes.end(), list.begin(), list.end());
  return nearest.groups;
}

void set_groups(Deck& deck, const std::vector<PackGroup>& groups, DeckNeeds needs) {
  std::vector<std::int64_t> tokens, ranks, recompute;
  for (const PackGroup& g : groups)
    tokens.push_back(g.tokens), ranks.push_back(g.ranks), recompute.push_back(g.recompute_layers);
  const std::string place = "profile table " + deck.text("profile.table");
  deck.set("batching.groups", tokens, place);
  deck.set("batching.group_ranks", ranks, place);
  deck.set("batching.group_recompute", recompute, place);
  deck.set("batching.groups_from", std::string("deck"), place);
  const std::vector<std::string> problems = deck_problems(deck, needs);
  require(problems.empty(), "{}", fmt::join(problems, "\n"));
}

}  // namespace ballast

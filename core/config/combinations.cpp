#include "core/config/combinations.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/config/run_options.hpp"

namespace ballast {
namespace {

using Choices = std::vector<Choice>;

/// Choices of one dimension that are the values of one member.
template <class Block, class Value>
void values(Choices& all, const char* dimension, const char* key, Block Config::*block,
            Value Block::*member) {
  for (const auto& [value, name] : EnumNames<Value>::table)
    all.push_back({dimension,
                   name,
                   key,
                   {fmt::format("{}={}", key, name)},
                   [=, wanted = value](const Config& c) { return c.*block.*member == wanted; }});
}

void batching_choices(Choices& all) {
  for (const auto& [method, name] : EnumNames<Batching>::table) {
    std::vector<std::string> settings{fmt::format("batching.method={}", name)};
    if (method == Batching::hbp) settings.push_back("batching.groups=[64,256]");
    if (method == Batching::balanced) settings.push_back("batching.select_ranks=[1]");
    all.push_back({"method", name, "batching.method", settings, [wanted = method](const Config& c) {
                     return c.batching.method == wanted && !ranks_share_packs(c);
                   }});
  }
  all.push_back(
      {"method",
       "hbp over ranks",
       "batching.group_ranks",
       {"batching.method=hbp", "batching.groups=[64,256]", "batching.group_ranks=[1,2]"},
       [](const Config& c) { return c.batching.method == Batching::hbp && ranks_share_packs(c); }});
  all.push_back({"method",
                 "balanced over ranks",
                 "batching.select_ranks",
                 {"batching.method=balanced", "batching.select_ranks=[1,2]"},
                 [](const Config& c) {
                   return c.batching.method == Batching::balanced && ranks_share_packs(c);
                 }});
  values(all, "scope", "batching.scope", &Config::batching, &BatchingConfig::scope);
  for (const auto& [normaliser, name] : EnumNames<LossNormaliser>::table)
    if (normaliser != LossNormaliser::pair_mean)  // comes with pairs, not by choice
      all.push_back(
          {"normaliser",
           name,
           "loss.normaliser",
           {fmt::format("loss.normaliser={}", name)},
           [wanted = normaliser](const Config& c) { return c.loss.normaliser == wanted; }});
  all.push_back(
      {"loss", "cross_entropy", "loss.kind", {}, [](const Config& c) { return !trains_pairs(c); }});
  all.push_back({"loss",
                 "dpo",
                 "loss.kind",
                 {"loss.kind=dpo", "dpo.reference_free=true", "data.long=truncate"},
                 trains_pairs});
}

void attention_choices(Choices& all) {
  values(all, "pattern", "attention.pattern", &Config::attention, &AttentionConfig::pattern);
  values(all, "index", "attention.index", &Config::attention, &AttentionConfig::index);
  all.push_back({"selection", "last", "attention.selection", {}, [](const Config& c) {
                   return c.attention.selection == IndexSelection::last;
                 }});
  all.push_back({"selection",
                 "causal",
                 "attention.selection",
                 {"attention.selection=causal", "attention.stretch=64"},
                 [](const Config& c) { return c.attention.selection == IndexSelection::causal; }});
  all.push_back({"dst", "off", "dst.enabled", {}, [](const Config& c) { return !c.dst.enabled; }});
  all.push_back({"dst",
                 "on",
                 "dst.enabled",
                 {"dst.enabled=true", "dst.base_budget=2", "dst.budgets=[1,2,3]"},
                 [](const Config& c) { return c.dst.enabled; }});
}

/// Degrees of the mesh: one choice of 1 and one above it.
void degree(Choices& all, const char* dimension, int MeshShape::*member) {
  const std::string key = fmt::format("mesh.{}", dimension);
  all.push_back(
      {dimension, "1", key, {}, [member](const Config& c) { return c.mesh.*member == 1; }});
  all.push_back({dimension, "2", key, {key + "=2"}, [member](const Config& c) {
                   return c.mesh.*member > 1;
                 }});
}

void mesh_choices(Choices& all) {
  degree(all, "dp", &MeshShape::dp);
  degree(all, "pp", &MeshShape::pp);
  degree(all, "sp", &MeshShape::sp);
  degree(all, "tp", &MeshShape::tp);
  all.push_back(
      {"ring", "none", "mesh.cp_inner", {}, [](const Config& c) { return c.mesh.cp() == 1; }});
  all.push_back({"ring", "flat", "mesh.cp_inner", {"mesh.cp_inner=2"}, [](const Config& c) {
                   return c.mesh.cp() > 1 && c.mesh.cp_outer == 1;
                 }});
  all.push_back({"ring",
                 "hierarchical",
                 "mesh.cp_outer",
                 {"mesh.cp_inner=2", "mesh.cp_outer=2"},
                 [](const Config& c) { return c.mesh.cp_outer > 1; }});
  values(all, "layout", "ring.layout", &Config::ring, &RingConfig::layout);
  values(all, "schedule", "pipeline.schedule", &Config::pipeline, &PipelineConfig::schedule);
}

void memory_choices(Choices& all) {
  values(all, "optimizer", "optimizer.kind", &Config::optimizer, &OptimizerConfig::kind);
  for (int stage = 0; stage <= 2; ++stage)
    all.push_back({"zero",
                   std::to_string(stage),
                   "optimizer.zero",
                   {fmt::format("optimizer.zero={}", stage)},
                   [stage](const Config& c) { return c.optimizer.zero == stage; }});
  values(all, "recompute", "recompute.mode", &Config::recompute, &RecomputeOptions::mode);
  values(all, "offload", "chunk.offload", &Config::chunk, &ChunkConfig::offload);
  all.push_back({"lora", "off", "lora.rank", {}, [](const Config& c) { return c.lora.rank == 0; }});
  all.push_back({"lora", "on", "lora.rank", {"lora.rank=4"}, [](const Config& c) {
                   return c.lora.rank > 0;
                 }});
  values(all, "precision", "run.precision", &Config::run, &RunConfig::precision);
  values(all, "backend", "run.backend", &Config::run, &RunConfig::backend);
}

using Refusals = std::vector<Refusal>;

void dst_refusals(Refusals& all) {
  for (const auto& [pattern, name] : EnumNames<PatternKind>::table)
    if (!has_budgets(pattern))
      all.push_back({{"dst on", fmt::format("pattern {}", name)},
                     fmt::format("dst.enabled tunes the budget of attention.pattern = \"moba\" or "
                                 "\"vertical_slash\"; \"{}\" has none",
                                 name),
                     ""});
  for (const char* index : {"generated", "recorded"})
    all.push_back(
        {{"dst on", fmt::format("index {}", index)},
         fmt::format("dst.enabled needs routing scores, which attention.index = \"{}\" does "
                     "not have",
                     index),
         "set \"pattern\""});
  all.push_back({{"dst on", "method hbp over ranks"},
                 "dst.enabled: a pack on several ranks (batching.group_ranks) has no latency that "
                 "the others could be aligned to",
                 "use packs of one rank, or mesh.sp"});
  all.push_back({{"dst on", "method balanced over ranks"},
                 "dst.enabled: a micro-batch on several ranks (batching.method = \"balanced\") has "
                 "no latency that the others could be aligned to",
                 "set batching.select_ranks = [1], or use mesh.sp"});
}

void selection_refusals(Refusals& all) {
  all.push_back({{"selection causal", "pattern xattention"},
                 "attention.selection = \"causal\": xattention chooses for a block of queries by "
                 "that block's own queries",
                 "use \"vertical_slash\", or \"moba\", which looks at no later token"});
  for (const char* pattern : {"by_head", "flexprefill"})
    all.push_back({{"selection causal", fmt::format("pattern {}", pattern)},
                   fmt::format("attention.selection = \"causal\": {} chooses by a segment's last "
                               "queries so far",
                               pattern),
                   "use \"vertical_slash\", or \"moba\", which looks at no later token"});
  all.push_back({{"selection causal", "dst on"},
                 "attention.selection = \"causal\": dst.enabled gives a layer one budget, by "
                 "coverage that all queries of a micro-batch have a part in",
                 ""});
  all.push_back(
      {{"selection causal", "pattern vertical_slash", "backend cuda"},
       "attention.selection = \"causal\" with vertical_slash is chosen on the host so far",
       "set run.backend = \"host\""});
}

void sharing_refusals(Refusals& all) {
  all.push_back({{"sp 2", "method hbp over ranks"},
                 "mesh.sp above 1: with batching.group_ranks each group joins data-parallel ranks "
                 "itself",
                 "set mesh.sp = 1"});
  all.push_back({{"sp 2", "method balanced over ranks"},
                 "mesh.sp above 1: with batching.select_ranks above 1 groups join data-parallel "
                 "ranks themselves",
                 "set mesh.sp = 1 or batching.select_ranks = [1]"});
}

void precision_refusals(Refusals& all) {
  all.push_back({{"precision bf16", "backend host"},
                 "run.precision = \"bf16\" needs run.backend = \"cuda\"",
                 "the host computes in \"fp32\" or \"fp64\""});
  all.push_back({{"precision fp64", "backend cuda"},
                 "run.precision = \"fp64\" needs run.backend = \"host\"",
                 "CUDA computes in \"bf16\""});
}

void loss_refusals(Refusals& all) {
  all.push_back({{"loss dpo", "method chunkflow"},
                 "loss.kind = \"dpo\" needs both answers of a pair in one micro-batch, which "
                 "batching.method = \"chunkflow\" cuts",
                 "set \"packed\", \"hbp\" or \"balanced\""});
}

void optimizer_refusals(Refusals& all) {
  all.push_back({{"optimizer muon", "zero 2"},
                 "optimizer.kind = \"muon\" takes whole matrices of the step's summed gradient, "
                 "and is not run with optimizer.zero = 2",
                 "set optimizer.zero = 1, or optimizer.kind = \"adamw\""});
}

/// What no executor of this version runs; plans are made of epochs alone.
void planned_refusals(Refusals& all) {
  all.push_back(
      {{"tp 2"},
       "mesh.tp above 1: tensor parallelism cannot be run by this version",
       "set mesh.tp = 1 and use optimizer.zero and the ring (mesh.cp_outer, mesh.cp_inner)"});
  all.push_back(
      {{"scope epoch"},
       "batching.scope = \"epoch\" is for `ballast pack`: a training step's samples do not "
       "depend on the mesh",
       "set batching.scope = \"step\"",
       true});
  for (const auto& [method, name] : EnumNames<Batching>::table)
    if (!packs_whole_samples(method))
      all.push_back({{"scope epoch", fmt::format("method {}", name)},
                     fmt::format("batching.scope = \"epoch\" packs whole epochs; batching.method = "
                                 "\"{}\" needs batching.scope = \"step\"",
                                 name),
                     ""});
}

}  // namespace

std::span<const Choice> choices() {
  static const Choices all = [] {
    Choices list;
    batching_choices(list);
    attention_choices(list);
    mesh_choices(list);
    memory_choices(list);
    return list;
  }();
  return all;
}

std::span<const Refusal> refusals() {
  static const Refusals all = [] {
    Refusals list;
    precision_refusals(list);
    dst_refusals(list);
    selection_refusals(list);
    sharing_refusals(list);
    loss_refusals(list);
    optimizer_refusals(list);
    planned_refusals(list);
    return list;
  }();
  return all;
}

std::vector<Key> Refusal::keys() const {
  std::vector<Key> list;
  for (const std::string& name : choices)
    for (const Choice& choice : ballast::choices())
      if (choice.name() == name) list.push_back(choice.key);
  return list;
}

std::vector<Problem> refused_combinations(const Config& config, bool executes) {
  std::set<std::string> chosen;
  for (const Choice& choice : choices())
    if (choice.chosen(config)) chosen.insert(choice.name());
  std::vector<Problem> found;
  for (const Refusal& r : refusals())
    if ((executes || !r.planned) &&
        std::all_of(r.choices.begin(), r.choices.end(),
                    [&](const std::string& name) { return chosen.count(name) != 0; }))
      found.push_back({r.keys(), r.because, r.remedy});
  return found;
}

std::string combinations_text() {
  std::string text =
      "What a deck can choose between.  Choices of different dimensions run together unless they "
      "are\nrefused below.\n";
  const std::string* dimension = nullptr;
  for (const Choice& choice : choices()) {
    if (dimension == nullptr || *dimension != choice.dimension)
      text += fmt::format("\n{} ({})\n", choice.dimension, choice.key.path);
    dimension = &choice.dimension;
    const auto settings =
        choice.settings.empty() ? "default" : fmt::format("{}", fmt::join(choice.settings, "  "));
    text += fmt::format("  {:<20}{}\n", choice.value, settings);
  }
  text += "\nRefused\n";
  for (const Refusal& r : refusals())
    text += fmt::format("  {}{}\n    {}\n", fmt::join(r.choices, " with "),
                        r.planned ? " (planned, not executed)" : "",
                        Problem{{}, r.because, r.remedy}.message());
  return text;
}

std::string combinations_json() {
  nlohmann::ordered_json json;
  for (const Choice& choice : choices())
    json["dimensions"][choice.dimension].push_back(
        {{"value", choice.value}, {"key", choice.key.path}, {"settings", choice.settings}});
  for (const Refusal& r : refusals()) {
    std::vector<std::string> keys;
    for (const Key& key : r.keys()) keys.push_back(key.path);
    json["refused"].push_back({{"choices", r.choices},
                               {"keys", keys},
                               {"because", r.because},
                               {"remedy", r.remedy},
                               {"planned", r.planned}});
  }
  return json.dump(2) + "\n";
}

}  // namespace ballast

// Rules that join several keys.  One line a rule; messages name the keys, the place and the remedy.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/config/deck.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {
namespace {

class Rules {
 public:
  Rules(const Deck& deck, const std::set<std::string>& faulty) : deck_(deck), faulty_(faulty) {}

  /// Reports `message` at the first of `keys` that the deck sets, unless one of them is faulty.
  void add(const std::vector<std::string>& keys, const std::string& message) {
    for (const auto& key : keys)
      if (faulty_.count(key) != 0) return;
    std::string place = deck_.file.empty() ? "deck" : deck_.file;
    for (const auto& key : keys)
      if (deck_.is_set(key) && !deck_.place(key).starts_with("preset ")) {
        place = deck_.place(key);
        break;
      }
    list.push_back(place + ": " + message);
  }
  std::vector<std::string> list;

 private:
  const Deck& deck_;
  const std::set<std::string>& faulty_;
};

std::vector<std::string> paths_of(const std::string& block) {
  std::vector<std::string> paths;
  for (const auto& key : block_keys(block)) paths.push_back(block + "." + key);
  return paths;
}

void run_rules(const Deck& deck, Rules& rules) {
  const std::string& backend = deck.text("run.backend");
  const std::string& precision = deck.text("run.precision");
  if (backend == "host" && precision == "bf16")
    rules.add({"run.precision", "run.backend"},
              "run.precision = \"bf16\" needs run.backend = \"cuda\"; the host computes in "
              "\"fp32\" or \"fp64\"");
  if (backend == "cuda" && precision == "fp64")
    rules.add({"run.precision", "run.backend"},
              "run.precision = \"fp64\" needs run.backend = \"host\"; CUDA computes in \"bf16\"");
  const bool needle = deck.text("data.source") == "needle";
  const char* held_out = needle ? "data.needle_held_out" : "data.validation_share";
  if (deck.integer("eval.every_steps") > 0 &&
      (needle ? deck.integer(held_out) == 0 : deck.real(held_out) == 0))
    rules.add({"eval.every_steps", held_out},
              fmt::format("eval.every_steps = {} needs held-out samples; set {} above 0",
                          deck.integer("eval.every_steps"), held_out));
}

void mesh_rules(const Deck& deck, Rules& rules) {
  const MeshShape mesh = mesh_shape(deck);
  for (const std::string& problem : problems(mesh, 0)) rules.add(paths_of("mesh"), problem);
  const std::int64_t layers = model_shape(deck).layers;
  if (layers > 0 && mesh.pp > layers)
    rules.add(
        {"mesh.pp", "model.layers"},
        fmt::format("mesh.pp = {} is more than the model's {} layers: a stage needs at least one",
                    mesh.pp, layers));
  const std::int64_t heads = model_shape(deck).query_heads;
  if (mesh.sp > 1 && heads > 0)
    if (const std::string problem = head_split_problem(heads, mesh.sp); !problem.empty())
      rules.add({"mesh.sp", "model.query_heads"},
                fmt::format("mesh.sp = {}: {}", mesh.sp, problem));
}

void model_rules(const Deck& deck, Rules& rules) {
  const bool custom = deck.text("model.preset") == "custom";
  for (const std::string& problem : problems(model_shape(deck))) {
    // Messages of a shape begin with the field's name, which is the key's.
    const std::string key = fmt::format("model.{}", problem.substr(0, problem.find(' ')));
    const bool missing = custom && find_key(key) != nullptr && !deck.is_set(key);
    const std::string hint =
        missing ? "; a custom model states its whole shape, or choose a model.preset" : "";
    std::vector<std::string> keys;
    if (find_key(key) != nullptr) keys.push_back(key);
    for (const auto& path : paths_of("model"))
      if (problem.find(fmt::format(" {} ", path.substr(6))) != std::string::npos)
        keys.push_back(path);  // the others that it names
    keys.push_back("model.preset");
    rules.add(keys, "model." + problem + hint);
  }
  // What the attention kernels are written for (kernels/cuda/attention/attention_operations.cpp).
  const ModelShape shape = model_shape(deck);
  if (deck.text("run.backend") != "cuda" || shape.head_dim <= 0 || shape.kv_heads <= 0) return;
  if (shape.head_dim != 64 && shape.head_dim != 128)
    rules.add({"model.head_dim", "run.backend"},
              fmt::format("model.head_dim = {}: attention on CUDA needs 64 or 128; choose one, or "
                          "run.backend = \"host\"",
                          shape.head_dim));
  if (shape.query_heads / shape.kv_heads > 16)
    rules.add({"model.kv_heads", "model.query_heads", "run.backend"},
              fmt::format("model.kv_heads = {} for {} query heads: attention on CUDA takes at most "
                          "16 query heads a key/value head; or "
                          "run.backend = \"host\"",
                          shape.kv_heads, shape.query_heads));
}

void data_rules(const Deck& deck, Rules& rules) {
  const std::string& source = deck.text("data.source");
  const auto needs = [&](const char* key, bool there, const char* what) {
    if (!there)
      rules.add({"data.source", key},
                fmt::format("data.source = \"{}\" needs {}: {}", source, key, what));
  };
  if (source == "files") {
    needs("data.paths", !deck.get<std::vector<std::string>>("data.paths").empty(),
          "folders or files to read");
    const std::int64_t vocabulary = model_shape(deck).vocabulary;
    if (vocabulary > 0 && vocabulary < 256)
      rules.add({"model.vocabulary", "data.source", "model.preset"},
                fmt::format("model.vocabulary = {} is below the 256 token ids of byte-level data "
                            "(data.source = \"files\")",
                            vocabulary));
  }
  if (source == "megatron")
    needs("data.path", !deck.text("data.path").empty(),
          "the common stem of the .bin and .idx files");
  if (source == "hdf5") needs("data.path", !deck.text("data.path").empty(), "the HDF5 file");
  if (source == "lengths") {
    const bool file = !deck.text("data.lengths_file").empty(),
               list = !deck.get<std::vector<std::int64_t>>("data.lengths").empty();
    needs("data.lengths_file", file || list,
          "a text file with one length a line (or data.lengths, a list)");
    if (file && list)
      rules.add({"data.lengths", "data.lengths_file"},
                "data.lengths and data.lengths_file exclude each other; keep one");
  }
  if (source == "distribution") {
    const auto& edges = deck.get<std::vector<std::int64_t>>("data.bin_tokens");
    const auto& shares = deck.get<std::vector<double>>("data.bin_share");
    needs("data.bin_tokens", !edges.empty(), "upper edges of the length bins");
    needs("data.samples", deck.integer("data.samples") > 0, "how many samples to draw");
    if (edges.size() != shares.size())
      rules.add({"data.bin_share", "data.bin_tokens"},
                fmt::format("data.bin_share has {} values for {} bins in data.bin_tokens",
                            shares.size(), edges.size()));
    if (std::adjacent_find(edges.begin(), edges.end(), std::greater_equal<>()) != edges.end())
      rules.add({"data.bin_tokens"},
                fmt::format("data.bin_tokens = {} must ascend", to_text(edges)));
    const std::int64_t least = std::max<std::int64_t>(1, deck.integer("data.min_tokens"));
    if (!edges.empty() && edges.front() < least)
      rules.add({"data.bin_tokens", "data.min_tokens"},
                fmt::format("data.bin_tokens begins with {}, below data.min_tokens = {}",
                            edges.front(), least));
    double sum = 0;
    for (double share : shares) sum += share;
    if (!shares.empty() && !(sum > 0 && std::isfinite(sum)))
      rules.add({"data.bin_share"},
                fmt::format("data.bin_share = {} must have a positive sum", to_text(shares)));
  }
  if (source == "needle") {
    needs("data.samples", deck.integer("data.samples") > 0,
          "how many samples to draw for training");
    for (const std::string& problem : problems(needle_options(deck)))
      rules.add(
          {problem.substr(0, problem.find_first_of(" :")), "data.needle_lengths", "data.source"},
          problem);
    if (deck.real("data.validation_share") > 0)
      rules.add({"data.validation_share", "data.source"},
                "data.validation_share does not apply to data.source = \"needle\", whose held-out "
                "samples have streams of their own; set data.needle_held_out");
    for (const auto& [key, otherwise] : {std::pair{"data.max_tokens", 0}, {"data.min_tokens", 1}})
      if (deck.integer(key) != otherwise)
        rules.add({key, "data.source"},
                  fmt::format("{} does not apply to data.source = \"needle\": samples are never "
                              "cut; set data.needle_lengths",
                              key));
  }
  const std::int64_t shortest = deck.integer("data.min_tokens"),
                     longest = deck.integer("data.max_tokens");
  if (longest > 0 && shortest > longest)
    rules.add(
        {"data.min_tokens", "data.max_tokens"},
        fmt::format("data.min_tokens = {} is above data.max_tokens = {}: no sample would be left",
                    shortest, longest));
}

void balanced_rules(const Deck& deck, Rules& rules) {
  const RunOptions options = RunOptions::from(deck);
  for (const std::int64_t ranks : deck.get<std::vector<std::int64_t>>("batching.select_ranks"))
    if (std::none_of(options.batching.splits.begin(), options.batching.splits.end(),
                     [&](const PlacementSplit& s) { return s.ranks == ranks; }))
      rules.add({"batching.select_ranks", "mesh.dp", "model.query_heads", "mesh.sp"},
                fmt::format("batching.select_ranks: {} ranks must divide mesh.dp = {} and the {} "
                            "query heads, and mesh.sp be 1",
                            ranks, options.mesh.dp, options.model.query_heads));
  const bool shared = options.batching.splits.size() > 1;
  if (options.mesh.pp > 1 && state_aware(deck.text("pipeline.schedule")))
    rules.add({"pipeline.schedule", "batching.method"},
              fmt::format("pipeline.schedule = \"{}\" orders each data-parallel rank's "
                          "micro-batches by themselves, but batching.method = \"balanced\" makes "
                          "ranks share some; set \"1f1b\" or \"gpipe\"",
                          deck.text("pipeline.schedule")));
  if (deck.boolean("dst.enabled") && shared)
    rules.add({"dst.enabled", "batching.method"},
              "dst.enabled: a micro-batch on several ranks (batching.method = \"balanced\") has no "
              "latency that the others could be aligned to; set batching.select_ranks = [1], or "
              "mesh.sp");
}

void batching_rules(const Deck& deck, DeckNeeds needs, Rules& rules) {
  if (deck.integer("curriculum.steps") > 0 && deck.integer("curriculum.max_tokens") == 0 &&
      deck.text("batching.method") != "hbp")
    rules.add({"curriculum.steps", "curriculum.max_tokens"},
              "curriculum.steps needs curriculum.max_tokens, the longest sample of those steps: "
              "batching.method has no packing groups to take it from");
  const std::vector<std::string> keys{"batching.groups", "batching.group_ranks",
                                      "batching.group_recompute"};
  if (deck.text("batching.method") != "hbp") return;  // a deck may state groups for its other cases
  for (const char* key : {"batching.select_lengths", "batching.select_ranks"})
    if (const auto& list = deck.get<std::vector<std::int64_t>>(key);
        std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) != list.end())
      rules.add({key}, fmt::format("{} = {} must ascend", key, to_text(list)));
  for (const std::int64_t ranks : deck.get<std::vector<std::int64_t>>("batching.select_ranks"))
    if (const std::int64_t heads = model_shape(deck).query_heads;
        heads > 0 && !head_split_problem(heads, static_cast<int>(ranks)).empty())
      rules.add({"batching.select_ranks", "model.query_heads"},
                fmt::format("batching.select_ranks: {}",
                            head_split_problem(heads, static_cast<int>(ranks))));
    else if (deck.integer("mesh.dp") % ranks != 0)
      rules.add({"batching.select_ranks", "mesh.dp"},
                fmt::format("batching.select_ranks: {} does not divide mesh.dp = {}", ranks,
                            deck.integer("mesh.dp")));
  const bool selects = !deck.get<std::vector<std::int64_t>>("batching.select_lengths").empty();
  if (selects && deck.integer("mesh.pp") > 1)
    rules.add(
        {"batching.select_lengths", "mesh.pp"},
        fmt::format(
            "batching.select_lengths: groups are selected for packs that run through the whole "
            "model on a rank, not through {} stages; set mesh.pp = 1 or state batching.groups",
            deck.integer("mesh.pp")));
  if (deck.text("batching.groups_from") == "profile") {
    if (deck.text("profile.table").empty())
      rules.add({"batching.groups_from", "profile.table"},
                "batching.groups_from = \"profile\" needs profile.table, which `ballast plan` "
                "stores selected groups in");
    return;  // the stated ones are for other cases
  }
  const std::size_t groups = deck.get<std::vector<std::int64_t>>(keys[0]).size();
  if (groups == 0 && selects && !needs.groups) return;  // to be selected
  for (const auto& key : {keys[1], keys[2]}) {
    const std::size_t size = deck.get<std::vector<std::int64_t>>(key).size();
    if (size > 0 && size != groups)
      rules.add({key, keys[0]}, fmt::format("{} has {} values for {} groups in batching.groups",
                                            key, size, groups));
  }
  const RunOptions options = RunOptions::from(deck);
  for (const std::string& problem : problems(options.batching.groups, options.mesh.dp)) {
    const std::string key = problem.substr(0, problem.find_first_of(" :"));
    rules.add({key, "batching.method", "mesh.dp"}, problem);
  }
  for (const PackGroup& group : options.batching.groups) {
    if (const std::string problem = head_split_problem(options.model.query_heads, group.ranks);
        options.model.query_heads > 0 && !problem.empty())
      rules.add({keys[1], "model.query_heads"}, fmt::format("batching.group_ranks: {}", problem));
    if (options.model.layers > 0 && group.recompute_layers > options.model.layers)
      rules.add({keys[2], "model.layers"},
                fmt::format("batching.group_recompute = {} is more than the model's {} layers",
                            group.recompute_layers, options.model.layers));
  }
  const bool shared = std::any_of(options.batching.groups.begin(), options.batching.groups.end(),
                                  [](const PackGroup& g) { return g.ranks > 1; });
  if (shared && options.mesh.pp > 1 && state_aware(deck.text("pipeline.schedule")))
    rules.add({"pipeline.schedule", keys[1]},
              fmt::format("pipeline.schedule = \"{}\" orders each data-parallel rank's "
                          "micro-batches by themselves, but batching.group_ranks makes ranks share "
                          "some; set \"1f1b\" or \"gpipe\"",
                          deck.text("pipeline.schedule")));
  if (shared && options.mesh.sp > 1)
    rules.add({"mesh.sp", keys[1]},
              fmt::format("mesh.sp = {}: with batching.group_ranks each group joins data-parallel "
                          "ranks itself; set mesh.sp = 1",
                          options.mesh.sp));
}

void attention_rules(const Deck& deck, Rules& rules) {
  const RunOptions options = RunOptions::from(deck);
  const AttentionOptions& attention = options.attention;
  const std::int64_t align = attention.align();
  for (const auto& [key, tokens] : {std::pair{"attention.moba_block", attention.moba_block},
                                    {"attention.xattention_block", attention.xattention_block}})
    if (tokens % kBlock != 0)
      rules.add({key}, fmt::format("{} = {} must be a multiple of {} tokens", key, tokens, kBlock));
  if (kBlock % attention.xattention_stride != 0)
    rules.add({"attention.xattention_stride"},
              fmt::format("attention.xattention_stride = {} must divide {}",
                          attention.xattention_stride, kBlock));
  if (attention.sparse() && deals_stripes(options.layout) && options.stripe % align != 0)
    rules.add({"ring.stripe", "ring.layout", "attention.pattern", "attention.index"},
              fmt::format("ring.stripe = {}: sparse attention computes blocks of {} tokens, which "
                          "stripes must not cut; set a multiple of {}, or attention.pattern = "
                          "\"dense\" with attention.index = \"pattern\"",
                          options.stripe, align, align));
  if (attention.sparse() && options.batching.method == "chunkflow" &&
      options.batching.micro_batch_tokens % align != 0)
    rules.add(
        {"chunk.tokens", "attention.pattern", "attention.index"},
        fmt::format("chunk.tokens = {}: sparse attention needs chunks of a multiple of {} tokens",
                    options.batching.micro_batch_tokens, align));
}

void optimizer_rules(const Deck& deck, Rules& rules) {
  const double peak = deck.real("optimizer.learning_rate"),
               least = deck.real("optimizer.minimum_learning_rate");
  if (least > peak)
    rules.add(
        {"optimizer.minimum_learning_rate", "optimizer.learning_rate"},
        fmt::format("optimizer.minimum_learning_rate = {} is above optimizer.learning_rate = {}",
                    least, peak));
  const std::int64_t warmup = deck.integer("optimizer.warmup_steps"),
                     decay = deck.integer("optimizer.decay_steps");
  if (decay > 0 && warmup > decay)
    rules.add({"optimizer.warmup_steps", "optimizer.decay_steps"},
              fmt::format("optimizer.warmup_steps = {} is above optimizer.decay_steps = {}: the "
                          "cosine would end before it begins",
                          warmup, decay));
  const std::int64_t layers = deck.integer("recompute.layers"), all = model_shape(deck).layers;
  if (deck.text("recompute.mode") == "full" && all > 0 && layers > all)
    rules.add({"recompute.layers", "model.layers"},
              fmt::format("recompute.layers = {} is more than the model's {} layers; -1 means all",
                          layers, all));
}

void lora_rules(const Deck& deck, Rules& rules) {
  for (const std::string& problem : problems(lora_options(deck)))
    rules.add({problem.substr(0, problem.find_first_of(" :"))}, problem);
}

void cost_rules(const Deck& deck, Rules& rules) {
  for (const char* level : {"inner", "outer"}) {
    const std::string forward = fmt::format("costs.forward_{}_hop_ms", level),
                      backward = fmt::format("costs.backward_{}_hop_ms", level);
    if (deck.real(backward) < deck.real(forward))
      rules.add(
          {backward, forward},
          fmt::format(
              "{} = {} is below {} = {}: backward's hop carries KV and dKV, forward's KV alone",
              backward, deck.real(backward), forward, deck.real(forward)));
  }
}

void dst_rules(const Deck& deck, Rules& rules) {
  const auto& budgets = deck.get<std::vector<std::int64_t>>("dst.budgets");
  const RunOptions options = RunOptions::from(deck);
  const PatternKind pattern = options.attention.pattern;
  const std::int64_t stated = deck.integer("dst.base_budget"),
                     base = stated == 0 ? options.attention.moba_top_k : stated;
  if (deck.boolean("dst.enabled")) {
    if (pattern != PatternKind::moba && pattern != PatternKind::vertical_slash)
      rules.add({"dst.enabled", "attention.pattern"},
                fmt::format("dst.enabled tunes the budget of attention.pattern = \"moba\" or "
                            "\"vertical_slash\"; \"{}\" has none",
                            name(pattern)));
    if (options.attention.generated)
      rules.add({"dst.enabled", "attention.index"},
                "dst.enabled needs routing scores, which attention.index = \"generated\" does not "
                "have; set \"pattern\"");
    if (pattern == PatternKind::vertical_slash && stated == 0)
      rules.add({"dst.base_budget", "dst.enabled"},
                "dst.base_budget = 0: vertical_slash has no fixed budget; state the one that "
                "tuning starts from");
    const auto& groups = options.batching.groups;
    const bool shared =
        options.batching.method == "hbp" &&
        std::any_of(groups.begin(), groups.end(), [](const PackGroup& g) { return g.ranks > 1; });
    if (shared)
      rules.add({"dst.enabled", "batching.group_ranks"},
                "dst.enabled: a pack on several ranks (batching.group_ranks) has no latency that "
                "the others could be aligned to; use packs of one rank, or mesh.sp");
  }
  if (std::adjacent_find(budgets.begin(), budgets.end(), std::greater_equal<>()) != budgets.end())
    rules.add({"dst.budgets"}, fmt::format("dst.budgets = {} must ascend", to_text(budgets)));
  else if (!budgets.empty() && !std::binary_search(budgets.begin(), budgets.end(), base))
    rules.add({"dst.budgets", "dst.base_budget"},
              fmt::format("dst.budgets = {} lacks dst.base_budget = {}", to_text(budgets), base));
}

void profile_rules(const Deck& deck, Rules& rules) {
  for (const char* key : {"profile.lengths", "profile.prefixes", "profile.budgets"}) {
    const auto& list = deck.get<std::vector<std::int64_t>>(key);
    if (std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) != list.end())
      rules.add({key}, fmt::format("{} = {} must ascend", key, to_text(list)));
    const bool tokens = std::string(key) != "profile.budgets";
    if (tokens && deck.text("attention.pattern") != "dense" &&
        std::any_of(list.begin(), list.end(), [](std::int64_t n) { return n % kBlock != 0; }))
      rules.add({key},
                fmt::format("{} = {} must be multiples of {} with attention.pattern = \"{}\"", key,
                            to_text(list), kBlock, deck.text("attention.pattern")));
  }
  const auto& modes = deck.get<std::vector<std::string>>("profile.recompute");
  for (const std::string& mode : modes)
    if (mode != "none" && mode != "selective" && mode != "full")
      rules.add({"profile.recompute"},
                fmt::format("profile.recompute: \"{}\" is none of none, selective, full", mode));
  if (modes.empty())
    rules.add({"profile.recompute"}, "profile.recompute is empty; name at least \"none\"");
}

}  // namespace

std::vector<std::string> deck_problems(const Deck& deck, DeckNeeds needs,
                                       const std::set<std::string>& faulty) {
  Rules rules(deck, faulty);
  run_rules(deck, rules);
  mesh_rules(deck, rules);
  if (needs.model || deck.block_set("model")) model_rules(deck, rules);
  if (needs.data || deck.block_set("data")) data_rules(deck, rules);
  batching_rules(deck, needs, rules);
  if (deck.text("batching.method") == "balanced") balanced_rules(deck, rules);
  attention_rules(deck, rules);
  optimizer_rules(deck, rules);
  if (deck.block_set("lora")) lora_rules(deck, rules);
  if (deck.block_set("costs")) cost_rules(deck, rules);
  if (deck.block_set("profile")) profile_rules(deck, rules);
  if (deck.block_set("dst")) dst_rules(deck, rules);
  const bool predicts = deck.boolean("dst.enabled") || deck.text("batching.method") == "sab";
  if (predicts && deck.text("profile.table").empty() && deck.real("costs.forward_pair_s") == 0)
    rules.add({"dst.enabled", "batching.method"},
              "dst.enabled and batching.method = \"sab\" predict latency: name a profile.table "
              "(`ballast profile` measures one), or state "
              "costs.forward_token_s and costs.forward_pair_s");
  const std::string& method = deck.text("batching.method");
  if ((method == "chunkflow" || method == "sab" || method == "lbb" || method == "balanced") &&
      deck.text("batching.scope") == "epoch")
    rules.add({"batching.scope", "batching.method"},
              fmt::format("batching.scope = \"epoch\" packs whole epochs; batching.method = \"{}\" "
                          "needs batching.scope = \"step\"",
                          method));
  return rules.list;
}

}  // namespace ballast

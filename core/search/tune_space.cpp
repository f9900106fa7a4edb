#include "core/search/tune_space.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "core/config/combinations.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/mesh_links.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kLeastTokens = 1024;  // of the longest sample, that a rank should get

const Config& defaults() { return default_config(); }

std::vector<int> divisors(int n) {
  std::vector<int> list;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) list.push_back(d);
  return list;
}

/// `values` without repetition in their order; the deck's alone where the command line holds it.
template <class T>
std::vector<T> choices_of(const Config& base, const void* member, T stated, std::vector<T> values) {
  if (held(base, member)) return {stated};
  std::vector<T> list;
  for (const T& value : values)
    if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
  return list;
}

/// Degrees of rings: flat, and two levels where a flat one leaves its node.
std::vector<std::pair<int, int>> ring_levels(int ring, int sp, int node) {
  std::vector<std::pair<int, int>> levels{{1, ring}};
  const int inner = sp < node && node % sp == 0 ? node / sp : 1;
  if (ring * sp > node && inner > 1 && ring % inner == 0 && ring / inner > 1)
    levels.emplace_back(ring / inner, inner);
  return levels;
}

std::vector<MeshShape> meshes(const Config& base, int ranks, std::int64_t longest) {
  const MeshShape &deck = base.mesh, &d = defaults().mesh;
  const int node = node_ranks(deck);
  const std::int64_t least = std::clamp<std::int64_t>(longest / kBlock, kBlock, kLeastTokens),
                     finest = std::max<std::int64_t>(1, longest / least);
  const auto keeps = [&](const int& member, int stated, int value) {
    return value == stated || !held(base, &member);
  };
  std::vector<MeshShape> list;
  for (const int pp : divisors(ranks)) {
    if (pp > base.model.layers || !keeps(d.pp, deck.pp, pp)) continue;
    for (const int sp : divisors(ranks / pp)) {
      if (!keeps(d.sp, deck.sp, sp) || base.model.query_heads % sp != 0) continue;
      for (const int ring : divisors(ranks / pp / sp)) {
        const int dp = ranks / pp / sp / ring;
        // What the deck says may be finer.
        const bool as_deck = sp == deck.sp && ring == deck.cp();
        if ((std::int64_t{sp} * ring > finest && !as_deck) || !keeps(d.dp, deck.dp, dp)) continue;
        std::vector<std::pair<int, int>> levels = ring_levels(ring, sp, node);
        if (deck.cp() == ring) levels.emplace_back(deck.cp_outer, deck.cp_inner);
        std::set<std::pair<int, int>> seen;
        for (const auto& [outer, inner] : levels)
          if (keeps(d.cp_outer, deck.cp_outer, outer) && keeps(d.cp_inner, deck.cp_inner, inner) &&
              seen.emplace(outer, inner).second)
            list.push_back({dp, pp, outer, inner, sp, 1, deck.ranks_per_node});
      }
    }
  }
  return list;
}

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::vector<std::int64_t> capacities(const Config& base, std::int64_t longest) {
  const std::int64_t deck = base.batching.micro_batch_tokens;
  std::vector<std::int64_t> list{deck};
  for (const std::int64_t times : {2, 4, 8})
    if (deck * times <= std::max(longest, deck)) list.push_back(deck * times);
  if (deck >= 2 * kBlock) list.push_back(deck / 2);
  return choices_of(base, &defaults().batching.micro_batch_tokens, deck, list);
}

std::vector<std::int64_t> chunk_tokens(const Config& base, std::int64_t longest) {
  const std::int64_t align = std::max<std::int64_t>(kBlock, attention_options(base).align());
  std::vector<std::int64_t> list = base.chunk.search_tokens;
  const bool named = !list.empty();
  if (!named && base.is_set(&Config::chunk, &ChunkConfig::tokens)) list = {base.chunk.tokens};
  for (std::int64_t parts = 2; parts <= 32 && !named; parts *= 2)
    if (longest / parts >= align) list.push_back(round_up(longest / parts, align));
  if (list.empty()) list.push_back(round_up(longest, align));
  if (base.batching.method == Batching::chunkflow) list.push_back(base.chunk.tokens);
  return choices_of(base, &defaults().chunk.tokens, base.chunk.tokens, list);
}

/// Of chunks of so many tokens, the deck's first.  More than twice the longest sample's chunks keep
/// all, as fewer do.
std::vector<std::int64_t> chunk_ks(const Config& base, std::int64_t tokens, std::int64_t longest) {
  const std::int64_t chunks = (longest + tokens - 1) / tokens, deck = base.chunk.k;
  std::vector<std::int64_t> list;
  if (base.batching.method == Batching::chunkflow &&
      (tokens == base.chunk.tokens || deck < 2 * chunks))
    list.push_back(deck);
  for (const std::int64_t k : base.chunk.search_k.empty()
                                  ? std::vector<std::int64_t>{1, 2, 4, 8, 16}
                                  : base.chunk.search_k)
    if (list.empty() || k < 2 * chunks) list.push_back(k);
  return choices_of(base, &defaults().chunk.k, deck, list);
}

/// The deck's groups where it says which.
std::vector<PackGroup> deck_groups(const Config& base) {
  return base.batching.groups_from == GroupSource::deck ? pack_groups(base)
                                                        : std::vector<PackGroup>{};
}

/// Groups with the ranks and recomputed layers that the command line states; none where it states
/// another number of them.
std::vector<PackGroup> with_held(const Config& base, std::vector<PackGroup> groups) {
  const BatchingConfig &b = base.batching, &d = defaults().batching;
  const bool ranks = held(base, &d.group_ranks), layers = held(base, &d.group_recompute);
  const auto says = [&](const std::vector<std::int64_t>& list, std::size_t g, int unsaid) {
    return list.empty() ? unsaid : static_cast<int>(list[g]);
  };
  for (const auto& [stated, list] :
       {std::pair(ranks, &b.group_ranks), std::pair(layers, &b.group_recompute)})
    if (stated && !list->empty() && list->size() != groups.size()) return {};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (ranks) groups[g].ranks = says(b.group_ranks, g, 1);
    if (layers) groups[g].recompute_layers = says(b.group_recompute, g, -1);
  }
  return groups;
}

/// Ways to pack by groups: short samples alone on a rank, the longest on several.
std::vector<std::vector<PackGroup>> pack_group_choices(const Config& base, const MeshShape& mesh,
                                                       std::int64_t longest) {
  const BatchingConfig& d = defaults().batching;
  if (held(base, &d.groups)) return {pack_groups(base)};
  std::vector<std::vector<PackGroup>> list;
  const auto add = [&](const std::vector<PackGroup>& like) {
    const std::vector<PackGroup> groups = with_held(base, like);
    const bool divide = std::all_of(groups.begin(), groups.end(), [&](const PackGroup& g) {
      return mesh.dp % std::max(1, g.ranks) == 0;
    });
    if (!groups.empty() && divide && std::find(list.begin(), list.end(), groups) == list.end())
      list.push_back(groups);
  };
  if (const std::vector<PackGroup> deck = deck_groups(base);
      !deck.empty() && deck.back().tokens >= longest)
    add(deck);
  const std::int64_t whole = round_up(longest, attention_options(base).align()),
                     first = base.batching.micro_batch_tokens;
  for (const std::int64_t shorter : {first, 2 * first})
    for (const int ranks : divisors(mesh.dp)) {
      if (ranks > 1 && mesh.sp > 1) continue;
      if (shorter < whole) add({{shorter, 1, -1}, {whole, ranks, -1}});
    }
  const bool one = (held(base, &d.group_ranks) && base.batching.group_ranks.size() == 1) ||
                   (held(base, &d.group_recompute) && base.batching.group_recompute.size() == 1);
  if (2 * first >= whole || one) add({{whole, 1, -1}});
  return list;
}

std::vector<Batching> methods(const Config& base) {
  std::vector<Batching> list{base.batching.method, Batching::packed, Batching::balanced,
                             Batching::hbp,        Batching::lbb,    Batching::chunkflow,
                             Batching::none};
  if (!base.profile.table.empty() || base.costs.forward_pair_s > 0) list.push_back(Batching::sab);
  return choices_of(base, &defaults().batching.method, base.batching.method, list);
}

/// Candidates of a mesh by method, all else the deck's.
std::vector<Candidate> method_choices(const Config& base, const MeshShape& mesh,
                                      std::int64_t longest) {
  Candidate point = deck_plan(base);
  point.mesh = mesh;
  std::vector<Candidate> list;
  for (const Batching method : methods(base)) {
    point.method = method, point.groups.clear();
    point.capacity = base.batching.micro_batch_tokens;
    if (method == Batching::chunkflow) {
      for (const std::int64_t tokens : chunk_tokens(base, longest))
        for (const std::int64_t k : chunk_ks(base, tokens, longest)) {
          Candidate& c = list.emplace_back(point);
          c.capacity = tokens, c.chunk_k = k;
        }
    } else if (method == Batching::hbp) {
      for (std::vector<PackGroup>& groups : pack_group_choices(base, mesh, longest))
        list.emplace_back(point).groups = std::move(groups);
    } else if (method == Batching::none) {
      list.push_back(point);
    } else {
      for (const std::int64_t tokens : capacities(base, longest))
        list.emplace_back(point).capacity = tokens;
    }
  }
  return list;
}

std::vector<LayoutKind> layouts(const Config& base, const Candidate& c) {
  if (c.ring() == 1) return {base.ring.layout};
  return choices_of(
      base, &defaults().ring.layout, base.ring.layout,
      {base.ring.layout, LayoutKind::document_zigzag, LayoutKind::striped, LayoutKind::zigzag});
}

std::vector<ScheduleKind> schedules(const Config& base, const Candidate& c) {
  const bool chunks = c.method == Batching::chunkflow;
  if (c.mesh.pp == 1 && !chunks) return {base.pipeline.schedule};
  std::vector<ScheduleKind> list{ScheduleKind::one_f_one_b, ScheduleKind::state_aware_1f1b};
  if (c.mesh.pp > 1)
    list.insert(list.end(), {ScheduleKind::zero_bubble, ScheduleKind::gpipe});
  else if (base.pipeline.schedule != ScheduleKind::automatic)  // it only bounds live chunks
    list.push_back(base.pipeline.schedule);
  return choices_of(base, &defaults().pipeline.schedule, base.pipeline.schedule, list);
}

/// Groups that are the deck's leave its keys as they are.
void take(const std::vector<PackGroup>& groups, const Config& base, BatchingConfig& batching) {
  batching.groups = base.batching.groups, batching.group_ranks = base.batching.group_ranks;
  batching.group_recompute = base.batching.group_recompute;
  batching.groups_from = base.batching.groups_from;
  if (groups == deck_groups(base)) return;
  set_groups(batching, groups);
  // A list of recomputed layers that says nothing is left out, as is a held one of ranks.
  if (held(base, &defaults().batching.group_ranks))
    batching.group_ranks = base.batching.group_ranks;
  if (std::none_of(groups.begin(), groups.end(),
                   [](const PackGroup& g) { return g.recompute_layers >= 0; }))
    batching.group_recompute.clear();
  if (held(base, &defaults().batching.group_recompute))
    batching.group_recompute = base.batching.group_recompute;
}

/// Remembers what the table of combinations says of candidates that are alike to it.
class Allowed {
 public:
  explicit Allowed(const Config& base) : base_(base), scratch_(base) {}
  /// "" or why not.
  const std::string& words(const Candidate& c) {
    scratch_.mesh = c.mesh;
    scratch_.batching.method = c.method;
    if (c.method == Batching::hbp) take(c.groups, base_, scratch_.batching);
    const auto key = std::tuple(c.method, ranks_share_packs(scratch_), c.mesh.dp > 1, c.mesh.pp > 1,
                                c.mesh.sp > 1, c.mesh.cp_outer > 1, c.ring() > 1, c.layout,
                                c.schedule, c.offload);
    const auto [at, fresh] = known_.try_emplace(key);
    if (fresh) {
      scratch_.ring.layout = c.layout, scratch_.pipeline.schedule = c.schedule;
      scratch_.chunk.offload = c.offload;
      const auto found = refused_combinations(scratch_, true);
      if (!found.empty()) at->second = found.front().message();
    }
    return at->second;
  }

 private:
  const Config& base_;
  Config scratch_;
  std::map<
      std::tuple<Batching, bool, bool, bool, bool, bool, bool, LayoutKind, ScheduleKind, Offload>,
      std::string>
      known_;
};

/// Costs of a stage, for other stages than the deck's.
void scale_stated_costs(const Config& base, Config& changed) {
  if (!base.profile.table.empty() || !states_times(base)) return;
  if (base.mesh.pp == changed.mesh.pp) return;
  const double times = static_cast<double>(base.mesh.pp) / changed.mesh.pp;
  const PipelineCosts stage = pipeline_options(base).costs;
  CostsConfig& costs = changed.costs;
  costs.forward_token_s = stage.token_s * times;
  costs.forward_pair_s = stage.pair_s * times;
  costs.forward_micro_batch_s = stage.micro_batch_s * times;
  costs.exchange_token_s = base.costs.exchange_token_s * times;
  costs.ring_hop_token_s = base.costs.ring_hop_token_s * times;
}

}  // namespace

bool held(const Config& config, const void* member_of_default) {
  return config.from.of(key_filling(member_of_default).path()).origin == Origin::command_line;
}

Candidate deck_plan(const Config& base) {
  Candidate c;
  c.mesh = base.mesh, c.method = base.batching.method;
  const bool chunks = c.method == Batching::chunkflow;
  c.capacity = chunks ? base.chunk.tokens : base.batching.micro_batch_tokens;
  c.chunk_k = base.chunk.k, c.offload = base.chunk.offload;
  if (c.method == Batching::hbp) c.groups = deck_groups(base);
  // With stages or chunks the search names the schedule that "auto" is.
  c.schedule = c.mesh.pp > 1 || chunks ? pipeline_options(base).schedule : base.pipeline.schedule;
  c.layout = base.ring.layout, c.orders = base.pipeline.search;
  c.recompute = base.recompute, c.zero = base.optimizer.zero;
  return c;
}

bool same_choices(const Candidate& a, const Candidate& b) {
  return a.mesh == b.mesh && a.method == b.method && a.groups == b.groups &&
         a.capacity == b.capacity && a.chunk_k == b.chunk_k && a.layout == b.layout &&
         a.schedule == b.schedule;
}

Config with(const Config& base, const Candidate& c) {
  Config changed = base;
  changed.mesh = c.mesh;
  BatchingConfig& batching = changed.batching;
  batching.method = c.method;
  if (c.method == Batching::chunkflow) {
    changed.chunk.tokens = c.capacity, changed.chunk.k = c.chunk_k;
    changed.chunk.offload = c.offload;
  } else {
    batching.micro_batch_tokens = c.capacity;
  }
  if (c.method == Batching::hbp) take(c.groups, base, batching);
  changed.ring.layout = c.layout, changed.pipeline.schedule = c.schedule;
  if (state_aware(c.schedule) && !held(base, &defaults().pipeline.search))
    changed.pipeline.search = c.orders;
  changed.recompute = c.recompute, changed.optimizer.zero = c.zero;
  if (c.budget > 0) {
    if (budget_pattern(base) == PatternKind::moba) changed.attention.moba_top_k = c.budget;
    if (base.is_set(&Config::dst)) changed.dst.base_budget = c.budget;
  }
  scale_stated_costs(base, changed);
  for (const KeySpec& spec : deck_schema())
    if (spec.value(changed) != spec.value(base))
      changed.from.settings[spec.path()] = {Origin::search, "ballast tune"};
  return changed;
}

std::vector<std::string> overrides(const Config& base, const Config& changed) {
  std::vector<std::string> list;
  for (const KeySpec& spec : deck_schema())
    if (const DeckValue value = spec.value(changed); value != spec.value(base))
      list.push_back(fmt::format("{}={}", spec.path(), to_text(value)));
  return list;
}

std::string stated_deck(const Config& config) {
  std::string out;
  for (const BlockSpec& block : deck_blocks()) {
    std::string keys;
    for (const KeySpec& spec : deck_schema()) {
      const Origin origin = config.from.of(spec.path()).origin;
      if (spec.block == block.name && origin != Origin::unset && origin != Origin::preset &&
          origin != Origin::weights)
        keys += fmt::format("{} = {}\n", spec.key, to_text(spec.value(config)));
    }
    if (!keys.empty()) out += fmt::format("\n[{}]\n{}", block.name, keys);
  }
  return out;
}

/// Whether chunk.k says anything: schedules that are not state-aware keep all of a sample's chunks.
static bool counts_chunks(const Candidate& c) {
  return c.method == Batching::chunkflow &&
         (state_aware(c.schedule) || c.schedule == ScheduleKind::automatic);
}

std::vector<std::pair<std::string, std::string>> facets(const Candidate& c, bool saving) {
  std::vector<std::pair<std::string, std::string>> list{
      {"method", name(c.method)},
      {"pp", fmt::to_string(c.mesh.pp)},
      {"sp", fmt::to_string(c.mesh.sp)},
      {"ring", c.mesh.cp_outer > 1 ? fmt::format("{} x {}", c.mesh.cp_outer, c.mesh.cp_inner)
                                   : fmt::to_string(c.ring())}};
  const bool chunks = c.method == Batching::chunkflow;
  if (c.ring() > 1) list.emplace_back("layout", name(c.layout));
  if (c.mesh.pp > 1 || chunks) list.emplace_back("schedule", name(c.schedule));
  if (chunks) {
    list.emplace_back("chunk", fmt::to_string(c.capacity));
    if (counts_chunks(c)) list.emplace_back("k", fmt::to_string(c.chunk_k));
    if (saving) list.emplace_back("offload", name(c.offload));
  } else if (c.method != Batching::none && c.method != Batching::hbp) {
    list.emplace_back("micro-batch", fmt::to_string(c.capacity));
  }
  if (c.budget > 0) list.emplace_back("budget", fmt::to_string(c.budget));
  if (!saving) return list;
  list.emplace_back("recompute", name(c.recompute.mode));
  list.emplace_back("zero", fmt::to_string(c.zero));
  return list;
}

std::string describe(const Candidate& c) {
  std::string text = name(c.method);
  if (c.method == Batching::chunkflow)
    text +=
        fmt::format(" {}{}{}", c.capacity, counts_chunks(c) ? fmt::format(" K {}", c.chunk_k) : "",
                    c.offload == Offload::host ? " offloaded" : "");
  else if (c.method == Batching::hbp)
    for (const PackGroup& g : c.groups) {
      text += fmt::format(" {}/{}", g.tokens, g.ranks);
      if (g.recompute_layers >= 0) text += fmt::format(" (recompute {})", g.recompute_layers);
    }
  else if (c.method != Batching::none)
    text += fmt::format(" {}", c.capacity);
  text += fmt::format(", dp {}", c.mesh.dp);
  if (c.mesh.pp > 1) text += fmt::format(" pp {}", c.mesh.pp);
  if (c.mesh.sp > 1) text += fmt::format(" sp {}", c.mesh.sp);
  if (c.mesh.cp_outer > 1)
    text += fmt::format(" cp {}x{}", c.mesh.cp_outer, c.mesh.cp_inner);
  else if (c.ring() > 1)
    text += fmt::format(" cp {}", c.ring());
  if (c.ring() > 1) text += fmt::format(" {}", name(c.layout));
  if (c.mesh.pp > 1 || c.method == Batching::chunkflow) text += fmt::format(", {}", c.schedule);
  if (c.recompute.mode != Recompute::none) {
    text += fmt::format(", recompute {}", name(c.recompute.mode));
    if (c.recompute.layers >= 0) text += fmt::format(" {}", c.recompute.layers);
  }
  text += fmt::format(", ZeRO {}", c.zero);
  return c.budget > 0 ? text + fmt::format(", budget {}", c.budget) : text;
}

namespace {

/// Whether the candidate differs in nothing that runs from the one of the first K.
bool repeats(const Config& base, const Candidate& c, std::int64_t longest) {
  return c.method == Batching::chunkflow && !counts_chunks(c) &&
         c.chunk_k != chunk_ks(base, c.capacity, longest).front();
}

}  // namespace

TuneSpace tune_space(const Config& base, int ranks, std::int64_t longest,
                     const std::vector<std::int64_t>& budgets) {
  TuneSpace space;
  Allowed allowed(base);
  std::set<std::string> told;
  for (const MeshShape& mesh : meshes(base, ranks, longest))
    for (Candidate& choice : method_choices(base, mesh, longest))
      for (const LayoutKind layout : layouts(base, choice))
        for (const ScheduleKind schedule : schedules(base, choice)) {
          choice.layout = layout, choice.schedule = schedule;
          if (repeats(base, choice, longest)) continue;
          if (const std::string& words = allowed.words(choice); !words.empty()) {
            ++space.refusals;
            if (told.insert(words).second) space.refused.push_back({choice, words});
            continue;
          }
          for (const std::int64_t budget : budgets) {
            choice.budget = budget;
            space.candidates.push_back(choice);
          }
        }
  return space;
}

std::vector<RecomputeOptions> recompute_choices(const Config& base) {
  std::vector<RecomputeOptions> list{
      {Recompute::none, -1}, {Recompute::selective, -1}, {Recompute::full, -1}};
  const Config& d = defaults();
  if (held(base, &d.recompute.mode) || held(base, &d.recompute.layers)) return {base.recompute};
  return list;
}

std::vector<Offload> offload_choices(const Config& base, Batching method) {
  if (method != Batching::chunkflow) return {base.chunk.offload};
  return choices_of(base, &defaults().chunk.offload, base.chunk.offload,
                    {Offload::none, Offload::host});
}

std::vector<int> zero_choices(const Config& base) {
  std::vector<int> stages{0, 1};
  if (base.optimizer.kind != OptimizerKind::muon) stages.push_back(2);
  return choices_of(base, &defaults().optimizer.zero, base.optimizer.zero, stages);
}

}  // namespace ballast

#include "app/plan/compared_placements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/planned_samples.hpp"
#include "core/base/error.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/placed_batch.hpp"
#include "core/plan/batch/rivals/dynamic_cp.hpp"
#include "core/plan/batch/rivals/flexsp.hpp"
#include "core/plan/batch/rivals/wlb_llm.hpp"
#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {
namespace {

/// Steps x ranks that splits and packs of a whole run are chosen over, and the fewest steps.
constexpr std::int64_t kTriedRankSteps = 2048, kTriedSteps = 4;
constexpr std::int64_t kWindow = 8;  // steps that LongAlign sorts, where the deck names none

/// A deck's ranks as one row of data-parallel ones.
Config row_of(Config config) {
  MeshShape& mesh = config.mesh;
  mesh.dp *= mesh.sp * mesh.cp();
  mesh.sp = mesh.cp_outer = mesh.cp_inner = 1;
  config.batching.method = Batching::balanced;
  config.batching.scope = BatchScope::step;
  config.batching.groups_from = GroupSource::deck;
  return config;
}

class Comparison {
 public:
  Comparison(const Config& config, std::vector<std::string>& notes)
      : row_(row_of(config)), notes_(notes), costs_(plan_costs(row_, notes)) {
    const PlannedSamples samples(row_);
    for (std::int64_t s = 0; s < samples.dataset().samples(); ++s)
      longest_ = std::max(longest_, samples.dataset().length(s));
    for (int sp = 1; sp <= row_.mesh.dp; sp *= 2)
      for (int ring = 1; sp * ring <= row_.mesh.dp; ring *= 2)
        if (row_.mesh.dp % (sp * ring) == 0 &&
            row_.batching.micro_batch_tokens * sp * ring >= longest_ &&
            head_split_problem(std::max<std::int64_t>(1, row_.model.query_heads), sp).empty())
          splits_.push_back({sp * ring, sp, ring});
  }

  std::vector<ComparedPlacement> run() {
    add("balanced", "placement by predicted time", row_);
    attempt("packed", [&] { add_fixed("packed", "best fit on the best fixed split", row_); });
    attempt("hbp", [&] { add_hbp(); });
    attempt("hbp-909e272-selected", [&] { add_selected(); });
    attempt("longalign", [&] { add_longalign(); });
    add("flexsp-like",
        "FlexSP: groups of 2^k ranks side by side, from a solver over length buckets", row_)
        .place = flexsp_placement;
    attempt("wlb-llm-like", [&] { add_wlb_llm(); });
    Config megatron = row_;
    megatron.ring.layout = LayoutKind::document_zigzag;
    add("megatron-dynamic-cp-like",
        "Megatron-Core: rings of the fewest 2^k ranks that hold a sample, side by side", megatron)
        .place = dynamic_cp_placement;
    add("attention apart",
        "core attention disaggregation at best: tokens and attention even, transfers hidden", row_)
        .apart = true;
    return std::move(list_);
  }

 private:
  ComparedPlacement& add(const std::string& name, const std::string& source, const Config& config) {
    return list_.emplace_back(ComparedPlacement{name, source, config, {}, false});
  }
  template <class F>
  void attempt(const std::string& name, F&& f) {
    try {
      f();
    } catch (const Error& e) {
      notes_.push_back(fmt::format("{} is left out: {}", name, e.what()));
    }
  }
  std::int64_t tried_steps() const { return std::max(kTriedSteps, kTriedRankSteps / row_.mesh.dp); }
  void require_splits() const {
    require(!splits_.empty(),
            "{} tokens, the longest sample, fit no split of {} ranks with "
            "batching.micro_batch_tokens = {} on each",
            longest_, row_.mesh.dp, row_.batching.micro_batch_tokens);
  }

  /// Every micro-batch on the split and with the packs that take least time.
  void add_fixed(const std::string& name, const std::string& source, const Config& of) {
    require_splits();
    double least = std::numeric_limits<double>::infinity();
    Config best = of;
    std::string chosen;
    for (const PlacementSplit& s : splits_)
      for (int part = 1; part <= s.ranks; part *= 2) {
        Config tried = of;
        tried.mesh.dp = row_.mesh.dp / s.ranks, tried.mesh.sp = s.sp, tried.mesh.cp_inner = s.ring;
        tried.batching.method = Batching::packed;
        tried.batching.micro_batch_tokens = row_.batching.micro_batch_tokens * s.ranks / part;
        const double step_s = first_steps(tried, costs_, tried_steps()).mean_step_s();
        if (step_s >= least) continue;
        least = step_s, best = tried;
        chosen = fmt::format("SP {} x ring {}, packs of {} tokens", s.sp, s.ring,
                             tried.batching.micro_batch_tokens);
      }
    add(name, source + ": " + chosen, best);
  }

  /// The deck's groups, else single ranks for what fits them and the fewest that hold the rest.
  std::vector<PackGroup> groups() const {
    const std::vector<PackGroup> stated = pack_groups(row_);
    if (!stated.empty() && stated.back().tokens >= longest_ &&
        problems(stated, row_.mesh.dp).empty())
      return stated;
    require_splits();
    std::vector<PackGroup> derived{{row_.batching.micro_batch_tokens, 1, -1}};
    if (longest_ > derived.front().tokens) {
      const auto fewest =
          std::min_element(splits_.begin(), splits_.end(), [](const auto& a, const auto& b) {
            return a.ring != b.ring ? a.ring < b.ring : a.ranks < b.ranks;
          });
      derived.push_back({row_.batching.micro_batch_tokens * fewest->ranks, fewest->ranks, -1});
    }
    return derived;
  }
  Config hbp(const std::vector<PackGroup>& groups, GroupPacking packing) const {
    Config config = row_;
    config.batching.method = Batching::hbp;
    config.batching.packing = packing;
    config.batching.balance = true;
    set_groups(config, groups, "pack --compare");
    return config;
  }
  static std::string words(const std::vector<PackGroup>& groups) {
    std::vector<std::string> list;
    for (const PackGroup& g : groups) list.push_back(fmt::format("{} on {}", g.tokens, g.ranks));
    return fmt::format("groups of {} ranks", fmt::join(list, ", "));
  }
  void add_hbp() {
    const std::vector<PackGroup> of = groups();
    add("hbp", "Hierarchical Balance Packing, Algorithm 2 as printed (isf): " + words(of),
        hbp(of, GroupPacking::isf));
    add("hbp-909e272", "batches as commit 909e272 trained them: " + words(of),
        hbp(of, GroupPacking::alike));
  }
  void add_selected() {
    require(has_costs(row_), "groups are selected by a profile table or by block costs");
    Config search = hbp(groups(), GroupPacking::alike);
    Integers& lengths = search.batching.select_lengths;
    if (lengths.empty() || lengths.back() < longest_) {
      lengths.clear();
      const auto first = static_cast<std::uint64_t>(search.batching.micro_batch_tokens) / 4 + 1;
      for (auto n = static_cast<std::int64_t>(std::bit_floor(first)); n < 2 * longest_; n *= 2)
        lengths.push_back(n);
    }
    const auto part = plan_groups(search);
    std::vector<PackGroup> selected;
    for (std::size_t g = 0; part && g < part->values.at("groups").size(); ++g)
      selected.push_back({part->values.at("groups")[g].get<std::int64_t>(),
                          part->values.at("group_ranks")[g].get<int>(),
                          part->values.at("group_recompute")[g].get<int>()});
    add("hbp-909e272-selected",
        "the same with groups of Algorithm 1 and its third stage: " + words(selected),
        hbp(selected, GroupPacking::alike));
  }
  void add_longalign() {
    Config config = row_;
    if (config.batching.window == 1) config.batching.window = kWindow;
    config.batching.window_rule = WindowRule::sorted;
    config.loss.normaliser = LossNormaliser::sequence_mean;
    add_fixed("longalign",
              fmt::format("LongAlign, {} steps sorted by length, samples weigh alike",
                          config.batching.window),
              config);
  }
  void add_wlb_llm() {
    require_splits();
    const RunOptions options = RunOptions::from(row_);
    const SimulationOptions simulation = simulation_options(row_, options);
    const StepOptions step = step_options(row_, options, simulation, *costs_);
    const PlacementOptions placement = placement_options(step.batching);
    const PlacementCosts& times = *step.batching.placement_costs;
    PlannedSamples samples(row_);
    SamplerPosition position;
    std::vector<double> sums(splits_.size(), 0.0);
    for (std::int64_t n = 0; n < tried_steps(); ++n) {
      const std::vector<SampleLength> of = samples.next(position);
      for (std::size_t s = 0; s < splits_.size(); ++s) {
        const Placement placed = wlb_llm_placement(of, placement, splits_[s], times);
        sums[s] += simulate(plan_placement_step(n, placed, of, step), simulation, *costs_).step_s;
      }
    }
    const auto least =
        static_cast<std::size_t>(std::min_element(sums.begin(), sums.end()) - sums.begin());
    const PlacementSplit best = splits_[least];
    add("wlb-llm-like",
        fmt::format("WLB-LLM, packs of equal work, shards by document: SP {} x ring {}", best.sp,
                    best.ring),
        row_)
        .place = [best](const std::vector<SampleLength>& of, const PlacementOptions& o,
                        const PlacementCosts& costs) {
      return wlb_llm_placement(of, o, best, costs);
    };
  }

  Config row_;
  std::vector<std::string>& notes_;
  std::shared_ptr<const Costs> costs_;
  std::int64_t longest_ = 0;
  std::vector<PlacementSplit> splits_;  ///< that hold every sample
  std::vector<ComparedPlacement> list_;
};

}  // namespace

std::vector<ComparedPlacement> compared_placements(const Config& config,
                                                   std::vector<std::string>& notes) {
  return Comparison(config, notes).run();
}

}  // namespace ballast

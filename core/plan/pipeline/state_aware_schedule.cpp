// State-aware 1F1B and its zero-bubble variant: the search over orders of samples.
#include "core/plan/pipeline/state_aware_schedule.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/pipeline/list_scheduler.hpp"

namespace ballast {
namespace {

/// List entries after which a search tries no further order: below a second on one core.  The first
/// order is tried by all rules, whatever its length.
constexpr std::int64_t kMostEntries = 4'000'000;

/// The rules that list scheduling is tried with: those of weight gradients where backward is split,
/// those of recomputation where a group is recomputed.
std::vector<ListRules> rules_for(bool split, bool recompute) {
  std::vector<ListRules> rules;
  for (const WeightHalves weights :
       {WeightHalves::whole, WeightHalves::fill, WeightHalves::patient, WeightHalves::lag})
    for (const auto& [recompute_first, early] :
         {std::pair{true, true}, {true, false}, {false, true}, {false, false}})
      if ((split || weights == WeightHalves::whole) && (recompute || (recompute_first && early)))
        rules.push_back({recompute_first, early, weights});
  return rules;
}

/// Search over the order of groups for the shortest step.
class OrderSearch {
 public:
  OrderSearch(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs, int search,
              bool split)
      : groups_(groups),
        scheduler_(groups, stages, k, costs),
        most_orders_(std::max(1, search)),
        split_(split && stages > 1),  // one stage keeps nobody waiting
        least_(scheduler_.least_s(split_)) {
    bool recompute = false;
    std::int64_t size = 0;
    for (const auto& group : groups) {
      recompute = recompute || static_cast<int>(group.size()) > k;
      size += static_cast<std::int64_t>(group.size());
    }
    rules_ = rules_for(split_, recompute);
    entries_of_a_list_ = (split_ ? 3 : 2) * size * stages;
  }

  Schedule best() {
    std::vector<std::size_t> order(groups_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    attempt(order);
    if (groups_.size() >= 2) climb(sorted_by_work(order));
    return scheduler_.schedule(best_order_, best_rules_);
  }

 private:
  using Order = ListScheduler::Order;

  bool good_enough() const {
    return best_s_ <= least_ * (1 + 1e-12) || tried_ >= most_orders_ || entries_ > kMostEntries;
  }

  /// Whether the order gives a shorter step than all before it.
  bool attempt(const Order& order) {
    bool better = false;
    for (const ListRules& r : rules_) {
      entries_ += entries_of_a_list_;
      const double end = scheduler_.end_s(order, r, best_s_);
      if (end >= best_s_) continue;
      best_s_ = end, best_order_ = order, best_rules_ = r;
      better = true;
    }
    ++tried_;
    return better;
  }

  /// Tries the longest group first and the longest last; returns the best order so far.
  Order sorted_by_work(const Order& order) {
    const OpDurations& durations = scheduler_.durations();
    std::vector<double> work(groups_.size(), 0);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      for (int m : groups_[g])
        work[g] += durations.op(0, OpKind::forward, m) + durations.op(0, OpKind::backward, m);
    Order chosen = order;
    for (const bool longest_first : {true, false}) {
      if (good_enough()) break;
      Order sorted = order;
      std::stable_sort(sorted.begin(), sorted.end(), [&](std::size_t a, std::size_t b) {
        return longest_first ? work[a] > work[b] : work[a] < work[b];
      });
      if (attempt(sorted)) chosen = sorted;
    }
    return chosen;
  }

  /// Hill climbing: moves one group elsewhere, keeps what helps.
  void climb(Order chosen) {
    for (std::uint64_t draw = 0; !good_enough(); ++draw) {
      Order moved = chosen;
      const auto place = [&](std::uint64_t index, std::size_t n) {
        return static_cast<std::ptrdiff_t>(
            random_bits(0, stream_of("state_aware_schedule"), 2 * draw + index) % n);
      };
      const std::ptrdiff_t from = place(0, moved.size());
      const std::size_t group = moved[from];
      moved.erase(moved.begin() + from);
      moved.insert(moved.begin() + place(1, moved.size() + 1), group);
      if (attempt(moved)) chosen = moved;
    }
  }

  const ChunkGroups& groups_;
  ListScheduler scheduler_;
  int most_orders_;
  bool split_;
  double least_, best_s_ = std::numeric_limits<double>::infinity();
  Order best_order_;
  ListRules best_rules_;
  std::vector<ListRules> rules_;
  int tried_ = 0;
  std::int64_t entries_of_a_list_ = 0, entries_ = 0;
};

}  // namespace

Schedule state_aware_schedule(const ChunkGroups& groups, int stages, int k,
                              const ScheduleCosts& costs, int search, bool split) {
  require(k >= 1, "pipeline schedule: k = {} chunks; must be at least 1", k);
  return OrderSearch(groups, stages, k, costs, search, split).best();
}

}  // namespace ballast

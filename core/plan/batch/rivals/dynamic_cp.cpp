#include "core/plan/batch/rivals/dynamic_cp.hpp"

#include <algorithm>
#include <bit>

#include "core/base/error.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/plan/batch/rivals/group_lists.hpp"

namespace ballast {
namespace {

class DynamicCp {
 public:
  DynamicCp(const std::vector<SampleLength>& samples, const PlacementOptions& options,
            const PlacementCosts& costs)
      : samples_(samples), options_(options), costs_(costs), degree_(samples.size(), 1) {
    for (int ranks = 1; ranks <= options.ranks; ranks *= 2) {
      splits_.push_back({ranks, 1, ranks});
      most_.push_back(most_tokens(splits_.back(), options, costs));
    }
    std::vector<std::int64_t> lengths;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      lengths.push_back(samples[i].tokens);
      const auto fits = std::lower_bound(most_.begin(), most_.end(), samples[i].tokens);
      require(fits != most_.end(),
              "a sample of {} tokens fits the memory of no group of up to {} ranks",
              samples[i].tokens, splits_.back().ranks);
      degree_[i] = 1 << (fits - most_.begin());
    }
    order_ = longest_first(lengths);
  }

  Placement run() {
    Placement best = placed();
    while (best.idle_ranks() > 0 && !order_.empty()) {
      const auto slowest = *std::max_element(
          order_.begin(), order_.end(),
          [&](std::uint32_t a, std::uint32_t b) { return seconds_of(a) < seconds_of(b); });
      if (degree_[slowest] * 2 > options_.ranks) break;
      degree_[slowest] *= 2;
      Placement wider = placed();
      if (wider.step_s > best.step_s) break;
      best = std::move(wider);
    }
    return best;
  }

 private:
  const PlacementSplit& split(std::uint32_t i) const {
    return splits_[static_cast<std::size_t>(std::countr_zero(static_cast<unsigned>(degree_[i])))];
  }
  double seconds_of(std::uint32_t i) const {
    return seconds(whole(samples_[i]), split(i), costs_, options_.align);
  }

  Placement placed() const {
    std::vector<double> end(static_cast<std::size_t>(options_.ranks), 0.0);
    std::vector<PlacedMicroBatch> list;
    std::vector<std::vector<std::uint32_t>> alone(end.size());
    for (const std::uint32_t i : order_) {
      const int ranks = degree_[i], first = earliest_block(end, ranks);
      const auto begin = end.begin() + first;
      std::fill(begin, begin + ranks, *std::max_element(begin, begin + ranks) + seconds_of(i));
      if (ranks > 1)
        list.push_back({whole(samples_[i]), first, split(i)});
      else
        alone[static_cast<std::size_t>(first)].push_back(i);
    }
    for (std::size_t rank = 0; rank < alone.size(); ++rank) {
      BestFit fit(most_.front());
      const std::size_t begin = list.size();
      for (const std::uint32_t i : alone[rank]) {
        const std::size_t pack = begin + fit.place(samples_[i].tokens);
        if (pack == list.size()) list.push_back({{}, static_cast<int>(rank), splits_.front()});
        list[pack].segments.push_back(whole(samples_[i]).front());
      }
    }
    return in_order(std::move(list), options_, costs_);
  }

  const std::vector<SampleLength>& samples_;
  const PlacementOptions& options_;
  const PlacementCosts& costs_;
  std::vector<int> degree_;             ///< [sample] ranks that share it
  std::vector<PlacementSplit> splits_;  ///< [log2 ranks]
  std::vector<std::int64_t> most_;      ///< [log2 ranks] tokens that fit
  std::vector<std::uint32_t> order_;    ///< longest first
};

}  // namespace

Placement dynamic_cp_placement(const std::vector<SampleLength>& samples,
                               const PlacementOptions& options, const PlacementCosts& costs) {
  return DynamicCp(samples, options, costs).run();
}

}  // namespace ballast

#include "core/plan/batch/partition.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

#include "core/base/error.hpp"

namespace ballast {
namespace {

using Bins = std::vector<std::vector<std::uint32_t>>;

std::vector<std::uint32_t> heaviest_first(std::span<const double> weights) {
  std::vector<std::uint32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return weights[a] > weights[b]; });
  return order;
}

double load_of(const std::vector<std::uint32_t>& bin, std::span<const double> weights) {
  double sum = 0;
  for (const std::uint32_t i : bin) sum += weights[i];
  return sum;
}

Partition in_order(Bins bins) {
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  std::stable_sort(bins.begin(), bins.end(), [](const auto& a, const auto& b) {
    return !a.empty() && (b.empty() || a.front() < b.front());
  });
  return bins;
}

/// Several-way largest differencing: tuples of `bins` partial sums; the two of largest spread are
/// joined, heaviest part with lightest.
Bins largest_differencing(std::span<const double> weights, std::size_t bins) {
  struct Tuple {
    std::vector<double> load;                         ///< descending
    std::vector<std::vector<std::uint32_t>> members;  ///< likewise
    std::uint32_t number = 0;
    double spread() const { return load.front() - load.back(); }
  };
  const auto smaller = [](const Tuple& a, const Tuple& b) {
    return a.spread() != b.spread() ? a.spread() < b.spread() : a.number > b.number;
  };
  std::priority_queue<Tuple, std::vector<Tuple>, decltype(smaller)> tuples(smaller);
  for (std::uint32_t i = 0; i < weights.size(); ++i) {
    Tuple t{std::vector<double>(bins, 0), Bins(bins), i};
    t.load[0] = weights[i];
    t.members[0] = {i};
    tuples.push(std::move(t));
  }
  while (tuples.size() > 1) {
    Tuple a = tuples.top();
    tuples.pop();
    Tuple b = tuples.top();
    tuples.pop();
    std::vector<std::size_t> order(bins);
    for (std::size_t i = 0; i < bins; ++i) {
      a.load[i] += b.load[bins - 1 - i];
      auto& other = b.members[bins - 1 - i];
      a.members[i].insert(a.members[i].end(), other.begin(), other.end());
    }
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return a.load[x] > a.load[y]; });
    Tuple joined{{}, {}, std::min(a.number, b.number)};
    for (const std::size_t i : order) {
      joined.load.push_back(a.load[i]);
      joined.members.push_back(std::move(a.members[i]));
    }
    tuples.push(std::move(joined));
  }
  return tuples.empty() ? Bins(bins) : tuples.top().members;
}

/// Moves and swaps out of the heaviest bin while they make the larger of the two bins lighter.
void improve(Bins& bins, std::span<const double> weights) {
  std::vector<double> load;
  for (const auto& bin : bins) load.push_back(load_of(bin, weights));
  for (int round = 0; round < 1000; ++round) {
    const auto h =
        static_cast<std::size_t>(std::max_element(load.begin(), load.end()) - load.begin());
    double best = load[h] * (1 - 1e-12);
    std::size_t to = 0, from_at = 0, to_at = 0;
    bool found = false;
    for (std::size_t b = 0; b < bins.size(); ++b) {
      if (b == h) continue;
      for (std::size_t i = 0; i < bins[h].size(); ++i)
        for (std::size_t j = 0; j <= bins[b].size(); ++j) {  // the last one: a move alone
          const double shift = weights[bins[h][i]] - (j < bins[b].size() ? weights[bins[b][j]] : 0);
          const double larger = std::max(load[h] - shift, load[b] + shift);
          if (larger < best) best = larger, to = b, from_at = i, to_at = j, found = true;
        }
    }
    if (!found) return;
    if (to_at < bins[to].size()) {
      std::swap(bins[h][from_at], bins[to][to_at]);
    } else {
      bins[to].push_back(bins[h][from_at]);
      bins[h].erase(bins[h].begin() + static_cast<std::ptrdiff_t>(from_at));
    }
    load[h] = load_of(bins[h], weights);
    load[to] = load_of(bins[to], weights);
  }
}

/// Depth-first search for a lighter heaviest bin; loads that are equal are one.
class Search {
 public:
  Search(std::span<const double> weights, std::size_t bins, double best)
      : weights_(weights),
        order_(heaviest_first(weights)),
        load_(bins, 0),
        bin_(weights.size()),
        best_(best) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    bound_ =
        std::max(total / static_cast<double>(bins), weights.empty() ? 0 : weights[order_.front()]);
  }
  bool run() {
    place(0);
    return !found_.empty();
  }
  Bins result() const {
    Bins bins(load_.size());
    for (std::size_t i = 0; i < found_.size(); ++i) bins[found_[i]].push_back(order_[i]);
    return bins;
  }

 private:
  void place(std::size_t i) {
    if (++nodes_ > kNodes || best_ <= bound_ * (1 + 1e-9)) return;
    if (i == order_.size()) {
      best_ = *std::max_element(load_.begin(), load_.end());
      found_ = bin_;
      return;
    }
    std::vector<std::size_t> bins(load_.size());
    std::iota(bins.begin(), bins.end(), std::size_t{0});
    std::sort(bins.begin(), bins.end(), [&](std::size_t a, std::size_t b) {
      return load_[a] != load_[b] ? load_[a] < load_[b] : a < b;
    });
    double last = -1;
    for (const std::size_t b : bins) {
      if (load_[b] == last) continue;
      last = load_[b];
      const double w = weights_[order_[i]];
      if (load_[b] + w >= best_ * (1 - 1e-12)) break;  // heavier bins will not do either
      load_[b] += w;
      bin_[i] = b;
      place(i + 1);
      load_[b] = last;
    }
  }
  static constexpr int kNodes = 20000;
  std::span<const double> weights_;
  std::vector<std::uint32_t> order_;
  std::vector<double> load_;
  std::vector<std::size_t> bin_, found_;
  double best_, bound_ = 0;
  int nodes_ = 0;
};

void check(std::span<const double> weights, int bins) {
  require(bins >= 1, "a partition needs at least one bin, not {}", bins);
  for (const double w : weights)
    require(w >= 0 && std::isfinite(w), "a partition's weight is {}", w);
}

}  // namespace

double heaviest(const Partition& partition, std::span<const double> weights) {
  double most = 0;
  for (const auto& bin : partition) most = std::max(most, load_of(bin, weights));
  return most;
}

Partition longest_first_partition(std::span<const double> weights, int bins) {
  check(weights, bins);
  Bins result(static_cast<std::size_t>(bins));
  std::vector<double> load(result.size(), 0);
  for (const std::uint32_t i : heaviest_first(weights)) {
    const auto b =
        static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    result[b].push_back(i);
    load[b] += weights[i];
  }
  return in_order(std::move(result));
}

Partition balanced_partition(std::span<const double> weights, int bins) {
  Bins best = longest_first_partition(weights, bins);
  Bins other = largest_differencing(weights, static_cast<std::size_t>(bins));
  improve(best, weights);
  improve(other, weights);
  if (heaviest(other, weights) < heaviest(best, weights)) best = std::move(other);
  if (weights.size() <= 24) {
    Search search(weights, static_cast<std::size_t>(bins), heaviest(best, weights));
    if (search.run()) best = search.result();
  }
  return in_order(std::move(best));
}

}  // namespace ballast

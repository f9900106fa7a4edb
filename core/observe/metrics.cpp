#include "core/observe/metrics.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/error.hpp"

namespace ballast {
namespace {

double mean(std::span<const double> values) {
  return values.empty() ? 0.0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

std::size_t common_steps(const std::vector<std::vector<double>>& times) {
  for (const auto& worker : times)
    require(worker.size() == times.front().size(),
            "metrics: workers have {} and {} ring steps; give every worker the same steps",
            times.front().size(), worker.size());
  return times.empty() ? 0 : times.front().size();
}

}  // namespace

double imbalance_degree(std::span<const double> values) {
  const double average = mean(values);
  return average > 0 ? *std::max_element(values.begin(), values.end()) / average : 1.0;
}

double worker_imbalance(const std::vector<std::vector<double>>& times) {
  const std::size_t steps = common_steps(times);
  if (steps == 0) return 1.0;
  double sum = 0;
  std::vector<double> at_step(times.size());
  for (std::size_t t = 0; t < steps; ++t) {
    for (std::size_t w = 0; w < times.size(); ++w) at_step[w] = times[w][t];
    sum += imbalance_degree(at_step);
  }
  return sum / static_cast<double>(steps);
}

double step_imbalance(const std::vector<std::vector<double>>& times) {
  if (common_steps(times) == 0) return 1.0;
  double sum = 0;
  for (const auto& worker : times) sum += imbalance_degree(worker);
  return sum / static_cast<double>(times.size());
}

double computation_ratio(const std::vector<std::vector<double>>& compute,
                         const std::vector<std::vector<double>>& wall) {
  require(compute.size() == wall.size() && common_steps(compute) == common_steps(wall),
          "metrics: computation and wall times must have the same workers and ring steps");
  double sum = 0;
  std::size_t count = 0;
  for (std::size_t w = 0; w < wall.size(); ++w)
    for (std::size_t t = 0; t < wall[w].size(); ++t)
      if (wall[w][t] > 0) {
        sum += compute[w][t] / wall[w][t];
        ++count;
      }
  return count > 0 ? sum / static_cast<double>(count) : 1.0;
}

double balance_ratio(std::span<const double> values) {
  return values.empty() ? 0.0
                        : padding_ratio(values, *std::max_element(values.begin(), values.end()));
}

double padding_ratio(std::span<const double> pack_tokens, double capacity) {
  return pack_tokens.empty() || capacity <= 0 ? 0.0 : (capacity - mean(pack_tokens)) / capacity;
}

Pop pop(std::span<const double> useful, double runtime) {
  const double most = useful.empty() ? 0.0 : *std::max_element(useful.begin(), useful.end());
  if (most <= 0 || runtime <= 0) return {};
  Pop p;
  p.load_balance = mean(useful) / most;
  p.communication_efficiency = most / runtime;
  p.parallel_efficiency = p.load_balance * p.communication_efficiency;
  return p;
}

std::vector<double> exclusive_seconds(std::span<const Event> events) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return events[a].begin_s != events[b].begin_s ? events[a].begin_s < events[b].begin_s
                                                  : events[a].end_s > events[b].end_s;
  });
  std::vector<double> seconds(events.size());
  std::vector<std::size_t> open;  // enclosing events, outermost first
  for (const std::size_t i : order) {
    const Event& e = events[i];
    if (beside(e.kind)) continue;
    seconds[i] = e.end_s - e.begin_s;
    while (!open.empty() && events[open.back()].end_s <= e.begin_s) open.pop_back();
    // Taken from the innermost event around it, and from the next one out where that ended earlier.
    double from = e.begin_s;
    for (auto outer = open.rbegin(); outer != open.rend() && from < e.end_s; ++outer) {
      const double to = std::min(e.end_s, events[*outer].end_s);
      if (to <= from) continue;
      seconds[*outer] -= to - from;
      from = to;
    }
    open.push_back(i);
  }
  return seconds;
}

double kind_seconds(std::span<const Event> events, EventKind kind, std::int64_t step) {
  double sum = 0;
  for (const Event& e : events)
    if (e.kind == kind && e.step == step) sum += e.end_s - e.begin_s;
  return sum;
}

void OverheadShare::add(double most_s, double step_s) {
  if (steps_++ == 1) spent_s_ = whole_s_ = 0;
  spent_s_ += most_s;
  whole_s_ += step_s;
}

double OverheadShare::share() const { return whole_s_ > 0 ? spent_s_ / whole_s_ : 0; }

}  // namespace ballast

#include "core/data/sampler_window.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"

namespace ballast {
namespace {

/// Samples of a window in the sampler's order, and what they weigh.
struct Pool {
  std::vector<std::int64_t> samples, weights;
};

/// Places of the pool's samples, heaviest first; equal ones in the sampler's order.
std::vector<std::uint32_t> heaviest_first(const Pool& pool) {
  std::vector<std::uint32_t> order(pool.samples.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return pool.weights[a] > pool.weights[b];
  });
  return order;
}

using Steps = std::vector<std::vector<std::uint32_t>>;

/// Each to the step with the least work so far; a step of `most` samples is full (0: never).
Steps equal_work(const Pool& pool, std::size_t steps, std::size_t most) {
  using Load = std::pair<std::int64_t, std::size_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> load;
  for (std::size_t s = 0; s < steps; ++s) load.emplace(0, s);
  Steps result(steps);
  for (const std::uint32_t i : heaviest_first(pool)) {
    const auto [sum, s] = load.top();
    load.pop();
    result[s].push_back(i);
    if (most == 0 || result[s].size() < most) load.emplace(sum + pool.weights[i], s);
  }
  return result;
}

/// Neighbours by weight together, steps of equal work, or of `most` samples.
Steps neighbours(const Pool& pool, std::size_t steps, std::size_t most) {
  const std::int64_t total =
      std::accumulate(pool.weights.begin(), pool.weights.end(), std::int64_t{0});
  const auto parts = static_cast<std::int64_t>(steps);
  Steps result(steps);
  std::int64_t sum = 0;
  std::size_t s = 0;
  for (const std::uint32_t i : heaviest_first(pool)) {
    const std::int64_t here = static_cast<std::int64_t>(s) + 1;
    const bool full = most > 0 ? result[s].size() == most
                               : sum >= total / parts * here + total % parts * here / parts;
    if (full && !result[s].empty() && s + 1 < steps) ++s;
    result[s].push_back(i);
    sum += pool.weights[i];
  }
  return result;
}

}  // namespace

std::int64_t pairs_of_token(double token_flops, double pair_flops) {
  return pair_flops > 0 ? static_cast<std::int64_t>(token_flops / pair_flops) : 0;
}

SamplerWindow::SamplerWindow(const WindowOptions& options) : options_(options) {
  require(options.steps >= 1, "batching.window = {} steps must be at least 1", options.steps);
}

void SamplerWindow::fill(Sampler& sampler, const SamplerPosition& begin,
                         const std::function<std::int64_t(std::int64_t)>& length) {
  begin_ = end_ = begin;
  steps_.clear();
  const std::int64_t boundary = begin.epoch == 0 ? sampler.short_samples() : 0;
  Pool pool;
  while (static_cast<std::int64_t>(steps_.size()) < options_.steps) {
    SamplerPosition next = end_;
    const auto step = sampler.next(next, options_.global_tokens, options_.global_samples, length);
    const bool beyond =
        next.epoch > begin.epoch + (next.index == 0 ? 1 : 0) ||
        (end_.index < boundary && next.epoch == begin.epoch && next.index > boundary);
    if (beyond && !steps_.empty()) break;
    steps_.push_back(step);
    end_ = next;
    if (beyond || next.epoch > begin.epoch || (boundary > 0 && next.index == boundary)) break;
  }
  if (steps_.size() == 1) return;
  for (const auto& step : steps_)
    for (const std::int64_t sample : step) {
      // FLOPs fit 64 bits in units of a pair; a sample without tokens weighs nothing.
      const std::int64_t n = length ? length(sample) : 1;
      pool.samples.push_back(sample);
      pool.weights.push_back(options_.token_pairs > 0 ? n * options_.token_pairs + n * (n + 1) / 2
                                                      : n);
    }
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(0, options_.global_samples));
  Steps dealt = options_.rule == WindowRule::sorted ? neighbours(pool, steps_.size(), most)
                                                    : equal_work(pool, steps_.size(), most);
  const std::uint64_t stream =
      stream_of("sampler.window") + static_cast<std::uint64_t>(begin.epoch) * 0x9E3779B97F4A7C15ull;
  for (std::size_t s = dealt.size(); s > 1; --s)  // no step of a window is the first by rule
    std::swap(dealt[s - 1], dealt[random_bits(sampler.seed(), stream,
                                              static_cast<std::uint64_t>(begin.index) * 4096 + s) %
                                  s]);
  for (std::size_t s = 0; s < dealt.size(); ++s) {
    std::sort(dealt[s].begin(), dealt[s].end());
    steps_[s].clear();
    for (const std::uint32_t i : dealt[s]) steps_[s].push_back(pool.samples[i]);
  }
}

std::vector<std::int64_t> SamplerWindow::next(
    Sampler& sampler, SamplerPosition& position,
    const std::function<std::int64_t(std::int64_t)>& length) {
  require(position.window_step == 0 || position.window == options_.steps,
          "the run stopped at step {} of a window of {} steps: batching.window = {} until that "
          "window has ended, not {}",
          position.window_step, position.window, position.window, options_.steps);
  if (begin_.epoch != position.epoch || begin_.index != position.index)
    fill(sampler, {position.epoch, position.index, 0, 0}, length);
  require(
      position.window_step < static_cast<std::int64_t>(steps_.size()),
      "the run stopped at step {} of a window that has {} here: was the checkpoint written with "
      "another dataset or another size of a step?",
      position.window_step, steps_.size());
  const auto step = static_cast<std::size_t>(position.window_step);
  if (step + 1 < steps_.size())
    position.window_step += 1, position.window = options_.steps;
  else
    position = end_;
  return steps_[step];
}

}  // namespace ballast

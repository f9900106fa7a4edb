#include "core/plan/attention/slash_windows.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {
namespace {

void add_stretches(const AttentionOptions& options, const KeyAxis& axis, int segment,
                   std::int64_t begin, bool carries, std::vector<SlashWindow>& windows) {
  const std::int64_t stretch = options.stretch,
                     end = axis.first_position[segment] + axis.count[segment];
  require(begin % stretch == 0,
          "causal selection: a chunk starts at token {}, inside a stretch of {}", begin, stretch);
  for (std::int64_t at = begin; at < end; at += stretch) {
    SlashWindow window{segment, at, std::min(end, at + stretch), {}, at == 0};
    if (at > begin) window.rows = {{segment, at - options.last_q, options.last_q}};
    windows.push_back(std::move(window));
  }
  if (carries && end % stretch == 0)  // for the next chunk of the sample
    windows.push_back({segment, end, end, {{segment, end - options.last_q, options.last_q}}});
}

}  // namespace

std::vector<SlashWindow> slash_windows(const AttentionOptions& options, const KeyAxis& axis,
                                       std::span<const std::int64_t> first_query, bool carries) {
  std::vector<SlashWindow> windows;
  for (int s = 0; s < axis.segments(); ++s) {
    const std::int64_t begin = first_query[s], end = axis.first_position[s] + axis.count[s];
    if (options.causal() && axis.count[s] > 0) {
      add_stretches(options, axis, s, begin, carries, windows);
      continue;
    }
    SlashWindow window{s, begin, std::max(begin, end), {}, axis.count[s] <= options.last_q};
    const std::int64_t first = std::max(begin, end - options.last_q);
    if (!window.whole && first < end) window.rows = {{s, first, end - first}};
    windows.push_back(std::move(window));
  }
  return windows;
}

std::int64_t observed_pairs(const SlashWindow& window, const KeyAxis& axis) {
  if (!window.observed()) return 0;
  std::int64_t pairs = 0;
  for (const AxisRange& rows : window.rows) {
    const std::int64_t before = rows.position - axis.first_position[window.segment];
    pairs += rows.count * before + rows.count * (rows.count + 1) / 2;
  }
  return pairs;
}

std::vector<std::size_t> observed_batches(std::span<const SlashWindow> windows, const KeyAxis& axis,
                                          std::int64_t last_q) {
  const std::int64_t most =
      last_q * std::accumulate(axis.count.begin(), axis.count.end(), std::int64_t{0});
  std::vector<std::size_t> batches{0};
  std::int64_t pairs = 0;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const std::int64_t more = observed_pairs(windows[w], axis);
    if (pairs > 0 && pairs + more > most) {
      batches.push_back(w);
      pairs = 0;
    }
    pairs += more;
  }
  batches.push_back(windows.size());
  return batches;
}

}  // namespace ballast

#include "app/measure/profile_grid.hpp"

#include <algorithm>
#include <cmath>

#include "core/config/run_options.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/predict/latency_model.hpp"

namespace ballast {
ProfileBins::ProfileBins(const Config& config, bool gpu)
    : pattern(budget_pattern(config)),
      block_tokens(budget_block_tokens(config)),
      lengths(config.profile.lengths),
      prefixes(config.profile.prefixes),
      budgets(config.profile.budgets),
      recompute(config.profile.recompute) {
  // Near the short end launches set the pace of a GPU and times bend; further out they follow power
  // laws.
  if (lengths.empty())
    lengths = gpu ? std::vector<std::int64_t>{1024, 2048, 4096, 16384, 65536}
                  : std::vector<std::int64_t>{256, 512, 1024, 2048};
  prefixes.insert(prefixes.begin(), 0);
  if (budgets.empty())
    budgets = gpu ? std::vector<std::int64_t>{4, 8, 16, 32, 64, 128}
                  : std::vector<std::int64_t>{2, 4, 8, 16, 32};
  if (pattern == PatternKind::dense) budgets.clear();
}

std::vector<ProfilePoint> profile_points(const ProfileBins& bins) {
  std::vector<ProfilePoint> points;
  for (const std::int64_t n : bins.lengths) {
    for (const Recompute recompute : bins.recompute)
      points.push_back({ProfilePart::rest, {}, n, 0, 0, recompute});
    points.push_back({ProfilePart::head, {}, n, 0, 0});
    for (const std::int64_t p : bins.prefixes) {
      points.push_back({ProfilePart::attention, PatternKind::dense, n, p, 0});
      for (std::size_t i = 0; i < bins.budgets.size(); ++i) {
        const bool last = i + 1 == bins.budgets.size();
        if (p > 0 && i % 2 == 1 && !last) continue;
        points.push_back({ProfilePart::attention, bins.pattern, n, p, bins.budgets[i]});
        if (budget_takes_all(bins.budgets[i], bins.block_tokens, n + p))
          break;  // larger ones compute the same
      }
    }
  }
  return points;
}

std::vector<double> estimated_run_seconds(const std::vector<ProfilePoint>& points,
                                          const PilotTimes& pilot, std::int64_t block_tokens) {
  const auto pairs = [&](std::int64_t n, std::int64_t p, std::int64_t budget) {
    return static_cast<double>(n) * mean_keys(n, p, budget, block_tokens);
  };
  std::vector<double> seconds;
  for (const ProfilePoint& point : points) {
    const double tokens =
        static_cast<double>(point.query_tokens) / static_cast<double>(pilot.tokens);
    double s = tokens * (point.part == ProfilePart::head ? pilot.head_s : pilot.rest_s);
    if (point.part == ProfilePart::attention)
      s = pilot.attention_s * pairs(point.query_tokens, point.prefix_tokens, point.budget) /
          pairs(pilot.tokens, 0, 0);
    seconds.push_back(s / 2);
  }
  return seconds;
}

std::int64_t RepeatRule::warmups(double run_s) const {
  const auto within = [&](double seconds) {
    return static_cast<std::int64_t>(std::min(seconds / std::max(run_s, 1e-9), most_runs));
  };
  const std::int64_t few =
      std::clamp<std::int64_t>(within(pass_s), 1, std::max<std::int64_t>(1, warmup));
  return std::max(few, within(std::min(heat_s, pass_s / 2)));
}

std::int64_t RepeatRule::runs(double run_s) const {
  return static_cast<std::int64_t>(
      std::ceil(std::clamp(batch_s / std::max(run_s, 1e-9), 1.0, most_runs)));
}

std::int64_t RepeatRule::batches(double run_s) const {
  const double fit = pass_s / std::max(1e-9, run_s * static_cast<double>(runs(run_s)));
  return static_cast<std::int64_t>(
      std::clamp(fit, static_cast<double>(std::min(least, most)), static_cast<double>(most)));
}

double RepeatRule::seconds(double run_s) const {
  return run_s * static_cast<double>(warmups(run_s) + runs(run_s) * batches(run_s));
}

}  // namespace ballast

// LatencyModel: interpolation of a profile table.
#include "core/predict/latency_model.hpp"

#include <algorithm>
#include <cmath>

#include "core/base/error.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

double mean_keys(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                 std::int64_t block_tokens) {
  const double n = static_cast<double>(query_tokens), p = static_cast<double>(prefix_tokens);
  const double limit = static_cast<double>(budget) * static_cast<double>(block_tokens);
  if (budget_takes_all(budget, block_tokens, prefix_tokens + query_tokens)) return p + (n + 1) / 2;
  if (limit <= p + 1) return limit;
  const double below = limit - p;  // queries that see no more than the limit
  return (below * p + below * (below + 1) / 2 + (n - below) * limit) / n;
}

PowerCurve::PowerCurve(std::span<const double> x, std::span<const double> y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    require(x[i] > 0 && y[i] > 0 && (i == 0 || (x[i] > x[i - 1] && y[i] >= y[i - 1])),
            "a power curve needs positive, ascending points");
    log_x_.push_back(std::log(x[i]));
    log_y_.push_back(std::log(y[i]));
  }
}

double PowerCurve::operator()(double x) const {
  if (log_x_.empty() || x <= 0) return 0;
  const double at = std::log(x);
  const std::size_t last = log_x_.size() - 1;
  if (last == 0) return std::exp(log_y_[0] + at - log_x_[0]);
  const auto upper =
      static_cast<std::size_t>(std::upper_bound(log_x_.begin(), log_x_.end(), at) - log_x_.begin());
  const std::size_t hi = std::clamp<std::size_t>(upper, 1, last), lo = hi - 1;
  double slope = (log_y_[hi] - log_y_[lo]) / (log_x_[hi] - log_x_[lo]);
  if (upper == 0) return std::exp(log_y_[0] + std::min(slope, 1.0) * (at - log_x_[0]));
  if (upper > last)
    return std::exp(log_y_[last] + std::clamp(slope, 1.0, 2.0) * (at - log_x_[last]));
  return std::exp(log_y_[lo] + slope * (at - log_x_[lo]));
}

namespace {

/// Rows of one series of a table.
struct TableSeries {
  const ProfileTable& table;
  const LatencyOptions& options;
  int sp = 1;

  bool holds(const ProfileRow& r, ProfilePart part, ProfilePass pass) const {
    return r.part == part && r.sp == (part == ProfilePart::head ? 1 : sp) && r.pass == pass &&
           r.recompute == options.recompute &&
           (part != ProfilePart::attention || r.pattern == options.pattern);
  }
  bool complete() const {
    const auto has = [&](ProfilePart part) {
      return std::any_of(table.rows.begin(), table.rows.end(),
                         [&](const ProfileRow& r) { return holds(r, part, ProfilePass::forward); });
    };
    return has(ProfilePart::attention) && has(ProfilePart::rest);
  }
  template <class Value>
  PowerCurve curve(ProfilePart part, ProfilePass pass, Value&& value) const {
    std::vector<double> x, y;
    for (const ProfileRow& r : table.rows) {
      if (!holds(r, part, pass) || value(r) <= 0) continue;
      x.push_back(static_cast<double>(r.query_tokens));
      y.push_back(std::max(y.empty() ? 0.0 : y.back(), value(r)));
    }
    return PowerCurve(x, y);
  }
};

/// The series of options.sp ranks, else that of one rank.
TableSeries series_of(const ProfileTable& table, const LatencyOptions& options) {
  for (const int sp : {options.sp, 1})
    if (const TableSeries series{table, options, sp}; series.complete()) return series;
  std::string known;
  for (const ProfileRow& r : table.rows) {
    const std::string of = r.pattern ? pattern_text(r) + " " : "";
    const std::string one = fmt::format("{} {}recompute {}", name(r.part), of, r.recompute);
    if (known.find(one) == std::string::npos) known += (known.empty() ? "" : "; ") + one;
  }
  fail(
      "profile table: no times of pattern \"{}\" with recompute \"{}\"; it has {}; measure them "
      "with `ballast profile`",
      name(options.pattern), name(options.recompute), known);
}

}  // namespace

LatencyModel::LatencyModel(const ProfileTable& table, const LatencyOptions& options)
    : block_tokens_(table.block_tokens) {
  const TableSeries series = series_of(table, options);
  divides_heads_ = series.sp != options.sp;
  shares_ = options.cp * (divides_heads_ ? options.sp : 1);
  head_shares_ = options.cp * options.sp;
  // Ranks of a Ulysses group lie side by side: as those of an inner ring, or, where packs join
  // them, data-parallel ones.
  const ProfileLink *inner = table.link("inner"), *between = inner ? inner : table.link("dp");
  if (divides_heads_ && between != nullptr) {
    // One exchange before attention (q, k, v) and one after (o); each rank keeps its own part.
    const double away = 1 - 1.0 / options.sp;
    exchange_s_ = away * options.exchange_bytes_per_token / between->bytes_per_s;
    exchanges_s_ = 2 * between->latency_s;
  }
  const auto median = [](const ProfileRow& r) { return r.median_s; };
  bytes_ = series.curve(ProfilePart::rest, ProfilePass::forward,
                        [](const ProfileRow& r) { return static_cast<double>(r.bytes); });
  for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward}) {
    const auto i = static_cast<std::size_t>(pass);
    rest_[i] = series.curve(ProfilePart::rest, pass, median);
    head_[i] = series.curve(ProfilePart::head, pass, median);
    std::vector<ProfileRow> rows;
    for (const ProfileRow& r : table.rows)
      if (series.holds(r, ProfilePart::attention, pass)) rows.push_back(r);
    attention_[i] = grid_of(rows);
  }
}

LatencyModel::Grid LatencyModel::grid_of(std::span<const ProfileRow> rows) const {
  Grid grid;
  std::vector<double> keys, seconds;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ProfileRow& r = rows[i];
    keys.push_back(mean_keys(r.query_tokens, r.prefix_tokens, r.budget, block_tokens_));
    seconds.push_back(r.median_s);
    if (i + 1 < rows.size() && rows[i + 1].query_tokens == r.query_tokens &&
        rows[i + 1].prefix_tokens == r.prefix_tokens)
      continue;
    if (grid.empty() || grid.back().tokens != r.query_tokens) grid.push_back({r.query_tokens, {}});
    grid.back().prefixes.push_back({r.prefix_tokens, PowerCurve(keys, seconds)});
    keys.clear(), seconds.clear();
  }
  return grid;
}

double LatencyModel::at_length(const Length& length, std::int64_t prefix_tokens,
                               const Keys& computed) const {
  const auto keys = [&](std::int64_t prefix) {
    const double all = mean_keys(length.tokens, prefix, computed.budget, block_tokens_);
    return computed.budget == 0 ? computed.share * all : all;
  };
  double low = 0;  // of the prefixes up to this one: times never fall
  for (std::size_t j = 0; j < length.prefixes.size(); ++j) {
    const Prefix& here = length.prefixes[j];
    low = std::max(low, here.seconds(keys(here.tokens)));
    if (j + 1 == length.prefixes.size()) return std::max(low, here.seconds(keys(prefix_tokens)));
    const Prefix& next = length.prefixes[j + 1];
    if (prefix_tokens >= next.tokens) continue;
    // Between two prefixes both curves are asked for these keys; the nearer one weighs more.
    const double share = static_cast<double>(prefix_tokens - here.tokens) /
                         static_cast<double>(next.tokens - here.tokens);
    const double before =
        std::min(here.seconds(keys(prefix_tokens)), next.seconds(keys(next.tokens)));
    const double after = std::max(before, next.seconds(keys(prefix_tokens)));
    return std::max(low, before + share * (after - before));
  }
  return low;
}

double LatencyModel::seconds(const Grid& grid, std::int64_t query_tokens,
                             std::int64_t prefix_tokens, const Keys& computed) const {
  if (query_tokens <= 0) return 0;
  // Below the shortest and above the longest length a query costs what it costs there with as many
  // keys.
  const auto like = [&](Length end) {
    const double queries = static_cast<double>(query_tokens) / static_cast<double>(end.tokens);
    end.tokens = query_tokens;
    return queries * at_length(end, prefix_tokens, computed);
  };
  if (query_tokens < grid.front().tokens) return like(grid.front());
  double low = 0;
  for (std::size_t i = 0; i + 1 < grid.size(); ++i) {
    low = std::max(low, at_length(grid[i], prefix_tokens, computed));
    if (query_tokens >= grid[i + 1].tokens) continue;
    const double high = std::max(low, at_length(grid[i + 1], prefix_tokens, computed));
    const double share =
        std::log(static_cast<double>(query_tokens) / static_cast<double>(grid[i].tokens)) /
        std::log(static_cast<double>(grid[i + 1].tokens) / static_cast<double>(grid[i].tokens));
    return low * std::pow(high / low, share);
  }
  return std::max(low, like(grid.back()));
}

LayerTime LatencyModel::rest(std::int64_t tokens) const {
  const double share = static_cast<double>(tokens) / shares_;
  return {rest_[0](share), rest_[1](share)};
}

LayerTime LatencyModel::head(std::int64_t tokens) const {
  const double share = static_cast<double>(tokens) / head_shares_;
  return {head_[0](share), head_[1](share)};
}

LayerTime LatencyModel::attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                                  std::int64_t budget, double share) const {
  const Keys computed{budget, share};
  return {seconds(attention_[0], query_tokens, prefix_tokens, computed) / shares_,
          seconds(attention_[1], query_tokens, prefix_tokens, computed) / shares_};
}

double LatencyModel::exchange(std::int64_t tokens) const {
  return tokens > 0 ? exchanges_s_ + exchange_s_ * static_cast<double>(tokens) / shares_ : 0;
}

LayerTime LatencyModel::predict(const MicroBatch& micro_batch,
                                std::span<const std::int64_t> budgets) const {
  require(budgets.size() == 1 || budgets.size() == micro_batch.segments.size(),
          "predict: {} budgets for {} segments", budgets.size(), micro_batch.segments.size());
  const std::int64_t tokens = micro_batch.axis_tokens();
  LayerTime time = rest(tokens);
  time.forward_s += exchange(tokens);
  time.backward_s += exchange(tokens);
  for (std::size_t s = 0; s < micro_batch.segments.size(); ++s) {
    const Segment& segment = micro_batch.segments[s];
    const LayerTime one =
        attention(segment.tokens(), segment.begin, budgets[budgets.size() == 1 ? 0 : s]);
    time.forward_s += one.forward_s;
    time.backward_s += one.backward_s;
  }
  return time;
}

double LatencyModel::activation_bytes(std::int64_t tokens) const {
  return bytes_(static_cast<double>(tokens) / shares_);
}

}  // namespace ballast

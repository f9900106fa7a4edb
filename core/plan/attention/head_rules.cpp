#include "core/plan/attention/head_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

struct Parameter {
  const char* name;
  std::int64_t HeadRule::*member;
  HeadPattern pattern;
  std::int64_t least, multiple;
};
constexpr Parameter kParameters[] = {
    {"sink", &HeadRule::sink, HeadPattern::a_shape, kBlock, kBlock},
    {"window", &HeadRule::window, HeadPattern::a_shape, kBlock, kBlock},
    {"columns", &HeadRule::columns, HeadPattern::vertical_slash, 0, 1},
    {"slashes", &HeadRule::slashes, HeadPattern::vertical_slash, 1, 1},
    {"blocks", &HeadRule::blocks, HeadPattern::block_sparse, 1, 1},
};
constexpr std::int64_t kMost = std::int64_t{1} << 30;

}  // namespace

std::string to_text(const HeadRule& rule) {
  std::string text = name(rule.pattern);
  for (const Parameter& p : kParameters)
    if (p.pattern == rule.pattern) text += fmt::format(" {} {}", p.name, rule.*p.member);
  return text;
}

std::string problems(const HeadRule& rule) {
  for (const Parameter& p : kParameters) {
    const std::int64_t value = rule.*p.member;
    if (p.pattern != rule.pattern) {
      if (value != 0)
        return fmt::format("{} = {} is none of {}", p.name, value, name(rule.pattern));
    } else if (value < p.least || value > kMost || value % p.multiple != 0) {
      return fmt::format("{} = {} of {}: a {} from {} to {}", p.name, value, name(rule.pattern),
                         p.multiple == 1 ? "number" : "multiple of 64", p.least, kMost);
    }
  }
  return "";
}

HeadTable::HeadTable(int layers, int heads, const HeadRule& rule)
    : layers_(layers), heads_(heads), rules_(static_cast<std::size_t>(layers * heads), rule) {
  require(layers > 0 && heads > 0, "patterns by head: a table of {} layers and {} heads", layers,
          heads);
}

std::size_t HeadTable::place(int layer, int head) const {
  require(layer >= 0 && layer < layers_ && head >= 0 && head < heads_,
          "patterns by head: layer {}, head {} of a table of {} layers and {} heads", layer, head,
          layers_, heads_);
  return static_cast<std::size_t>(layer * heads_ + head);
}

VerticalSlash choose_by_rule(const HeadRule& rule, const HeadMass* mass, std::int64_t tokens) {
  VerticalSlash head;
  switch (rule.pattern) {
    case HeadPattern::dense:
      return dense_head(tokens);
    case HeadPattern::a_shape: {
      const std::int64_t blocks = (tokens + kBlock - 1) / kBlock;
      head.slashes.resize(static_cast<std::size_t>(std::min(rule.window / kBlock, blocks)));
      std::iota(head.slashes.begin(), head.slashes.end(), 0);
      for (std::int64_t c = kBlock; c < std::min(rule.sink, tokens); ++c) head.columns.push_back(c);
      return head;
    }
    case HeadPattern::vertical_slash: {
      require(mass != nullptr, "patterns by head: vertical_slash without observed queries");
      AttentionOptions counts;  // a share of 1 takes all, of which the caps leave the heaviest
      counts.vertical_share = counts.slash_share = 1;
      counts.max_columns = std::max<std::int64_t>(1, rule.columns);
      counts.max_slashes = rule.slashes;
      head = choose_vertical_slash(*mass, counts).head;
      if (rule.columns == 0) head.columns.clear();
      return head;
    }
    case HeadPattern::block_sparse:
      return head;
  }
  return head;
}

double divergence(const std::vector<double>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), "divergence of {} weights and {}", a.size(), b.size());
  const double all_a = std::accumulate(a.begin(), a.end(), 0.0),
               all_b = std::accumulate(b.begin(), b.end(), 0.0);
  if (all_a <= 0 || all_b <= 0) return 0;
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double p = a[i] / all_a, q = b[i] / all_b, mean = (p + q) / 2;
    if (p > 0) sum += p * std::log(p / mean) / 2;
    if (q > 0) sum += q * std::log(q / mean) / 2;
  }
  return std::sqrt(std::max(0.0, sum));
}

}  // namespace ballast

#include "core/data/needle_task.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"

namespace ballast {
namespace {

/// Every sample has a stream of its own; held-out samples come from another family, so that no
/// training sample is ever among them.
std::uint64_t stream(bool held_out, std::int64_t index) {
  constexpr std::uint64_t training = stream_of("needle.training"),
                          validation = stream_of("needle.held_out");
  return random_bits(held_out ? validation : training, static_cast<std::uint64_t>(index), 0);
}

/// A sample's draws, numbered by use: each use counts from a place of its own, so that one more
/// draw here moves nothing there.
class Draws {
 public:
  enum Use : std::uint64_t { length, filler, positions, keys, values, asked };
  Draws(std::uint64_t seed, std::uint64_t stream, Use use)
      : seed_(seed), stream_(stream), next_(std::uint64_t{use} << 48) {}
  /// Integer in [0, n).
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_bits(seed_, stream_, next_++) %
                                     static_cast<std::uint64_t>(n));
  }
  double uniform() { return random_uniform(seed_, stream_, next_++); }
  /// `count` distinct numbers of [0, n), each set alike, ascending (Floyd).
  std::vector<std::int64_t> subset(std::int64_t n, std::int64_t count) {
    std::set<std::int64_t> chosen;
    for (std::int64_t top = n - count; top < n; ++top) {
      const std::int64_t drawn = below(top + 1);
      chosen.insert(chosen.count(drawn) == 0 ? drawn : top);
    }
    return {chosen.begin(), chosen.end()};
  }
  /// [0, n) in random order.
  std::vector<std::int64_t> order(std::int64_t n) {
    std::vector<std::int64_t> list(static_cast<std::size_t>(n));
    std::iota(list.begin(), list.end(), std::int64_t{0});
    for (std::size_t i = list.size(); i > 1; --i)
      std::swap(list[i - 1], list[static_cast<std::size_t>(below(static_cast<std::int64_t>(i)))]);
    return list;
  }

 private:
  std::uint64_t seed_, stream_, next_;
};

/// Lengths that do not hold what is asked of them, in options that are sound one by one.
std::vector<Problem> problems_of_lengths(const NeedleOptions& o) {
  std::vector<Problem> list;
  for (std::size_t i = 0; i < o.lengths.size(); ++i) {
    const std::int64_t pairs = o.pairs_of(i), questions = o.questions_of(i),
                       needed = pairs * o.pair_tokens() + questions * o.question_tokens();
    if (questions > pairs)
      list.push_back({{"data.needle_questions"},
                      fmt::format("data.needle_questions = {} is above data.needle_pairs = {}: a "
                                  "pair is asked for once",
                                  questions, pairs)});
    if (pairs > o.keys)
      list.push_back({{"data.needle_pairs"},
                      fmt::format("data.needle_pairs = {} is above data.needle_keys = {}: a "
                                  "sample's keys are distinct",
                                  pairs, o.keys)});
    if (o.lengths[i] < needed)
      list.push_back(
          {{"data.needle_lengths"},
           fmt::format("data.needle_lengths: {} tokens do not hold {} pairs of {} tokens and {} "
                       "questions of {}, which take {}",
                       o.lengths[i], pairs, o.pair_tokens(), questions, o.question_tokens(),
                       needed)});
  }
  if (o.vocabulary > 0 && o.vocabulary <= o.keys + o.values)
    list.push_back({{"data.needle_keys"},
                    fmt::format("data.needle_keys + data.needle_values = {} leave no filler in "
                                "model.vocabulary = {}",
                                o.keys + o.values, o.vocabulary)});
  return list;
}

}  // namespace

std::vector<Problem> problems(const NeedleOptions& o) {
  std::vector<Problem> list;
  const auto positive = [&](const char* key, std::int64_t value) {
    if (value < 1) list.push_back({{key}, fmt::format("{} = {} must be at least 1", key, value)});
  };
  positive("data.needle_keys", o.keys);
  positive("data.needle_values", o.values);
  positive("data.needle_value_tokens", o.value_tokens);
  if (o.lengths.empty())
    list.push_back({{"data.needle_lengths"},
                    "data.needle_lengths is empty",
                    "list the lengths of samples in tokens"});
  for (const auto& [key, share] : {std::pair{"data.needle_length_share", &o.length_share},
                                   {"data.needle_held_out_share", &o.held_out_share}}) {
    if (share->empty()) continue;
    const double sum = std::accumulate(share->begin(), share->end(), 0.0);
    if (share->size() != o.lengths.size())
      list.push_back({{key},
                      fmt::format("{} has {} values for {} lengths in data.needle_lengths", key,
                                  share->size(), o.lengths.size())});
    else if (!(sum > 0 && std::isfinite(sum)) ||
             *std::min_element(share->begin(), share->end()) < 0)
      list.push_back(
          {{key}, fmt::format("{}: shares are not negative, and their sum is positive", key)});
  }
  const auto fits = [&](const char* key, const std::vector<std::int64_t>& values) {
    if (values.size() != 1 && values.size() != o.lengths.size())
      list.push_back({{key},
                      fmt::format("{} has {} values", key, values.size()),
                      fmt::format("give one, or one for each of {} lengths in data.needle_lengths",
                                  o.lengths.size())});
    for (const std::int64_t value : values) positive(key, value);
  };
  fits("data.needle_pairs", o.pairs);
  fits("data.needle_questions", o.questions);
  if (list.empty()) list = problems_of_lengths(o);
  return list;
}

std::size_t NeedleOptions::kind(bool held_out, std::int64_t index) const {
  std::size_t chosen = 0;
  Draws draws(seed, stream(held_out, index), Draws::length);
  const std::vector<double>& share =
      held_out && !held_out_share.empty() ? held_out_share : length_share;
  if (share.empty())
    return static_cast<std::size_t>(draws.below(static_cast<std::int64_t>(lengths.size())));
  double rest = draws.uniform() * std::accumulate(share.begin(), share.end(), 0.0);
  while (chosen + 1 < lengths.size() && rest >= share[chosen]) rest -= share[chosen++];
  while (share[chosen] == 0) --chosen;  // rounding can run past the last length that has a share
  return chosen;
}

NeedleSample::NeedleSample(const NeedleOptions& options, bool held_out, std::int64_t index)
    : options_(options), stream_(stream(held_out, index)) {
  const auto list = problems(options);
  require(list.empty() && options.vocabulary > 0, "needle task: {}",
          list.empty() ? "the vocabulary is not known" : list.front().message());
  const std::size_t kind = options.kind(held_out, index);
  length_ = options.lengths[kind];
  pairs_ = options.pairs_of(kind);
  const std::int64_t width = options.pair_tokens(), questions = options.questions_of(kind),
                     context = length_ - questions * options.question_tokens();
  // Pairs and filler tokens in a random order: a set of slots for the pairs among all of them.
  const auto slots =
      Draws(options.seed, stream_, Draws::positions).subset(context - pairs_ * (width - 1), pairs_);
  const auto keys = Draws(options.seed, stream_, Draws::keys).order(options.keys);
  Draws values(options.seed, stream_, Draws::values);
  values_.resize(static_cast<std::size_t>(pairs_ * options.value_tokens));
  for (auto& token : values_)
    token = static_cast<std::int32_t>(options.keys + values.below(options.values));
  for (std::size_t p = 0; p < slots.size(); ++p)
    placed_.push_back({slots[p] + static_cast<std::int64_t>(p) * (width - 1), keys[p],
                       static_cast<std::int64_t>(p) * options.value_tokens});
  const auto asked = Draws(options.seed, stream_, Draws::asked).order(pairs_);
  const double furthest = static_cast<double>(std::max<std::int64_t>(1, context - width));
  for (std::int64_t q = 0; q < questions; ++q) {
    Placed pair = placed_[static_cast<std::size_t>(asked[static_cast<std::size_t>(q)])];
    const double depth = static_cast<double>(pair.position) / furthest;
    pair.position = context + q * options.question_tokens();
    questions_.push_back({pair.position, pair.position + options.value_tokens, depth});
    placed_.push_back(pair);
  }
}

void NeedleSample::tokens(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::int64_t end = begin + static_cast<std::int64_t>(out.size()),
                     first = options_.keys + options_.values;
  require(0 <= begin && end <= length_, "tokens [{}, {}) of a needle sample of {}", begin, end,
          length_);
  const auto filler = static_cast<std::uint64_t>(options_.vocabulary - first);
  for (std::int64_t i = begin; i < end;) {
    const auto words =
        philox(options_.seed, stream_,
               (std::uint64_t{Draws::filler} << 48) + static_cast<std::uint64_t>(i / 4));
    for (std::int64_t w = i % 4; w < 4 && i < end; ++w, ++i)
      out[static_cast<std::size_t>(i - begin)] = static_cast<std::int32_t>(
          first + static_cast<std::int64_t>(
                      (std::uint64_t{words[static_cast<std::size_t>(w)]} * filler) >> 32));
  }
  for (std::size_t i = first_from(begin); i < placed_.size() && placed_[i].position < end; ++i) {
    const Placed& pair = placed_[i];
    for (std::int64_t t = std::max(begin, pair.position);
         t < std::min(end, pair.position + tokens_of(i)); ++t) {
      const std::int64_t within = t - pair.position;
      out[static_cast<std::size_t>(t - begin)] =
          within == 0 || within > options_.value_tokens
              ? static_cast<std::int32_t>(pair.key)
              : values_[static_cast<std::size_t>(pair.value + within - 1)];
    }
  }
}

void NeedleSample::targets(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
  require(0 <= begin && end <= length_, "targets [{}, {}) of a needle sample of {}", begin, end,
          length_);
  std::fill(out.begin(), out.end(), -1);
  for (std::size_t i = first_from(begin); i < placed_.size() && placed_[i].position < end; ++i) {
    const Placed& pair = placed_[i];
    const bool asked = i >= static_cast<std::size_t>(pairs_);
    const std::int64_t last =
        pair.position + options_.value_tokens;  // of the value; it predicts the closing key
    if (asked) {
      for (std::int64_t t = std::max(begin, pair.position); t < std::min(end, last); ++t)
        out[static_cast<std::size_t>(t - begin)] =
            values_[static_cast<std::size_t>(pair.value + t - pair.position)];
    } else if (options_.closing && begin <= last && last < end) {
      out[static_cast<std::size_t>(last - begin)] = static_cast<std::int32_t>(pair.key);
    }
  }
}

std::int64_t NeedleSample::tokens_of(std::size_t placed) const {
  return placed < static_cast<std::size_t>(pairs_) ? options_.pair_tokens()
                                                   : options_.question_tokens();
}

std::size_t NeedleSample::first_from(std::int64_t position) const {
  const auto at = std::lower_bound(
      placed_.begin(), placed_.end(), position, [&](const Placed& p, std::int64_t from) {
        return p.position + tokens_of(static_cast<std::size_t>(&p - placed_.data())) <= from;
      });
  return static_cast<std::size_t>(at - placed_.begin());
}

}  // namespace ballast

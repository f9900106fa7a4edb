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
  enum Use : std::uint64_t { length, filler, positions, keys, values, asked, arrangement };
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
  // What several lengths lack alike is one problem.
  const auto add = [&](Problem problem) {
    if (std::ranges::find(list, problem.text, &Problem::text) == list.end())
      list.push_back(std::move(problem));
  };
  for (std::size_t i = 0; i < o.lengths.size(); ++i) {
    const std::int64_t pairs = o.pairs_of(i), questions = o.questions_of(i),
                       keys = pairs * (o.task == NeedleTask::variables ? o.repeats_of(i) : 1),
                       needed = o.items_of(i) * o.item_tokens(i) + questions * o.question_tokens(i);
    if (questions > pairs)
      add({{"data.needle_questions"},
           fmt::format("data.needle_questions = {} is above data.needle_pairs = {}: a "
                       "pair is asked for once",
                       questions, pairs)});
    if (keys > o.keys)
      add({{"data.needle_pairs"},
           fmt::format("data.needle_pairs = {}{} is above data.needle_keys = {}: a "
                       "sample's keys are distinct",
                       pairs, keys > pairs ? fmt::format(" x {}", o.repeats_of(i)) : "", o.keys)});
    if (o.lengths[i] < needed)
      add({{"data.needle_lengths"},
           fmt::format("data.needle_lengths: {} tokens do not hold {} pairs of {} tokens and {} "
                       "questions of {}, which take {}",
                       o.lengths[i], o.items_of(i), o.item_tokens(i), questions,
                       o.question_tokens(i), needed)});
    if (o.task == NeedleTask::common && questions != 1)
      add({{"data.needle_questions"},
           fmt::format("data.needle_questions = {}: data.needle_task = \"common\" has "
                       "one answer",
                       questions),
           "set it to 1"});
  }
  if (o.vocabulary > 0 && o.vocabulary <= o.keys + o.values)
    list.push_back({{"data.needle_keys"},
                    fmt::format("data.needle_keys + data.needle_values = {} leave no filler in "
                                "model.vocabulary = {}",
                                o.keys + o.values, o.vocabulary)});
  return list;
}

/// What a task other than retrieval does not have.
void problems_of_task(const NeedleOptions& o, std::vector<Problem>& list) {
  if (!o.repeated()) return;
  const std::string task = fmt::format("data.needle_task = \"{}\"", name(o.task));
  if (o.value_tokens != 1)
    list.push_back({{"data.needle_value_tokens"},
                    fmt::format("data.needle_value_tokens = {}: with {} a value is one token",
                                o.value_tokens, task),
                    "set it to 1"});
  for (const std::int64_t repeats : o.repeats) {
    if (repeats < 2 && o.task == NeedleTask::common)
      list.push_back(
          {{"data.needle_repeats"},
           fmt::format("data.needle_repeats = {} must be at least 2 with {}", repeats, task)});
    if (o.task == NeedleTask::values && repeats > o.values)
      list.push_back({{"data.needle_repeats"},
                      fmt::format("data.needle_repeats = {} is above data.needle_values = {}: the "
                                  "values of a key are distinct",
                                  repeats, o.values)});
  }
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
  problems_of_task(o, list);
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
  fits("data.needle_repeats", o.repeats);
  fits("data.needle_copies", o.copies);
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

/// Makes one sample's items and questions.
class NeedleSample::Maker {
 public:
  Maker(NeedleSample& sample, std::size_t kind)
      : s_(sample),
        o_(sample.options_),
        kind_(kind),
        pairs_(o_.pairs_of(kind)),
        repeats_(o_.repeats_of(kind)),
        context_(s_.length_ - o_.questions_of(kind) * o_.question_tokens(kind)),
        keys_(draws(Draws::keys).order(o_.keys)) {
    // Items and filler tokens in a random order: a set of slots for the items among all of them.
    const std::int64_t items = o_.items_of(kind), width = o_.item_tokens(kind);
    slots_ = draws(Draws::positions).subset(context_ - items * (width - 1), items);
    for (std::size_t i = 0; i < slots_.size(); ++i)
      slots_[i] += static_cast<std::int64_t>(i) * (width - 1);
    switch (o_.task) {
      case NeedleTask::retrieval:
        retrieval();
        break;
      case NeedleTask::values:
        values();
        break;
      case NeedleTask::variables:
        variables();
        break;
      case NeedleTask::common:
        common();
        break;
    }
    const auto asked = draws(Draws::asked).order(static_cast<std::int64_t>(answers_.size()));
    for (std::int64_t q = 0; q < o_.questions_of(kind); ++q)
      ask(context_ + q * o_.question_tokens(kind), answers_[at(asked, q)]);
  }

 private:
  struct Answer {
    std::int32_t key = 0;
    std::vector<std::int32_t> tokens;
    std::int64_t position = 0;  // of its first item
  };
  using Tokens = std::vector<std::int32_t>;

  Draws draws(Draws::Use use) const { return {o_.seed, s_.stream_, use}; }
  static std::int64_t at(const std::vector<std::int64_t>& list, std::int64_t i) {
    return list[static_cast<std::size_t>(i)];
  }
  std::int32_t key(std::int64_t i) const { return static_cast<std::int32_t>(at(keys_, i)); }
  std::int32_t value(std::int64_t drawn) const {
    return static_cast<std::int32_t>(o_.keys + drawn);
  }
  /// Appends tokens, of which those from loss_begin on are targets.
  void put(std::int64_t position, const Tokens& tokens, std::int64_t loss_begin) {
    const auto begin = static_cast<std::int64_t>(s_.tokens_.size()),
               count = static_cast<std::int64_t>(tokens.size());
    s_.tokens_.insert(s_.tokens_.end(), tokens.begin(), tokens.end());
    s_.placed_.push_back({position, begin, count, loss_begin, count});
  }
  /// The same tokens, as often as an item is written.
  Tokens copied(const Tokens& once) const {
    Tokens all;
    for (std::int64_t i = 0; i < o_.copies_of(kind_); ++i)
      all.insert(all.end(), once.begin(), once.end());
    return all;
  }
  void put_item(std::int64_t slot, std::int32_t of, Tokens value) {
    value.insert(value.begin(), of);
    Tokens item = copied(value);
    const auto closing = static_cast<std::int64_t>(item.size());
    if (o_.closes()) item.push_back(of);
    put(at(slots_, slot), item, closing);
  }
  void ask(std::int64_t position, const Answer& answer) {
    Tokens tokens{answer.key};
    tokens.insert(tokens.end(), answer.tokens.begin(), answer.tokens.end());
    const double furthest =
        static_cast<double>(std::max<std::int64_t>(1, context_ - o_.item_tokens(kind_)));
    s_.questions_.push_back({position, position + o_.answer_tokens(kind_),
                             static_cast<double>(answer.position) / furthest});
    put(position, tokens, 1);
  }

  void retrieval() {
    Draws drawn = draws(Draws::values);
    for (std::int64_t p = 0; p < pairs_; ++p) {
      Tokens tokens(static_cast<std::size_t>(o_.value_tokens));
      for (auto& token : tokens) token = value(drawn.below(o_.values));
      put_item(p, key(p), tokens);
      answers_.push_back({key(p), tokens, at(slots_, p)});
    }
  }

  /// Of each of n slots in order: which of n / repeats groups it belongs to.
  std::vector<std::int64_t> arrangement() const {
    auto groups = draws(Draws::arrangement).order(static_cast<std::int64_t>(slots_.size()));
    for (std::int64_t& g : groups) g /= repeats_;
    return groups;
  }

  void values() {
    Draws drawn = draws(Draws::values);
    for (std::int64_t p = 0; p < pairs_; ++p) {
      Tokens sorted;
      for (const std::int64_t v : drawn.subset(o_.values, repeats_)) sorted.push_back(value(v));
      answers_.push_back({key(p), sorted, -1});
    }
    const auto groups = arrangement();
    std::vector<std::vector<std::int64_t>> orders;
    for (std::int64_t p = 0; p < pairs_; ++p) orders.push_back(drawn.order(repeats_));
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(slots_.size()); ++i) {
      const auto p = static_cast<std::size_t>(at(groups, i));
      Answer& answer = answers_[p];
      if (answer.position < 0) answer.position = at(slots_, i);
      put_item(i, answer.key, {answer.tokens[static_cast<std::size_t>(orders[p].back())]});
      orders[p].pop_back();
    }
  }

  void variables() {
    Draws drawn = draws(Draws::values);
    for (std::int64_t p = 0; p < pairs_; ++p)
      answers_.push_back({0, {value(drawn.below(o_.values))}, -1});
    const auto groups = arrangement();
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(slots_.size()); ++i) {
      Answer& chain = answers_[static_cast<std::size_t>(at(groups, i))];
      const std::int32_t next = key(i);
      put_item(i, next, {chain.tokens.front()});
      if (chain.position < 0) chain.position = at(slots_, i);
      chain.key = next;
      chain.tokens.insert(chain.tokens.begin(), next);
    }
    // The last variable is the question, so it does not belong to the answer.
    for (Answer& chain : answers_) chain.tokens.erase(chain.tokens.begin());
  }

  void common() {
    const auto order = draws(Draws::arrangement).order(static_cast<std::int64_t>(slots_.size()));
    Answer answer{value(0), {key(0)}, -1};
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(slots_.size()); ++i) {
      const std::int64_t word = std::max<std::int64_t>(0, at(order, i) - repeats_ + 1);
      if (word == 0 && answer.position < 0) answer.position = at(slots_, i);
      put(at(slots_, i), copied({key(word)}), o_.copies_of(kind_));
    }
    answers_.push_back(answer);
  }

  NeedleSample& s_;
  const NeedleOptions& o_;
  std::size_t kind_;
  std::int64_t pairs_, repeats_, context_;
  std::vector<std::int64_t> keys_, slots_;
  std::vector<Answer> answers_;
};

NeedleSample::NeedleSample(const NeedleOptions& options, bool held_out, std::int64_t index)
    : options_(options), stream_(stream(held_out, index)) {
  const auto list = problems(options);
  require(list.empty() && options.vocabulary > 0, "needle task: {}",
          list.empty() ? "the vocabulary is not known" : list.front().message());
  const std::size_t kind = options.kind(held_out, index);
  length_ = options.lengths[kind];
  Maker(*this, kind);
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
    const Placed& item = placed_[i];
    for (std::int64_t t = std::max(begin, item.position);
         t < std::min(end, item.position + item.count); ++t)
      out[static_cast<std::size_t>(t - begin)] =
          tokens_[static_cast<std::size_t>(item.begin + t - item.position)];
  }
}

void NeedleSample::targets(std::int64_t begin, std::span<std::int32_t> out) const {
  const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
  require(0 <= begin && end <= length_, "targets [{}, {}) of a needle sample of {}", begin, end,
          length_);
  std::fill(out.begin(), out.end(), -1);
  for (std::size_t i = first_from(begin); i < placed_.size() && placed_[i].position < end; ++i) {
    const Placed& item = placed_[i];
    // The token before a target carries the loss.
    for (std::int64_t t = std::max(begin, item.position + item.loss_begin - 1);
         t < std::min(end, item.position + item.loss_end - 1); ++t)
      out[static_cast<std::size_t>(t - begin)] =
          tokens_[static_cast<std::size_t>(item.begin + t + 1 - item.position)];
  }
}

std::size_t NeedleSample::first_from(std::int64_t position) const {
  const auto at = std::lower_bound(
      placed_.begin(), placed_.end(), position,
      [](const Placed& p, std::int64_t from) { return p.position + p.count <= from; });
  return static_cast<std::size_t>(at - placed_.begin());
}

}  // namespace ballast

// Needle task: samples read back token by token, as somebody would who knows the rules but not the
// generator.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/data/needle_task.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

NeedleOptions options() {
  NeedleOptions o;
  o.lengths = {96, 300};
  o.pairs = {7, 20};
  o.questions = {5};
  o.keys = 30;
  o.values = 11;
  o.value_tokens = 3;
  o.vocabulary = 60;
  o.seed = test_seed();
  return o;
}

std::vector<std::int32_t> tokens_of(const NeedleSample& s) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(s.length()));
  s.tokens(0, out);
  return out;
}
std::vector<std::int32_t> targets_of(const NeedleSample& s) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(s.length()));
  s.targets(0, out);
  return out;
}

TEST(Needle, PairsAreHiddenOnceAndQuestionsAskForThem) {
  NeedleOptions o = options();
  std::set<std::int64_t> lengths;
  for (std::int64_t index = 0; index < 200; ++index) {
    SCOPED_TRACE(fmt::format("seed {} sample {}", test_seed(), index));
    o.closing = index % 3 != 0;
    const std::int64_t width = o.closing ? 5 : 4;
    const NeedleSample sample(o, index % 2 == 1, index);
    const auto tokens = tokens_of(sample), targets = targets_of(sample);
    const std::size_t kind = sample.length() == 96 ? 0 : 1;
    lengths.insert(sample.length());
    ASSERT_EQ(kind, o.kind(index % 2 == 1, index));
    const std::int64_t context = sample.length() - 5 * 4;
    std::size_t with_loss = 0;
    std::map<std::int32_t, std::pair<std::int64_t, std::vector<std::int32_t>>>
        pairs;  // key -> place, value
    for (std::int64_t t = 0; t < context;) {
      const auto at = tokens.begin() + t;
      if (*at >= 41) {
        ASSERT_LT(*at, 60);
        ++t;
        continue;
      }
      ASSERT_LT(*at, 30) << "a value without its key at " << t;
      ASSERT_LE(t + width, context);
      ASSERT_TRUE(std::all_of(at + 1, at + 4, [](std::int32_t v) { return v >= 30 && v < 41; }));
      ASSERT_TRUE(
          pairs.emplace(*at, std::pair(t, std::vector<std::int32_t>(at + 1, at + 4))).second)
          << "key " << *at << " twice";
      if (o.closing) {
        ASSERT_EQ(at[4], *at);
        ASSERT_EQ(targets[static_cast<std::size_t>(t + 3)], *at);
        ++with_loss;
      }
      t += width;
    }
    ASSERT_EQ(pairs.size(), kind == 0 ? 7u : 20u);
    ASSERT_EQ(sample.questions().size(), 5u);
    std::set<std::int32_t> asked;
    for (std::int64_t q = 0; q < 5; ++q) {
      const std::int64_t at = context + 4 * q;
      const std::int32_t key = tokens[static_cast<std::size_t>(at)];
      ASSERT_TRUE(pairs.count(key) == 1 && asked.insert(key).second);
      const NeedleQuestion& question = sample.questions()[static_cast<std::size_t>(q)];
      ASSERT_EQ(question.first, at);
      ASSERT_EQ(question.last, at + 3);
      ASSERT_DOUBLE_EQ(question.depth, static_cast<double>(pairs[key].first) /
                                           static_cast<double>(context - width));
      for (std::int64_t i = 0; i < 3; ++i) {
        ASSERT_EQ(tokens[static_cast<std::size_t>(at + 1 + i)],
                  pairs[key].second[static_cast<std::size_t>(i)]);
        ASSERT_EQ(targets[static_cast<std::size_t>(at + i)],
                  pairs[key].second[static_cast<std::size_t>(i)]);
      }
      with_loss += 3;
    }
    ASSERT_EQ(
        targets.size() - static_cast<std::size_t>(std::count(targets.begin(), targets.end(), -1)),
        with_loss);
    ASSERT_EQ(o.loss_tokens(kind), static_cast<std::int64_t>(with_loss));
  }
  EXPECT_EQ(lengths, (std::set<std::int64_t>{96, 300}));
}

TEST(Needle, AnItemMayBeWrittenSeveralTimesInARow) {
  NeedleOptions o = options();
  o.value_tokens = 1;
  o.copies = {1, 4};
  for (std::int64_t index = 0; index < 100; ++index) {
    SCOPED_TRACE(fmt::format("seed {} sample {}", test_seed(), index));
    o.closing = index % 2 == 0;
    const NeedleSample sample(o, false, index);
    const auto tokens = tokens_of(sample), targets = targets_of(sample);
    const std::size_t kind = sample.length() == 96 ? 0 : 1;
    const std::int64_t copies = kind == 0 ? 1 : 4, context = sample.length() - 5 * 2;
    ASSERT_EQ(o.item_tokens(kind), 2 * copies + (o.closing ? 1 : 0));
    std::int64_t items = 0, with_loss = 5;
    for (std::int64_t t = 0; t < context; ++t) {
      const auto at = static_cast<std::size_t>(t);
      if (tokens[at] >= 41) continue;
      ++items;
      for (std::int64_t c = 0; c < copies; ++c, t += 2)
        for (const std::size_t x : {0u, 1u})
          ASSERT_EQ(tokens[static_cast<std::size_t>(t) + x], tokens[at + x]) << "copy " << c;
      ASSERT_LT(tokens[at], 30);
      if (o.closing) {
        ASSERT_EQ(tokens[static_cast<std::size_t>(t)], tokens[at]);
        ASSERT_EQ(targets[static_cast<std::size_t>(t) - 1], tokens[at]);
        ++with_loss;
      } else {
        --t;  // the next item may follow at once
      }
    }
    ASSERT_EQ(items, o.pairs_of(kind));
    ASSERT_EQ(o.loss_tokens(kind), with_loss);
    ASSERT_EQ(std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; }),
              with_loss);
  }
}

/// The context's items [key, value, key], and the questions with their answers, as a reader finds
/// them.
struct Read {
  std::vector<std::pair<std::int32_t, std::int32_t>> items;
  std::vector<std::vector<std::int32_t>> questions;
};
Read read(const NeedleOptions& o, const NeedleSample& sample, std::int64_t questions) {
  const auto tokens = tokens_of(sample), targets = targets_of(sample);
  const std::int64_t width = o.question_tokens(0), context = sample.length() - questions * width;
  Read found;
  std::int64_t with_loss = 0;
  for (std::int64_t t = 0; t < context; ++t) {
    const auto at = static_cast<std::size_t>(t);
    if (tokens[at] >= o.keys + o.values) continue;
    EXPECT_EQ(tokens[at], tokens[at + 2]) << "no closing key at " << t;
    EXPECT_EQ(targets[at + 1], tokens[at + 2]);
    found.items.emplace_back(tokens[at], tokens[at + 1]);
    ++with_loss;
    t += 2;
  }
  for (std::int64_t q = 0; q < questions; ++q) {
    const auto begin = tokens.begin() + context + q * width;
    found.questions.emplace_back(begin, begin + width);
    for (std::int64_t i = 0; i + 1 < width; ++i)
      EXPECT_EQ(targets[static_cast<std::size_t>(context + q * width + i)], begin[i + 1]);
    with_loss += width - 1;
    const NeedleQuestion& asked = sample.questions()[static_cast<std::size_t>(q)];
    EXPECT_EQ(asked.first, context + q * width);
    EXPECT_EQ(asked.last, asked.first + width - 1);
  }
  const auto silent = std::count(targets.begin(), targets.end(), -1);
  EXPECT_EQ(static_cast<std::int64_t>(targets.size()) - silent, with_loss);
  return found;
}

NeedleOptions repeated(NeedleTask task) {
  NeedleOptions o = options();
  o.task = task;
  o.lengths = {200};
  o.pairs = {5};
  o.questions = {3};
  o.repeats = {4};
  o.value_tokens = 1;
  return o;
}

TEST(Needle, AllValuesOfAKeyAreAskedForInAscendingOrder) {
  const NeedleOptions o = repeated(NeedleTask::values);
  for (std::int64_t index = 0; index < 200; ++index) {
    SCOPED_TRACE(fmt::format("seed {} sample {}", test_seed(), index));
    const NeedleSample sample(o, false, index);
    const Read found = read(o, sample, 3);
    ASSERT_EQ(o.loss_tokens(0), 5 * 4 + 3 * 4);
    std::map<std::int32_t, std::set<std::int32_t>> values;
    for (const auto& [key, value] : found.items) {
      ASSERT_TRUE(key < 30 && value >= 30 && value < 41);
      ASSERT_TRUE(values[key].insert(value).second) << "a value twice";
    }
    ASSERT_EQ(values.size(), 5u);
    std::set<std::int32_t> asked;
    for (const auto& question : found.questions) {
      ASSERT_TRUE(asked.insert(question.front()).second);
      const auto& known = values.at(question.front());
      ASSERT_EQ(std::vector<std::int32_t>(question.begin() + 1, question.end()),
                std::vector<std::int32_t>(known.begin(), known.end()));
      ASSERT_EQ(known.size(), 4u);
    }
  }
}

TEST(Needle, AVariableIsTrackedBackToItsValue) {
  const NeedleOptions o = repeated(NeedleTask::variables);
  for (std::int64_t index = 0; index < 200; ++index) {
    SCOPED_TRACE(fmt::format("seed {} sample {}", test_seed(), index));
    const Read found = read(o, NeedleSample(o, true, index), 3);
    ASSERT_EQ(found.items.size(), 20u);
    std::map<std::int32_t, std::int32_t> assigned;
    for (const auto& [key, value] : found.items) {
      ASSERT_TRUE(value >= 30 || assigned.count(value) == 1) << "used before it is assigned";
      ASSERT_TRUE(assigned.emplace(key, value).second);
    }
    std::set<std::int32_t> asked;
    for (const auto& question : found.questions) {
      ASSERT_TRUE(asked.insert(question.front()).second);
      for (std::size_t i = 0; i + 1 < question.size(); ++i)
        ASSERT_EQ(assigned.at(question[i]), question[i + 1]);
      ASSERT_GE(question.back(), 30);
    }
  }
}

TEST(Needle, TheMostCommonWordIsTheAnswer) {
  NeedleOptions o = repeated(NeedleTask::common);
  o.questions = {1};
  for (std::int64_t index = 0; index < 200; ++index) {
    SCOPED_TRACE(fmt::format("seed {} sample {}", test_seed(), index));
    const NeedleSample sample(o, false, index);
    const auto tokens = tokens_of(sample), targets = targets_of(sample);
    std::map<std::int32_t, int> times;
    for (std::size_t t = 0; t < 198; ++t)
      if (tokens[t] < 41) ++times[tokens[t]];
    ASSERT_EQ(times.size(), 5u);
    ASSERT_EQ(times.at(tokens[199]), 4);
    ASSERT_EQ(std::count_if(times.begin(), times.end(), [](auto& w) { return w.second == 1; }), 4);
    ASSERT_EQ(tokens[198], 30);  // the question
    ASSERT_EQ(targets[198], tokens[199]);
    ASSERT_EQ(std::count(targets.begin(), targets.end(), -1), 199);
    ASSERT_EQ(o.loss_tokens(0), 1);
    ASSERT_EQ(sample.questions().size(), 1u);
    ASSERT_EQ(tokens[static_cast<std::size_t>(std::llround(sample.questions()[0].depth * 197))],
              tokens[199]);
  }
}

TEST(Needle, AnyRangeIsPartOfTheSample) {
  std::mt19937_64 random(test_seed());
  const NeedleOptions o = options();
  for (std::int64_t index = 0; index < 100; ++index) {
    const NeedleSample sample(o, false, index);
    const auto tokens = tokens_of(sample), targets = targets_of(sample);
    auto begin = static_cast<std::size_t>(random() % (tokens.size() + 1)),
         end = static_cast<std::size_t>(random() % (tokens.size() + 1));
    if (begin > end) std::swap(begin, end);
    std::vector<std::int32_t> part(end - begin);
    sample.tokens(static_cast<std::int64_t>(begin), part);
    ASSERT_TRUE(
        std::equal(part.begin(), part.end(), tokens.begin() + static_cast<std::ptrdiff_t>(begin)))
        << "seed " << test_seed();
    sample.targets(static_cast<std::int64_t>(begin), part);
    ASSERT_TRUE(
        std::equal(part.begin(), part.end(), targets.begin() + static_cast<std::ptrdiff_t>(begin)))
        << "seed " << test_seed();
    const NeedleSample copy = sample;  // holds no pointer into the other
    ASSERT_EQ(tokens_of(copy), tokens);
  }
}

TEST(Needle, SamplesDifferAndRepeat) {
  NeedleOptions o = options(), other = o;
  other.seed += 1;
  std::set<std::vector<std::int32_t>> seen;
  for (std::int64_t index = 0; index < 300; ++index)
    for (const bool held_out : {false, true}) {
      EXPECT_TRUE(seen.insert(tokens_of(NeedleSample(o, held_out, index))).second);
      EXPECT_TRUE(seen.insert(tokens_of(NeedleSample(other, held_out, index))).second);
      EXPECT_FALSE(seen.insert(tokens_of(NeedleSample(o, held_out, index))).second);
    }
}

TEST(Needle, DepthsKeysAndQuestionsAreUniform) {
  NeedleOptions o = options();
  o.lengths = {400};
  o.pairs = {4};
  o.questions = {1};
  const int samples = 20000;
  std::vector<int> depth(10), key(30);
  double order = 0;
  for (std::int64_t index = 0; index < samples; ++index) {
    const NeedleSample sample(o, false, index);
    ++depth[std::min<std::size_t>(9, static_cast<std::size_t>(sample.questions()[0].depth * 10))];
    std::vector<std::int32_t> asked(1);
    sample.tokens(sample.questions()[0].first, asked);
    ++key[static_cast<std::size_t>(asked[0])];
    order += sample.questions()[0].depth;
  }
  for (int n : depth) EXPECT_NEAR(n, samples / 10, 250) << "seed " << test_seed();
  for (int n : key) EXPECT_NEAR(n, samples / 30, 160) << "seed " << test_seed();
  EXPECT_NEAR(order / samples, 0.5, 0.012);
}

TEST(Needle, SharesOfLengths) {
  NeedleOptions o = options();
  o.length_share = {3, 1};
  int longer = 0;
  for (std::int64_t index = 0; index < 8000; ++index) longer += o.kind(false, index) == 1;
  EXPECT_NEAR(longer, 2000, 200) << "seed " << test_seed();
  o.length_share = {0, 2};
  for (std::int64_t index = 0; index < 100; ++index) EXPECT_EQ(o.kind(true, index), 1u);
  o.held_out_share = {1, 0};
  for (std::int64_t index = 0; index < 100; ++index) {
    EXPECT_EQ(o.kind(true, index), 0u);
    EXPECT_EQ(o.kind(false, index), 1u);
  }
}

TEST(Needle, MistakesAreNamed) {
  EXPECT_TRUE(problems(options()).empty());
  const auto named = [](auto&& change, const std::string& text) {
    NeedleOptions o = options();
    change(o);
    const auto list = problems(o);
    ASSERT_EQ(list.size(), 1u) << messages(list);
    EXPECT_EQ(list[0].text.rfind(text, 0), 0u) << list[0].text;
    EXPECT_TRUE(text.starts_with(list[0].keys.at(0).path)) << list[0].text;
    EXPECT_THROW(NeedleSample(o, false, 0), Error);
  };
  named(
      [](NeedleOptions& o) {
        o.lengths = {};
        o.pairs = o.questions = {4};
      },
      "data.needle_lengths is empty");
  named([](NeedleOptions& o) { o.lengths = {54, 300}; }, "data.needle_lengths: 54 tokens");
  named(
      [](NeedleOptions& o) {
        o.pairs = {7, 31};
      },
      "data.needle_pairs = 31 is above data.needle_keys = 30");
  named(
      [](NeedleOptions& o) {
        o.questions = {8, 9};
      },
      "data.needle_questions = 8 is above data.needle_pairs = 7");
  named([](NeedleOptions& o) { o.questions = {1, 1, 1}; }, "data.needle_questions has 3 values");
  named([](NeedleOptions& o) { o.questions = {0}; }, "data.needle_questions = 0");
  named([](NeedleOptions& o) { o.length_share = {1}; }, "data.needle_length_share has 1 values");
  named([](NeedleOptions& o) { o.length_share = {0, 0}; }, "data.needle_length_share: ");
  named([](NeedleOptions& o) { o.held_out_share = {1, -1}; }, "data.needle_held_out_share: ");
  named([](NeedleOptions& o) { o.vocabulary = 41; }, "data.needle_keys + data.needle_values");
  named([](NeedleOptions& o) { o.value_tokens = 0; }, "data.needle_value_tokens = 0");
  for (const NeedleTask task : {NeedleTask::values, NeedleTask::variables, NeedleTask::common})
    EXPECT_EQ(problems(repeated(task)).size(), task == NeedleTask::common ? 1u : 0u);
  named([](NeedleOptions& o) { o = repeated(NeedleTask::common); }, "data.needle_questions = 3");
  named(
      [](NeedleOptions& o) {  // of both lengths alike
        o.pairs = {7};
        o.questions = {8};
      },
      "data.needle_questions = 8 is above data.needle_pairs = 7");
  named(
      [](NeedleOptions& o) {
        o = repeated(NeedleTask::variables);
        o.pairs = {8};
      },
      "data.needle_pairs = 8 x 4 is above data.needle_keys = 30");
  named(
      [](NeedleOptions& o) {
        o = repeated(NeedleTask::values);
        o.repeats = {12};
      },
      "data.needle_repeats = 12 is above data.needle_values = 11");
  named(
      [](NeedleOptions& o) {
        o = repeated(NeedleTask::values);
        o.value_tokens = 3;
      },
      "data.needle_value_tokens = 3");
  named(
      [](NeedleOptions& o) {
        o = repeated(NeedleTask::variables);
        o.repeats = {1, 2};
      },
      "data.needle_repeats has 2 values");
  named([](NeedleOptions& o) { o.copies = {1, 2, 3}; }, "data.needle_copies has 3 values");
  named([](NeedleOptions& o) { o.copies = {8, 1}; }, "data.needle_lengths: 96 tokens do not hold");
  NeedleOptions o = options();
  o.vocabulary = 0;  // not known yet: no problem of the deck, but no sample either
  EXPECT_TRUE(problems(o).empty());
  EXPECT_THROW(NeedleSample(o, false, 0), Error);
}

}  // namespace
}  // namespace ballast

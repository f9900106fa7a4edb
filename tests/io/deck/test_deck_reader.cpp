// Deck reader: values, places, cases, overrides, and every problem reported with its place.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "core/config/combinations.hpp"
#include "core/config/run_options.hpp"
#include "core/model/presets.hpp"
#include "io/deck/deck_reader.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

const char* const kSound = R"(# A sound deck.
[run]
seed = 11
[mesh]
dp = 2
[model]
preset = "qwen2.5-0.5b"
layers = 2
[data]
paths = ["/usr/include", "/tmp"]
[optimizer]
learning_rate = 1
beta2 = 0.98
)";

/// Text of the error, or "" when the deck is read.
std::string problem(const std::string& text, const std::vector<std::string>& overrides = {},
                    const std::string& case_name = "") {
  try {
    parse_deck(text, "deck.toml", overrides, case_name);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

testing::AssertionResult holds(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos)
      return testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
  return testing::AssertionSuccess();
}

TEST(DeckReader, ValuesTypesAndPlaces) {
  const Deck deck = parse_deck(kSound, "deck.toml");
  EXPECT_EQ(deck.get<std::int64_t>("run.seed"), 11);
  EXPECT_EQ(deck.get<std::int64_t>("mesh.dp"), 2);
  EXPECT_EQ(deck.config().from.settings.at("mesh.dp").place, "deck.toml:5");
  EXPECT_EQ(deck.get<double>("optimizer.learning_rate"), 1.0);  // an integer will do for a number
  EXPECT_EQ(deck.get<std::vector<std::string>>("data.paths"),
            (std::vector<std::string>{"/usr/include", "/tmp"}));
  EXPECT_EQ(deck.get<std::int64_t>("model.hidden"), 896);  // from the preset
  EXPECT_EQ(deck.config().from.settings.at("model.hidden").place, "preset qwen2.5-0.5b");
  EXPECT_EQ(deck.get<std::int64_t>("model.layers"), 2);
}

TEST(DeckReader, OtherSpellingsOfTwoLevels) {
  const std::string text =
      "mesh = { dp = 3 }\nrun.seed = 4\nmodel.preset = 'qwen2.5-0.5b'\n\"data\".paths = ['/x']\n";
  const Deck deck = parse_deck(text, "deck.toml");
  EXPECT_EQ(deck.get<std::int64_t>("mesh.dp"), 3);
  EXPECT_EQ(deck.get<std::int64_t>("run.seed"), 4);
  EXPECT_EQ(
      parse_deck(std::string("\xEF\xBB\xBF") + text, "deck.toml").get<std::int64_t>("mesh.dp"), 3);
  std::string dos = kSound;
  for (std::size_t at = 0; (at = dos.find('\n', at)) != std::string::npos; at += 2)
    dos.insert(at, 1, '\r');
  EXPECT_EQ(parse_deck(dos, "deck.toml").config().from.settings.at("mesh.dp").place, "deck.toml:5");
}

TEST(DeckReader, EffectiveDeckReadsBackToTheSame) {
  const Deck deck = parse_deck(kSound, "deck.toml",
                               {"data.long=split", "ring.layout=striped", "data.bin_tokens=[4, 8]",
                                "data.bin_share=[1, 0.25]", "run.output=a \"b\" \\c"});
  const std::string text = deck.config().effective_deck();
  const Deck again = parse_deck(text, "effective.toml");
  for (const KeySpec& spec : deck_schema())
    EXPECT_EQ(again.value(spec.path()), deck.value(spec.path())) << spec.path();
  EXPECT_EQ(again.config().effective_deck(), text);
  EXPECT_EQ(again.text("run.output"), "a \"b\" \\c");
}

// Stated costs, even at their default, take the place of the device's rates; others do not.
TEST(DeckReader, EffectiveDecksStateTheCostsThatWereStated) {
  const auto again = [](const std::vector<std::string>& settings) {
    return parse_deck(parse_deck(kSound, "deck.toml", settings).config().effective_deck(),
                      "effective.toml")
        .config();
  };
  EXPECT_FALSE(again({}).is_set(&Config::costs));
  const double token_s = default_config().costs.forward_token_s;
  const Config one = again({"costs.forward_token_s=" + to_text(DeckValue(token_s))});
  EXPECT_TRUE(one.is_set(&Config::costs, &CostsConfig::forward_token_s));
  EXPECT_FALSE(one.is_set(&Config::costs, &CostsConfig::forward_pair_s));
}

TEST(DeckReader, RandomEffectiveDecksRoundTrip) {
  const unsigned seed = test_seed();
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 100; ++trial) {
    Deck deck = parse_deck(kSound, "deck.toml");
    const auto number = [&](const KeySpec& spec) {
      const double low = spec.minimum.value_or(-1e6),
                   high = std::min(spec.maximum.value_or(1e6), low + 1e6);
      return low + (high - low) * (static_cast<double>(random() % 1000003) + 0.5) / 1000004.0;
    };
    for (const KeySpec& spec : deck_schema()) {
      if (spec.block == "model" || spec.block == "mesh" || random() % 3 != 0) continue;
      DeckValue value = spec.default_value;
      if (std::holds_alternative<bool>(value))
        value = random() % 2 == 0;
      else if (std::holds_alternative<double>(value))
        value = number(spec);
      else if (std::holds_alternative<std::int64_t>(value))
        value = static_cast<std::int64_t>(number(spec));
      else if (std::holds_alternative<std::vector<double>>(value))
        value = std::vector<double>{number(spec), number(spec)};
      else if (std::holds_alternative<std::vector<std::int64_t>>(value))
        value = std::vector<std::int64_t>{static_cast<std::int64_t>(
            std::max(1.0, spec.minimum.value_or(1)) + static_cast<double>(random() % 9))};
      else if (std::holds_alternative<std::string>(value))
        value = spec.allowed.empty() ? std::string("p\t\"q\" \xc3\xa9#=[")
                                     : spec.allowed[random() % spec.allowed.size()];
      else if (!spec.allowed.empty())
        value = std::vector<std::string>{spec.allowed.back(), spec.allowed.front()};
      else
        value = std::vector<std::string>{"one, two", "]"};
      ASSERT_EQ(value_problem(spec, value), "") << spec.path() << " seed " << seed;
      deck.set(spec.path(), value, "test");
    }
    if (!problems(deck.config()).empty()) continue;  // a combination that a rule refuses
    const Deck again = parse_deck(deck.config().effective_deck(), "effective.toml");
    for (const KeySpec& spec : deck_schema())
      ASSERT_EQ(again.value(spec.path()), deck.value(spec.path()))
          << spec.path() << " seed " << seed;
  }
}

TEST(DeckReader, RetiredKeysNameTheirSuccessor) {
  try {
    parse_deck(std::string(kSound) + "\n[profile]\npattern = \"moba\"\n", "deck.toml",
               {"profile.block_tokens=64"});
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("profile.pattern is no key any more; use attention.pattern"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("profile.block_tokens is no key any more; use attention.moba_block"),
              std::string::npos)
        << text;
  }
}

TEST(DeckReader, OverridesWinAndBareWordsAreText) {
  const Deck deck =
      parse_deck(kSound, "deck.toml",
                 {"mesh.dp=4", "ring.layout=striped", "data.paths=/a,/b", "run.output=123",
                  "run.seed=5", "run.seed=6", "optimizer.beta1=0", "trace.enabled=false",
                  "data.extensions=[.hpp,.h]", "recompute.layers=-1"});
  EXPECT_EQ(deck.get<std::int64_t>("mesh.dp"), 4);
  EXPECT_EQ(deck.config().from.settings.at("mesh.dp").place, "command line: mesh.dp=4");
  EXPECT_EQ(deck.text("ring.layout"), "striped");
  EXPECT_EQ(deck.get<std::vector<std::string>>("data.paths"),
            (std::vector<std::string>{"/a", "/b"}));
  EXPECT_EQ(deck.get<std::vector<std::string>>("data.extensions"),
            (std::vector<std::string>{".hpp", ".h"}));
  EXPECT_EQ(deck.text("run.output"), "123");
  EXPECT_EQ(deck.get<std::int64_t>("run.seed"), 6);
  EXPECT_EQ(
      parse_deck(kSound, "d", {R"(data.paths="/a")"}).get<std::vector<std::string>>("data.paths"),
      (std::vector<std::string>{"/a"}));
  EXPECT_EQ(deck.get<double>("optimizer.beta1"), 0);
  EXPECT_FALSE(deck.get<bool>("trace.enabled"));
  EXPECT_EQ(deck.get<std::vector<std::string>>("data.paths"),
            parse_deck(kSound, "d", {R"(data.paths=["/a", "/b"])"})
                .get<std::vector<std::string>>("data.paths"));
}

TEST(DeckReader, SettingsOfTheTableOfCombinationsChooseWhatTheySay) {
  // What a choice needs beside it, so that no rule refuses the deck.
  const std::map<std::string, std::string> beside{{"dst on", "attention.pattern=moba"},
                                                  {"pattern by_head", "attention.heads=heads.json"},
                                                  {"index recorded", "attention.recorded=indexes"},
                                                  {"precision bf16", "run.backend=cuda"}};
  for (const Choice& choice : choices()) {
    if (choice.name() == "tp 2") continue;  // no command takes such a deck
    std::vector<std::string> overrides{"costs.forward_pair_s=1e-9"};
    if (const auto more = beside.find(choice.name()); more != beside.end())
      overrides.push_back(more->second);
    overrides.insert(overrides.end(), choice.settings.begin(), choice.settings.end());
    std::string text = kSound;
    if (choice.name() == "dp 1") text.replace(text.find("dp = 2"), 6, "dp = 1");
    const Config config = parse_config(text, "deck.toml", overrides, "", {.executes = false});
    EXPECT_TRUE(choice.chosen(config)) << choice.name();
    std::map<std::string, int> chosen;
    for (const Choice& other : choices()) chosen[other.dimension] += other.chosen(config) ? 1 : 0;
    for (const auto& [dimension, times] : chosen)
      EXPECT_EQ(times, 1) << dimension << " with " << choice.name();
  }
}

TEST(DeckReader, APresetReplacesTheShapeThatStoodBeforeIt) {
  const std::string text = R"(
[model]
layers = 2
hidden = 64
intermediate = 128
query_heads = 4
kv_heads = 2
head_dim = 16
vocabulary = 512
yarn_factor = 4.0
[data]
paths = ["/a"]
[[case]]
name = "large"
model.preset = "qwen2.5-7b"
model.layers = 3
)";
  const ModelShape published = model_preset("qwen2.5-7b");
  EXPECT_EQ(parse_deck(text, "d").get<std::int64_t>("model.hidden"), 64);
  const Deck large = parse_deck(text, "d", {}, "large");
  EXPECT_EQ(large.get<std::int64_t>("model.hidden"), published.hidden);
  EXPECT_EQ(large.get<std::int64_t>("model.head_dim"), published.head_dim);
  EXPECT_EQ(large.get<std::int64_t>("model.layers"), 3);
  EXPECT_EQ(large.get<double>("model.yarn_factor"), 4);  // the run's choice, not the model's
  const Deck command_line =
      parse_deck(text, "d", {"model.layers=5", "model.preset=qwen2.5-7b"}, "large");
  EXPECT_EQ(command_line.get<std::int64_t>("model.vocabulary"), published.vocabulary);
  EXPECT_EQ(command_line.get<std::int64_t>("model.layers"), 5);
  EXPECT_EQ(parse_deck(text, "d", {"model.preset=custom"}, "").get<std::int64_t>("model.hidden"),
            64);
}

TEST(DeckReader, BadOverridesNameThemselves) {
  EXPECT_TRUE(
      holds(problem(kSound, {"mesh.dp=x"}),
            {"command line: mesh.dp=x: mesh.dp expects an integer [ranks], found the text \"x\""}));
  EXPECT_TRUE(holds(problem(kSound, {"mesh.dq=3"}),
                    {"command line: mesh.dq=3: unknown key mesh.dq (did you mean mesh.dp?)"}));
  EXPECT_TRUE(
      holds(problem(kSound, {"mseh.dp=3"}), {"unknown key mseh.dp (did you mean mesh.dp?)"}));
  EXPECT_TRUE(holds(problem(kSound, {"steps=3"}),
                    {"command line: steps=3", "did you mean run.steps or curriculum.steps?"}));
  EXPECT_TRUE(holds(problem(kSound, {"nonsense"}),
                    {"command line: nonsense: an override is block.key=value"}));
  EXPECT_TRUE(holds(problem(kSound, {"mesh.dp=1\nx = 2"}),
                    {"command line: mesh.dp=1\\x0ax = 2", "expects an integer"}));
  EXPECT_TRUE(holds(problem(kSound, {"mesh.dp="}), {"command line: mesh.dp=:"}));
  for (const char* text :
       {"profile.table=l\xe4rm.h5", "profile.table='l\xe4rm'", "data.paths=a,\xff"})
    EXPECT_TRUE(holds(problem(kSound, {text}), {"command line: ", "\\x", "is no UTF-8 text"}));
  EXPECT_EQ(problem(kSound, {"profile.table=l\xc3\xa4rm.h5"}), "");
  EXPECT_TRUE(holds(problem(kSound, {"sab.k=1"}),
                    {"command line: sab.k=1: unknown key sab.k", "keys of [sab]: decay"}));
}

TEST(DeckReader, CasesOverrideAndAreAllValidated) {
  const std::string text = std::string(kSound) + R"(
[[case]]
name = "dotted"
mesh.dp = 3
"ring.layout" = "striped"
[[case]]
name = "block"
mesh = { dp = 5 }
[case.run]
seed = 9
)";
  EXPECT_EQ(parse_deck_cases(text, "deck.toml"), (std::vector<std::string>{"dotted", "block"}));
  EXPECT_EQ(parse_deck(text, "deck.toml").get<std::int64_t>("mesh.dp"), 2);
  const Deck dotted = parse_deck(text, "deck.toml", {"run.seed=1"}, "dotted");
  EXPECT_EQ(dotted.get<std::int64_t>("mesh.dp"), 3);
  EXPECT_EQ(dotted.text("ring.layout"), "striped");
  EXPECT_EQ(dotted.case_name, "dotted");
  EXPECT_EQ(dotted.get<std::int64_t>("run.seed"), 1);
  const Deck block = parse_deck(text, "deck.toml", {}, "block");
  EXPECT_EQ(block.get<std::int64_t>("mesh.dp"), 5);
  EXPECT_EQ(block.get<std::int64_t>("run.seed"), 9);
  EXPECT_TRUE(
      holds(problem(text, {}, "doted"),
            {"deck.toml: no case \"doted\" (did you mean \"dotted\"?); cases: dotted, block"}));
  EXPECT_TRUE(holds(problem(kSound, {}, "x"), {"no [[case]] list"}));
  EXPECT_TRUE(holds(problem(text + "[[case]]\nname = \"z\"\nmesh.dpx = 3\n"),
                    {"deck.toml:26: unknown key mesh.dpx (did you mean mesh.dp?)"}));
  EXPECT_TRUE(
      holds(problem(text + "mesh.dp = 3\n"), {"deck.toml:24: run.mesh is a table inside a block"}));
  EXPECT_TRUE(holds(problem(text + "[[case]]\nname = \"z\"\nmesh.dp = 3\n\"mesh.dp\" = 4\n"),
                    {"case \"z\" states mesh.dp twice"}));
  EXPECT_TRUE(holds(problem(text + "[[case]]\n"), {"a case needs a name"}));
  EXPECT_TRUE(
      holds(problem(text + "[[case]]\nname = 3\n"), {"deck.toml:25", "found the integer 3"}));
  EXPECT_TRUE(holds(problem(text + "[[case]]\nname = \"block\"\n"),
                    {"deck.toml:25", "two cases have the name \"block\""}));
  EXPECT_TRUE(holds(problem(std::string(kSound) + "[case]\nname = \"x\"\n"), {"write [[case]]"}));
}

TEST(DeckReader, AllProblemsAtOnceInOrder) {
  const std::string text = problem(R"([run]
seeed = 1
[mesh]
dp = "two"
dp = 2
pp = 0
[modle]
layers = 2
[ring]
layout = "zigzg"
[data]
paths = ["/x"]
min_tokens = 9
max_tokens = 3
[curriculum]
k = 1
)",
                                   {"optimizer.zero=3"});
  const std::vector<std::string> expected = {
      "deck.toml:2: unknown key run.seeed (did you mean run.seed?); keys of [run]: backend, "
      "precision, seed",
      "deck.toml:4: mesh.dp expects an integer [ranks], found the text \"two\"",
      "deck.toml:5: not valid TOML",
      "deck.toml:6: mesh.pp = 0 is out of range: it must be at least 1",
      "deck.toml:7: unknown block modle (did you mean [model]?)",
      "deck.toml:10: ring.layout = \"zigzg\" is not a known value (did you mean \"zigzag\"?); "
      "allowed: \"contiguous\", \"zigzag\", "
      "\"striped\"",
      "deck.toml:16: unknown key curriculum.k",
      "command line: optimizer.zero=3: optimizer.zero = 3 is out of range: it must be at least 0 "
      "and at most 2",
  };
  std::size_t from = 0;
  for (const auto& line : expected) {
    const auto at = text.find(line, from);
    EXPECT_NE(at, std::string::npos) << line << "\nis missing or out of order in\n" << text;
    if (at != std::string::npos) from = at;
  }
  EXPECT_TRUE(holds(text, {"deck.toml: 8 problems in the deck"}));
}

TEST(DeckReader, RulesNameTheLine) {
  EXPECT_TRUE(holds(problem(std::string(kSound) + "[ring]\nstripe = 3\n[eval]\nevery_steps = 5\n"),
                    {"deck.toml:17: eval.every_steps = 5", "data.validation_share"}));
  EXPECT_TRUE(holds(problem(""), {"deck.toml: model.layers = 0",
                                  "deck.toml: data.source = \"files\" needs data.paths"}));
  // A misspelt key is not reported a second time as missing.
  const std::string text =
      problem("[model]\npreset = \"qwen2.5-0.5b\"\n[data]\npathes = [\"/x\"]\n");
  EXPECT_TRUE(holds(text, {"deck.toml: 1 problem in the deck",
                           "deck.toml:4: unknown key data.pathes (did you mean data.paths?)"}));
}

TEST(DeckReader, FilesThatAreNoDecks) {
  namespace fs = std::filesystem;
  const std::string path =
      (fs::temp_directory_path() / fmt::format("ballast-deck-{}.toml", ::getpid())).string();
  const auto message = [](const std::string& file) -> std::string {
    try {
      read_deck(file);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_TRUE(holds(message(path), {path, "No such file"}));
  EXPECT_TRUE(holds(message(fs::temp_directory_path().string()), {"is a folder"}));
  EXPECT_TRUE(holds(message("/dev/zero"), {"/dev/zero", "larger than"}));
  std::ofstream(path) << std::string(2 << 20, '#');
  EXPECT_TRUE(holds(message(path), {path, "larger than"}));
  std::ofstream(path) << kSound;
  EXPECT_EQ(read_deck(path).file, path);
  EXPECT_TRUE(deck_cases(path).empty());
  fs::remove(path);
}

}  // namespace
}  // namespace ballast

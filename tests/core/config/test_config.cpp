// Config: every key of the schema reaches its member and comes back in the effective deck; choices
// have one name each; provenance is typed.
#include <gtest/gtest.h>

#include <set>

#include "core/config/config.hpp"
#include "core/config/deck.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "tests/core/config/other_value.hpp"

namespace ballast {
namespace {

TEST(Config, EveryKeyReachesItsMemberAndTheEffectiveDeck) {
  const std::string defaults = Config().effective_deck();
  for (const KeySpec& spec : deck_schema()) {
    const DeckValue other = other_value(spec);
    ASSERT_NE(other, spec.default_value) << spec.path();
    ASSERT_EQ(value_problem(spec, other), "") << spec.path();
    Deck deck;
    deck.set(spec.path(), other, "deck.toml:7");
    const Config config = deck.config();
    EXPECT_EQ(spec.value(config), other) << spec.path();
    EXPECT_EQ(config.from.of(spec.path()).place, "deck.toml:7");
    const bool preset = spec.path() == "model.preset";  // fills the keys of the shape
    for (const KeySpec& rest : deck_schema())
      if (rest.path() != spec.path() && !(preset && rest.block == "model")) {
        EXPECT_EQ(rest.value(config), rest.default_value)
            << spec.path() << " moves " << rest.path();
      }
    const std::string effective = config.effective_deck();
    EXPECT_NE(effective, defaults) << spec.path();
    EXPECT_NE(effective.find("\n" + spec.key + " = " + to_text(other) + "  # "), std::string::npos)
        << spec.path();
  }
}

TEST(Config, EveryKeyFillsAMemberOfItsOwn) {
  std::set<const void*> members;
  for (const KeySpec& spec : deck_schema()) {
    EXPECT_TRUE(members.insert(spec.member).second) << spec.path();
    EXPECT_EQ(&key_filling(spec.member), &spec);
    const char* begin = reinterpret_cast<const char*>(&default_config());
    EXPECT_TRUE(spec.member >= begin && spec.member < begin + sizeof(Config)) << spec.path();
  }
  EXPECT_THROW(key_filling(&members), std::logic_error);
}

TEST(Config, ChoicesAllowTheNamesOfTheirTable) {
  EXPECT_EQ(find_key("batching.method")->allowed, names_of<Batching>());
  EXPECT_EQ(find_key("attention.pattern")->allowed, names_of<PatternKind>());
  EXPECT_EQ(find_key("profile.recompute")->allowed, names_of<Recompute>());
  EXPECT_EQ(find_key("lora.projections")->allowed, names_of<Projection>());
}

TEST(Config, SettingsAreFoundByMember) {
  Deck deck;
  EXPECT_FALSE(deck.config().is_set(&Config::costs));
  deck.set("costs.backward_compute_ms", 0.0, "command line: x", Origin::command_line);
  const Config config = deck.config();
  EXPECT_TRUE(config.is_set(&Config::costs));
  EXPECT_TRUE(config.is_set(&Config::costs, &CostsConfig::backward));
  EXPECT_TRUE(config.is_set(&Config::costs, &CostsConfig::backward, &RingPassConfig::compute_ms));
  EXPECT_FALSE(config.is_set(&Config::costs, &CostsConfig::forward));
  EXPECT_FALSE(config.is_set(&Config::lora));
  EXPECT_FALSE(config.is_set(&Config::checkpoint));
  EXPECT_EQ(config.from.of("costs.backward_compute_ms").origin, Origin::command_line);
  EXPECT_EQ(config.from.of("costs.forward_token_s").origin, Origin::unset);
}

/// Every value has one name, every name one value.
template <class E>
void expect_round_trip() {
  std::set<std::string> texts;
  std::set<E> values;
  for (const auto& [value, text] : EnumNames<E>::table) {
    EXPECT_TRUE(texts.insert(text).second) << text;
    EXPECT_TRUE(values.insert(value).second) << text;
    EXPECT_STREQ(name(value), text);
    EXPECT_EQ(parse<E>(text), value);
    EXPECT_EQ(parse_or_fail<E>(text, "test"), value);
  }
  // The values count from 0, so that the last one tells whether one is missing.
  EXPECT_EQ(static_cast<std::size_t>(*values.rbegin()) + 1, values.size());
  EXPECT_EQ(parse<E>("no such name"), std::nullopt);
  EXPECT_THROW(parse_or_fail<E>("no such name", "test"), Error);
}

TEST(Config, EveryChoiceHasOneNameAValue) {
  expect_round_trip<Backend>();
  expect_round_trip<Precision>();
  expect_round_trip<DataSource>();
  expect_round_trip<LongDocuments>();
  expect_round_trip<Projection>();
  expect_round_trip<Recompute>();
  expect_round_trip<PatternKind>();
  expect_round_trip<IndexOrigin>();
  expect_round_trip<Anchor>();
  expect_round_trip<Batching>();
  expect_round_trip<BatchScope>();
  expect_round_trip<GroupSource>();
  expect_round_trip<LongSamples>();
  expect_round_trip<LossNormaliser>();
  expect_round_trip<LayoutKind>();
  expect_round_trip<ScheduleKind>();
  expect_round_trip<Offload>();
}

TEST(Config, ACopyCarriesItsOwnEdits) {
  Deck deck;
  deck.set("batching.method", std::string("packed"), "deck.toml:1");
  const Config config = deck.config();
  Config edited = config;
  edited.batching.method = Batching::chunkflow;
  edited.chunk.k = 4;
  EXPECT_NE(edited.effective_deck().find("\nmethod = \"chunkflow\"  # "), std::string::npos);
  EXPECT_EQ(config.batching.method, Batching::packed);
}

}  // namespace
}  // namespace ballast

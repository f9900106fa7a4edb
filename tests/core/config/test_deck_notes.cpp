// Notes on what a deck states and a run does not do: told wherever it is stated, and only then.
#include <gtest/gtest.h>

#include "core/base/decimal.hpp"
#include "core/config/deck.hpp"
#include "core/config/deck_notes.hpp"

namespace ballast {
namespace {

using I = std::int64_t;
using S = std::string;
using Settings = std::vector<std::pair<S, DeckValue>>;

Config config_of(const Settings& settings, Origin origin = Origin::file) {
  Deck deck;
  for (const auto& [path, value] : settings) deck.set(path, value, "here", origin);
  return deck.config();
}
S notes(const Settings& settings, Origin origin = Origin::file) {
  return messages(deck_notes(config_of(settings, origin)));
}

TEST(DeckNotes, InitialWeightsThatTheFolderReplaces) {
  const std::pair<S, DeckValue> weights{"model.weights", S("models/a")};
  const S told =
      "model.initial_std = 0.1 has no effect with model.weights = \"models/a\", whose values "
      "training begins with";
  for (const Origin origin : {Origin::file, Origin::command_line})
    EXPECT_EQ(notes({weights, {"model.initial_std", 0.1}}, origin), told);
  EXPECT_EQ(notes({weights}), "");
  EXPECT_EQ(notes({weights, {"model.initial_std", 0.02}}), "") << "the default asks for nothing";
  EXPECT_EQ(notes({{"model.initial_std", 0.1}}), "");
}

TEST(DeckNotes, TokensOfMicroBatchesThatGoBySamples) {
  const DeckValue some = I{2}, tokens = I{512};
  for (const char* method : {"sab", "lbb"})
    EXPECT_EQ(notes({{"batching.method", S(method)},
                     {"batching.micro_batch_samples", some},
                     {"batching.micro_batch_tokens", tokens}}),
              S("batching.micro_batch_tokens = 512 bounds no micro-batch with "
                "batching.micro_batch_samples = 2: \"") +
                  method + "\" puts that many samples of any length into one, on average");
  EXPECT_EQ(notes({{"batching.method", S("sab")}, {"batching.micro_batch_samples", some}}), "");
  EXPECT_EQ(notes({{"batching.method", S("sab")}, {"batching.micro_batch_tokens", tokens}}), "");
  EXPECT_EQ(notes({{"batching.method", S("packed")},
                   {"batching.micro_batch_samples", some},
                   {"batching.micro_batch_tokens", tokens}}),
            "")
      << "packs are bounded";
}

TEST(DeckNotes, ASelectionThatMobaDoesWithout) {
  const Settings moba{{"attention.pattern", S("moba")}, {"attention.selection", S("causal")}};
  EXPECT_EQ(notes(moba),
            "attention.selection = \"causal\" has no effect with attention.pattern = \"moba\", "
            "which looks at no later token");
  EXPECT_EQ(deck_notes(config_of(moba, Origin::command_line)).size(), 1u) << "told once";
  EXPECT_EQ(
      notes({{"attention.pattern", S("vertical_slash")}, {"attention.selection", S("causal")}}),
      "");
  EXPECT_EQ(notes({{"attention.pattern", S("moba")}}), "");
}

TEST(DeckNotes, APrecisionThatIsNotComputedIn) {
  const Settings stated{{"run.precision", S("fp32")}, {"run.backend", S("cuda")}};
  const S note = precision_note(config_of(stated), DType::bf16);
  EXPECT_NE(note.find("run.precision = \"fp32\""), S::npos) << note;
  EXPECT_NE(note.find("bf16"), S::npos) << note;
  EXPECT_EQ(precision_note(config_of(stated), DType::f32), "") << "no GPU is here";
  EXPECT_EQ(precision_note(config_of({{"run.backend", S("cuda")}}), DType::bf16), "")
      << "nobody asked for it";
  EXPECT_EQ(precision_note(config_of({{"run.precision", S("bf16")}}), DType::bf16), "");
}

TEST(Decimal, NumbersAsDecksWriteThem) {
  for (const char* text : {"0", "7", "10", "-3", "+12", "9223372036854775807"})
    EXPECT_TRUE(is_decimal(text)) << text;
  for (const char* text : {"", "-", "010", "00", "-01", "0x10", "1e3", "1.0", " 1", "1 ", "ten"})
    EXPECT_FALSE(is_decimal(text)) << text;
}

}  // namespace
}  // namespace ballast

// 200 damaged decks, each refused with a message that names the place; and random bytes, which must
// never do more than that.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "io/deck/deck_reader.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

/// A sound deck as lines, so that damage can say where it is.
const std::vector<std::string> kLines = {
    "# Trains on headers.",        // 1
    "[run]",                       // 2
    "seed = 7",                    // 3
    "steps = 20",                  // 4
    "precision = \"fp32\"",        // 5
    "[mesh]",                      // 6
    "dp = 2",                      // 7
    "cp_inner = 2",                // 8
    "[model]",                     // 9
    "layers = 2",                  // 10
    "hidden = 64",                 // 11
    "intermediate = 128",          // 12
    "query_heads = 4",             // 13
    "kv_heads = 2",                // 14
    "head_dim = 16",               // 15
    "vocabulary = 256",            // 16
    "[data]",                      // 17
    "source = \"files\"",          // 18
    "paths = [\"/usr/include\"]",  // 19
    "max_tokens = 4096",           // 20
    "long = \"split\"",            // 21
    "validation_share = 0.1",      // 22
    "[batching]",                  // 23
    "method = \"packed\"",         // 24
    "micro_batch_tokens = 4096",   // 25
    "[ring]",                      // 26
    "layout = \"zigzag\"",         // 27
    "[optimizer]",                 // 28
    "learning_rate = 0.001",       // 29
    "warmup_steps = 3",            // 30
    "[eval]",                      // 31
    "every_steps = 10",            // 32
};

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

/// The message of a refused deck; fails the test for anything but a clean refusal.
std::string refusal(const std::string& text, const std::string& what) {
  try {
    parse_deck(text, "deck.toml");
  } catch (const Error& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << what << ": not an Error but " << e.what();
    return "";
  }
  ADD_FAILURE() << what << ": accepted\n" << text;
  return "";
}

class Damage {
 public:
  explicit Damage(unsigned seed) : random_(seed) {}
  std::size_t below(std::size_t n) { return random_() % n; }

  bool is_key(std::size_t i) const { return kLines[i].find('=') != std::string::npos; }
  /// Index of a random line with a key, or of a header.
  std::size_t key_line() {
    return pick([this](std::size_t i) { return is_key(i); });
  }
  std::size_t header_line() {
    return pick([](std::size_t i) { return kLines[i][0] == '['; });
  }
  std::string block_of(std::size_t i) const {
    while (kLines[i][0] != '[') --i;
    return kLines[i].substr(1, kLines[i].size() - 2);
  }
  std::string key_of(std::size_t i) const { return kLines[i].substr(0, kLines[i].find(' ')); }

  /// One letter dropped, doubled, swapped or changed, so that the word differs.
  std::string misspelt(const std::string& word) {
    for (;;) {
      std::string other = word;
      const std::size_t at = below(word.size());
      switch (below(4)) {
        case 0:
          other.erase(at, 1);
          break;
        case 1:
          other.insert(at, 1, word[at]);
          break;
        case 2:
          std::swap(other[at], other[(at + 1) % word.size()]);
          break;
        default:
          other[at] = static_cast<char>('a' + below(26));
      }
      if (other != word && !other.empty() &&
          other.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789") == std::string::npos)
        return other;
    }
  }
  std::string garbage(std::size_t n) {
    std::string text(n, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }

 private:
  template <class F>
  std::size_t pick(F&& good) {
    for (;;)
      if (const std::size_t i = below(kLines.size()); good(i)) return i;
  }
  std::mt19937 random_;
};

struct Damaged {
  std::string what, text;
  std::vector<std::string> mentions;  ///< one of them must be in the message
};

std::string at(std::size_t index) { return fmt::format("deck.toml:{}:", index + 1); }

Damaged damaged(Damage& d, int kind) {
  std::vector<std::string> lines = kLines;
  const std::size_t k = d.key_line(), h = d.header_line();
  const std::string key = d.key_of(k), path = d.block_of(k) + "." + key;
  const KeySpec& spec = *find_key(path);
  switch (kind) {
    case 0: {  // truncated inside a key, before its value
      const std::size_t length = 1 + d.below(lines[k].find('=') + 1);
      lines[k].resize(length);
      lines.resize(k + 1);
      std::string text = join(lines);
      text.pop_back();
      return {"truncated in line " + lines[k], text, {at(k)}};
    }
    case 1:  // truncated inside a header
      lines[h].pop_back();
      lines.resize(h + 1);
      return {"truncated header", join(lines), {at(h)}};
    case 2: {  // a flipped character of a key
      std::string name = key;
      name[d.below(name.size())] ^= static_cast<char>(1 << d.below(4));
      lines[k] = name + lines[k].substr(key.size());
      return {"flipped character in " + key + " -> " + name, join(lines), {at(k)}};
    }
    case 3:  // misspelt key
      lines[k] = d.misspelt(key) + lines[k].substr(key.size());
      if (find_key(d.block_of(k) + "." + lines[k].substr(0, lines[k].find(' '))) != nullptr)
        return damaged(d, kind);
      return {"misspelt key " + lines[k], join(lines), {at(k)}};
    case 4: {  // misspelt block
      const std::string name = d.misspelt(d.block_of(h));
      if (find_block(name) != nullptr) return damaged(d, kind);
      lines[h] = "[" + name + "]";
      return {"misspelt block " + lines[h], join(lines), {at(h)}};
    }
    case 5: {  // wrong type
      static const std::vector<std::string> others = {"true",       "\"word\"",  "1.5",
                                                      "[1, true]",  "{ x = 1 }", "1979-05-27",
                                                      "[\"a\", 3]", "12:30:00"};
      const std::string value = others[d.below(others.size())];
      if ((value[0] == '"' && std::holds_alternative<std::string>(spec.default_value)) ||
          (value == "1.5" && std::holds_alternative<double>(spec.default_value)))
        return damaged(d, kind);
      lines[k] = key + " = " + value;
      return {"wrong type " + lines[k], join(lines), {at(k)}};
    }
    case 6: {  // out of range or not allowed
      std::string value;
      if (!spec.allowed.empty())
        value = "\"" + d.misspelt(spec.allowed[0]) + "\"";
      else if (std::holds_alternative<std::int64_t>(spec.default_value) && spec.minimum)
        value = fmt::format("{}", static_cast<std::int64_t>(*spec.minimum) - 1 -
                                      static_cast<std::int64_t>(d.below(1000)));
      else if (std::holds_alternative<double>(spec.default_value))
        value = d.below(2) == 0 ? "-0.5" : "nan";
      else
        return damaged(d, kind);
      lines[k] = key + " = " + value;
      return {"out of range " + lines[k], join(lines), {at(k)}};
    }
    case 7:  // a key twice
      lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(k), lines[k]);
      return {"duplicate " + lines[k], join(lines), {at(k + 1)}};
    case 8: {  // a block twice
      const std::string name = lines[h];
      lines.push_back(name);
      return {"duplicate block " + name, join(lines), {at(lines.size() - 1)}};
    }
    case 9: {  // a third level
      lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(k) + 1,
                   fmt::format("deeper.{} = 1", key));
      return {"nested table", join(lines), {at(k + 1)}};
    }
    case 10: {  // binary garbage in place of a value
      lines[k] = key + " = \x01" + d.garbage(1 + d.below(60));
      return {"garbage in line " + fmt::to_string(k + 1), join(lines), {"deck.toml:"}};
    }
    case 11:  // binary garbage altogether
      return {"garbage", std::string(1, '\0') + d.garbage(d.below(2000)), {"deck.toml:"}};
    case 12:  // empty, blank, comments only
      return {"empty",
              std::string(d.below(5), d.below(2) == 0 ? '\n' : ' ') +
                  (d.below(2) == 0 ? "# nothing\n" : ""),
              {"model.layers"}};
    case 13: {  // a needed line is missing
      static const std::size_t needed[] = {9, 10, 11, 12, 13, 14, 15, 18};
      const std::size_t i = needed[d.below(8)];
      const std::string name = d.block_of(i) + "." + d.key_of(i);
      lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(i));
      return {"missing " + name, join(lines), {name}};
    }
    case 14: {  // numbers that no type holds
      static const std::vector<std::string> numbers = {
          "99999999999999999999", "1e999", "0x", "1__0", "--1", "1.2.3", "+", "1e", "inf", "08"};
      if (std::holds_alternative<std::string>(spec.default_value) ||
          std::holds_alternative<std::vector<std::string>>(spec.default_value))
        return damaged(d, kind);
      lines[k] = key + " = " + numbers[d.below(numbers.size())];
      return {"number " + lines[k], join(lines), {at(k)}};
    }
    case 15: {  // broken text or list
      static const std::vector<std::string> values = {
          "\"open",    "[1, 2",  "\"\"\"open",         "'",
          "[[[[[[[[",  "{ a = ", "\"bad \\q escape\"", "\"\\u12\"",
          "bare word", "=",      "[\"a\" \"b\"]"};
      lines[k] = key + " = " + values[d.below(values.size())];
      return {"broken value " + lines[k], join(lines), {"deck.toml:"}};
    }
    case 16: {  // a block of a later version, or one turned into a list or a value
      static const std::vector<std::string> blocks = {"[Costs]", "[[mesh2]]", "[[]]",
                                                      "[]",      "[a.b.c]",   "[mesh.dp]"};
      lines.push_back(blocks[d.below(blocks.size())]);
      return {"block " + lines.back(), join(lines), {at(lines.size() - 1)}};
    }
    case 17: {  // cases gone wrong
      static const std::vector<std::string> cases = {
          "[[case]]\nmesh.dp = 2",           "[case]\nname = \"x\"",
          "[[case]]\nname = \"\"",           "[[case]]\nname = \"x\"\nmesh.dq = 1",
          "[[case]]\nname = \"x\"\ndp = 1",  "[[case]]\nname = \"x\"\n[[case]]\nname = \"x\"",
          "[[case]]\nname = \"x\"\nmesh = 3"};
      const std::size_t begin = lines.size();
      lines.push_back(cases[d.below(cases.size())]);
      Damaged result{"case " + lines.back(), join(lines), {}};
      for (std::size_t i = begin; i < begin + 5; ++i) result.mentions.push_back(at(i));
      return result;
    }
    case 18: {  // a combination that a rule refuses
      static const std::vector<std::pair<std::size_t, std::string>> breaches = {
          {4, "precision = \"bf16\""},
          {12, "query_heads = 5"},
          {14, "head_dim = 15"},
          {15, "vocabulary = 100"},
          {19, "max_tokens = 4096\nmin_tokens = 5000"},
          {17, "source = \"hdf5\""},
          {21, "validation_share = 0.0"},
          {7, "cp_inner = 4\ncp_outer = 2\nranks_per_node = 2"},
          {29, "warmup_steps = 30\ndecay_steps = 20"}};
      const auto& [i, text] = breaches[d.below(breaches.size())];
      lines[i] = text;
      return {"rule " + text, join(lines), {"deck.toml:"}};
    }
    default: {  // UTF-16, as some editors write
      std::string text = "\xFF\xFE";
      for (char c : join(lines)) text += std::string{c, '\0'};
      return {"UTF-16", text, {"deck.toml"}};
    }
  }
}

TEST(DeckDamage, TheUndamagedDeckIsSound) {
  EXPECT_NO_THROW(parse_deck(join(kLines), "deck.toml"));
}

TEST(DeckDamage, TwoHundredDecksAreRefusedWithTheirPlace) {
  const unsigned seed = test_seed();
  Damage d(seed);
  for (int i = 0; i < 240; ++i) {
    const Damaged deck = damaged(d, i % 20);
    const std::string what = fmt::format("deck {} (seed {}): {}", i, seed, deck.what);
    const std::string message = refusal(deck.text, what);
    EXPECT_TRUE(std::any_of(deck.mentions.begin(), deck.mentions.end(),
                            [&](const auto& m) { return message.find(m) != std::string::npos; }))
        << what << "\nwants one of " << fmt::format("{}", fmt::join(deck.mentions, " | "))
        << " in\n"
        << message;
    EXPECT_TRUE(std::all_of(message.begin(), message.end(),
                            [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); }))
        << what << "\n"
        << message;
    EXPECT_LT(message.size(), 20000u) << what;
  }
}

TEST(DeckDamage, RandomEditsAreReadOrRefusedAndNothingElse) {
  const unsigned seed = test_seed();
  Damage d(seed);
  const std::string sound = join(kLines);
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    std::string text = sound;
    for (std::size_t edits = 1 + d.below(4); edits > 0; --edits) {
      const std::size_t where = d.below(text.size());
      switch (d.below(4)) {
        case 0:
          text[where] = static_cast<char>(d.below(256));
          break;
        case 1:
          text.erase(where, 1 + d.below(20));
          break;
        case 2:
          text.insert(where, d.garbage(1 + d.below(8)));
          break;
        default:
          text.insert(where, sound.substr(d.below(sound.size()), d.below(40)));
      }
      if (text.empty()) text = "x";
    }
    try {
      const Deck deck = parse_deck(text, "deck.toml");
      EXPECT_EQ(
          parse_deck(deck.config().effective_deck(), "effective.toml").config().effective_deck(),
          deck.config().effective_deck())
          << "seed " << seed << "\n"
          << text;
    } catch (const Error& e) {
      ++refused;
      EXPECT_EQ(std::string(e.what()).rfind("deck.toml: ", 0), 0u) << e.what();
      EXPECT_NE(std::string(e.what()).find("\ndeck.toml"), std::string::npos) << e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << "seed " << seed << ": not an Error but " << e.what() << "\n" << text;
    }
  }
  EXPECT_GT(refused, 200);
}

TEST(DeckDamage, DepthAndLengthHaveLimits) {
  EXPECT_NE(refusal("x = " + std::string(100000, '['), "deep list").find("deck.toml:1:"),
            std::string::npos);
  EXPECT_NE(refusal(std::string(100000, '['), "deep header").find("deck.toml:1:"),
            std::string::npos);
  std::string dotted = "a";
  for (int i = 0; i < 20000; ++i) dotted += ".a";
  EXPECT_NE(refusal(dotted + " = 1\n", "deep dotted key").find("deck.toml:1:"), std::string::npos);
  EXPECT_NE(refusal("[" + dotted + "]\n", "deep dotted header").find("deck.toml:1:"),
            std::string::npos);
  EXPECT_NE(
      refusal("[run]\nsteps = " + std::string(100000, '9'), "long number").find("deck.toml:2:"),
      std::string::npos);
  EXPECT_NE(refusal("[run]\n" + std::string(100000, 'k') + " = 1", "long key").find("deck.toml:2:"),
            std::string::npos);
  std::string many = "[run]\n";
  for (int i = 0; i < 3000; ++i) many += fmt::format("key_{} = 1\n", i);
  EXPECT_NE(refusal(many, "many keys").find("and 29"), std::string::npos);
}

}  // namespace
}  // namespace ballast

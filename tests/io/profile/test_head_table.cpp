// The table of patterns by head on disk: what was written is read, damage is named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>

#include "core/base/error.hpp"
#include "io/profile/head_table.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

class HeadTableFile : public TemporaryFolder {
 protected:
  std::string file() const { return dir + "/heads.json"; }
  std::string error_of(const nlohmann::ordered_json& text) {
    write_head_table(file(), text);
    try {
      read_head_table(file());
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  nlohmann::ordered_json sound() const {
    nlohmann::ordered_json text = {{"layers", 2}, {"heads", 2}, {"criterion", "for people"}};
    for (const auto& layer : rules) {
      nlohmann::ordered_json list = nlohmann::ordered_json::array();
      for (const HeadRule& rule : layer) list.push_back(to_json(rule));
      text["rules"].push_back(list);
    }
    return text;
  }
  const std::vector<std::vector<HeadRule>> rules{
      {{HeadPattern::a_shape, 64, 256}, {}},
      {{HeadPattern::vertical_slash, 0, 0, 100, 3}, {HeadPattern::block_sparse, 0, 0, 0, 0, 7}}};
};

TEST_F(HeadTableFile, ReadsWhatWasWritten) {
  ASSERT_EQ(error_of(sound()), "");
  const HeadTable table = read_head_table(file());
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head) EXPECT_EQ(table.at(layer, head), rules[layer][head]);
  EXPECT_NO_THROW(check_head_table(table, file(), 2, 2));
  EXPECT_THROW(check_head_table(table, file(), 2, 4), Error);
}

TEST_F(HeadTableFile, DamageIsNamedWithItsPlace) {
  const auto expect = [&](const nlohmann::ordered_json& text, const std::string& mention) {
    EXPECT_NE(error_of(text).find(mention), std::string::npos) << error_of(text);
  };
  auto text = sound();
  text["rules"][1][0]["blocks"] = 3;
  expect(text, "layer 1, head 0: blocks = 3 is none of vertical_slash");
  text = sound();
  text["rules"][0][0]["window"] = 100;
  expect(text, "window = 100");
  text = sound();
  text["rules"][0][1]["pattern"] = "triangle";
  expect(text, "\"triangle\" is unknown; allowed: dense, a_shape");
  text = sound();
  text["rules"][1].erase(0);
  expect(text, "rules of 1 heads for 2");
  for (const std::int64_t number : {std::int64_t{-1}, std::int64_t{1} << 40}) {
    text = sound();
    text["layers"] = number;
    expect(text, fmt::format("rules of 2 layers for {}", number));
    text = sound();
    text["heads"] = number;
    expect(text, fmt::format("rules of 2 heads for {}", number));
  }
  text = sound();
  text.erase("layers");
  expect(text, "layers");
  std::ofstream(file()) << "{";
  EXPECT_THROW(read_head_table(file()), Error);
  EXPECT_THROW(read_head_table(dir + "/none.json"), Error);
}

}  // namespace
}  // namespace ballast

#include "io/profile/head_table.hpp"

#include <filesystem>
#include <fstream>
#include <map>

#include "core/base/error.hpp"
#include "io/files/text_file.hpp"

namespace ballast {
namespace {

using Json = nlohmann::json;

const std::map<std::string, std::int64_t HeadRule::*> kParameters{{"sink", &HeadRule::sink},
                                                                  {"window", &HeadRule::window},
                                                                  {"columns", &HeadRule::columns},
                                                                  {"slashes", &HeadRule::slashes},
                                                                  {"blocks", &HeadRule::blocks}};

HeadRule rule_of(const Json& stored) {
  HeadRule rule;
  rule.pattern =
      parse_or_fail<HeadPattern>(stored.at("pattern").get<std::string>(), "pattern of a head");
  for (const auto& [key, member] : kParameters)
    if (stored.contains(key)) {
      require(stored.at(key).is_number_integer(), "{} must be a whole number, not {}", key,
              stored.at(key).dump());
      stored.at(key).get_to(rule.*member);
    }
  const std::string problem = problems(rule);
  require(problem.empty(), "{}", problem);
  return rule;
}

}  // namespace

HeadTable read_head_table(const std::string& file) {
  std::ifstream stream(file);
  require(stream.good(), "{}: no such file; `ballast bench heads DECK out=FILE` writes one", file);
  std::string place = "the file";
  try {
    const Json json = Json::parse(stream);
    for (const char* key : {"layers", "heads"})
      require(json.at(key).is_number_integer(), "{} must be a whole number, not {}", key,
              json.at(key).dump());
    const auto layers = json.at("layers").get<std::int64_t>(),
               each = json.at("heads").get<std::int64_t>();
    const Json& rules = json.at("rules");
    require(std::ssize(rules) == layers, "rules of {} layers for {}", rules.size(), layers);
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      place = fmt::format("layer {}", layer);
      const auto heads = std::ssize(rules.at(static_cast<std::size_t>(layer)));
      require(heads == each, "rules of {} heads for {}", heads, each);
    }
    HeadTable table(static_cast<int>(layers), static_cast<int>(each));
    for (int layer = 0; layer < table.layers(); ++layer) {
      const Json& heads = rules.at(static_cast<std::size_t>(layer));
      for (int head = 0; head < table.heads(); ++head) {
        place = fmt::format("layer {}, head {}", layer, head);
        table.at(layer, head) = rule_of(heads.at(static_cast<std::size_t>(head)));
      }
    }
    return table;
  } catch (const std::exception& error) {
    fail("{}: no table of patterns by head, at {}: {}", file, place, error.what());
  }
}

void check_head_table(const HeadTable& table, const std::string& file, std::int64_t layers,
                      std::int64_t heads) {
  require(table.layers() == layers && table.heads() == heads,
          "attention.heads = \"{}\": a table of {} layers and {} query heads for a model of {} and "
          "{}; write this model's with `ballast bench heads DECK out=FILE`",
          file, table.layers(), table.heads(), layers, heads);
}

nlohmann::ordered_json to_json(const HeadRule& rule) {
  nlohmann::ordered_json json;
  json["pattern"] = name(rule.pattern);
  for (const auto& [key, member] : kParameters)
    if (rule.*member != 0) json[key] = rule.*member;
  return json;
}

void check_head_table_target(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(file, ignored)) {
    const Json there = Json::parse(std::ifstream(file), nullptr, false);
    require(there.is_object() && there.contains("rules"),
            "{}: this file is there and is no table of patterns by head; choose another name",
            file);
  }
  const std::string why = unwritable(file);
  require(why.empty(), "{} cannot be written: {}", file, why);
}

void write_head_table(const std::string& file, const nlohmann::ordered_json& text) {
  require_written(file, text.dump(1) + '\n');
}

}  // namespace ballast

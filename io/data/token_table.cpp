#include "io/data/token_table.hpp"

#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/lfs_pointer.hpp"

namespace ballast {

namespace {

using Json = nlohmann::json;

std::string file_of(const std::string& folder) { return folder + "/tokenizer.json"; }

/// The vocabulary is {token: id} (BPE, WordPiece) or a list of [token, score] (Unigram).
std::map<std::int64_t, std::string> table_of(const Json& stored) {
  std::map<std::int64_t, std::string> table;
  const Json& vocabulary = stored.at("model").at("vocab");
  if (vocabulary.is_object()) {
    for (const auto& [token, id] : vocabulary.items()) table[id.get<std::int64_t>()] = token;
  } else {
    for (const Json& entry : vocabulary) {
      const auto id = static_cast<std::int64_t>(table.size());
      table[id] = entry.at(0).get<std::string>();
    }
  }
  if (const auto added = stored.find("added_tokens"); added != stored.end() && added->is_array()) {
    for (const Json& token : *added)
      table[token.at("id").get<std::int64_t>()] = token.at("content").get<std::string>();
  }
  return table;
}

}  // namespace

bool has_tokenizer(const std::string& folder) {
  return !folder.empty() && std::filesystem::is_regular_file(file_of(folder));
}

std::uint64_t token_table_crc32(const std::string& folder) {
  refuse_lfs_pointer(file_of(folder));
  std::ifstream stream(file_of(folder));
  require(stream.good(), "{}: cannot be read", file_of(folder));
  std::map<std::int64_t, std::string> table;
  try {
    table = table_of(Json::parse(stream));
  } catch (const Json::exception& error) {
    fail("{}: holds no table of tokens: {}", file_of(folder), error.what());
  }
  uLong sum = crc32(0, nullptr, 0);
  for (const auto& [id, token] : table) {
    const std::string line = fmt::format("{}\t{}\n", id, token);
    sum = crc32(sum, reinterpret_cast<const Bytef*>(line.data()), static_cast<uInt>(line.size()));
  }
  return sum;
}

}  // namespace ballast

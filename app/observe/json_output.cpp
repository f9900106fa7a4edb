#include "app/observe/json_output.hpp"

#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"
#include "io/files/text_file.hpp"

namespace ballast {

std::string json_problem(const std::string& file) {
  if (file.empty()) return "";
  std::error_code ignored;
  const bool there = std::filesystem::exists(file, ignored);
  if (std::filesystem::is_regular_file(file, ignored)) {
    std::ifstream old(file);
    if (char first = '{'; old >> first && first != '{' && first != '[')
      return fmt::format("--json {}: this file is there and is no JSON; choose another name", file);
  }
  const auto folder = std::filesystem::absolute(file, ignored).parent_path();
  if (there && std::filesystem::exists(folder / "config.json", ignored))
    return fmt::format(
        "--json {}: this file is there, beside a model's config.json; choose another "
        "name",
        file);
  const std::string why = unwritable(file);
  return why.empty() ? "" : fmt::format("--json {}: the file cannot be written: {}", file, why);
}

void write_json(const std::string& file, const nlohmann::ordered_json& value) {
  if (file.empty()) return;
  // Names come from files and may hold any bytes; what is no UTF-8 is replaced.
  const std::string text =
      value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
  const std::string why = write_text(file, text);
  require(why.empty(), "--json {}: the file cannot be written: {}", file, why);
}

}  // namespace ballast

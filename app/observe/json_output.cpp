#include "app/observe/json_output.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"

namespace ballast {

std::string json_problem(const std::string& file) {
  if (file.empty()) return "";
  const bool there = std::filesystem::exists(file);
  if (std::error_code ignored; std::filesystem::is_regular_file(file, ignored)) {
    std::ifstream old(file);
    if (char first = '{'; old >> first && first != '{' && first != '[')
      return fmt::format("--json {}: this file is there and is no JSON; choose another name", file);
  }
  const auto folder = std::filesystem::absolute(file).parent_path();
  if (there && std::filesystem::exists(folder / "config.json"))
    return fmt::format(
        "--json {}: this file is there, beside a model's config.json; choose another "
        "name",
        file);
  const bool opens = std::ofstream(file, std::ios::app).good();
  const std::string why = opens ? "" : std::strerror(errno);
  if (std::error_code ignored; opens && !there) std::filesystem::remove(file, ignored);
  return opens ? "" : fmt::format("--json {}: the file cannot be written: {}", file, why);
}

void write_json(const std::string& file, const nlohmann::ordered_json& value) {
  if (file.empty()) return;
  std::ofstream out(file);
  // Names come from files and may hold any bytes; what is no UTF-8 is replaced.
  out << value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  out.close();
  require(!out.fail(), "--json {}: the file cannot be written", file);
}

}  // namespace ballast

#include "app/json_twin.hpp"

#include <fstream>

#include "core/error.hpp"

namespace ballast {

void write_json(const std::string& file, const nlohmann::ordered_json& value) {
  if (file.empty()) return;
  std::ofstream out(file);
  // Names come from files and may hold any bytes; what is no UTF-8 is replaced.
  out << value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  out.close();
  require(!out.fail(), "--json {}: the file cannot be written", file);
}

}  // namespace ballast

// The machine-readable twin of what a command prints (--json FILE).
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace ballast {

/// What keeps `file` from being written, or "": asked before the work whose results it is to take.
std::string json_problem(const std::string& file);

/// Writes `value` to `file`; does nothing for an empty name.  Throws Error naming the file when it
/// cannot be written whole.
void write_json(const std::string& file, const nlohmann::ordered_json& value);

}  // namespace ballast

// The machine-readable twin of what a command prints (--json FILE).
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace ballast {

/// Writes `value` to `file`; does nothing for an empty name.  Throws Error naming the file when it cannot be written whole.
void write_json(const std::string& file, const nlohmann::ordered_json& value);

}  // namespace ballast

// The table of attention.pattern = "by_head" on disk, JSON:
//   {"layers": 2, "heads": 4, ..., "rules": [[{"pattern": "a_shape", "sink": 64, "window": 256},
//   ...], ...]}
// a list a layer, of an object a query head, with the parameters of its pattern by their names
// (HeadRule).  What else an object says, such as how the table was found, is for people.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "core/plan/attention/head_rules.hpp"

namespace ballast {

/// Errors, with file, layer and head: no JSON, another number of layers or heads than it says, a
/// pattern or parameter that is none.
HeadTable read_head_table(const std::string& file);
/// Error, with both numbers: a table for another model.
void check_head_table(const HeadTable& table, const std::string& file, std::int64_t layers,
                      std::int64_t heads);
/// Rules of a head as the file has them.
nlohmann::ordered_json to_json(const HeadRule& rule);
/// Errors: something else than a table is there, or no file can be.
void check_head_table_target(const std::string& file);
/// Writes `text`, which holds "layers", "heads" and "rules".  Error: a file that cannot be written.
void write_head_table(const std::string& file, const nlohmann::ordered_json& text);

}  // namespace ballast

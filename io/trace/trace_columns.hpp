// What the trace's tables hold: every column with its type, unit and meaning, in one list from
// which the writer makes the tables and their attributes, and the tests docs/trace.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/observe/events.hpp"
#include "io/hdf5/hdf5_support.hpp"

namespace ballast {

enum class ColumnType { int32, int64, uint64, float64, kind, text };

struct TraceColumn {
  const char* name;
  ColumnType type;
  std::size_t offset;  ///< in a row
  const char* units;   ///< "1" for a number without a unit, "" for an identifier or a text
  const char* meaning;
};

/// A row of /plans, and one of /plan_steps.
struct PlanRow {
  char kind[24] = {};
  std::uint64_t hash = 0;
  std::int64_t step = 0;              ///< first step that executed it
  std::int64_t begin = 0, bytes = 0;  ///< of its compressed text
  std::int64_t text_bytes = 0;        ///< of its text
};
struct PlanStep {
  std::int64_t step = 0, plan = 0;
};

/// Tables in the order of the fields of /rows.
enum TableName { kEvents, kSteps, kPlans, kPlanSteps, kPlanText, kBudgets, kPredicted, kTables };

struct TraceTable {
  const char* name;
  std::size_t row_bytes;                 ///< 0: a row is a step and its scalars; 1: bytes
  std::span<const TraceColumn> columns;  ///< of /steps and of bytes: of what every row has
  const char* meaning;
};
const TraceTable& trace_table(int table);

/// Unit and meaning of a scalar of /steps, and of an attribute of a session, by name; empty for
/// one that is not in the list.
struct NameMeaning {
  const char* name;  ///< capitals stand for what varies: peak_bytes_CATEGORY
  const char* units;
  const char* meaning;
};
std::span<const NameMeaning> step_scalars();
NameMeaning step_scalar(const std::string& name);

/// Type of a row in memory and in the file; `scalars` are the fields of /steps after `step`.
hdf5::Handle row_type(int table, const std::vector<std::string>& scalars);
/// Type of /rows: a field a table.
hdf5::Handle rows_type();

/// Attributes `description` and, for compound rows, `columns`: a list of {name, units,
/// description}; of tables of events also `kinds`, and the kinds that are `useful` and `beside`.
void describe_table(hid_t dataset, int table, const std::vector<std::string>& scalars);
/// Likewise of the file, of /rows and of /sessions.
void describe_file(hid_t file);
void describe_rows(hid_t dataset);
void describe_sessions(hid_t group);

}  // namespace ballast

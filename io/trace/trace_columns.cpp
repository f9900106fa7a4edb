#include "io/trace/trace_columns.hpp"

#include <cctype>

namespace ballast {
namespace {

using hdf5::check;
using hdf5::Handle;

constexpr auto kInt32 = ColumnType::int32;
constexpr auto kInt64 = ColumnType::int64;
constexpr auto kUint64 = ColumnType::uint64;
constexpr auto kFloat64 = ColumnType::float64;

constexpr TraceColumn kEventColumns[] = {
    {"step", kInt32, offsetof(Event, step), "", "step, from 1; -1: outside of steps"},
    {"micro_batch", kInt32, offsetof(Event, micro_batch), "",
     "place in the rank's list of micro-batches; -1: none"},
    {"chunk", kInt32, offsetof(Event, chunk), "",
     "chunk of a sample that is computed in chunks; -1: none"},
    {"layer", kInt32, offsetof(Event, layer), "", "layer of the model; -1: none"},
    {"stage", kInt32, offsetof(Event, stage), "", "pipeline stage; -1: none"},
    {"outer", kInt32, offsetof(Event, outer), "", "step of the outer ring; -1: no ring step"},
    {"inner", kInt32, offsetof(Event, inner), "", "step of the inner ring; -1: no ring step"},
    {"kind", ColumnType::kind, offsetof(Event, kind), "",
     "what was done; attribute kinds says what the names mean"},
    {"begin_s", kFloat64, offsetof(Event, begin_s), "s",
     "begin; the origin is common to the ranks of a session"},
    {"end_s", kFloat64, offsetof(Event, end_s), "s", "end, on the same clock"},
    {"flops", kFloat64, offsetof(Event, flops), "FLOP", "useful floating-point operations"},
    {"bytes", kInt64, offsetof(Event, bytes), "B", "bytes moved between ranks"}};

constexpr TraceColumn kStepColumns[] = {
    {"step", kInt64, 0, "", "step, from 1, as the log counts them"}};

constexpr TraceColumn kPlanColumns[] = {
    {"kind", ColumnType::text, offsetof(PlanRow, kind), "",
     "step, ring, budgets, recall, coverage, drift or generated: what the JSON holds"},
    {"hash", kUint64, offsetof(PlanRow, hash), "", "of the plan"},
    {"step", kInt64, offsetof(PlanRow, step), "", "first step that executed it"},
    {"begin", kInt64, offsetof(PlanRow, begin), "B", "where its text begins in /plan_text"},
    {"bytes", kInt64, offsetof(PlanRow, bytes), "B", "length of its text there, compressed"},
    {"text_bytes", kInt64, offsetof(PlanRow, text_bytes), "B", "length of its text uncompressed"}};

constexpr TraceColumn kPlanStepColumns[] = {
    {"step", kInt64, offsetof(PlanStep, step), "", "step"},
    {"plan", kInt64, offsetof(PlanStep, plan), "", "row of /plans that it executed"}};

constexpr TraceColumn kByteColumns[] = {{"", kInt64, 0, "B", "compressed text"}};

constexpr TraceColumn kBudgetColumns[] = {
    {"step", kInt32, offsetof(BudgetRow, step), "", "step, from 1"},
    {"micro_batch", kInt32, offsetof(BudgetRow, micro_batch), "",
     "place in the rank's list of micro-batches"},
    {"chunk", kInt32, offsetof(BudgetRow, chunk), "", "chunk of a sample; -1: none"},
    {"layer", kInt32, offsetof(BudgetRow, layer), "", "layer; -1: one choice for all"},
    {"head", kInt32, offsetof(BudgetRow, head), "", "query head among those of the rank"},
    {"budget", kFloat64, offsetof(BudgetRow, budget), "blocks",
     "key blocks a query, in the pattern's unit; NaN where none was set"},
    {"computed_pairs", kFloat64, offsetof(BudgetRow, computed_pairs), "pairs",
     "(query, key) pairs that the rank computes of its queries, of a head (a mean over heads where "
     "these choose for themselves)"},
    {"visible_pairs", kFloat64, offsetof(BudgetRow, visible_pairs), "pairs",
     "pairs that dense attention would compute"},
    {"overflow", kInt64, offsetof(BudgetRow, overflow), "1",
     "columns and slashes that caps left out"},
    {"overflow_mass", kFloat64, offsetof(BudgetRow, overflow_mass), "1",
     "share of the observed mass on them"},
    {"kind", kInt32, offsetof(BudgetRow, kind), "",
     "where heads differ, what most queries of the head compute: 0 dense, 1 a_shape, 2 "
     "vertical_slash, 3 block_sparse; -1: all heads alike"}};

constexpr TraceTable kTableList[kTables] = {
    {"events", sizeof(Event), kEventColumns, "What the rank did, an event a row; events nest"},
    {"steps", 0, kStepColumns, "Scalars of steps; NaN where a step has no such value"},
    {"plans", sizeof(PlanRow), kPlanColumns, "Distinct plans, their texts in /plan_text"},
    {"plan_steps", sizeof(PlanStep), kPlanStepColumns, "Which plans a step executed"},
    {"plan_text", 1, kByteColumns,
     "Texts of the plans: JSON in UTF-8, each compressed by zlib, one after another"},
    {"budgets", sizeof(BudgetRow), kBudgetColumns,
     "What sparse attention chose for a head of a layer, and what the rank computes of it"},
    {"predicted", sizeof(Event), kEventColumns,
     "Operations of the rank's stage as simulated; times since the step's schedule began"}};

constexpr NameMeaning kStepScalars[] = {
    {"loss", "nats", "training loss, of a token; of a pair under DPO; or summed (loss.normaliser)"},
    {"validation_loss", "nats", "loss of held-out samples, of a token or pair, after the step"},
    {"validation_tokens", "tokens", "of held-out samples, those that carry loss"},
    {"rewards_chosen", "1", "DPO: beta times what the policy gained on chosen answers, mean"},
    {"rewards_rejected", "1", "DPO: the same of rejected answers"},
    {"rewards_margin", "1", "DPO: rewards_chosen - rewards_rejected"},
    {"rewards_accuracy", "1", "DPO: share of pairs whose chosen answer gained more"},
    {"validation_rewards_margin", "1", "DPO: rewards_margin of held-out pairs"},
    {"validation_rewards_accuracy", "1", "DPO: rewards_accuracy of held-out pairs"},
    {"grad_norm", "1", "norm of the gradient before clipping"},
    {"learning_rate", "1", "learning rate of the update"},
    {"step_time_s", "s", "time of the step"},
    {"plan_s", "s", "host time of making the step's plan"},
    {"planning_s", "s", "time of planning that the step waited for"},
    {"tuning_s", "s", "time of tuning budgets"},
    {"computation_s", "s", "useful time of the rank"},
    {"exposed_reduction_s", "s",
     "time that gradient reductions and parameter gathers kept the rank waiting"},
    {"schedule_s", "s", "from the first operation of any rank to the end of the last"},
    {"predicted_schedule_s", "s", "schedule_s as simulated"},
    {"imbalance", "1", "max / mean over the micro-batches of their time"},
    {"load_balance", "1", "mean / max over ranks of useful time"},
    {"idle_ranks", "ranks", "ranks without a micro-batch"},
    {"tokens", "tokens", "of the global batch"},
    {"loss_tokens", "tokens", "of the global batch, those that carry loss"},
    {"flops_per_s", "FLOP/s", "of the model and a rank"},
    {"mfu", "1", "model FLOP utilisation: flops_per_s over the device's dense peak"},
    {"budget", "blocks", "mean budget of the rank's layers and micro-batches"},
    {"coverage_loss", "1", "coverage lost against the base budget, mean over the choices"},
    {"largest_coverage_loss", "1", "largest coverage lost over the choices"},
    {"recall", "1", "share of the exact attention on computed pairs"},
    {"recall_interval", "1", "half of the 95 % interval of recall"},
    {"drift", "1", "recall on a held-out sample: of its index now less of that before"},
    {"cap_share", "1", "share of the choices that caps on columns or slashes decided"},
    {"cap_mass", "1", "mean share of the observed mass that caps left out"},
    {"needle_accuracy", "1", "share of the held-out questions answered"},
    {"needle_accuracy.depth.D", "1", "needle_accuracy at depth class D"},
    {"needle_accuracy.length.N.depth.D", "1",
     "of N tokens and depth class D; beyond 400 scalars in steps.jsonl alone"},
    {"needle_accuracy.length.N", "1", "needle_accuracy in samples of N tokens"},
    {"peak_bytes_CATEGORY", "B", "most memory of a category up to here; total: at one moment"}};

constexpr NameMeaning kSessionAttributes[] = {
    {"rank", "", "rank that wrote the file"},
    {"ranks", "ranks", "of the run"},
    {"segment", "", "steps that were done when the session began"},
    {"mesh.NAME", "ranks", "degree of parallelism: dp, pp, cp_outer, cp_inner, sp, tp"},
    {"at.NAME", "", "the rank's place in it"},
    {"first_TABLE", "rows", "first row of the table that the session wrote"},
    {"host", "", "name of the machine"},
    {"device", "", "what computed"},
    {"mesh", "", "the rank's place as one text"},
    {"git_hash", "", "of the program"},
    {"started_unix_s", "s", "when the session started, since 1970 UTC"}};

/// Whether `name` is `pattern`, whose capitals stand for any text.
bool matches(const std::string& name, const std::string& pattern) {
  const auto capital = [](unsigned char c) { return std::isupper(c) != 0; };
  std::size_t n = 0;
  for (std::size_t p = 0; p < pattern.size();) {
    if (!capital(static_cast<unsigned char>(pattern[p]))) {
      if (n >= name.size() || name[n++] != pattern[p++]) return false;
      continue;
    }
    while (p < pattern.size() && capital(static_cast<unsigned char>(pattern[p]))) ++p;
    const std::size_t first = n;
    n = p < pattern.size() ? name.find(pattern[p], n) : name.size();
    if (n == std::string::npos || n == first) return false;
  }
  return n == name.size();
}

/// A row of attributes `columns` and `kinds`.
struct Described {
  const char* name;
  const char* units;
  const char* meaning;
};

void insert(hid_t type, const char* field, std::size_t offset, hid_t field_type) {
  check(H5Tinsert(type, field, offset, field_type), std::string("field ") + field);
}

Handle compound(std::size_t bytes) {
  return Handle(H5Tcreate(H5T_COMPOUND, bytes), H5Tclose, "compound type");
}

Handle text_type(std::size_t bytes) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "text type");
  check(H5Tset_size(type, bytes), "text type");
  return type;
}

Handle kind_type() {
  Handle type(H5Tenum_create(H5T_NATIVE_INT32), H5Tclose, "type of event kinds");
  for (std::int32_t i = 0; i < kEventKinds; ++i)
    check(H5Tenum_insert(type, name(static_cast<EventKind>(i)), &i), "type of event kinds");
  return type;
}

Handle column_type(ColumnType type) {
  switch (type) {
    case ColumnType::kind:
      return kind_type();
    case ColumnType::text:
      return text_type(sizeof(PlanRow::kind));
    default: {
      const hid_t native = type == kInt32    ? H5T_NATIVE_INT32
                           : type == kInt64  ? H5T_NATIVE_INT64
                           : type == kUint64 ? H5T_NATIVE_UINT64
                                             : H5T_NATIVE_DOUBLE;
      return Handle(H5Tcopy(native), H5Tclose, "column type");
    }
  }
}

void write_list(hid_t object, const char* attribute, const std::vector<Described>& rows,
                bool units) {
  const Handle text = text_type(H5T_VARIABLE), memory = compound(sizeof(Described));
  check(H5Tset_cset(text, H5T_CSET_UTF8), attribute);
  insert(memory, "name", offsetof(Described, name), text);
  if (units) insert(memory, "units", offsetof(Described, units), text);
  insert(memory, "description", offsetof(Described, meaning), text);
  const Handle stored(H5Tcopy(memory), H5Tclose, attribute);
  check(H5Tpack(stored), attribute);
  const Handle space = hdf5::simple_space({rows.size()});
  const Handle written(H5Acreate2(object, attribute, stored, space, H5P_DEFAULT, H5P_DEFAULT),
                       H5Aclose, attribute);
  check(H5Awrite(written, memory, rows.data()), attribute);
}

void write_kinds(hid_t dataset) {
  std::vector<Described> rows;
  std::string useful_names, beside_names;
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    rows.push_back({name(kind), "", meaning(kind)});
    if (useful(kind)) useful_names += (useful_names.empty() ? "" : " ") + std::string(name(kind));
    if (beside(kind)) beside_names += (beside_names.empty() ? "" : " ") + std::string(name(kind));
  }
  write_list(dataset, "kinds", rows, false);
  hdf5::write_attribute(dataset, "useful", useful_names);
  hdf5::write_attribute(dataset, "beside", beside_names);
}

}  // namespace

const TraceTable& trace_table(int table) { return kTableList[table]; }
std::span<const NameMeaning> step_scalars() { return kStepScalars; }

NameMeaning step_scalar(const std::string& name) {
  for (const NameMeaning& known : kStepScalars)
    if (matches(name, known.name)) return known;
  return {"", "", ""};
}

Handle row_type(int table, const std::vector<std::string>& scalars) {
  const TraceTable& t = trace_table(table);
  if (t.row_bytes == 1) return Handle(H5Tcopy(H5T_NATIVE_UINT8), H5Tclose, "byte type");
  Handle type = compound(t.row_bytes > 0 ? t.row_bytes : 8 * (1 + scalars.size()));
  for (const TraceColumn& c : t.columns) insert(type, c.name, c.offset, column_type(c.type));
  if (t.row_bytes == 0)
    for (std::size_t i = 0; i < scalars.size(); ++i)
      insert(type, scalars[i].c_str(), 8 * (1 + i), H5T_NATIVE_DOUBLE);
  return type;
}

Handle rows_type() {
  Handle type = compound(kTables * sizeof(std::int64_t));
  for (int t = 0; t < kTables; ++t)
    insert(type, trace_table(t).name, static_cast<std::size_t>(t) * sizeof(std::int64_t),
           H5T_NATIVE_INT64);
  return type;
}

void describe_table(hid_t dataset, int table, const std::vector<std::string>& scalars) {
  const TraceTable& t = trace_table(table);
  hdf5::write_attribute(dataset, "description", std::string(t.meaning));
  if (t.row_bytes == 1) {
    hdf5::write_attribute(dataset, "units", std::string(t.columns.front().units));
    return;
  }
  std::vector<Described> rows;
  for (const TraceColumn& c : t.columns) rows.push_back({c.name, c.units, c.meaning});
  if (t.row_bytes == 0)
    for (const std::string& scalar : scalars) {
      const NameMeaning known = step_scalar(scalar);
      rows.push_back({scalar.c_str(), known.units, known.meaning});
    }
  write_list(dataset, "columns", rows, true);
  if (table == kEvents || table == kPredicted) write_kinds(dataset);
}

void describe_file(hid_t file) {
  hdf5::write_attribute(
      file, "description",
      std::string("What one rank of a Ballast run did. /rows says how many rows of each table are "
                  "in use; attribute columns of a table says what its columns mean"));
}

void describe_rows(hid_t dataset) {
  hdf5::write_attribute(dataset, "description",
                        std::string("Rows in use of each table; what lies beyond is spare room"));
  hdf5::write_attribute(dataset, "units", std::string("rows"));
}

void describe_sessions(hid_t group) {
  hdf5::write_attribute(group, "description",
                        std::string("A group a start or restart: who wrote the rows from first_* "
                                    "on, and the effective deck"));
  std::vector<Described> rows;
  for (const NameMeaning& a : kSessionAttributes) rows.push_back({a.name, a.units, a.meaning});
  write_list(group, "columns", rows, true);
}

}  // namespace ballast

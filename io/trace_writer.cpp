#include "io/trace_writer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>

#include "io/hdf5_support.hpp"

namespace ballast {
namespace {

using hdf5::check;
using hdf5::Handle;

constexpr std::int64_t kFormatVersion = 1;
constexpr hsize_t kCopyBytes = 1 << 22;

/// Tables whose used rows /rows counts; the order is that of its fields.
enum Table { kEvents, kSteps, kPlans, kPlanSteps, kPlanText, kTables };
constexpr const char* kTableNames[kTables] = {"events", "steps", "plans", "plan_steps", "plan_text"};
constexpr hsize_t kFirstCapacity[kTables] = {16384, 1024, 256, 1024, 1 << 18};

struct PlanRow {
  char kind[24] = {};
  std::uint64_t hash = 0;
  std::int64_t step = 0;  ///< first step that executed it
  std::int64_t begin = 0, bytes = 0;
};

struct PlanStep {
  std::int64_t step = 0, plan = 0;
};

void insert(hid_t type, const char* field, std::size_t offset, hid_t field_type) {
  check(H5Tinsert(type, field, offset, field_type), std::string("field ") + field);
}

Handle compound(std::size_t bytes) { return Handle(H5Tcreate(H5T_COMPOUND, bytes), H5Tclose, "compound type"); }

Handle kind_type() {
  Handle type(H5Tenum_create(H5T_NATIVE_INT32), H5Tclose, "type of event kinds");
  for (std::int32_t i = 0; i < kEventKinds; ++i) check(H5Tenum_insert(type, name(static_cast<EventKind>(i)), &i), "type of event kinds");
  return type;
}

Handle event_type() {
  Handle type = compound(sizeof(Event));
  insert(type, "step", offsetof(Event, step), H5T_NATIVE_INT32);
  insert(type, "micro_batch", offsetof(Event, micro_batch), H5T_NATIVE_INT32);
  insert(type, "chunk", offsetof(Event, chunk), H5T_NATIVE_INT32);
  insert(type, "layer", offsetof(Event, layer), H5T_NATIVE_INT32);
  insert(type, "stage", offsetof(Event, stage), H5T_NATIVE_INT32);
  insert(type, "outer", offsetof(Event, outer), H5T_NATIVE_INT32);
  insert(type, "inner", offsetof(Event, inner), H5T_NATIVE_INT32);
  insert(type, "kind", offsetof(Event, kind), kind_type());
  insert(type, "begin_s", offsetof(Event, begin_s), H5T_NATIVE_DOUBLE);
  insert(type, "end_s", offsetof(Event, end_s), H5T_NATIVE_DOUBLE);
  insert(type, "flops", offsetof(Event, flops), H5T_NATIVE_DOUBLE);
  insert(type, "bytes", offsetof(Event, bytes), H5T_NATIVE_INT64);
  return type;
}

Handle plan_type() {
  Handle type = compound(sizeof(PlanRow));
  Handle text(H5Tcopy(H5T_C_S1), H5Tclose, "text type");
  check(H5Tset_size(text, sizeof(PlanRow::kind)), "text type");
  insert(type, "kind", offsetof(PlanRow, kind), text);
  insert(type, "hash", offsetof(PlanRow, hash), H5T_NATIVE_UINT64);
  insert(type, "step", offsetof(PlanRow, step), H5T_NATIVE_INT64);
  insert(type, "begin", offsetof(PlanRow, begin), H5T_NATIVE_INT64);
  insert(type, "bytes", offsetof(PlanRow, bytes), H5T_NATIVE_INT64);
  return type;
}

Handle plan_step_type() {
  Handle type = compound(sizeof(PlanStep));
  insert(type, "step", offsetof(PlanStep, step), H5T_NATIVE_INT64);
  insert(type, "plan", offsetof(PlanStep, plan), H5T_NATIVE_INT64);
  return type;
}

Handle rows_type() {
  Handle type = compound(kTables * sizeof(std::int64_t));
  for (int t = 0; t < kTables; ++t) insert(type, kTableNames[t], t * sizeof(std::int64_t), H5T_NATIVE_INT64);
  return type;
}

Handle copy_of(hid_t type) { return Handle(H5Tcopy(type), H5Tclose, "type"); }

/// One contiguous dataset of the file.  `table` says which row count it belongs to.
struct Column {
  std::string path;
  Table table;
  Handle type;
  Handle dataset;
};

void transfer(const Column& column, hsize_t begin, hsize_t count, void* data, bool write) {
  if (count == 0) return;
  const Handle file(H5Dget_space(column.dataset), H5Sclose, "dataspace of " + column.path);
  check(H5Sselect_hyperslab(file, H5S_SELECT_SET, &begin, nullptr, &count, nullptr), "rows of " + column.path);
  const Handle memory = hdf5::simple_space({count});
  if (write)
    check(H5Dwrite(column.dataset, column.type, memory, file, H5P_DEFAULT, data), "writing " + column.path);
  else
    check(H5Dread(column.dataset, column.type, memory, file, H5P_DEFAULT, data), "reading " + column.path);
}

void put(const Column& column, hsize_t begin, hsize_t count, const void* data) {
  transfer(column, begin, count, const_cast<void*>(data), true);
}
void get(const Column& column, hsize_t begin, hsize_t count, void* data) { transfer(column, begin, count, data, false); }

}  // namespace

struct TraceWriter::Impl {
  std::string path;
  Handle file, rows_dataset;
  std::int64_t rows[kTables] = {};
  hsize_t capacity[kTables] = {};
  std::vector<Column> columns;                     ///< events, plans, plan_steps, plan_text, steps/step, then scalars
  std::map<std::int64_t, std::int64_t> step_rows;  ///< this session's row of a step
  std::map<std::pair<std::string, std::uint64_t>, std::int64_t> plans;
  std::int64_t sessions = 0;

  Column& column(const std::string& name) {
    return *std::find_if(columns.begin(), columns.end(), [&](const Column& c) { return c.path == name; });
  }
  bool has(const std::string& name) const {
    return std::any_of(columns.begin(), columns.end(), [&](const Column& c) { return c.path == name; });
  }

  static std::vector<Column> fixed_columns() {
    std::vector<Column> list;
    list.push_back({"events", kEvents, event_type(), {}});
    list.push_back({"plans", kPlans, plan_type(), {}});
    list.push_back({"plan_steps", kPlanSteps, plan_step_type(), {}});
    list.push_back({"plan_text", kPlanText, copy_of(H5T_NATIVE_UINT8), {}});
    list.push_back({"steps/step", kSteps, copy_of(H5T_NATIVE_INT64), {}});
    return list;
  }

  static Column scalar_column(const std::string& name) { return {"steps/" + name, kSteps, copy_of(H5T_NATIVE_DOUBLE), {}}; }

  /// Access without locks and without a sieve buffer: a write goes to the file at once and readers are welcome.
  static Handle access() {
    Handle list = hdf5::property_list(H5P_FILE_ACCESS);
    check(H5Pset_sieve_buf_size(list, 0), "file access");
#if H5_VERSION_GE(1, 10, 7)
    check(H5Pset_file_locking(list, 0, 1), "file access");
#endif
    return list;
  }

  void create_column(hid_t parent, Column& column) const {
    const Handle list = hdf5::property_list(H5P_DATASET_CREATE);
    check(H5Pset_layout(list, H5D_CONTIGUOUS), "layout of " + column.path);
    check(H5Pset_alloc_time(list, H5D_ALLOC_TIME_EARLY), "layout of " + column.path);
    check(H5Pset_fill_time(list, H5D_FILL_TIME_NEVER), "layout of " + column.path);  // spare rows stay holes in the file
    check(H5Pset_obj_track_times(list, false), "layout of " + column.path);
    column.dataset = hdf5::create_dataset(parent, column.path, column.type, {capacity[column.table]}, list);
  }

  void read_existing() {
    file = hdf5::open_file(path, false, access());
    require(hdf5::read_text_attribute(file, "format") == "ballast-trace", "it is not a Ballast trace");
    const std::int64_t found = hdf5::read_int_attribute(file, "format_version");
    require(found == kFormatVersion, "it has format version {}, this program writes version {}", found, kFormatVersion);
    check(H5Dread(hdf5::open_dataset(file, "rows"), rows_type(), H5S_ALL, H5S_ALL, H5P_DEFAULT, rows), "reading rows");
    columns = fixed_columns();
    for (const std::string& name : hdf5::names_in(file, "steps"))
      if (name != "step") columns.push_back(scalar_column(name));
    for (Column& c : columns) {
      c.dataset = hdf5::open_dataset(file, c.path);
      const auto dims = hdf5::dims_of(c.dataset, c.path);
      require(dims.size() == 1 && rows[c.table] >= 0 && static_cast<hsize_t>(rows[c.table]) <= dims[0], "{} has fewer rows than /rows says",
              c.path);
      capacity[c.table] = dims[0];
    }
    sessions = static_cast<std::int64_t>(hdf5::names_in(file, "sessions").size());
    std::vector<PlanRow> known(static_cast<std::size_t>(rows[kPlans]));
    get(column("plans"), 0, known.size(), known.data());
    for (std::size_t i = 0; i < known.size(); ++i) plans[{known[i].kind, known[i].hash}] = static_cast<std::int64_t>(i);
  }

  /// Writes the file anew with the capacities and columns as they are now, and `extra` on top, and puts it in place.
  template <class Extra>
  void rewrite(std::vector<Column> next, const Extra& extra) {
    const std::string temporary = path + ".tmp";
    const Handle list = access();
    Handle fresh = hdf5::create_file(temporary, H5P_DEFAULT, list);
    hdf5::write_attribute(fresh, "format", std::string("ballast-trace"));
    hdf5::write_attribute(fresh, "format_version", kFormatVersion);
    hdf5::create_group(fresh, "steps");
    if (file.valid())
      check(H5Ocopy(file, "sessions", fresh, "sessions", H5P_DEFAULT, H5P_DEFAULT), "copying sessions");
    else
      hdf5::create_group(fresh, "sessions");
    for (Column& c : next) {
      create_column(fresh, c);
      const hsize_t bytes = H5Tget_size(c.type), used = static_cast<hsize_t>(rows[c.table]);
      std::vector<char> buffer;
      if (has(c.path)) {
        for (hsize_t begin = 0; begin < used;) {
          const hsize_t count = std::min(used - begin, std::max<hsize_t>(1, kCopyBytes / bytes));
          buffer.resize(count * bytes);
          get(column(c.path), begin, count, buffer.data());
          put(c, begin, count, buffer.data());
          begin += count;
        }
      } else if (c.path != "steps/step" && c.table == kSteps && used > 0) {
        const std::vector<double> missing(used, std::numeric_limits<double>::quiet_NaN());
        put(c, 0, used, missing.data());
      }
    }
    const Handle row_list = hdf5::property_list(H5P_DATASET_CREATE);
    check(H5Pset_alloc_time(row_list, H5D_ALLOC_TIME_EARLY), "layout of rows");
    check(H5Pset_obj_track_times(row_list, false), "layout of rows");
    Handle fresh_rows = hdf5::create_dataset(fresh, "rows", rows_type(), {}, row_list);
    extra(fresh);
    check(H5Dwrite(fresh_rows, rows_type(), H5S_ALL, H5S_ALL, H5P_DEFAULT, rows), "writing rows");
    check(H5Fflush(fresh, H5F_SCOPE_GLOBAL), "flushing");
    int* descriptor = nullptr;
    if (H5Fget_vfd_handle(fresh, H5P_DEFAULT, reinterpret_cast<void**>(&descriptor)) >= 0 && descriptor) ::fsync(*descriptor);
    require(std::rename(temporary.c_str(), path.c_str()) == 0, "renaming {}: {}", temporary, std::strerror(errno));
    columns = std::move(next);
    rows_dataset = std::move(fresh_rows);
    file = std::move(fresh);
  }

  /// The columns as they are, without their datasets.
  std::vector<Column> same_columns() const {
    std::vector<Column> list = fixed_columns();
    for (const Column& c : columns)
      if (c.table == kSteps && c.path != "steps/step") list.push_back(scalar_column(c.path.substr(6)));
    return list;
  }

  void reserve(Table table, hsize_t more) {
    const hsize_t needed = static_cast<hsize_t>(rows[table]) + more;
    if (needed <= capacity[table]) return;
    while (capacity[table] < needed) capacity[table] *= 2;
    rewrite(same_columns(), [](hid_t) {});
  }

  /// Appends rows to a table of one column.
  void append(const char* name, Table table, hsize_t count, const void* data) {
    reserve(table, count);
    put(column(name), static_cast<hsize_t>(rows[table]), count, data);
    rows[table] += static_cast<std::int64_t>(count);
  }

  void begin_session(const TraceHeader& header) {
    for (int t = 0; t < kTables; ++t) capacity[t] = std::max({capacity[t], kFirstCapacity[t], static_cast<hsize_t>(rows[t])});
    rewrite(columns.empty() ? fixed_columns() : same_columns(), [&](hid_t fresh) {
      const Handle group = hdf5::create_group(fresh, fmt::format("sessions/{:03}", sessions));
      const auto text = [&](const char* key, const std::string& value) { hdf5::write_attribute(group, key, value); };
      const auto number = [&](const std::string& key, std::int64_t value) { hdf5::write_attribute(group, key, value); };
      number("rank", header.rank);
      number("ranks", header.ranks);
      number("segment", header.segment);
      for (const auto& [key, value] : header.mesh_degrees) number("mesh." + key, value);
      for (const auto& [key, value] : header.coordinates) number("at." + key, value);
      number("first_events", rows[kEvents]);
      number("first_steps", rows[kSteps]);
      number("first_plan_steps", rows[kPlanSteps]);
      text("host", header.host);
      text("device", header.device);
      text("mesh", header.mesh);
      text("git_hash", header.git_hash);
      hdf5::write_attribute(group, "started_unix_s",
                            std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
      hdf5::write_text(group, "deck", header.deck);
    });
    ++sessions;
  }

  void flush() { check(H5Dwrite(rows_dataset, rows_type(), H5S_ALL, H5S_ALL, H5P_DEFAULT, rows), "writing rows"); }

  /// Runs `work`; its errors get the file's name and the likely remedy.
  template <class Work>
  void guarded(const Work& work) {
    try {
      work();
    } catch (const Error& e) {
      fail("trace {}: {}; look at the space and rights on its disk, or switch the trace off with trace.enabled=false", path, e.what());
    }
  }
};

TraceWriter::TraceWriter(const std::string& dir, const TraceHeader& header) : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  hdf5::silence();
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  m.path = fmt::format("{}/trace_{:05}.h5", dir, header.rank);
  m.guarded([&] {
    if (std::filesystem::exists(m.path)) {
      try {
        m.read_existing();
      } catch (const Error&) {
        const std::string path = m.path;
        m = Impl();
        m.path = path;
        require(std::rename(path.c_str(), (path + ".damaged").c_str()) == 0, "a damaged file is in the way and cannot be renamed: {}",
                std::strerror(errno));
      }
    }
    m.begin_session(header);
  });
}

TraceWriter::~TraceWriter() {
  try {
    Impl& m = *impl_;
    if (!m.file.valid()) return;
    m.flush();
    for (int t = 0; t < kTables; ++t) m.capacity[t] = static_cast<hsize_t>(m.rows[t]);
    m.rewrite(m.same_columns(), [](hid_t) {});
  } catch (const std::exception&) {  // the file in place is whole up to the last flush
    std::remove((impl_->path + ".tmp").c_str());
  }
}

void TraceWriter::events(std::span<const Event> events) {
  impl_->guarded([&] { impl_->append("events", kEvents, events.size(), events.data()); });
}

void TraceWriter::step(std::int64_t step, const StepRow& row) {
  Impl& m = *impl_;
  m.guarded([&] {
    std::vector<Column> next;
    for (const auto& [name, value] : row) {
      const bool sound = !name.empty() && name != "step" && std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return std::isalnum(c) || c == '_' || c == '.' || c == '-';
      });
      require(sound, "'{}' cannot name a step scalar", name);
      if (m.has("steps/" + name)) continue;
      if (next.empty()) next = m.same_columns();
      next.push_back(Impl::scalar_column(name));
    }
    if (!next.empty()) m.rewrite(std::move(next), [](hid_t) {});
    auto found = m.step_rows.find(step);
    if (found == m.step_rows.end()) {
      m.reserve(kSteps, 1);
      const std::int64_t at = m.rows[kSteps]++;
      const double missing = std::numeric_limits<double>::quiet_NaN();
      for (const Column& c : m.columns)
        if (c.table == kSteps) put(c, static_cast<hsize_t>(at), 1, c.path == "steps/step" ? static_cast<const void*>(&step) : &missing);
      found = m.step_rows.emplace(step, at).first;
    }
    for (const auto& [name, value] : row) put(m.column("steps/" + name), static_cast<hsize_t>(found->second), 1, &value);
  });
}

void TraceWriter::plan(const std::string& kind, std::uint64_t hash, const std::string& text, std::int64_t step) {
  Impl& m = *impl_;
  m.guarded([&] {
    require(!kind.empty() && kind.size() < sizeof(PlanRow::kind), "plan kind '{}' must have 1 to {} characters", kind,
            sizeof(PlanRow::kind) - 1);
    auto found = m.plans.find({kind, hash});
    if (found == m.plans.end()) {
      PlanRow row;
      kind.copy(row.kind, sizeof(row.kind) - 1);
      row.hash = hash;
      row.step = step;
      row.begin = m.rows[kPlanText];
      row.bytes = static_cast<std::int64_t>(text.size());
      m.append("plan_text", kPlanText, text.size(), text.data());
      m.append("plans", kPlans, 1, &row);
      found = m.plans.emplace(std::pair{kind, hash}, m.rows[kPlans] - 1).first;
    }
    const PlanStep executed{step, found->second};
    m.append("plan_steps", kPlanSteps, 1, &executed);
  });
}

void TraceWriter::flush() {
  impl_->guarded([&] { impl_->flush(); });
}

const std::string& TraceWriter::path() const { return impl_->path; }

}  // namespace ballast

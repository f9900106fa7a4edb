#include "io/trace/trace_writer.hpp"

#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>

#include "io/files/raw_file.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "io/trace/trace_columns.hpp"
#include "parallel/comm/library_watch.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

using hdf5::check;
using hdf5::Handle;

constexpr std::int64_t kFormatVersion = 5;
constexpr hsize_t kCopyBytes = 1 << 22;
// HDF5 keeps a table's columns in a header of 64 KiB.
constexpr std::size_t kMostWithCells = 400;

constexpr hsize_t kFirstCapacity[kTables] = {16384, 1024, 256, 1024, 1 << 18, 1024, 1024};

const char* name_of(int table) { return trace_table(table).name; }

/// As files count: from 1; -1 stays.
template <class Step>
Step counted(Step step) {
  return step < 0 ? step : step + 1;
}

/// Rows whose steps are counted as files do.
template <class Row>
std::vector<Row> counted_rows(std::span<const Row> rows) {
  std::vector<Row> counted_from_1(rows.begin(), rows.end());
  for (Row& row : counted_from_1) row.step = counted(row.step);
  return counted_from_1;
}

std::vector<unsigned char> compressed(const std::string& text) {
  uLongf bytes = compressBound(static_cast<uLong>(text.size()));
  std::vector<unsigned char> out(bytes);
  require(compress2(out.data(), &bytes, reinterpret_cast<const Bytef*>(text.data()),
                    static_cast<uLong>(text.size()), Z_DEFAULT_COMPRESSION) == Z_OK,
          "compressing the text of a plan");
  out.resize(bytes);
  return out;
}

/// Whether a scalar is one of many cells, which steps.jsonl has too: of a length and a depth.
bool is_cell(const std::string& scalar) {
  return scalar.starts_with("needle_accuracy.") && scalar.find(".depth.") != std::string::npos;
}

/// Another file stands where the trace's was.
class Replaced : public Error {
 public:
  using Error::Error;
};

/// One contiguous dataset of the file, with its type in memory and in the file.
struct Table {
  Handle type, dataset;
  std::int64_t rows = 0;
  hsize_t capacity = 0;
};

/// What ends a rank whose old trace HDF5 reads without an end.
std::string endless_reading(const std::string& path) {
  return fmt::format(
      "ballast: rank {} on {}: HDF5 has read the trace {} for {:.1f} s (run.hang_timeout_s), which "
      "may be damaged: move it away, and the run goes on without its earlier steps\n",
      launched_rank(), host_name(), path, wait_limit());
}

void transfer(hid_t dataset, hid_t type, hsize_t begin, hsize_t count, void* data, bool write,
              const char* name) {
  if (count == 0) return;
  const Handle file(H5Dget_space(dataset), H5Sclose, std::string("dataspace of ") + name);
  check(H5Sselect_hyperslab(file, H5S_SELECT_SET, &begin, nullptr, &count, nullptr),
        std::string("rows of ") + name);
  const Handle memory = hdf5::simple_space({count});
  if (write)
    check(H5Dwrite(dataset, type, memory, file, H5P_DEFAULT, data), std::string("writing ") + name);
  else
    check(H5Dread(dataset, type, memory, file, H5P_DEFAULT, data), std::string("reading ") + name);
}

}  // namespace

struct TraceWriter::Impl {
  std::string path;
  Handle file, rows_dataset, rows_memory = rows_type();
  Table tables[kTables];
  std::vector<std::string> scalars;                ///< fields of /steps after `step`
  std::map<std::int64_t, std::int64_t> step_rows;  ///< this session's row of a step
  std::map<std::pair<std::string, std::uint64_t>, std::int64_t> plans;
  std::int64_t sessions = 0;
  std::string set_aside;  ///< new name of a damaged file that was in the way; "": none
  bool lost = false;      ///< a call failed

  Handle type_of(int table) const { return row_type(table, scalars); }

  void put(TableName table, std::int64_t row, std::size_t count, const void* data) {
    transfer(tables[table].dataset, tables[table].type, static_cast<hsize_t>(row), count,
             const_cast<void*>(data), true, name_of(table));
  }

  /// Access without locks: readers are welcome.
  static Handle access() {
    Handle list = hdf5::property_list(H5P_FILE_ACCESS);
#if H5_VERSION_GE(1, 10, 7)
    check(H5Pset_file_locking(list, 0, 1), "file access");
#endif
    return list;
  }

  /// Space is reserved at once and never filled, so that spare rows stay holes in the file.
  static Handle layout() {
    Handle list = hdf5::property_list(H5P_DATASET_CREATE);
    check(H5Pset_layout(list, H5D_CONTIGUOUS), "dataset layout");
    check(H5Pset_alloc_time(list, H5D_ALLOC_TIME_EARLY), "dataset layout");
    check(H5Pset_fill_time(list, H5D_FILL_TIME_NEVER), "dataset layout");
    check(H5Pset_obj_track_times(list, false), "dataset layout");
    return list;
  }

  void read_existing() {
    file = hdf5::open_file(path, false, access());
    require(hdf5::read_text_attribute(file, "format") == "ballast-trace",
            "it is not a Ballast trace");
    const std::int64_t found = hdf5::read_int_attribute(file, "format_version");
    require(found == kFormatVersion, "it has format version {}, this program writes version {}",
            found, kFormatVersion);
    std::int64_t rows[kTables] = {};
    check(
        H5Dread(hdf5::open_dataset(file, "rows"), rows_memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, rows),
        "reading rows");
    for (int t = 0; t < kTables; ++t) {
      tables[t].dataset = hdf5::open_dataset(file, name_of(t));
      tables[t].rows = rows[t];
      const auto dims = hdf5::dims_of(tables[t].dataset, name_of(t));
      require(dims.size() == 1 && rows[t] >= 0 && static_cast<hsize_t>(rows[t]) <= dims[0],
              "{} has fewer rows than /rows says", name_of(t));
    }
    const Handle fields(H5Dget_type(tables[kSteps].dataset), H5Tclose, "type of steps");
    for (int i = 1; i < check(H5Tget_nmembers(fields), "type of steps"); ++i) {
      char* field = H5Tget_member_name(fields, static_cast<unsigned>(i));
      scalars.emplace_back(field ? field : "");
      H5free_memory(field);
    }
    for (int t = 0; t < kTables; ++t) tables[t].type = type_of(t);
    sessions = static_cast<std::int64_t>(hdf5::names_in(file, "sessions").size());
    std::vector<PlanRow> known(static_cast<std::size_t>(rows[kPlans]));
    transfer(tables[kPlans].dataset, tables[kPlans].type, 0, known.size(), known.data(), false,
             "plans");
    for (std::size_t i = 0; i < known.size(); ++i)
      plans[{known[i].kind, known[i].hash}] = static_cast<std::int64_t>(i);
  }

  /// Copies the used rows; a scalar that the old file lacks becomes NaN, an event kind is matched
  /// by its name.
  void copy_rows(int table, const Table& to) const {
    const Table& from = tables[table];
    const hsize_t bytes = H5Tget_size(to.type), used = static_cast<hsize_t>(from.rows),
                  most = std::max<hsize_t>(1, kCopyBytes / bytes);
    std::vector<double> buffer;
    for (hsize_t begin = 0; from.dataset.valid() && begin < used; begin += most) {
      const hsize_t count = std::min(used - begin, most);
      buffer.assign((count * bytes + 7) / 8, std::numeric_limits<double>::quiet_NaN());
      transfer(from.dataset, to.type, begin, count, buffer.data(), false, name_of(table));
      transfer(to.dataset, to.type, begin, count, buffer.data(), true, name_of(table));
    }
  }

  /// Session by session: the group's own attributes, of variable length, would be read from the
  /// old file's heap, where damage lets HDF5 loop for ever or crash.
  void copy_sessions(hid_t fresh) const {
    const Handle group = hdf5::create_group(fresh, "sessions");
    describe_sessions(group);
    if (!file.valid()) return;
    const Handle from = hdf5::open_group(file, "sessions");
    for (const std::string& name : hdf5::names_in(file, "sessions"))
      check(H5Ocopy(from, name.c_str(), group, name.c_str(), H5P_DEFAULT, H5P_DEFAULT),
            "copying session " + name);
  }

  /// HDF5 1.10 brings the process down where a copy of groups meets a full disk, so the disk is
  /// asked for room first: what the file has, and its new tables' headers.
  void require_room() const {
    constexpr std::uint64_t kHeaders = std::uint64_t{64} << 10;
    struct stat found {};
    const bool there = ::stat(path.c_str(), &found) == 0;
    const std::uint64_t held = there ? static_cast<std::uint64_t>(found.st_blocks) * 512 : 0;
    const std::string room = path + ".tmp";
    try {
      const std::string why = "it is written anew where it grows";
      reserve_space(room, held + kHeaders, true, {why, why});
    } catch (const Error&) {
      std::remove(room.c_str());
      throw;
    }
  }

  /// Whether the file is at its path, not where it cannot be told.  Errors: another one is.
  bool in_place() const {
    int* descriptor = nullptr;
    require(H5Fget_vfd_handle(file, H5P_DEFAULT, reinterpret_cast<void**>(&descriptor)) >= 0 &&
                descriptor,
            "its file has no descriptor");
    const auto held = place_of(*descriptor), there = place_of(path);
    if (held && there && *held != *there)
      throw Replaced(fmt::format(
          "trace {}: another file stands in its place, to which nothing is added: the run folder "
          "was replaced while this run was at work",
          path));
    return held && there;
  }

  /// A file that another may have taken the place of is not written anew.
  void require_in_place() const {
    require(!file.valid() || in_place(), "its file is no longer there");
  }

  /// Writes the file anew with the capacities and scalars as they are now, and `extra` on top, and
  /// puts it in place.
  template <class Extra>
  void rewrite(const Extra& extra) {
    const std::string temporary = path + ".tmp";
    require_in_place();
    require_room();
    Handle fresh = hdf5::create_file(temporary, H5P_DEFAULT, access());
    hdf5::write_attribute(fresh, "format", std::string("ballast-trace"));
    hdf5::write_attribute(fresh, "format_version", kFormatVersion);
    describe_file(fresh);
    copy_sessions(fresh);
    Table next[kTables];
    for (int t = 0; t < kTables; ++t) {
      next[t] = {type_of(t), {}, tables[t].rows, tables[t].capacity};
      next[t].dataset =
          hdf5::create_dataset(fresh, name_of(t), next[t].type, {next[t].capacity}, layout());
      describe_table(next[t].dataset, t, scalars);
      copy_rows(t, next[t]);
    }
    Handle fresh_rows = hdf5::create_dataset(fresh, "rows", rows_memory, {}, layout());
    describe_rows(fresh_rows);
    extra(fresh);
    write_rows(fresh_rows);
    check(H5Fflush(fresh, H5F_SCOPE_GLOBAL), "flushing");
    int* descriptor = nullptr;
    if (H5Fget_vfd_handle(fresh, H5P_DEFAULT, reinterpret_cast<void**>(&descriptor)) >= 0 &&
        descriptor)
      ::fsync(*descriptor);
    require_in_place();
    require(std::rename(temporary.c_str(), path.c_str()) == 0, "renaming {}: {}", temporary,
            std::strerror(errno));
    for (int t = 0; t < kTables; ++t) tables[t] = std::move(next[t]);
    rows_dataset = std::move(fresh_rows);
    file = std::move(fresh);
  }

  /// What an end of rewrite left beside the file, where that is this run's.
  void remove_temporary() const {
    try {
      if (in_place()) std::remove((path + ".tmp").c_str());
    } catch (const Error&) {
    }
  }

  void reserve(TableName table, std::size_t more) {
    Table& t = tables[table];
    const hsize_t needed = static_cast<hsize_t>(t.rows) + more;
    if (needed <= t.capacity) return;
    while (t.capacity < needed) t.capacity *= 2;
    rewrite([](hid_t) {});
  }

  void append(TableName table, std::size_t count, const void* data) {
    reserve(table, count);
    put(table, tables[table].rows, count, data);
    tables[table].rows += static_cast<std::int64_t>(count);
  }

  void begin_session(const TraceHeader& header) {
    for (int t = 0; t < kTables; ++t) {
      tables[t].capacity = kFirstCapacity[t];
      while (tables[t].capacity < 2 * static_cast<hsize_t>(tables[t].rows)) tables[t].capacity *= 2;
    }
    rewrite([&](hid_t fresh) {
      const Handle group = hdf5::create_group(fresh, fmt::format("sessions/{:03}", sessions));
      const auto text = [&](const char* key, const std::string& value) {
        hdf5::write_attribute(group, key, value);
      };
      const auto number = [&](const std::string& key, std::int64_t value) {
        hdf5::write_attribute(group, key, value);
      };
      number("rank", header.rank);
      number("ranks", header.ranks);
      number("segment", header.segment);
      for (const auto& [key, value] : header.mesh_degrees) number("mesh." + key, value);
      for (const auto& [key, value] : header.coordinates) number("at." + key, value);
      number("first_events", tables[kEvents].rows);
      number("first_steps", tables[kSteps].rows);
      number("first_plan_steps", tables[kPlanSteps].rows);
      number("first_budgets", tables[kBudgets].rows);
      number("first_predicted", tables[kPredicted].rows);
      text("host", header.host);
      text("device", header.device);
      text("mesh", header.mesh);
      text("git_hash", header.git_hash);
      hdf5::write_attribute(
          group, "started_unix_s",
          std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
              .count());
      hdf5::write_text(group, "deck", header.deck);
    });
    ++sessions;
  }

  void write_rows(hid_t dataset) const {
    std::int64_t rows[kTables];
    for (int t = 0; t < kTables; ++t) rows[t] = tables[t].rows;
    check(H5Dwrite(dataset, rows_memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, rows), "writing rows");
  }

  /// Runs `work`; its errors get the file's name and the likely remedy.
  template <class Work>
  void guarded(const Work& work) {
    try {
      work();
    } catch (const Replaced&) {
      lost = true;
      throw;
    } catch (const Error& e) {
      lost = true;
      fail(
          "trace {}: {}; look at the space and rights on its disk, or switch the trace off with "
          "trace.enabled=false",
          path, e.what());
    }
  }
};

TraceWriter::TraceWriter(const std::string& dir, const TraceHeader& header)
    : impl_(std::make_unique<Impl>()) {
  Impl& m = *impl_;
  hdf5::silence();
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  m.path = fmt::format("{}/trace_{:05}.h5", dir, header.rank);
  m.guarded([&] {
    std::optional<LibraryWatch> watch;
    if (std::filesystem::exists(m.path)) {
      watch.emplace(wait_limit(), endless_reading(m.path), 1);
      const RawFile reached(m.path, true);  // one that cannot be opened may be sound
      try {
        m.read_existing();
      } catch (const Error&) {
        const std::string path = m.path;
        m = Impl();
        m.path = path;
        m.set_aside = ballast::set_aside(path);
      }
    }
    m.begin_session(header);
  });
}

TraceWriter::~TraceWriter() {
  try {
    Impl& m = *impl_;
    if (!m.file.valid() || m.lost) return;  // of a file that failed the last flush counts
    m.write_rows(m.rows_dataset);
    for (Table& t : m.tables) t.capacity = static_cast<hsize_t>(t.rows);
    m.rewrite([](hid_t) {});
  } catch (const std::exception&) {  // the file in place is whole up to the last flush
    impl_->remove_temporary();
  }
}

void TraceWriter::events(std::span<const Event> events) {
  const std::vector<Event> rows = counted_rows(events);
  impl_->guarded([&] { impl_->append(kEvents, rows.size(), rows.data()); });
}

void TraceWriter::budgets(std::span<const BudgetRow> given) {
  if (given.empty()) return;
  const std::vector<BudgetRow> rows = counted_rows(given);
  impl_->guarded([&] { impl_->append(kBudgets, rows.size(), rows.data()); });
}

void TraceWriter::predicted(std::span<const Event> ops) {
  if (ops.empty()) return;
  const std::vector<Event> rows = counted_rows(ops);
  impl_->guarded([&] { impl_->append(kPredicted, rows.size(), rows.data()); });
}

void TraceWriter::step(std::int64_t index, const StepRow& row) {
  Impl& m = *impl_;
  const std::int64_t step = counted(index);
  for (const auto& [name, value] : row) {
    const bool sound = !name.empty() && name != "step" &&
                       std::all_of(name.begin(), name.end(), [](unsigned char c) {
                         return std::isalnum(c) || c == '_' || c == '.' || c == '-';
                       });
    require(sound, "'{}' cannot name a step scalar", name);
  }
  m.guarded([&] {
    std::vector<std::string> unknown;
    for (const auto& [name, value] : row) {
      const bool fits = !is_cell(name) || m.scalars.size() + unknown.size() < kMostWithCells;
      if (fits && std::find(m.scalars.begin(), m.scalars.end(), name) == m.scalars.end())
        unknown.push_back(name);
    }
    if (!unknown.empty()) {
      m.scalars.insert(m.scalars.end(), unknown.begin(), unknown.end());
      m.rewrite([](hid_t) {});
    }
    std::vector<double> values(1 + m.scalars.size(), std::numeric_limits<double>::quiet_NaN());
    std::memcpy(values.data(), &step, sizeof(step));
    const auto found = m.step_rows.find(step);
    Table& table = m.tables[kSteps];
    if (found != m.step_rows.end())
      transfer(table.dataset, table.type, static_cast<hsize_t>(found->second), 1, values.data(),
               false, "steps");
    for (std::size_t i = 0; i < m.scalars.size(); ++i)
      if (const auto given = row.find(m.scalars[i]); given != row.end())
        values[1 + i] = given->second;
    if (found != m.step_rows.end()) {
      m.put(kSteps, found->second, 1, values.data());
    } else {
      m.append(kSteps, 1, values.data());
      m.step_rows[step] = table.rows - 1;
    }
  });
}

void TraceWriter::plan(const std::string& kind, std::uint64_t hash, const std::string& text,
                       std::int64_t index) {
  Impl& m = *impl_;
  const std::int64_t step = counted(index);
  require(!kind.empty() && kind.size() < sizeof(PlanRow::kind),
          "plan kind '{}' must have 1 to {} characters", kind, sizeof(PlanRow::kind) - 1);
  m.guarded([&] {
    auto found = m.plans.find({kind, hash});
    if (found == m.plans.end()) {
      PlanRow row;
      kind.copy(row.kind, sizeof(row.kind) - 1);
      row.hash = hash;
      row.step = step;
      row.begin = m.tables[kPlanText].rows;
      const std::vector<unsigned char> stored = compressed(text);
      row.bytes = static_cast<std::int64_t>(stored.size());
      row.text_bytes = static_cast<std::int64_t>(text.size());
      m.append(kPlanText, stored.size(), stored.data());
      m.append(kPlans, 1, &row);
      found = m.plans.emplace(std::pair{kind, hash}, m.tables[kPlans].rows - 1).first;
    }
    const PlanStep executed{step, found->second};
    m.append(kPlanSteps, 1, &executed);
  });
}

const std::string& TraceWriter::set_aside() const { return impl_->set_aside; }

bool TraceWriter::in_place() const {
  bool found = false;
  impl_->guarded([&] { found = impl_->in_place(); });
  return found;
}

void TraceWriter::flush() {
  impl_->guarded([&] { impl_->write_rows(impl_->rows_dataset); });
}

}  // namespace ballast

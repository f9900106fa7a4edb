// Trace files: what was written reads back, restarts append, and a writer killed at any moment
// leaves a file that opens.
#include <gtest/gtest.h>
#include <mpi.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "io/hdf5/hdf5_support.hpp"
#include "io/trace/trace_writer.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

namespace fs = std::filesystem;

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// A folder of this rank alone, removed at the end.
class TraceFile : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() /
           fmt::format("ballast_trace_{}_{}", ::getpid(),
                       ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(dir_);
    header_.rank = world_rank();
    header_.ranks = 8;
    header_.host = "node0";
    header_.deck = "[run]\nsteps = 3\n";
    header_.git_hash = "abc";
    header_.mesh_degrees = {{"dp", 4}, {"cp_inner", 2}};
    header_.coordinates = {{"dp", 1}, {"cp_inner", 0}};
  }
  void TearDown() override { fs::remove_all(dir_); }
  std::string dir() const { return dir_.string(); }
  std::string path() const { return fmt::format("{}/trace_{:05}.h5", dir(), header_.rank); }

  fs::path dir_;
  TraceHeader header_;
};

std::vector<Event> numbered_events(std::int64_t first, int count) {
  std::vector<Event> events(count);
  for (int i = 0; i < count; ++i) {
    const std::int64_t n = first + i;
    events[i].step = static_cast<std::int32_t>(n);
    events[i].kind = static_cast<EventKind>(n % kEventKinds);
    events[i].begin_s = static_cast<double>(n);
    events[i].end_s = static_cast<double>(n) + 0.5;
    events[i].flops = 2.0 * static_cast<double>(n);
    events[i].bytes = 3 * n;
  }
  return events;
}

struct Rows {
  std::int64_t events = -1, steps = -1, plans = -1, plan_steps = -1, plan_text = -1, budgets = -1;
};

/// What an independent reader of the file sees: names and layout spelled out here, not taken from
/// the writer.
struct Contents {
  Rows rows;
  std::vector<std::int64_t> event_steps, event_bytes;
  std::vector<double> event_begin;
  std::vector<std::string> event_kinds;
  std::map<std::string, std::vector<double>> scalars;
  std::vector<std::int64_t> steps;
  std::int64_t sessions = 0;
};

/// Reads a copy: the bytes on disk, not what the HDF5 library of this process still holds of a file
/// that the writer has open.
Contents read(const std::string& path) {
  Contents c;
  const std::string copy = path + ".copy";
  fs::copy_file(path, copy, fs::copy_options::overwrite_existing);
  const auto file = hdf5::open_file(copy);
  const auto row_type = hdf5::Handle(H5Tcreate(H5T_COMPOUND, sizeof(Rows)), H5Tclose, "rows");
  const std::pair<const char*, std::size_t> fields[] = {
      {"events", offsetof(Rows, events)},       {"steps", offsetof(Rows, steps)},
      {"plans", offsetof(Rows, plans)},         {"plan_steps", offsetof(Rows, plan_steps)},
      {"plan_text", offsetof(Rows, plan_text)}, {"budgets", offsetof(Rows, budgets)}};
  for (const auto& [field, offset] : fields) H5Tinsert(row_type, field, offset, H5T_NATIVE_INT64);
  hdf5::check(
      H5Dread(hdf5::open_dataset(file, "rows"), row_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, &c.rows),
      "rows");
  const auto field = [&](const char* name, hid_t type, auto& out) {
    const auto dataset = hdf5::open_dataset(file, "events");
    const auto single = hdf5::Handle(H5Tcreate(H5T_COMPOUND, 8), H5Tclose, name);
    H5Tinsert(single, name, 0, type);
    out.resize(hdf5::dims_of(dataset, "events")[0]);
    if (!out.empty())
      hdf5::check(H5Dread(dataset, single, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()), name);
    out.resize(c.rows.events);
  };
  field("step", H5T_NATIVE_INT64, c.event_steps);
  field("bytes", H5T_NATIVE_INT64, c.event_bytes);
  field("begin_s", H5T_NATIVE_DOUBLE, c.event_begin);
  {
    const auto dataset = hdf5::open_dataset(file, "events");
    const auto whole = hdf5::Handle(H5Dget_type(dataset), H5Tclose, "events");
    const auto kind = hdf5::Handle(H5Tget_member_type(whole, H5Tget_member_index(whole, "kind")),
                                   H5Tclose, "kind");
    const auto single = hdf5::Handle(H5Tcreate(H5T_COMPOUND, 4), H5Tclose, "kind");
    H5Tinsert(single, "kind", 0, kind);
    std::vector<std::int32_t> values(hdf5::dims_of(dataset, "events")[0]);
    if (!values.empty())
      hdf5::check(H5Dread(dataset, single, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), "kind");
    values.resize(c.rows.events);
    for (std::int32_t& value : values) {
      char text[64] = {};
      hdf5::check(H5Tenum_nameof(kind, &value, text, sizeof(text)), "kind");
      c.event_kinds.push_back(text);
    }
  }
  const auto steps = hdf5::open_dataset(file, "steps");
  const auto step_fields = hdf5::Handle(H5Dget_type(steps), H5Tclose, "steps");
  for (int i = 0; i < H5Tget_nmembers(step_fields); ++i) {
    char* name = H5Tget_member_name(step_fields, i);
    const auto single = hdf5::Handle(H5Tcreate(H5T_COMPOUND, 8), H5Tclose, name);
    std::vector<double> values(hdf5::dims_of(steps, "steps")[0]);
    const bool is_step = std::string(name) == "step";
    H5Tinsert(single, name, 0, is_step ? H5T_NATIVE_INT64 : H5T_NATIVE_DOUBLE);
    c.steps.resize(values.size());
    if (!values.empty())
      hdf5::check(H5Dread(steps, single, H5S_ALL, H5S_ALL, H5P_DEFAULT,
                          is_step ? static_cast<void*>(c.steps.data()) : values.data()),
                  name);
    values.resize(c.rows.steps);
    if (!is_step) c.scalars[name] = values;
    H5free_memory(name);
  }
  c.steps.resize(c.rows.steps);
  c.sessions = static_cast<std::int64_t>(hdf5::names_in(file, "sessions").size());
  return c;
}

void expect_numbered(const Contents& c, std::int64_t at_least) {
  ASSERT_GE(c.rows.events, at_least);
  for (std::int64_t n = 0; n < c.rows.events; ++n) {
    ASSERT_EQ(c.event_steps[n], n + 1);
    ASSERT_EQ(c.event_bytes[n], 3 * n);
    ASSERT_EQ(c.event_begin[n], static_cast<double>(n));
    ASSERT_EQ(c.event_kinds[n], name(static_cast<EventKind>(n % kEventKinds)));
  }
}

TEST_F(TraceFile, EventsReadBackWhileOpenAndAfterClose) {
  {
    TraceWriter writer(dir(), header_);
    EXPECT_EQ(read(path()).rows.events, 0);
    std::int64_t n = 0;
    for (const int count : {1, 0, 20000, 7, 40000}) {  // grows beyond the first capacity
      writer.events(numbered_events(n, count));
      n += count;
      writer.flush();
      expect_numbered(read(path()), n);
    }
  }
  const Contents c = read(path());
  expect_numbered(c, 60008);
  const auto file = hdf5::open_file(path());
  EXPECT_EQ(hdf5::dims_of(hdf5::open_dataset(file, "events"), "events")[0], 60008u)
      << "spare rows are dropped at the end";
  EXPECT_FALSE(fs::exists(path() + ".tmp"));
}

TEST_F(TraceFile, HeaderIsStoredPerSession) {
  { TraceWriter writer(dir(), header_); }
  header_.segment = 17;
  header_.deck = std::string(200000, 'x');  // more than an attribute holds
  { TraceWriter writer(dir(), header_); }
  const auto file = hdf5::open_file(path());
  EXPECT_EQ(hdf5::names_in(file, "sessions"), (std::vector<std::string>{"000", "001"}));
  const auto first = hdf5::open_group(file, "sessions/000"),
             second = hdf5::open_group(file, "sessions/001");
  EXPECT_EQ(hdf5::read_int_attribute(first, "rank"), header_.rank);
  EXPECT_EQ(hdf5::read_int_attribute(first, "ranks"), 8);
  EXPECT_EQ(hdf5::read_int_attribute(first, "mesh.dp"), 4);
  EXPECT_EQ(hdf5::read_int_attribute(first, "at.dp"), 1);
  EXPECT_EQ(hdf5::read_int_attribute(second, "segment"), 17);
  EXPECT_EQ(hdf5::read_text_attribute(first, "host"), "node0");
  EXPECT_EQ(hdf5::read_text_attribute(first, "device"), "");
  EXPECT_EQ(hdf5::read_text(first, "deck"), "[run]\nsteps = 3\n");
  EXPECT_EQ(hdf5::read_text(second, "deck"), header_.deck);
  EXPECT_GT(hdf5::read_real_attribute(second, "started_unix_s"), 1.6e9);
}

TEST_F(TraceFile, StepScalarsShareARowAndMissingOnesAreNaN) {
  {
    TraceWriter writer(dir(), header_);
    writer.step(0, {{"loss", 5.5}});
    writer.flush();
    writer.step(1, {{"loss", 5.0}, {"peak_bytes_total", 1e9}});
    writer.step(1, {{"validation_loss", 4.5}});
    EXPECT_THROW(writer.step(2, {{"step", 1}}), Error);
    EXPECT_THROW(writer.step(2, {{"a/b", 1}}), Error);
    EXPECT_THROW(writer.step(2, {{"", 1}}), Error);
  }
  {
    TraceWriter writer(dir(), header_);  // step 1 once more: a row of its own
    writer.step(1, {{"loss", 4.9}, {"mfu", 0.5}});
    for (int s = 2; s < 3000; ++s) writer.step(s, {{"loss", 1.0 / s}});
  }
  const Contents c = read(path());
  ASSERT_EQ(c.rows.steps, 3001);
  EXPECT_EQ(c.steps[0], 1) << "files count from 1";
  EXPECT_EQ(c.steps[1], 2);
  EXPECT_EQ(c.steps[2], 2);
  EXPECT_EQ(c.steps[3000], 3000);
  EXPECT_EQ(c.scalars.at("loss")[1], 5.0);
  EXPECT_EQ(c.scalars.at("loss")[2], 4.9);
  EXPECT_EQ(c.scalars.at("loss")[3000], 1.0 / 2999);
  EXPECT_EQ(c.scalars.at("validation_loss")[1], 4.5);
  EXPECT_TRUE(std::isnan(c.scalars.at("validation_loss")[0]));
  EXPECT_TRUE(std::isnan(c.scalars.at("peak_bytes_total")[0]));
  EXPECT_TRUE(std::isnan(c.scalars.at("mfu")[1]));
  EXPECT_TRUE(std::isnan(c.scalars.at("mfu")[3000]));
}

TEST_F(TraceFile, PlansAreStoredOnceCompressedAndCountedAtEveryStep) {
  const std::string text = R"({"step": 0})", large(300000, 'a');
  {
    TraceWriter writer(dir(), header_);
    writer.plan("step", 7, text, 0);
    writer.plan("step", 7, text, 1);
    writer.plan("ring", 7, large, 1);
    EXPECT_THROW(writer.plan("a kind of more than twenty-three", 1, "", 1), Error);
  }
  {
    TraceWriter writer(dir(), header_);
    writer.plan("step", 7, text, 2);
    writer.plan("budgets", 9, "", 2);
  }
  const Contents c = read(path());
  EXPECT_EQ(c.rows.plans, 3);
  EXPECT_EQ(c.rows.plan_steps, 5);
  const auto stored = hdf5::read_vector<std::uint8_t>(hdf5::open_file(path()), "plan_text");
  EXPECT_LT(stored.size(), 1000u);
  std::string found(text.size(), ' ');
  uLongf bytes = found.size();
  ASSERT_EQ(uncompress(reinterpret_cast<Bytef*>(found.data()), &bytes, stored.data(),
                       static_cast<uLong>(stored.size())),
            Z_OK);
  EXPECT_EQ(found, text);
}

TEST_F(TraceFile, RestartContinuesAfterTheLastFlushOfAKilledRun) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    TraceWriter writer(dir(), header_);
    writer.events(numbered_events(0, 100));
    writer.flush();
    writer.events(numbered_events(5000, 50));  // never flushed
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(read(path()).rows.events, 100);
  { TraceWriter(dir(), header_).events(numbered_events(100, 20)); }
  const Contents c = read(path());
  EXPECT_EQ(c.rows.events, 120);
  expect_numbered(c, 120);
  EXPECT_EQ(c.sessions, 2);
}

TEST_F(TraceFile, AKillAtAnyMomentLeavesAReadableFile) {
  const unsigned seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int round = 0; round < (size > 2 ? 3 : 12); ++round) {
    fs::remove_all(dir_);
    int flushed[2];
    ASSERT_EQ(::pipe(flushed), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // Small flushes, growing tables and new columns, as fast as possible; the pipe says how far
      // it got.
      TraceWriter writer(dir(), header_);
      std::mt19937 own(round);
      for (std::int64_t n = 0, s = 0;; ++s) {
        const int count = static_cast<int>(own() % 3000);
        writer.events(numbered_events(n, count));
        n += count;
        writer.step(s, {{"loss", 1.0}, {fmt::format("column_{}", s % 40), 2.0}});
        writer.plan("batch", static_cast<std::uint64_t>(s), std::string(500, 'p'), s);
        writer.flush();
        if (::write(flushed[1], &n, sizeof(n)) != sizeof(n)) ::_exit(0);
      }
    }
    ::close(flushed[1]);
    std::int64_t n = 0, last = 0;
    const int flushes = static_cast<int>(random() % 30) + 1;
    for (int i = 0; i < flushes && ::read(flushed[0], &n, sizeof(n)) == sizeof(n); ++i) last = n;
    ::usleep(random() % 5000);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ::close(flushed[0]);
    Contents c;
    ASSERT_NO_THROW(c = read(path())) << "round " << round;
    expect_numbered(c, last);
    EXPECT_EQ(c.rows.steps, c.rows.plan_steps);
    for (const double loss : c.scalars.at("loss")) ASSERT_EQ(loss, 1.0);
  }
}

TEST_F(TraceFile, DamagedFilesAreSetAsideAndNamed) {
  for (const char* damage : {"", "this is no HDF5 file", "truncate"}) {
    fs::remove_all(dir_);
    { TraceWriter(dir(), header_).events(numbered_events(0, 5000)); }
    if (std::string(damage) == "truncate")
      fs::resize_file(path(), fs::file_size(path()) / 2);
    else
      std::ofstream(path()) << damage;
    { TraceWriter(dir(), header_).events(numbered_events(0, 10)); }
    expect_numbered(read(path()), 10);
    EXPECT_TRUE(fs::exists(path() + ".damaged"));
    std::ofstream(path()) << "this neither";
    EXPECT_EQ(TraceWriter(dir(), header_).set_aside(), path() + ".damaged.2");
    EXPECT_TRUE(fs::exists(path() + ".damaged")) << "each has its own name";
  }
  fs::remove_all(dir_);
  fs::create_directories(path());  // what cannot be opened may be sound
  EXPECT_THROW(TraceWriter(dir(), header_), Error);
  EXPECT_TRUE(fs::is_directory(path()));
}

TEST_F(TraceFile, ALostSectorNeitherHangsNorKillsACarriedOnTrace) {
  if (world_rank() > 0) GTEST_SKIP() << "one rank's trials are enough";
  constexpr std::size_t kSector = 512;
  for (int start = 0; start < 2; ++start) {
    TraceWriter writer(dir(), header_);
    writer.events(numbered_events(10 * start, 10));
    writer.step(start, {{"loss", 1.0}});
    writer.plan("batch", 7, "a plan", start);
  }
  std::ifstream file(path(), std::ios::binary);
  const std::string sound(std::istreambuf_iterator<char>(file), {});
  int trials = 0;
  for (std::size_t at = 0; at < sound.size(); at += kSector) {
    const std::size_t bytes = std::min(kSector, sound.size() - at);
    if (sound.find_first_not_of('\0', at) >= at + bytes) continue;
    ++trials;
    std::string damaged = sound;
    damaged.replace(at, bytes, bytes, '\0');
    std::ofstream(path(), std::ios::binary) << damaged;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(20);
      try {
        TraceWriter(dir(), header_).events(numbered_events(20, 3));
      } catch (const Error&) {  // costs the run its trace and a warning
      }
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "sector at " << at << ": signal " << WTERMSIG(status);
  }
  EXPECT_GT(trials, 10);
}

TEST_F(TraceFile, AnotherRunsFileInItsPlaceIsLeftAlone) {
  const auto bytes = [&] {
    std::ifstream file(path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::string theirs;
  {
    TraceWriter writer(dir(), header_);
    EXPECT_TRUE(writer.in_place());
    fs::rename(dir_, dir() + "_kept");
    EXPECT_FALSE(writer.in_place()) << "it may come back";
    { TraceWriter(dir(), header_).events(numbered_events(0, 7)); }
    theirs = bytes();
    try {
      writer.in_place();
      ADD_FAILURE() << "another's file stands there";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("another file stands in its place"), std::string::npos) << text;
      EXPECT_EQ(text.find("space"), std::string::npos) << text;
    }
    EXPECT_THROW(writer.events(numbered_events(0, 1 << 15)), Error) << "it has to grow";
    EXPECT_EQ(bytes(), theirs);
  }
  EXPECT_EQ(bytes(), theirs);
  fs::remove_all(dir_);
  {
    TraceWriter writer(dir(), header_);
    fs::remove_all(dir_);
    { TraceWriter(dir(), header_).events(numbered_events(0, 7)); }
    theirs = bytes();
    std::ofstream(path() + ".tmp") << "theirs too";
  }  // as a run ends
  EXPECT_EQ(bytes(), theirs);
  EXPECT_TRUE(fs::exists(path() + ".tmp"));
  fs::remove_all(dir() + "_kept");
}

TEST_F(TraceFile, AFolderThatWasAwayAndCameBackCostsNothing) {
  {
    TraceWriter writer(dir(), header_);
    fs::rename(dir_, dir() + "_away");
    EXPECT_FALSE(writer.in_place());
    writer.events(numbered_events(0, 7));
    fs::rename(dir() + "_away", dir_);
    EXPECT_TRUE(writer.in_place());
    writer.events(numbered_events(7, 9));
  }
  expect_numbered(read(path()), 16);
}

TEST_F(TraceFile, CellsOfManyDepthsLeaveRoomForTheRest) {
  StepRow row;
  for (int length : {1024, 2048})
    for (int depth = 0; depth < 500; ++depth)
      row[fmt::format("needle_accuracy.length.{}.depth.{}", length, depth)] = depth;
  {
    TraceWriter writer(dir(), header_);
    writer.step(0, {{"loss", 1.0}});
    writer.step(1, row);
    writer.step(2, {{"loss", 2.0}, {"recall", 0.5}});
    writer.step(2, row);
  }
  const Contents c = read(path());
  EXPECT_EQ(c.scalars.size(), 401u);
  EXPECT_EQ(c.scalars.at("loss").back(), 2.0);
  EXPECT_EQ(c.scalars.at("recall").back(), 0.5);
  EXPECT_EQ(c.scalars.at("needle_accuracy.length.1024.depth.0").back(), 0.0);
}

TEST_F(TraceFile, AnUnwritablePlaceIsAnErrorThatNamesTheFile) {
  fs::create_directories(dir_);
  std::ofstream(dir_ / "file") << "in the way";
  try {
    TraceWriter writer((dir_ / "file").string(), header_);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("trace_"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("trace.enabled=false"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ballast

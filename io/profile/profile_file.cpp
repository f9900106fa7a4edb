#include "io/profile/profile_file.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/plan/batch/batch_plan.hpp"
#include "io/files/text_file.hpp"
#include "io/hdf5/hdf5_support.hpp"

namespace ballast {
namespace {

using hdf5::Handle;

/// Lies in the HDF5 user block, so that HDF5 is never handed an altered file: an altered length in
/// it could ask for any memory.
struct Envelope {
  char magic[16] = {'B', 'a', 'l', 'l', 'a', 's', 't', ' ',
                    'p', 'r', 'o', 'f', 'i', 'l', 'e', '\n'};
  std::uint64_t version = kProfileVersion, file_bytes = 0,
                hash = 0;  ///< xxHash64 of all bytes after the user block
};
constexpr std::size_t kUserBlock = 512;

std::string whole_file(const std::string& path) {
  require(std::filesystem::is_regular_file(path), "not a file");
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "it cannot be opened");
  return {std::istreambuf_iterator<char>(file), {}};
}

Envelope envelope_of(const std::string& bytes) {
  Envelope e;
  e.file_bytes = bytes.size();
  e.hash = XXH64(bytes.data() + kUserBlock, bytes.size() - kUserBlock, 0);
  return e;
}

void check_envelope(const std::string& path) {
  const std::string bytes = whole_file(path);
  Envelope stated, fresh;
  require(bytes.size() > kUserBlock, "{} bytes are no profile table", bytes.size());
  std::memcpy(&stated, bytes.data(), sizeof stated);
  require(std::memcmp(stated.magic, fresh.magic, sizeof fresh.magic) == 0, "not a profile table");
  require(stated.version == fresh.version, "format version {}; this program reads version {}",
          stated.version, fresh.version);
  require(stated.file_bytes == bytes.size(), "{} bytes, written with {}: truncated or extended",
          bytes.size(), stated.file_bytes);
  require(stated.hash == envelope_of(bytes).hash, "altered (checksum)");
}

/// One column of a struct's list: name, unit, member.
template <class Row, class T>
struct Column {
  const char* name;
  const char* unit;
  T Row::*member;
};
template <class Row, class T>
void write_column(hid_t group, const std::vector<Row>& rows, const Column<Row, T>& column) {
  std::vector<T> values;
  for (const Row& r : rows) values.push_back(r.*column.member);
  hdf5::write_vector(group, column.name, std::span<const T>(values));
  hdf5::write_attribute(hdf5::open_dataset(group, column.name), "unit", std::string(column.unit));
}
template <class Row, class T>
void read_column(hid_t group, std::vector<Row>& rows, const Column<Row, T>& column) {
  const std::vector<T> values = hdf5::read_vector<T>(group, column.name);
  require(values.size() == rows.size(), "column {} has {} values for {} rows", column.name,
          values.size(), rows.size());
  const std::string unit =
      hdf5::read_text_attribute(hdf5::open_dataset(group, column.name), "unit");
  require(unit == column.unit, "column {} is in \"{}\", this program reads \"{}\"", column.name,
          unit, column.unit);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].*column.member = values[i];
}

constexpr auto each_column = [](auto&& of) {
  using R = ProfileRow;
  of(Column<R, std::int64_t>{"query_tokens", "tokens", &R::query_tokens});
  of(Column<R, std::int64_t>{"prefix_tokens", "tokens", &R::prefix_tokens});
  of(Column<R, std::int64_t>{"budget", "key blocks", &R::budget});
  of(Column<R, int>{"sp", "ranks", &R::sp});
  of(Column<R, double>{"median_s", "s", &R::median_s});
  of(Column<R, double>{"spread_s", "s", &R::spread_s});
  of(Column<R, std::int64_t>{"bytes", "bytes", &R::bytes});
};
constexpr auto each_link_column = [](auto&& of) {
  of(Column<ProfileLink, double>{"latency_s", "s", &ProfileLink::latency_s});
  of(Column<ProfileLink, double>{"bytes_per_s", "bytes/s", &ProfileLink::bytes_per_s});
};

/// Texts as numbers into a list of names, one a line.
class Names {
 public:
  int number(const std::string& text) {
    const auto at = std::find(list.begin(), list.end(), text);
    if (at != list.end()) return static_cast<int>(at - list.begin());
    list.push_back(text);
    return static_cast<int>(list.size()) - 1;
  }
  const std::string& text(int number) const {
    require(number >= 0 && number < static_cast<int>(list.size()), "name {} of {}", number,
            list.size());
    return list[static_cast<std::size_t>(number)];
  }
  std::vector<std::string> list;
};

const std::vector<std::pair<const char*, std::string (*)(const ProfileRow&)>>& text_columns() {
  static const std::vector<std::pair<const char*, std::string (*)(const ProfileRow&)>> columns{
      {"part", [](const ProfileRow& r) { return std::string(name(r.part)); }},
      {"pattern", [](const ProfileRow& r) { return pattern_text(r); }},
      {"recompute", [](const ProfileRow& r) { return std::string(name(r.recompute)); }},
      {"pass", [](const ProfileRow& r) { return std::string(name(r.pass)); }},
  };
  return columns;
}

template <class E>
E value_named(const std::string& text, std::initializer_list<E> all) {
  for (const E e : all)
    if (text == name(e)) return e;
  fail("\"{}\" is unknown", text);
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> list;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos;
       begin = end + 1)
    list.push_back(text.substr(begin, end - begin));
  return list;
}

void write_groups(hid_t file, const std::vector<StoredGroups>& selections) {
  const Handle all = hdf5::create_group(file, "groups");
  hdf5::write_attribute(all, "selections", static_cast<std::int64_t>(selections.size()));
  for (std::size_t i = 0; i < selections.size(); ++i) {
    const Handle one = hdf5::create_group(all, fmt::to_string(i));
    std::string made_for;
    for (const auto& [key, value] : selections[i].made_for) made_for += key + "=" + value + "\n";
    hdf5::write_text(one, "made_for", made_for);
    write_column(one, selections[i].groups,
                 Column<PackGroup, std::int64_t>{"tokens", "tokens", &PackGroup::tokens});
    write_column(one, selections[i].groups,
                 Column<PackGroup, int>{"ranks", "ranks", &PackGroup::ranks});
    write_column(
        one, selections[i].groups,
        Column<PackGroup, int>{"recompute_layers", "layers", &PackGroup::recompute_layers});
  }
}

std::vector<StoredGroups> read_groups(hid_t file) {
  const Handle all = hdf5::open_group(file, "groups");
  const std::int64_t count = hdf5::read_int_attribute(all, "selections");
  require(count >= 0 && count < (1 << 16), "{} selections of packing groups", count);
  std::vector<StoredGroups> selections(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < selections.size(); ++i) {
    const Handle one = hdf5::open_group(all, fmt::to_string(i));
    for (const std::string& line : lines(hdf5::read_text(one, "made_for")))
      selections[i].made_for[line.substr(0, line.find('='))] = line.substr(line.find('=') + 1);
    selections[i].groups.resize(hdf5::read_vector<std::int64_t>(one, "tokens").size());
    read_column(one, selections[i].groups,
                Column<PackGroup, std::int64_t>{"tokens", "tokens", &PackGroup::tokens});
    read_column(one, selections[i].groups,
                Column<PackGroup, int>{"ranks", "ranks", &PackGroup::ranks});
    read_column(one, selections[i].groups,
                Column<PackGroup, int>{"recompute_layers", "layers", &PackGroup::recompute_layers});
  }
  return selections;
}

void write(const std::string& path, const ProfileTable& t) {
  const Handle creation = hdf5::property_list(H5P_FILE_CREATE);
  hdf5::check(H5Pset_userblock(creation, kUserBlock), "user block");
  Handle file = hdf5::create_file(path, creation);
  hdf5::write_attribute(file, "block_tokens", t.block_tokens);
  hdf5::write_attribute(file, "row_count", static_cast<std::int64_t>(t.rows.size()));
  hdf5::write_attribute(file, "link_count", static_cast<std::int64_t>(t.links.size()));
  Names names;
  {
    const Handle identity = hdf5::create_group(file, "identity");
    for (const auto& [key, value] : t.identity) hdf5::write_attribute(identity, key, value);
    const Handle rows = hdf5::create_group(file, "rows"), links = hdf5::create_group(file, "links");
    each_column([&](const auto& column) { write_column(rows, t.rows, column); });
    each_link_column([&](const auto& column) { write_column(links, t.links, column); });
    const auto write_names = [&](hid_t group, const char* column, const auto& list, auto&& text) {
      std::vector<std::int32_t> numbers;
      for (const auto& r : list) numbers.push_back(names.number(text(r)));
      hdf5::write_vector(group, column, std::span<const std::int32_t>(numbers));
    };
    for (const auto& [column, text] : text_columns()) write_names(rows, column, t.rows, text);
    write_names(links, "level", t.links, [](const ProfileLink& l) { return l.level; });
    hdf5::write_text(file, "names", fmt::format("{}", fmt::join(names.list, "\n")) + "\n");
    std::string keys;
    for (const auto& [key, value] : t.identity) keys += key + "\n";
    hdf5::write_text(file, "identity_names", keys);
    if (!t.groups.empty()) write_groups(file, t.groups);
  }
  file.close("writing " + path);
  const Envelope envelope = envelope_of(whole_file(path));
  std::fstream raw(path, std::ios::binary | std::ios::in | std::ios::out);
  raw.write(reinterpret_cast<const char*>(&envelope), sizeof envelope);
  raw.close();
  require(raw.good(), "its last bytes are not written; is the disk full?");
}

ProfileTable read(const std::string& path) {
  check_envelope(path);
  const Handle file = hdf5::open_file(path);
  ProfileTable t;
  t.block_tokens = hdf5::read_int_attribute(file, "block_tokens");
  const std::int64_t row_count = hdf5::read_int_attribute(file, "row_count"),
                     link_count = hdf5::read_int_attribute(file, "link_count");
  require(row_count >= 0 && row_count < (1 << 24) && link_count >= 0 && link_count < (1 << 16),
          "{} rows and {} links", row_count, link_count);
  t.rows.resize(static_cast<std::size_t>(row_count));
  t.links.resize(static_cast<std::size_t>(link_count));
  const Handle identity = hdf5::open_group(file, "identity"), rows = hdf5::open_group(file, "rows"),
               links = hdf5::open_group(file, "links");
  for (const std::string& key : lines(hdf5::read_text(file, "identity_names")))
    t.identity[key] = hdf5::read_text_attribute(identity, key);
  each_column([&](const auto& column) { read_column(rows, t.rows, column); });
  each_link_column([&](const auto& column) { read_column(links, t.links, column); });
  Names names;
  names.list = lines(hdf5::read_text(file, "names"));
  const auto read_names = [&](hid_t group, const char* column, auto& list, auto&& set) {
    const auto numbers = hdf5::read_vector<std::int32_t>(group, column);
    require(numbers.size() == list.size(), "column {} has {} values for {} rows", column,
            numbers.size(), list.size());
    for (std::size_t i = 0; i < list.size(); ++i) set(list[i], names.text(numbers[i]));
  };
  using P = ProfilePart;
  using W = ProfilePass;
  read_names(rows, "part", t.rows, [](ProfileRow& r, const std::string& s) {
    r.part = value_named(s, {P::rest, P::attention, P::head});
  });
  read_names(rows, "pattern", t.rows, [](ProfileRow& r, const std::string& s) {
    if (!s.empty()) r.pattern = parse_or_fail<PatternKind>(s, "attention pattern");
  });
  read_names(rows, "recompute", t.rows, [](ProfileRow& r, const std::string& s) {
    r.recompute = parse_or_fail<Recompute>(s, "recompute mode");
  });
  read_names(rows, "pass", t.rows, [](ProfileRow& r, const std::string& s) {
    r.pass = value_named(s, {W::forward, W::backward});
  });
  read_names(links, "level", t.links, [](ProfileLink& l, const std::string& s) { l.level = s; });
  if (hdf5::exists(file, "groups")) t.groups = read_groups(file);
  return t;
}

/// An empty or damaged table may be replaced as well.
bool begins_as_profile(const std::string& path) {
  const Envelope fresh;
  char magic[sizeof fresh.magic] = {};
  std::ifstream file(path, std::ios::binary);
  file.read(magic, sizeof magic);
  return file.gcount() == 0 || std::memcmp(magic, fresh.magic, sizeof magic) == 0;
}

}  // namespace

void require_writable_profile(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error, ignored;
  require(!std::filesystem::is_regular_file(path, ignored) || begins_as_profile(path),
          "profile table {}: this file is there, is no profile table and would be replaced; choose "
          "another name",
          path);
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, "profile table {} cannot be written: {}: {}", path, folder.string(),
          error.message());
  const std::string why =
      std::filesystem::is_directory(path) ? "it is a folder" : unwritable(path + ".partial");
  require(why.empty(), "profile table {} cannot be written: {}", path, why);
}

void write_profile(const std::string& path, const ProfileTable& table) {
  require_writable_profile(path);
  std::error_code error;
  const std::string partial = path + ".partial";
  try {
    write(partial, table);
    std::filesystem::rename(partial, path);
  } catch (const std::exception& e) {
    std::filesystem::remove(partial, error);
    fail("profile table {} cannot be written: {}", path, e.what());
  }
}

ProfileTable read_profile(const std::string& path) {
  require(
      std::filesystem::exists(path),
      "profile table {} does not exist; `ballast profile DECK` writes it, profile.table names it",
      path);
  try {
    return read(path);
  } catch (const Error& e) {
    fail("profile table {}: {}; measure it again with `ballast profile`", path, e.what());
  }
}

std::vector<std::string> identity_differences(const std::string& path, const ProfileTable& table,
                                              const std::map<std::string, std::string>& here,
                                              bool allowed) {
  std::vector<std::string> list;
  for (const auto& [key, value] : here) {
    const auto there = table.identity.find(key);
    const std::string stated = there == table.identity.end() ? "not stated" : there->second;
    if (stated != value)
      list.push_back(fmt::format("{} of the table: {}; here: {}", key, stated, value));
  }
  require(list.empty() || allowed,
          "profile table {} was measured on something else:\n  {}\nmeasure one here with `ballast "
          "profile`, or set profile.allow_mismatch "
          "= true",
          path, fmt::join(list, "\n  "));
  return list;
}

}  // namespace ballast

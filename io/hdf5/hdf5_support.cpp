#include "io/hdf5/hdf5_support.hpp"

#include <algorithm>
#include <filesystem>
#include <utility>

namespace ballast::hdf5 {

namespace {

/// Keeps the three innermost entries: the ones that say what happened.
herr_t collect(unsigned depth, const H5E_error2_t* entry, void* text_pointer) {
  auto& text = *static_cast<std::string*>(text_pointer);
  if (depth >= 3 || entry->desc == nullptr || entry->desc[0] == 0) return 0;
  if (!text.empty()) text += "; ";
  text += entry->desc;
  return 0;
}

Handle scalar_attribute(hid_t object, const std::string& name, hid_t type) {
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose, "attribute " + name);
  return Handle(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                "creating attribute " + name);
}

void write_scalar(hid_t object, const std::string& name, hid_t type, const void* value) {
  check(H5Awrite(scalar_attribute(object, name, type), type, value), "writing attribute " + name);
}

Handle open_scalar(hid_t object, const std::string& name, H5T_class_t expected) {
  Handle attribute(H5Aopen(object, name.c_str(), H5P_DEFAULT), H5Aclose,
                   "opening attribute " + name);
  const Handle space(H5Aget_space(attribute), H5Sclose, "attribute " + name);
  const Handle type(H5Aget_type(attribute), H5Tclose, "attribute " + name);
  require(H5Sget_simple_extent_npoints(space) == 1 && H5Tget_class(type) == expected,
          "attribute {} has an unexpected type or extent", name);
  return attribute;
}

void read_scalar(hid_t object, const std::string& name, H5T_class_t expected, hid_t type,
                 void* value) {
  check(H5Aread(open_scalar(object, name, expected), type, value), "reading attribute " + name);
}

/// Fixed-length text type of at least one byte, zero padded.
Handle text_type(std::size_t bytes, const std::string& name) {
  Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "text type of " + name);
  check(H5Tset_size(type, std::max<std::size_t>(bytes, 1)), "text type of " + name);
  check(H5Tset_strpad(type, H5T_STR_NULLPAD), "text type of " + name);
  check(H5Tset_cset(type, H5T_CSET_UTF8), "text type of " + name);
  return type;
}

/// Path of the file that an object lies in.
std::string file_of(hid_t object) {
  std::string path(4096, '\0');
  const auto length = H5Fget_name(object, path.data(), path.size());
  path.resize(static_cast<std::size_t>(std::clamp<ssize_t>(length, 0, 4095)));
  return path;
}

}  // namespace

void start() {
  H5dont_atexit();
  check(H5open(), "starting HDF5");
  silence();
}

void silence() { H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr); }

std::string last_error() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, collect, &text);
  H5Eclear2(H5E_DEFAULT);
  return text;
}

hid_t check(hid_t result, const std::string& what) {
  if (result < 0) {
    const std::string reason = last_error();
    fail("{}: {}", what, reason.empty() ? "HDF5 gives no reason" : reason);
  }
  return result;
}

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    release();
    id_ = std::exchange(other.id_, -1);
    close_ = other.close_;
  }
  return *this;
}

void Handle::close(const std::string& what) {
  if (valid()) check(close_(std::exchange(id_, -1)), what);
}

void Handle::release() noexcept {
  if (!valid()) return;
  close_(std::exchange(id_, -1));
  H5Eclear2(H5E_DEFAULT);
}

hid_t native_type(DType type) {
  switch (type) {
    case DType::f32:
      return H5T_NATIVE_FLOAT;
    case DType::f64:
      return H5T_NATIVE_DOUBLE;
    case DType::bf16:
      return H5T_NATIVE_UINT16;  // the bits: HDF5 has no bf16
    case DType::i32:
      return H5T_NATIVE_INT32;
    case DType::i64:
      return H5T_NATIVE_INT64;
    case DType::u8:
      return H5T_NATIVE_UINT8;
  }
  fail("no HDF5 type for dtype {}", static_cast<int>(type));
}

Handle create_file(const std::string& path, hid_t creation, hid_t access) {
  silence();
  const Handle direct(access == H5P_DEFAULT ? H5Pcreate(H5P_FILE_ACCESS) : H5Pcopy(access),
                      H5Pclose, "access to " + path);
  check(H5Pset_sieve_buf_size(direct, 0), "access to " + path);
  return Handle(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, direct), H5Fclose,
                "creating " + path);
}

Handle open_file(const std::string& path, bool writable, hid_t access) {
  silence();
  std::error_code error;  // HDF5 would wait for a writer of a FIFO
  require(!std::filesystem::exists(path, error) || std::filesystem::is_regular_file(path, error),
          "{} is no regular file", path);
  return Handle(H5Fopen(path.c_str(), writable ? H5F_ACC_RDWR : H5F_ACC_RDONLY, access), H5Fclose,
                "opening " + path);
}

Handle property_list(hid_t property_class) {
  return Handle(H5Pcreate(property_class), H5Pclose, "creating an HDF5 property list");
}

Handle simple_space(const std::vector<hsize_t>& dims, const std::vector<hsize_t>& max_dims) {
  if (dims.empty()) return Handle(H5Screate(H5S_SCALAR), H5Sclose, "creating a scalar dataspace");
  require(max_dims.empty() || max_dims.size() == dims.size(),
          "dataspace with {} dims and {} maximum dims", dims.size(), max_dims.size());
  return Handle(H5Screate_simple(static_cast<int>(dims.size()), dims.data(),
                                 max_dims.empty() ? nullptr : max_dims.data()),
                H5Sclose, "creating a dataspace");
}

bool exists(hid_t parent, const std::string& name) {
  // H5Lexists wants every step of a path to exist.
  for (std::size_t slash = name.find('/', 1); slash != std::string::npos;
       slash = name.find('/', slash + 1)) {
    if (check(H5Lexists(parent, name.substr(0, slash).c_str(), H5P_DEFAULT),
              "looking for " + name) == 0)
      return false;
  }
  return check(H5Lexists(parent, name.c_str(), H5P_DEFAULT), "looking for " + name) > 0;
}

Handle create_group(hid_t parent, const std::string& name) {
  const Handle creation = property_list(H5P_GROUP_CREATE);
  check(H5Pset_obj_track_times(creation, false), "times of group " + name);
  return Handle(H5Gcreate2(parent, name.c_str(), H5P_DEFAULT, creation, H5P_DEFAULT), H5Gclose,
                "creating group " + name);
}

Handle open_group(hid_t parent, const std::string& name) {
  return Handle(H5Gopen2(parent, name.c_str(), H5P_DEFAULT), H5Gclose, "opening group " + name);
}

Handle create_dataset(hid_t parent, const std::string& name, hid_t type,
                      const std::vector<hsize_t>& dims, hid_t creation) {
  const Handle plain = property_list(H5P_DATASET_CREATE);
  check(H5Pset_obj_track_times(plain, false), "times of dataset " + name);
  return Handle(H5Dcreate2(parent, name.c_str(), type, simple_space(dims), H5P_DEFAULT,
                           creation == H5P_DEFAULT ? hid_t{plain} : creation, H5P_DEFAULT),
                H5Dclose, "creating dataset " + name);
}

Handle open_dataset(hid_t parent, const std::string& name) {
  return Handle(H5Dopen2(parent, name.c_str(), H5P_DEFAULT), H5Dclose, "opening dataset " + name);
}

std::vector<hsize_t> dims_of(hid_t dataset, const std::string& name) {
  const Handle space(H5Dget_space(dataset), H5Sclose, "dataspace of " + name);
  const auto rank = check(H5Sget_simple_extent_ndims(space), "dimensions of " + name);
  std::vector<hsize_t> dims(static_cast<std::size_t>(rank));
  if (rank > 0)
    check(H5Sget_simple_extent_dims(space, dims.data(), nullptr), "dimensions of " + name);
  return dims;
}

std::uint64_t plain_offset(hid_t dataset, const std::string& name, std::uint64_t file_bytes) {
  const Handle creation(H5Dget_create_plist(dataset), H5Pclose, "storage of " + name);
  const Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
  const std::vector<hsize_t> dims = dims_of(dataset, name);
  require(check(H5Pget_external_count(creation), "storage of " + name) == 0,
          "dataset {} keeps its data in other files, which are not followed", name);
  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
  require(H5Pget_layout(creation) == H5D_CONTIGUOUS,
          "dataset {} is chunked, compressed or compact; only one that lies in one piece is read: "
          "`h5repack -f NONE -l CONTI OLD NEW` rewrites the file",
          name);
  std::uint64_t bytes = H5Tget_size(type);
  for (const hsize_t extent : dims) {
    require(bytes <= file_bytes / extent, "dataset {} claims more bytes than the file has", name);
    bytes *= extent;
  }
  const haddr_t offset = H5Dget_offset(dataset);
  require(offset != HADDR_UNDEF && offset <= file_bytes && bytes <= file_bytes - offset,
          "dataset {} does not lie inside the file", name);
  return offset;
}

std::vector<std::string> names_in(hid_t parent, const std::string& group_name) {
  struct Found {
    std::vector<std::string> names;
    std::string foreign;  ///< a link of another kind
  } found;
  // In HDF5's own order: a read that fails while it sorts a group's names brings HDF5 1.10 down.
  const auto visit = [](hid_t, const char* name, const H5L_info_t* link, void* to) -> herr_t {
    auto& into = *static_cast<Found*>(to);
    (link->type == H5L_TYPE_HARD ? into.names.emplace_back() : into.foreign) = name;
    return 0;
  };
  const Handle group = open_group(parent, group_name);
  hsize_t at = 0;
  check(H5Literate(group, H5_INDEX_NAME, H5_ITER_NATIVE, &at, visit, &found),
        "listing group " + group_name);
  require(found.foreign.empty(), "{}: {} in group {} is a link to another place", file_of(group),
          found.foreign, group_name);
  std::sort(found.names.begin(), found.names.end());
  return std::move(found.names);
}

bool has_attribute(hid_t object, const std::string& name) {
  return H5Aexists(object, name.c_str()) > 0;
}

void write_attribute(hid_t object, const std::string& name, std::int64_t value) {
  write_scalar(object, name, H5T_NATIVE_INT64, &value);
}
void write_attribute(hid_t object, const std::string& name, std::uint64_t value) {
  write_scalar(object, name, H5T_NATIVE_UINT64, &value);
}
void write_attribute(hid_t object, const std::string& name, double value) {
  write_scalar(object, name, H5T_NATIVE_DOUBLE, &value);
}
void write_attribute(hid_t object, const std::string& name, const std::string& value) {
  const std::string padded = value.empty() ? std::string(1, '\0') : value;
  write_scalar(object, name, text_type(padded.size(), name), padded.data());
}

std::int64_t read_int_attribute(hid_t object, const std::string& name) {
  std::int64_t value = 0;
  read_scalar(object, name, H5T_INTEGER, H5T_NATIVE_INT64, &value);
  return value;
}

std::uint64_t read_uint_attribute(hid_t object, const std::string& name) {
  std::uint64_t value = 0;
  read_scalar(object, name, H5T_INTEGER, H5T_NATIVE_UINT64, &value);
  return value;
}

double read_real_attribute(hid_t object, const std::string& name) {
  double value = 0;
  read_scalar(object, name, H5T_FLOAT, H5T_NATIVE_DOUBLE, &value);
  return value;
}

std::string read_text_attribute(hid_t object, const std::string& name) {
  const Handle attribute = open_scalar(object, name, H5T_STRING);
  const Handle type(H5Aget_type(attribute), H5Tclose, "attribute " + name);
  require(check(H5Tis_variable_str(type), "attribute " + name) == 0,
          "attribute {} is a variable-length text where a fixed one was expected", name);
  std::string text(H5Tget_size(type), '\0');
  check(H5Aread(attribute, type, text.data()), "reading attribute " + name);
  text.erase(text.find_last_not_of('\0') + 1);
  return text;
}

void write_text(hid_t parent, const std::string& name, const std::string& text) {
  const std::string padded = text.empty() ? std::string(1, '\0') : text;
  const Handle type = text_type(padded.size(), name);
  check(H5Dwrite(create_dataset(parent, name, type, {}), type, H5S_ALL, H5S_ALL, H5P_DEFAULT,
                 padded.data()),
        "writing text " + name);
}

std::string read_text(hid_t parent, const std::string& name) {
  const Handle dataset = open_dataset(parent, name);
  const Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
  require(H5Tget_class(type) == H5T_STRING &&
              check(H5Tis_variable_str(type), "type of " + name) == 0 &&
              dims_of(dataset, name).empty(),
          "dataset {} is not a fixed-length text", name);
  std::string text(H5Tget_size(type), '\0');
  check(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.data()), "reading text " + name);
  text.erase(text.find_last_not_of('\0') + 1);
  return text;
}

void read_range(hid_t dataset, const std::string& name, hid_t memory_type, std::uint64_t begin,
                std::uint64_t count, void* out) {
  if (count == 0) return;
  const hsize_t start[1] = {begin}, extent[1] = {count};
  const Handle file_space(H5Dget_space(dataset), H5Sclose, "dataspace of " + name);
  check(H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, nullptr, extent, nullptr),
        "selecting a range of " + name);
  const Handle memory_space = simple_space({count});
  check(H5Dread(dataset, memory_type, memory_space, file_space, H5P_DEFAULT, out),
        fmt::format("reading {} [{}, {})", name, begin, begin + count));
}

}  // namespace ballast::hdf5

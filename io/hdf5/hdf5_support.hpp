// HDF5 with every return code checked.  Handles close themselves, a failed call throws Error with
// HDF5's own reason in the text, and HDF5 prints nothing.  Checkpoint, trace and datasets go
// through here; whatever has no helper is called as check(H5..., "what, where").
#pragma once
#include <hdf5.h>

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/tensor.hpp"

namespace ballast::hdf5 {

/// Starts the library so that a failed close cannot end the process: HDF5 then neither clears up at
/// exit nor inside MPI_Finalize, where a file that could not be closed brings it down.  To be
/// called before MPI starts; files are closed by their handles.
void start();
/// Stops HDF5 from printing its error stack.  Every function here that opens a file calls it.
void silence();
/// The innermost entries of HDF5's error stack in one line ("" when it is empty), and clears it.
std::string last_error();
/// Throws Error "WHAT: REASON" for a negative identifier, status or truth value; otherwise returns
/// it.
hid_t check(hid_t result, const std::string& what);

/// Owns one HDF5 identifier.  The destructor closes and ignores errors; call close() where a
/// failure matters (a written file).
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() = default;
  /// Takes over `id`; throws Error naming `what` when it is negative.
  Handle(hid_t id, Close close, const std::string& what) : id_(check(id, what)), close_(close) {}
  Handle(Handle&& other) noexcept : id_(other.id_), close_(other.close_) { other.id_ = -1; }
  Handle& operator=(Handle&& other) noexcept;
  ~Handle() { release(); }
  operator hid_t() const { return id_; }
  bool valid() const { return id_ >= 0; }
  void close(const std::string& what);

 private:
  void release() noexcept;
  hid_t id_ = -1;
  Close close_ = nullptr;
};

/// Type in memory and in the file (this machine's byte order; HDF5 converts on others).
hid_t native_type(DType type);
template <class T>
hid_t native_type() {
  if constexpr (std::is_same_v<T, double>)
    return H5T_NATIVE_DOUBLE;
  else if constexpr (std::is_same_v<T, float>)
    return H5T_NATIVE_FLOAT;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return H5T_NATIVE_INT64;
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    return H5T_NATIVE_UINT64;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return H5T_NATIVE_INT32;
  else if constexpr (std::is_same_v<T, std::uint32_t>)
    return H5T_NATIVE_UINT32;
  else if constexpr (std::is_same_v<T, std::int16_t>)
    return H5T_NATIVE_INT16;
  else if constexpr (std::is_same_v<T, std::uint16_t>)
    return H5T_NATIVE_UINT16;
  else {
    static_assert(std::is_same_v<T, std::uint8_t>, "no HDF5 type for T");
    return H5T_NATIVE_UINT8;
  }
}

/// Files.  `access` is a file access property list (H5P_DEFAULT: this process alone, POSIX). Errors
/// name the file.
/// create_file truncates.  It has no sieve buffer: a write reaches the disk within its own call,
/// which tells of a full disk; the buffer of small datasets would be lost in their closing.
Handle create_file(const std::string& path, hid_t creation = H5P_DEFAULT,
                   hid_t access = H5P_DEFAULT);
Handle open_file(const std::string& path, bool writable = false, hid_t access = H5P_DEFAULT);
Handle property_list(hid_t property_class);
Handle simple_space(const std::vector<hsize_t>& dims,
                    const std::vector<hsize_t>& max_dims = {});  ///< no dims: a scalar

/// Objects below `parent`, by name or path; those made here have no time stamps, so that equal
/// contents give equal files.  Errors name the object.
bool exists(hid_t parent, const std::string& name);
Handle create_group(hid_t parent, const std::string& name);
Handle open_group(hid_t parent, const std::string& name);
Handle create_dataset(hid_t parent, const std::string& name, hid_t type,
                      const std::vector<hsize_t>& dims, hid_t creation = H5P_DEFAULT);
Handle open_dataset(hid_t parent, const std::string& name);
std::vector<hsize_t> dims_of(hid_t dataset, const std::string& name);
/// Hard links of a group, ascending.  Errors: a link of another kind, which may lead to other
/// files.
std::vector<std::string> names_in(hid_t parent, const std::string& group);
/// Offset in the file of a dataset that lies in one piece inside it, 0 for one without elements.
/// Errors: chunked or compressed storage, with the command that rewrites it; external files, which
/// are not followed; a size beyond `file_bytes`.
std::uint64_t plain_offset(hid_t dataset, const std::string& name, std::uint64_t file_bytes);

/// Attributes of a file, group or dataset.  Reading refuses another class of type.
bool has_attribute(hid_t object, const std::string& name);
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
void write_attribute(hid_t object, const std::string& name, std::uint64_t value);
void write_attribute(hid_t object, const std::string& name, double value);
void write_attribute(hid_t object, const std::string& name, const std::string& value);
std::int64_t read_int_attribute(hid_t object, const std::string& name);
std::uint64_t read_uint_attribute(hid_t object, const std::string& name);
double read_real_attribute(hid_t object, const std::string& name);
std::string read_text_attribute(hid_t object, const std::string& name);

/// A text of any length as a scalar dataset (an attribute ends at 64 KiB).  Trailing zero bytes are
/// not kept.
void write_text(hid_t parent, const std::string& name, const std::string& text);
std::string read_text(hid_t parent, const std::string& name);

/// Whole one-dimensional datasets, and elements [begin, begin + out.size()) of one.
template <class T>
void write_vector(hid_t parent, const std::string& name, std::span<const T> values) {
  const Handle dataset = create_dataset(parent, name, native_type<T>(), {values.size()});
  if (!values.empty())
    check(H5Dwrite(dataset, native_type<T>(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
          "writing dataset " + name);
}
void read_range(hid_t dataset, const std::string& name, hid_t memory_type, std::uint64_t begin,
                std::uint64_t count, void* out);
template <class T>
std::vector<T> read_vector(hid_t parent, const std::string& name) {
  const Handle dataset = open_dataset(parent, name);
  const auto dims = dims_of(dataset, name);
  require(dims.size() == 1, "dataset {} has {} dimensions where one was expected", name,
          dims.size());
  std::vector<T> values(dims[0]);
  read_range(dataset, name, native_type<T>(), 0, values.size(), values.data());
  return values;
}

}  // namespace ballast::hdf5

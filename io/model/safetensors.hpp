// Safetensors files: an 8-byte little-endian header length, a JSON header (name -> dtype, shape,
// data_offsets), then the tensors' bytes. Files are memory-mapped; every offset is checked before
// it is used.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ballast {

/// Of a folder whose weights are cut into several files: which tensor lies in which.
inline constexpr const char* kIndexFile = "model.safetensors.index.json";

struct SafetensorsEntry {
  std::string dtype;  ///< F64, F32, F16 or BF16
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  ///< bytes inside the data section
  std::int64_t numel() const;
};

/// One or several files of a model folder as one set of named tensors.
class Safetensors {
 public:
  /// `path`: a .safetensors file, or a folder with model.safetensors or
  /// model.safetensors.index.json.  Errors name file and tensor.
  explicit Safetensors(const std::string& path);
  ~Safetensors();
  bool contains(const std::string& name) const;
  const SafetensorsEntry& entry(const std::string& name) const;
  std::vector<std::string> names() const;
  /// Elements [begin, begin + out.size()) of a tensor in row-major order, widened (exact for every
  /// dtype).
  void read(const std::string& name, std::int64_t begin, std::span<double> out) const;
  void read(const std::string& name, std::int64_t begin, std::span<float> out) const;

 private:
  struct File;
  struct Place {
    const File* file;
    SafetensorsEntry entry;
  };
  void add_file(const std::string& path);
  const std::uint8_t* bytes(const std::string& name, std::int64_t begin, std::int64_t count) const;
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::string, Place> tensors_;
};

/// Errors: SafetensorsWriter would fail to write `path`, or would replace something else than a
/// safetensors file there.  Leaves everything as it is.
void check_safetensors_target(const std::string& path);

/// Writes one file tensor by tensor, so that no more than one is in memory.
class SafetensorsWriter {
 public:
  /// Fixes names, dtypes (F32 or BF16) and shapes; offsets are computed.  Throws Error when the
  /// file cannot be written.
  SafetensorsWriter(const std::string& path,
                    std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors,
                    const std::string& dtype);
  ~SafetensorsWriter();
  /// The next elements of the data section, in the order of the constructor's list; rounded to
  /// nearest even for BF16.
  void append(std::span<const float> values);
  /// Flushes and checks that everything was written; only then the file has its name, and the
  /// destructor removes what was not finished.
  void finish();

 private:
  void discard() noexcept;
  std::string path_, dtype_;
  int descriptor_ = -1;
  std::int64_t left_ = 0;
};

}  // namespace ballast

#include "io/model/safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/base/bf16.hpp"
#include "core/base/error.hpp"
#include "core/base/lfs_pointer.hpp"

namespace ballast {
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::uint64_t kMaxHeader = std::uint64_t{100} << 20;  // the format's own limit

int element_size(const std::string& dtype) {
  return dtype == "F64" ? 8 : dtype == "F32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

float from_half_bits(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

/// JSON in which no object has a key twice; `repeated` names one that it finds.
json parse_once(const std::string& text, std::string& repeated) {
  std::vector<std::set<std::string>> open;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      repeated = parsed.get<std::string>();
    return true;
  };
  return json::parse(text, watch, false);
}

std::vector<std::int64_t> whole_numbers(const json& list) {
  require(list.is_array(), "a list of numbers was expected");
  for (const json& number : list)
    require(number.is_number_integer(), "{} is no whole number", number.dump());
  return list.get<std::vector<std::int64_t>>();
}

/// A tensor's entry of the header.  Errors: damaged, another dtype, a size that does not fit.
SafetensorsEntry entry_of(const std::string& path, const std::string& name, const json& value,
                          std::int64_t data_bytes) {
  SafetensorsEntry entry;
  try {
    entry.dtype = value.at("dtype").get<std::string>();
    entry.shape = whole_numbers(value.at("shape"));
    const auto offsets = whole_numbers(value.at("data_offsets"));
    require(offsets.size() == 2, "data_offsets has {} numbers", offsets.size());
    entry.begin = offsets[0];
    entry.end = offsets[1];
  } catch (const std::exception& e) {
    fail("{}: tensor {}: damaged header entry ({})", path, name, e.what());
  }
  require(element_size(entry.dtype) != 0,
          "{}: tensor {}: dtype {} is not supported (F64, F32, F16, BF16)", path, name,
          entry.dtype);
  std::int64_t expected = element_size(entry.dtype);
  for (auto extent : entry.shape) {
    require(extent >= 0 && (extent == 0 || expected <= data_bytes / extent),
            "{}: tensor {}: shape [{}] does not fit the file", path, name,
            fmt::join(entry.shape, ", "));
    expected *= extent;
  }
  require(0 <= entry.begin && entry.begin <= entry.end && entry.end <= data_bytes &&
              entry.end - entry.begin == expected,
          "{}: tensor {}: bytes [{}, {}) do not match {} [{}] in {} bytes of data; the file is "
          "truncated or damaged",
          path, name, entry.begin, entry.end, entry.dtype, fmt::join(entry.shape, ", "),
          data_bytes);
  return entry;
}

/// The tensors lie one behind another from the first byte to the last, as the format wants: no
/// byte belongs to two of them or to none.
void check_cover(const std::string& path,
                 std::vector<std::pair<std::int64_t, std::int64_t>> extents,
                 std::int64_t data_bytes) {
  std::sort(extents.begin(), extents.end());
  std::int64_t end = 0;
  for (const auto& [from, to] : extents) {
    require(from == end, "{}: bytes [{}, {}) of the data belong to {}; the file is damaged", path,
            std::min(from, end), std::max(from, end), from < end ? "two tensors" : "no tensor");
    end = to;
  }
  require(end == data_bytes, "{}: {} bytes follow the last tensor; the file is damaged", path,
          data_bytes - end);
}

/// A file of a model's folder stays there; symbolic links may lead to other files there, or
/// to the blobs of a Hugging Face cache (MODEL/snapshots/REVISION beside MODEL/blobs).
void check_inside(const std::string& folder, const std::string& index, const std::string& name) {
  require(!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos,
          "{}: \"{}\" is no file name of this folder", index, name);
  std::error_code error;
  const fs::path home = fs::canonical(folder, error),
                 real = fs::canonical(folder + "/" + name, error);
  if (error) return;  // opening it says what is wrong
  const fs::path parent = real.parent_path();
  require(parent == home || parent == home.parent_path().parent_path() / "blobs",
          "{}: {} leads out of the folder, to {}; copy it here, or name its own folder", index,
          name, real.string());
}

template <class T>
void widen(const std::uint8_t* bytes, const std::string& dtype, std::span<T> out) {
  const auto load = [&]<class S>(S, auto&& convert) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      S x;
      std::memcpy(&x, bytes + i * sizeof(S), sizeof(S));
      out[i] = static_cast<T>(convert(x));
    }
  };
  if (dtype == "F64") load(double{}, [](double x) { return x; });
  if (dtype == "F32") load(float{}, [](float x) { return x; });
  if (dtype == "F16") load(std::uint16_t{}, from_half_bits);
  if (dtype == "BF16") load(std::uint16_t{}, from_bf16_bits);
}

}  // namespace

std::int64_t SafetensorsEntry::numel() const {
  std::int64_t n = 1;
  for (auto extent : shape) n *= extent;
  return n;
}

struct Safetensors::File {
  std::string path;
  const std::uint8_t* data = nullptr;
  std::uint64_t size = 0, header = 0;
  ~File() {
    if (data) ::munmap(const_cast<std::uint8_t*>(data), size);
  }
};

Safetensors::~Safetensors() = default;

void Safetensors::add_file(const std::string& path) {
  refuse_lfs_pointer(path);
  auto file = std::make_unique<File>();
  file->path = path;
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(descriptor >= 0, "{}: cannot be opened: {}", path, std::strerror(errno));
  struct stat info {};
  const bool known = ::fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) && info.st_size >= 8;
  void* mapped = known ? ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ,
                                MAP_PRIVATE, descriptor, 0)
                       : MAP_FAILED;
  ::close(descriptor);
  require(mapped != MAP_FAILED,
          "{}: is no safetensors file (shorter than its 8-byte header length, or unreadable)",
          path);
  file->data = static_cast<const std::uint8_t*>(mapped);
  file->size = static_cast<std::uint64_t>(info.st_size);
  std::memcpy(&file->header, file->data, 8);
  require(file->header <= kMaxHeader && file->header <= file->size - 8,
          "{}: header length {} does not fit a file of {} bytes; it is truncated or damaged", path,
          file->header, file->size);
  const char* text = reinterpret_cast<const char*>(file->data + 8);
  std::string repeated;
  const json header = parse_once(std::string(text, file->header), repeated);
  require(header.is_object(), "{}: header is not a JSON object; the file is damaged", path);
  require(repeated.empty(), "{}: \"{}\" occurs twice in the header", path, repeated);
  std::vector<std::pair<std::int64_t, std::int64_t>> extents;
  const auto data_bytes = static_cast<std::int64_t>(file->size - 8 - file->header);
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    const SafetensorsEntry entry = entry_of(path, name, value, data_bytes);
    require(tensors_.emplace(name, Place{file.get(), entry}).second, "{}: tensor {} occurs twice",
            path, name);
    extents.emplace_back(entry.begin, entry.end);
  }
  check_cover(path, std::move(extents), data_bytes);
  files_.push_back(std::move(file));
}

Safetensors::Safetensors(const std::string& path) {
  if (!fs::is_directory(path)) {
    add_file(path);
    return;
  }
  const std::string index = path + "/" + kIndexFile;
  if (!fs::exists(index)) {
    require(fs::exists(path + "/model.safetensors") || !fs::exists(path + "/pytorch_model.bin"),
            "{}: holds pytorch_model.bin and no safetensors, which are what is read; Transformers' "
            "save_pretrained writes them",
            path);
    check_inside(path, path, "model.safetensors");
    add_file(path + "/model.safetensors");
    return;
  }
  require(fs::is_regular_file(index), "{}: is no regular file", index);
  refuse_lfs_pointer(index);
  std::ifstream stream(index);
  std::string repeated;
  const json map = parse_once({std::istreambuf_iterator<char>(stream), {}}, repeated);
  require(repeated.empty(), "{}: \"{}\" occurs twice", index, repeated);
  require(map.is_object() && map.contains("weight_map") && map["weight_map"].is_object(),
          "{}: has no weight_map; the file is damaged", index);
  std::set<std::string> files;
  for (const auto& [name, file] : map["weight_map"].items()) {
    require(file.is_string(), "{}: weight_map of {} is not a file name", index, name);
    files.insert(file.get<std::string>());
  }
  // Readers disagree on which of the two counts.
  const std::string single = "model.safetensors";
  require(files.count(single) != 0 || !fs::exists(path + "/" + single),
          "{}: has both {} and {}, which names other files; remove one of them", path, single,
          kIndexFile);
  for (const auto& file : files) {
    check_inside(path, index, file);
    add_file(path + "/" + file);
  }
  for (const auto& [name, file] : map["weight_map"].items())
    require(contains(name) && tensors_.at(name).file->path == path + "/" + file.get<std::string>(),
            "{}: tensor {} is not in {}", index, name, file.get<std::string>());
}

bool Safetensors::contains(const std::string& name) const { return tensors_.count(name) != 0; }

const SafetensorsEntry& Safetensors::entry(const std::string& name) const {
  const auto found = tensors_.find(name);
  require(found != tensors_.end(), "{}: has no tensor {}",
          files_.empty() ? std::string("safetensors") : files_.front()->path, name);
  return found->second.entry;
}

std::vector<std::string> Safetensors::names() const {
  std::vector<std::string> list;
  for (const auto& [name, place] : tensors_) list.push_back(name);
  return list;
}

const std::uint8_t* Safetensors::bytes(const std::string& name, std::int64_t begin,
                                       std::int64_t count) const {
  const SafetensorsEntry& e = entry(name);
  require(0 <= begin && begin + count <= e.numel(), "tensor {}: elements [{}, {}) of {}", name,
          begin, begin + count, e.numel());
  const File& file = *tensors_.at(name).file;
  return file.data + 8 + file.header + e.begin + begin * element_size(e.dtype);
}

void Safetensors::read(const std::string& name, std::int64_t begin, std::span<double> out) const {
  widen(bytes(name, begin, static_cast<std::int64_t>(out.size())), entry(name).dtype, out);
}
void Safetensors::read(const std::string& name, std::int64_t begin, std::span<float> out) const {
  widen(bytes(name, begin, static_cast<std::int64_t>(out.size())), entry(name).dtype, out);
}

namespace {
void write_all(int descriptor, const std::string& path, const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = ::write(descriptor, at, bytes);
    if (wrote < 0 && errno == EINTR) continue;
    require(wrote > 0, "{}: cannot be written: {}", path, std::strerror(errno));
    at += wrote;
    bytes -= static_cast<std::size_t>(wrote);
  }
}

/// What a file has until it is whole.
std::string partial_of(const std::string& path) { return path + ".partial"; }

/// Whether a file begins as a safetensors file does: the length of a header that fits it, then
/// the header's brace.
bool begins_as_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t header = 0;
  char brace = 0;
  if (!file.read(reinterpret_cast<char*>(&header), 8).get(brace)) return false;
  std::error_code error;
  const std::uint64_t size = fs::file_size(path, error);
  return !error && brace == '{' && header >= 2 && header <= kMaxHeader && header <= size - 8;
}
}  // namespace

void check_safetensors_target(const std::string& path) {
  std::error_code ignored;
  const std::string partial = partial_of(path);
  for (const std::string& file : {path, partial})
    require(!fs::exists(file, ignored) || fs::is_regular_file(file, ignored),
            "{} is no regular file and would be replaced; choose another name", file);
  require(!fs::exists(path, ignored) || begins_as_safetensors(path),
          "{} is no safetensors file and would be replaced; remove it, or choose another name",
          path);
  const bool there = fs::exists(partial, ignored);
  const int descriptor = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
  require(descriptor >= 0, "{} cannot be written: {}; choose a name in a folder that can be", path,
          std::strerror(errno));
  ::close(descriptor);
  if (!there) ::unlink(partial.c_str());
}

SafetensorsWriter::SafetensorsWriter(
    const std::string& path, std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors,
    const std::string& dtype)
    : path_(path), dtype_(dtype) {
  require(dtype == "F32" || dtype == "BF16", "safetensors are written as F32 or BF16, not {}",
          dtype);
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::int64_t offset = 0;
  for (const auto& [name, shape] : tensors) {
    SafetensorsEntry entry{dtype, shape, 0, 0};
    const std::int64_t end = offset + entry.numel() * element_size(dtype);
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {offset, end}}};
    left_ += entry.numel();
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligned data, as readers like it
  descriptor_ = ::open(partial_of(path_).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  require(descriptor_ >= 0, "{}: cannot be written: {}", path, std::strerror(errno));
  const std::uint64_t length = text.size();
  try {
    write_all(descriptor_, path_, &length, 8);
    write_all(descriptor_, path_, text.data(), text.size());
  } catch (const Error&) {
    discard();
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() { discard(); }

void SafetensorsWriter::discard() noexcept {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(partial_of(path_).c_str());
}

void SafetensorsWriter::append(std::span<const float> values) {
  left_ -= static_cast<std::int64_t>(values.size());
  require(left_ >= 0, "{}: more values than its tensors hold", path_);
  if (dtype_ == "F32") {
    write_all(descriptor_, path_, values.data(), values.size_bytes());
    return;
  }
  std::vector<std::uint16_t> rounded(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) rounded[i] = to_bf16_bits(values[i]);
  write_all(descriptor_, path_, rounded.data(), rounded.size() * 2);
}

void SafetensorsWriter::finish() {
  require(left_ == 0, "{}: {} values are missing", path_, left_);
  require(::fsync(descriptor_) == 0, "{}: cannot be written: {}", path_, std::strerror(errno));
  require(std::rename(partial_of(path_).c_str(), path_.c_str()) == 0, "{}: cannot be written: {}",
          path_, std::strerror(errno));
  ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace ballast

#include "io/trace/event_file.hpp"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <filesystem>

#include "core/base/error.hpp"

namespace ballast {
namespace {

// A message of protocol buffers: fields, each a key (number and wire type) and a value.
enum Wire { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void add_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void add_key(std::string& out, int field, Wire wire) {
  add_varint(out, static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire));
}

template <class Bits>
void add_little_endian(std::string& out, Bits value) {
  for (std::size_t i = 0; i < sizeof(Bits); ++i) out.push_back(static_cast<char>(value >> 8 * i));
}

void add_bytes(std::string& out, int field, const std::string& value) {
  add_key(out, field, bytes);
  add_varint(out, value.size());
  out += value;
}

void add_integer(std::string& out, int field, std::int64_t value) {
  add_key(out, field, varint);
  add_varint(out, static_cast<std::uint64_t>(value));
}

/// Event with wall_time = 1 (double) and step = 2.
std::string event(std::int64_t step) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string out;
  add_key(out, 1, fixed64);
  add_little_endian(out, std::bit_cast<std::uint64_t>(now));
  add_integer(out, 2, step);
  return out;
}

std::string host() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "host";
}

/// As TFRecords store them, so that a sum over data that hold sums is not itself.
std::uint32_t masked(std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

}  // namespace

std::uint32_t crc32c(std::span<const char> data) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> t{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t x = i;
      for (int bit = 0; bit < 8; ++bit) x = x & 1 ? x >> 1 ^ 0x82f63b78u : x >> 1;
      t[i] = x;
    }
    return t;
  }();
  std::uint32_t crc = 0xffffffffu;
  for (const char c : data) crc = crc >> 8 ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

EventFile::EventFile(const std::string& dir, std::int64_t step) {
  std::filesystem::create_directories(dir);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto s = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  for (int i = 0; path_.empty() || std::filesystem::exists(path_); ++i)
    path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", dir, s, host(), getpid(), i);
  out_.open(path_, std::ios::binary);
  std::string version = event(0);
  add_bytes(version, 3, "brain.Event:2");  // Event.file_version
  record(std::move(version));
  std::string session;
  add_integer(session, 1, 1);  // SessionLog.status = START
  std::string start = event(step + 1);
  add_bytes(start, 7, session);  // Event.session_log
  record(std::move(start));
}

void EventFile::scalars(std::int64_t step,
                        const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, number] : values) {
    std::string value;
    add_bytes(value, 1, tag);  // Summary.Value.tag, simple_value
    add_key(value, 2, fixed32);
    add_little_endian(value, std::bit_cast<std::uint32_t>(static_cast<float>(number)));
    add_bytes(summary, 1, value);  // Summary.value
  }
  std::string all = event(step);
  add_bytes(all, 5, summary);  // Event.summary
  record(std::move(all));
}

void EventFile::record(std::string data) {
  std::string head;
  add_little_endian(head, static_cast<std::uint64_t>(data.size()));
  std::string all = head;
  add_little_endian(all, masked(crc32c(head)));
  all += data;
  add_little_endian(all, masked(crc32c(data)));
  out_.write(all.data(), static_cast<std::streamsize>(all.size()));
  out_.flush();
  require(out_.good(), "{} cannot be written; is the disk full?", path_);
}

}  // namespace ballast

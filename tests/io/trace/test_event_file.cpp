// Event files read back by a parser of TFRecords and protocol buffers that shares nothing with the
// writer; its CRC-32C works bit by bit.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>

#include "io/trace/event_file.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

std::uint32_t slow_crc32c(const std::string& data) {
  std::uint32_t crc = ~0u;
  for (const unsigned char c : data)
    for (int bit = 0; bit < 8; ++bit) {
      const std::uint32_t out = (crc ^ c >> bit) & 1;
      crc = crc >> 1 ^ (out ? 0x82f63b78u : 0);
    }
  return ~crc;
}

template <class T>
T take(const std::string& data, std::size_t at) {
  T value;
  EXPECT_LE(at + sizeof(T), data.size());
  std::memcpy(&value, data.data() + at, sizeof(T));
  return value;
}

/// The fields of a message by number; numbers as 8 bytes, what has a length as it is.
std::multimap<int, std::string> fields(const std::string& message) {
  std::multimap<int, std::string> found;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t key = varint();
    std::string value;
    if (const auto wire = key & 7; wire == 0) {
      const std::uint64_t number = varint();
      value.assign(reinterpret_cast<const char*>(&number), sizeof(number));
    } else {
      const std::uint64_t size = wire == 1 ? 8 : wire == 5 ? 4 : varint();
      value = message.substr(at, size);
      at += size;
    }
    found.emplace(static_cast<int>(key >> 3), value);
  }
  EXPECT_EQ(at, message.size());
  return found;
}

std::vector<std::string> records(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(in)), {});
  const auto masked = [](const std::string& data) {
    const std::uint32_t crc = slow_crc32c(data);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
  };
  std::vector<std::string> found;
  for (std::size_t at = 0; at < all.size();) {
    const auto size = take<std::uint64_t>(all, at);
    EXPECT_EQ(take<std::uint32_t>(all, at + 8), masked(all.substr(at, 8)));
    found.push_back(all.substr(at + 12, size));
    EXPECT_EQ(take<std::uint32_t>(all, at + 12 + size), masked(found.back()));
    at += size + 16;
  }
  return found;
}

TEST(Crc32c, ValuesOfRfc3720) {
  // RFC 3720, B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(std::string("123456789")), 0xe3069283u);
  EXPECT_EQ(slow_crc32c("123456789"), 0xe3069283u);
}

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    found.push_back(entry.path().string());
  return found;
}

class EventFileTest : public TemporaryFolder {};

TEST_F(EventFileTest, HoldsScalars) {
  EventFile file(dir + "/tensorboard", 41);
  file.scalars(42, {{"train/loss", 2.5}, {"speed/mfu", -1e-3}});
  const std::vector<std::string> all = records(files_of(dir + "/tensorboard").at(0));
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(fields(all[0]).find(3)->second, "brain.Event:2");
  const auto start = fields(all[1]);
  EXPECT_EQ(take<std::int64_t>(start.find(2)->second, 0), 42);
  EXPECT_EQ(take<std::int64_t>(fields(start.find(7)->second).find(1)->second, 0), 1);

  const auto step = fields(all[2]);
  EXPECT_GT(take<double>(step.find(1)->second, 0), 1.6e9);
  EXPECT_EQ(take<std::int64_t>(step.find(2)->second, 0), 42);
  std::map<std::string, float> values;
  const auto summary = fields(step.find(5)->second);
  for (const auto& [number, value] : summary) {
    EXPECT_EQ(number, 1);
    const auto parts = fields(value);
    values[parts.find(1)->second] = take<float>(parts.find(2)->second, 0);
  }
  EXPECT_EQ(values, (std::map<std::string, float>{{"train/loss", 2.5f}, {"speed/mfu", -1e-3f}}));
}

TEST_F(EventFileTest, SessionsGetFilesOfTheirOwn) {
  const EventFile one(dir, 0), two(dir, 0);
  EXPECT_EQ(files_of(dir).size(), 2u);
  EXPECT_THROW(EventFile("/proc/none", 0), std::exception);
}

}  // namespace
}  // namespace ballast

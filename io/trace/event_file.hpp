// Event files that TensorBoard reads: TFRecords (length, masked CRC-32C, data, masked CRC-32C) of
// Event messages in the wire format of protocol buffers (tensorflow/core/util/event.proto).
#pragma once
#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ballast {

/// CRC-32C (Castagnoli) of bytes.
std::uint32_t crc32c(std::span<const char> bytes);

class EventFile {
 public:
  /// A new file in `dir`, which is made.  TensorBoard forgets what older files of `dir` hold of
  /// steps after `step`, where this session begins.  Errors: cannot be written.
  EventFile(const std::string& dir, std::int64_t step);
  /// Points of charts at `step`, flushed.  Values are stored as f32.  Errors: cannot be written.
  void scalars(std::int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  void record(std::string event);
  std::string path_;
  std::ofstream out_;
};

}  // namespace ballast

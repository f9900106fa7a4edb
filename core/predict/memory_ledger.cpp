#include "core/predict/memory_ledger.hpp"

namespace ballast {

void MemoryEstimate::take_larger(const MemoryEstimate& other) {
  const std::int64_t pool = std::max(pool_bytes, other.pool_bytes);
  const auto larger = [&](std::int64_t mine, std::int64_t its) {
    return std::max(mine - pool_bytes, its - other.pool_bytes) + pool;
  };
  constexpr auto kWorkspace = static_cast<std::size_t>(MemoryCategory::workspace);
  const std::int64_t workspace = larger(bytes[kWorkspace], other.bytes[kWorkspace]);
  for (std::size_t c = 0; c < bytes.size(); ++c) bytes[c] = std::max(bytes[c], other.bytes[c]);
  bytes[kWorkspace] = workspace;
  peak_bytes = larger(peak_bytes, other.peak_bytes);
  context_bytes = std::max(context_bytes, other.context_bytes);
  pool_bytes = pool;
}

void MemoryEstimate::take_peaks(const MemoryEstimate& other) {
  for (std::size_t c = 0; c < bytes.size(); ++c) bytes[c] = std::max(bytes[c], other.bytes[c]);
  peak_bytes = std::max(peak_bytes, other.peak_bytes);
  context_bytes = std::max(context_bytes, other.context_bytes);
  pool_bytes = std::max(pool_bytes, other.pool_bytes);
}

std::string bytes_text(double bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1000 && unit < 6; ++unit) bytes /= 1024;
  const int digits = unit == 0 || bytes >= 100 ? 0 : bytes < 10 ? 2 : 1;
  return fmt::format("{:.{}f} {}", bytes, digits, units[unit]);
}

}  // namespace ballast

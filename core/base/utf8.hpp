// Whether bytes are text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

/// Whether `text` is UTF-8: no stray or missing bytes, no longer form than needed, no surrogates,
/// nothing beyond U+10FFFF.
inline bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    if (first < 0x80) continue;
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    std::uint32_t value = first & (0x3fu >> more);
    for (int k = 0; k < more; ++k, ++i) {
      if (i >= text.size() || (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return false;
      value = value << 6 | (static_cast<unsigned char>(text[i]) & 0x3f);
    }
    if (first < 0xc0 || first >= 0xf8 || value < kLeast[more] || value > 0x10ffff ||
        (value >= 0xd800 && value < 0xe000))
      return false;
  }
  return true;
}

}  // namespace ballast

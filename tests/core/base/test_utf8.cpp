// Bytes that are text, and those that are not.
#include <gtest/gtest.h>

#include "core/base/utf8.hpp"

namespace ballast {
namespace {

TEST(Utf8, TellsTextFromOtherBytes) {
  for (const char* text : {"", "plain", "l\xc3\xa4rm", "\xe2\x82\xac", "\xed\x9f\xbf",
                           "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(text)) << text;
  for (const char* bytes :
       {"\xe4", "a\xff", "\x80", "\xc3", "\xc3(", "\xe2\x82", "\xc0\x80", "\xe0\x80\x80",
        "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"})
    EXPECT_FALSE(is_utf8(bytes)) << bytes;
}

}  // namespace
}  // namespace ballast

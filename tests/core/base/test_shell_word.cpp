// Words of printed commands, read back by a shell.
#include <gtest/gtest.h>

#include <cstdio>

#include "core/base/random.hpp"
#include "core/base/shell_word.hpp"
#include "core/base/utf8.hpp"

namespace ballast {
namespace {

/// What /bin/sh makes of a word.
std::string read_back(const std::string& word) {
  const std::string command = "printf %s " + word;
  std::FILE* shell = popen(command.c_str(), "r");
  std::string text;
  for (int c = 0; shell != nullptr && (c = std::fgetc(shell)) != EOF;) text += static_cast<char>(c);
  if (shell != nullptr) pclose(shell);
  return text;
}

void expect_same(const std::string& text) {
  const std::string word = shell_word(text);
  EXPECT_EQ(read_back(word), text) << word;
  EXPECT_TRUE(is_utf8(word)) << word;
  for (const char c : word) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) << word;
}

TEST(ShellWord, PlainWordsStayAsTheyAre) {
  for (const char* text : {"deck.toml", "mesh.pp=2", "runs/a_b-c,d:e@f+g%"})
    EXPECT_EQ(shell_word(text), text);
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word(""), "''");
}

TEST(ShellWord, AShellReadsTheSameText) {
  for (const char* text : {"",
                           " ",
                           "it's",
                           "'",
                           "''",
                           "\"$HOME\"",
                           "`id`",
                           "a\\nb",
                           "~",
                           "*",
                           "#",
                           "!!",
                           "a\nb",
                           "\n",
                           "a\n\n",
                           "\n'",
                           "\t",
                           "\r\n",
                           "\x1b[0m",
                           "\x7f",
                           "l\xc3\xa4rm",
                           "\xf0\x9f\x98\x80",
                           "run.output=\"a b\"",
                           "\xe4",
                           "a\xff\xfe",
                           "\xc3",
                           "\xc3\n",
                           "\xed\xa0\x80z",
                           "$(printf x)"})
    expect_same(text);
  for (std::uint64_t i = 0; i < 40; ++i) {
    std::string text;
    for (std::uint64_t k = 0; k < 1 + i / 4; ++k)
      text += static_cast<char>(1 + random_bits(7, i, k) % 255);
    expect_same(text);
  }
}

TEST(ShellWord, CommentsStayOnTheirLine) {
  EXPECT_EQ(comment_text("times of a\nb\x7f l\xc3\xa4rm"), "times of a?b? l\xc3\xa4rm");
  EXPECT_EQ(comment_text("\xe4 of l\xc3\xa4rm"), "? of l??rm");
}

}  // namespace
}  // namespace ballast

// Words of printed commands, read back by a shell.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "core/base/random.hpp"
#include "core/base/shell_word.hpp"
#include "core/base/utf8.hpp"

namespace ballast {
namespace {

/// What one /bin/sh makes of words, none of which holds a byte 1.
std::vector<std::string> read_back(const std::vector<std::string>& words) {
  std::string command = "printf '%s\\001'";
  for (const std::string& word : words) command += " " + word;
  std::FILE* shell = popen(command.c_str(), "r");
  std::vector<std::string> texts(1);
  for (int c = 0; shell != nullptr && (c = std::fgetc(shell)) != EOF;)
    if (c == 1)
      texts.emplace_back();
    else
      texts.back() += static_cast<char>(c);
  if (shell != nullptr) pclose(shell);
  texts.pop_back();
  return texts;
}

TEST(ShellWord, PlainWordsStayAsTheyAre) {
  for (const char* text : {"deck.toml", "mesh.pp=2", "runs/a_b-c,d:e@f+g%"})
    EXPECT_EQ(shell_word(text), text);
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word(""), "''");
}

TEST(ShellWord, AShellReadsTheSameText) {
  std::vector<std::string> texts{"",
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
                                 "$(printf x)"};
  for (std::uint64_t i = 0; i < 400; ++i) {
    std::string& text = texts.emplace_back();
    for (std::uint64_t k = 0; k < 1 + i / 40; ++k)
      text += static_cast<char>(2 + random_bits(7, i, k) % 254);
  }
  std::vector<std::string> words;
  for (const std::string& text : texts) {
    const std::string& word = words.emplace_back(shell_word(text));
    EXPECT_TRUE(is_utf8(word)) << word;
    for (const char c : word)
      EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) << word;
  }
  EXPECT_EQ(read_back(words), texts);
}

TEST(ShellWord, CommentsStayOnTheirLine) {
  EXPECT_EQ(comment_text("times of a\nb\x7f l\xc3\xa4rm"), "times of a?b? l\xc3\xa4rm");
  EXPECT_EQ(comment_text("\xe4 of l\xc3\xa4rm"), "? of l??rm");
}

}  // namespace
}  // namespace ballast

// Documents in twos, read whole and by ranges across both answers.
#include <gtest/gtest.h>

#include <numeric>

#include "core/base/error.hpp"
#include "io/data/pairs.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

class PairsOfFiles : public TemporaryFolder {
 protected:
  std::unique_ptr<Dataset> open(std::int64_t samples = 0) const {
    DataOptions options;
    options.source = DataSource::files;
    options.paths = {dir};
    options.extensions = {".txt"};
    options.pairs = true;
    options.samples = samples;
    return open_dataset(options);
  }
};

TEST_F(PairsOfFiles, AreReadAcrossBothAnswers) {
  write("0.txt", "chosen");
  write("1.txt", "no");
  write("2.txt", "abc");
  write("3.txt", "defgh");
  const auto data = open();
  EXPECT_EQ(data->samples(), 2);
  EXPECT_EQ(data->length(0), 8);
  EXPECT_EQ(data->chosen_tokens(0), 6);
  EXPECT_EQ(data->loss_tokens(0), 6);
  EXPECT_EQ(data->chosen_loss_tokens(0), 5);
  const SampleLength length = sample_length(*data, 1);
  EXPECT_EQ(length.chosen_tokens, 3);
  EXPECT_EQ(length.tokens, 8);
  const std::string text = "abcdefgh";
  const std::vector<std::int32_t> next{'b', 'c', -1, 'e', 'f', 'g', 'h', -1};
  for (std::int64_t begin = 0; begin <= 8; ++begin)
    for (std::int64_t end = begin; end <= 8; ++end) {
      std::vector<std::int32_t> out(static_cast<std::size_t>(end - begin));
      data->tokens(1, begin, end, out);
      for (std::int64_t i = begin; i < end; ++i)
        EXPECT_EQ(out[static_cast<std::size_t>(i - begin)], text[static_cast<std::size_t>(i)]);
      data->targets(1, begin, end, out);
      for (std::int64_t i = begin; i < end; ++i)
        EXPECT_EQ(out[static_cast<std::size_t>(i - begin)], next[static_cast<std::size_t>(i)]);
    }
  EXPECT_EQ(open(1)->samples(), 1);
}

// Blocks of 64: 65 + 65 tokens take up 256, 128 + 64 take up 192.
TEST_F(PairsOfFiles, TheWidestNeedNotBeTheLongest) {
  const std::vector<std::size_t> lengths{128, 64, 65, 65, 66, 65};
  for (std::size_t i = 0; i < lengths.size(); ++i)
    write(std::to_string(i) + ".txt", std::string(lengths[i], 'a'));
  const auto data = open();
  EXPECT_EQ(longest_sample(*data), 0);
  EXPECT_EQ(widest_sample(*data, 1).sample, 0);
  EXPECT_EQ(widest_sample(*data, 64).sample, 2);
  EXPECT_EQ(widest_sample(*data, 64).chosen_tokens, 66);
  EXPECT_EQ(longest_document(*data), 128);
}

TEST_F(PairsOfFiles, WhatDoesNotPairIsRefused) {
  write("0.txt", "one");
  write("1.txt", "two");
  write("2.txt", "three");
  EXPECT_THROW(open(), Error);
  write("3.txt", "");
  EXPECT_THROW(open(), Error);
}

}  // namespace
}  // namespace ballast

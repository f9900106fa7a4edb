// Datasets: how documents become samples and targets, and the sources `files`, `lengths`,
// `distribution` and `needle`.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "io/data/dataset.hpp"
#include "tests/io/temporary_folder.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

namespace fs = std::filesystem;

std::string random_bytes(std::mt19937_64& random, std::size_t count) {
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

std::vector<std::int32_t> tokens_of(const Dataset& data, std::int64_t sample, std::int64_t begin,
                                    std::int64_t end) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(end - begin), -7);
  data.tokens(sample, begin, end, out);
  return out;
}
std::vector<std::int32_t> targets_of(const Dataset& data, std::int64_t sample, std::int64_t begin,
                                     std::int64_t end) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(end - begin), -7);
  data.targets(sample, begin, end, out);
  return out;
}

template <class F>
std::string error_of(F&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

class DatasetTest : public TemporaryFolder {
 protected:
  DataOptions files(std::vector<std::string> paths,
                    std::vector<std::string> extensions = {}) const {
    DataOptions options;
    for (std::string& p : paths) p = dir + "/" + p;
    options.paths = std::move(paths);
    options.extensions = std::move(extensions);
    return options;
  }
  /// Contents of all samples, in order.
  static std::vector<std::string> contents(const Dataset& data) {
    std::vector<std::string> all;
    for (std::int64_t s = 0; s < data.samples(); ++s) {
      std::string text;
      for (std::int32_t token : tokens_of(data, s, 0, data.length(s)))
        text += static_cast<char>(token);
      all.push_back(text);
    }
    return all;
  }
};
using Files = DatasetTest;
using Samples = DatasetTest;
using Lengths = DatasetTest;
using Distribution = DatasetTest;
using Needle = DatasetTest;

TEST_F(Samples, TokensAndTargetsOfAnyRange) {
  std::mt19937_64 random(test_seed());
  std::vector<std::string> texts;
  for (int i = 0; i < 100; ++i) {
    texts.push_back(random_bytes(random, 1 + random() % 300));
    write(fmt::format("{:03}", i), texts.back());
  }
  const auto data = open_dataset(files({"."}));
  ASSERT_EQ(data->samples(), 100);
  EXPECT_EQ(data->vocabulary(), 256);
  for (int i = 0; i < 2000; ++i) {  // more files than stay mapped, in random order
    const auto sample = static_cast<std::int64_t>(random() % 100);
    const std::string& text = texts[static_cast<std::size_t>(sample)];
    const auto length = static_cast<std::int64_t>(text.size());
    ASSERT_EQ(data->length(sample), length);
    ASSERT_EQ(data->loss_tokens(sample), length - 1);
    std::int64_t begin = static_cast<std::int64_t>(random() % (text.size() + 1)),
                 end = static_cast<std::int64_t>(random() % (text.size() + 1));
    if (begin > end) std::swap(begin, end);
    const auto tokens = tokens_of(*data, sample, begin, end),
               targets = targets_of(*data, sample, begin, end);
    for (std::int64_t p = begin; p < end; ++p) {
      const auto at = static_cast<std::size_t>(p - begin);
      ASSERT_EQ(tokens[at], static_cast<unsigned char>(text[static_cast<std::size_t>(p)]))
          << "seed " << test_seed();
      ASSERT_EQ(
          targets[at],
          p + 1 == length ? -1 : static_cast<unsigned char>(text[static_cast<std::size_t>(p) + 1]))
          << "seed " << test_seed();
    }
  }
}

TEST_F(Samples, LongDocumentsAreTruncatedSplitOrDropped) {
  write("a", "0123456789");
  write("b", "xyz");
  write("c", "ABCDEFGH");
  write("d", "q");
  DataOptions options = files({"."});
  options.max_tokens = 4;
  const auto with = [&](LongDocuments what, std::int64_t min_tokens) {
    options.long_samples = what;
    options.min_tokens = min_tokens;
    return open_dataset(options);
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(contents(*with(LongDocuments::truncate, 1)), (Texts{"0123", "xyz", "ABCD", "q"}));
  EXPECT_EQ(contents(*with(LongDocuments::drop, 1)), (Texts{"xyz", "q"}));
  options.max_tokens = 8;  // of exactly the limit is none above it
  EXPECT_EQ(contents(*with(LongDocuments::drop, 1)), (Texts{"xyz", "ABCDEFGH", "q"}));
  options.max_tokens = 4;
  EXPECT_EQ(contents(*with(LongDocuments::split, 1)),
            (Texts{"0123", "4567", "89", "xyz", "ABCD", "EFGH", "q"}));
  EXPECT_EQ(contents(*with(LongDocuments::split, 3)),
            (Texts{"0123", "4567", "xyz", "ABCD", "EFGH"}));
  // A piece is a sample of its own: its last token has no target, though the document goes on.
  const auto split = with(LongDocuments::split, 1);
  EXPECT_EQ(targets_of(*split, 0, 0, 4), (std::vector<std::int32_t>{'1', '2', '3', -1}));
  EXPECT_EQ(targets_of(*split, 1, 2, 4), (std::vector<std::int32_t>{'7', -1}));
  std::vector<std::int64_t> documents;
  for (std::int64_t s = 0; s < split->samples(); ++s) {
    EXPECT_EQ(split->loss_tokens(s), split->length(s) - 1);
    documents.push_back(split->document(s));
  }
  EXPECT_EQ(documents, (std::vector<std::int64_t>{0, 0, 0, 1, 2, 2, 3}));
  options.samples = 3;
  EXPECT_EQ(contents(*with(LongDocuments::split, 1)), (Texts{"0123", "4567", "89"}));
  EXPECT_EQ(contents(*with(LongDocuments::truncate, 2)), (Texts{"0123", "xyz", "ABCD"}));
  EXPECT_NE(with(LongDocuments::split, 1)->fingerprint(),
            with(LongDocuments::truncate, 1)->fingerprint());
}

TEST_F(Samples, MistakesAreRefused) {
  write("a", "0123456789");
  DataOptions options = files({"a"});
  const auto data = open_dataset(options);
  std::vector<std::int32_t> out(3);
  EXPECT_NE(error_of([&] { data->tokens(0, 8, 11, out); }).find("/a"), std::string::npos);
  EXPECT_THROW(data->tokens(0, 0, 2, out), Error);
  EXPECT_THROW(data->tokens(1, 0, 3, out), Error);
  EXPECT_THROW(data->tokens(-1, 0, 3, out), Error);
  EXPECT_THROW(data->targets(0, 3, 0, out), Error);
  const auto refused = [&](auto&& change, const std::string& text) {
    DataOptions bad = options;
    change(bad);
    EXPECT_NE(error_of([&] { open_dataset(bad); }).find(text), std::string::npos);
  };
  refused([](DataOptions& o) { o.min_tokens = 11; }, "no sample is left");
  refused([](DataOptions& o) { o.max_tokens = -1; }, "negative");
  refused([](DataOptions& o) { o.max_tokens = 4, o.min_tokens = 5; }, "above data.max_tokens");
  refused([](DataOptions& o) { o.paths.clear(); }, "data.paths");
  refused(
      [&](DataOptions& o) {
        o.paths = {dir}, o.extensions = {".hpp", ".cpp"};
      },
      "hold no text in files that end in .hpp, .cpp");
  refused([&](DataOptions& o) { o.source = DataSource::lengths, o.lengths_file = dir; },
          "is a folder");
  refused([&](DataOptions& o) { o.source = DataSource::lengths, o.lengths_file = dir + "/absent"; },
          "No such file or directory");
}

TEST_F(Files, FoldersGlobsAndExtensions) {
  write("src/a.hpp", "a");
  write("src/b.cpp", "b");
  write("src/deep/er/vector", "no extension");
  write("src/empty.hpp", "");
  write("src/x.txt", "text");
  write("other/c.hpp", "c");
  using Texts = std::vector<std::string>;
  EXPECT_EQ(contents(*open_dataset(files({"src"}))), (Texts{"a", "b", "no extension", "text"}));
  EXPECT_EQ(contents(*open_dataset(files({"src"}, {".hpp", ""}))), (Texts{"a", "no extension"}));
  EXPECT_EQ(contents(*open_dataset(files({"src"}, {"cpp"}))), (Texts{"b"}));
  EXPECT_EQ(contents(*open_dataset(files({"*/?.hpp"}))), (Texts{"c", "a"}));
  EXPECT_EQ(contents(*open_dataset(files({"s*"}, {".txt"}))), (Texts{"text"}));
  // A file that is named is taken whatever it ends in; the order of entries and a second mention
  // change nothing.
  EXPECT_EQ(contents(*open_dataset(files({"src", "other", "src/x.txt", "src/a.hpp"}, {".hpp"}))),
            (Texts{"c", "a", "text"}));
  EXPECT_EQ(open_dataset(files({"src", "other"}))->fingerprint(),
            open_dataset(files({"other", "src/../src"}))->fingerprint());
  EXPECT_NE(open_dataset(files({"src"}))->fingerprint(),
            open_dataset(files({"other"}))->fingerprint());
  EXPECT_NE(open_dataset(files({"src"}))->description().find("1 empty"), std::string::npos);
  EXPECT_NE(error_of([&] { open_dataset(files({"absent"})); }).find(dir + "/absent"),
            std::string::npos);
  EXPECT_NE(error_of([&] { open_dataset(files({"absent*"})); }).find("absent*"), std::string::npos);
  EXPECT_NE(error_of([&] { open_dataset(files({"src"}, {".java"})); }).find("data.extensions"),
            std::string::npos);
}

TEST_F(Files, LinksPipesAndLoops) {
  write("tree/a", "a");
  write("elsewhere/b", "b");
  fs::create_directory_symlink("..", dir + "/tree/up");  // a loop
  fs::create_directory_symlink(dir + "/elsewhere", dir + "/tree/out");
  fs::create_symlink(dir + "/tree/a", dir + "/tree/again");  // the same file
  fs::create_symlink("self", dir + "/tree/self");            // circles
  fs::create_symlink("absent", dir + "/tree/dangling");
  ASSERT_EQ(::mkfifo((dir + "/tree/pipe").c_str(), 0600), 0);  // opening it would hang
  const auto data = open_dataset(files({"tree"}));
  EXPECT_EQ(contents(*data), (std::vector<std::string>{"b", "a"}));
  EXPECT_NE(data->description().find("2 unreadable"), std::string::npos) << data->description();
  EXPECT_NE(error_of([&] { open_dataset(files({"tree/pipe"})); }).find("not a regular file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { open_dataset(files({"tree/dangling"})); }).find("dangling"),
            std::string::npos);
}

TEST_F(Files, UnreadableFilesAreCountedOrRefused) {
  write("tree/a", "a");
  write("tree/secret", "b");
  fs::permissions(dir + "/tree/secret", fs::perms::none);
  fs::permissions(dir, fs::perms::all);
  const bool root = ::geteuid() == 0;  // who may read everything: try as nobody
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  std::string description, error;
  try {
    description = open_dataset(files({"tree"}))->description();
    open_dataset(files({"tree/secret"}));
  } catch (const Error& e) {
    error = e.what();
  }
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_NE(description.find("1 unreadable"), std::string::npos) << description;
  EXPECT_NE(error.find("tree/secret"), std::string::npos) << error;
}

TEST_F(Files, PointersOfGitLfsAreNoDocuments) {
  using Texts = std::vector<std::string>;
  write("src/a", "text");
  write("src/b", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
  const auto found = open_dataset(files({"src"}));
  EXPECT_EQ(contents(*found), (Texts{"text"}));
  EXPECT_NE(found->description().find("1 unreadable"), std::string::npos);
  EXPECT_NE(error_of([&] { open_dataset(files({"src/b"})); }).find("src/b: a Git LFS pointer"),
            std::string::npos);
}

TEST_F(Files, AFileThatChangesIsNoticed) {
  const std::string path = write("a", std::string(100000, 'x'));
  write("b", "b");
  const auto data = open_dataset(files({"."}));
  EXPECT_EQ(tokens_of(*data, 0, 99999, 100000), (std::vector<std::int32_t>{'x'}));
  fs::resize_file(path, 10);  // under the map: reading it would be SIGBUS
  EXPECT_NE(error_of([&] { tokens_of(*data, 0, 99999, 100000); }).find(path), std::string::npos);
  const auto unmapped = open_dataset(files({"."}));
  fs::resize_file(path, 11);
  EXPECT_NE(error_of([&] { tokens_of(*unmapped, 0, 0, 1); }).find("11 now"), std::string::npos);
}

TEST_F(Files, InstalledHeadersHaveALongTail) {
  if (!fs::is_directory("/usr/include/c++")) GTEST_SKIP() << "no C++ headers here";
  DataOptions options;
  options.paths = {"/usr/include/c++"};
  options.extensions = {"", ".h", ".hpp", ".tcc"};
  const auto a = open_dataset(options), b = open_dataset(options);
  EXPECT_GT(a->samples(), 100);
  EXPECT_EQ(a->fingerprint(), b->fingerprint());
}

TEST_F(Lengths, FileOfLengths) {
  DataOptions options;
  options.source = DataSource::lengths;
  options.vocabulary = 1000;
  options.seed = test_seed();
  options.lengths_file =
      write("lengths.txt", "# header\n5\n  17  # with a comment\n\n0\n1\r\n40000");
  const auto data = open_dataset(options);
  ASSERT_EQ(data->samples(), 4);  // the empty one is left out
  EXPECT_EQ(data->length(1), 17);
  EXPECT_EQ(data->length(3), 40000);
  EXPECT_EQ(data->loss_tokens(2), 0);
  EXPECT_EQ(data->vocabulary(), 1000);
  const auto all = tokens_of(*data, 3, 0, 40000);
  double sum = 0;
  for (std::int32_t token : all) {
    ASSERT_TRUE(token >= 0 && token < 1000);
    sum += token;
  }
  EXPECT_NEAR(sum / 40000, 499.5, 10);
  for (const auto& [begin, end] : {std::pair{0, 3}, {1, 6}, {7, 7}, {39997, 40000}, {5, 12}}) {
    EXPECT_EQ(tokens_of(*data, 3, begin, end),
              (std::vector<std::int32_t>(all.begin() + begin, all.begin() + end)));
  }
  EXPECT_EQ(targets_of(*data, 3, 39998, 40000), (std::vector<std::int32_t>{all[39999], -1}));
  EXPECT_EQ(tokens_of(*open_dataset(options), 3, 0, 40000), all);
  options.seed += 1;
  EXPECT_NE(tokens_of(*open_dataset(options), 3, 0, 40000), all);
}

TEST_F(Lengths, LongestAndWhetherTheyDiffer) {
  DataOptions options;
  options.source = DataSource::lengths;
  options.vocabulary = 1000;
  const auto of = [&](const char* lines) {
    options.lengths_file = write("lengths.txt", lines);
    return open_dataset(options);
  };
  EXPECT_TRUE(lengths_differ(*of("7\n7\n7\n8\n7")));
  EXPECT_EQ(longest_sample(*of("7\n7\n7\n8\n7\n8")), 3);
  EXPECT_FALSE(lengths_differ(*of("7\n7\n7")));
  EXPECT_FALSE(lengths_differ(*of("7")));
  EXPECT_EQ(longest_sample(*of("7")), 0);
}

TEST_F(Lengths, BadLinesAreNamed) {
  DataOptions options;
  options.source = DataSource::lengths;
  options.vocabulary = 10;
  for (const char* line : {"-4", "12 13", "1e3", "0x10", "12.5", "99999999999999999999",
                           "1099511627777", "length", "\x80\xff"}) {
    options.lengths_file = write("lengths.txt", fmt::format("1\n{}\n3\n", line));
    EXPECT_NE(error_of([&] { open_dataset(options); }).find("lengths.txt:2"), std::string::npos)
        << line;
  }
  options.lengths_file = write("lengths.txt", "# nothing\n");
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("no length"), std::string::npos);
  options.lengths_file = dir + "/absent";
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("absent"), std::string::npos);
  options.lengths_file = dir;
  EXPECT_NE(error_of([&] { open_dataset(options); }).find(dir), std::string::npos);
  options.lengths_file = write("lengths.txt", "3");
  options.vocabulary = 0;
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("model.vocabulary"), std::string::npos);
}

TEST_F(Distribution, SharesAndShapeOfBins) {
  DataOptions options;
  options.source = DataSource::distribution;
  options.vocabulary = 50;
  options.seed = test_seed();
  options.bin_tokens = {1024, 4096, 8192, 32768};
  options.bin_share = {9.0, 0.5, 0, 0.5};  // in proportion
  options.samples = 40000;
  const auto data = open_dataset(options);
  ASSERT_EQ(data->samples(), 40000);
  std::map<std::size_t, int> counts;
  double log_sum = 0;
  for (std::int64_t s = 0; s < 40000; ++s) {
    const std::int64_t tokens = data->length(s);
    ASSERT_GE(tokens, 1);
    ASSERT_LE(tokens, 32768);
    const auto bin = static_cast<std::size_t>(
        std::lower_bound(options.bin_tokens.begin(), options.bin_tokens.end(), tokens) -
        options.bin_tokens.begin());
    ++counts[bin];
    if (bin == 3) log_sum += std::log(static_cast<double>(tokens));
  }
  EXPECT_NEAR(counts[0], 36000, 400) << "seed " << test_seed();
  EXPECT_NEAR(counts[1], 2000, 300);
  EXPECT_EQ(counts[2], 0);
  EXPECT_NEAR(counts[3], 2000, 300);
  // Log-uniform: the mean logarithm is the middle of the bin's.
  EXPECT_NEAR(log_sum / counts[3], (std::log(8193.0) + std::log(32768.0)) / 2, 0.06)
      << "seed " << test_seed();
  // More samples continue the list, whatever follows.
  options.samples = 50;
  const auto few = open_dataset(options);
  for (std::int64_t s = 0; s < 50; ++s) EXPECT_EQ(few->length(s), data->length(s));
  options.samples = 40000;
  options.bin_tokens = {1, 2};
  options.bin_share = {0, 1};
  const auto narrow = open_dataset(options);
  for (std::int64_t s = 0; s < 1000; ++s) ASSERT_EQ(narrow->length(s), 2);
}

TEST_F(Distribution, MistakesAreRefused) {
  DataOptions good;
  good.source = DataSource::distribution;
  good.vocabulary = 50;
  good.bin_tokens = {10, 20};
  good.bin_share = {0.5, 0.5};
  good.samples = 5;
  EXPECT_EQ(open_dataset(good)->samples(), 5);
  const auto refused = [&](auto&& change, const std::string& text) {
    DataOptions bad = good;
    change(bad);
    EXPECT_NE(error_of([&] { open_dataset(bad); }).find(text), std::string::npos);
  };
  refused([](DataOptions& o) { o.bin_share = {1}; }, "one size");
  refused([](DataOptions& o) { o.bin_share = {0, 0}; }, "data.bin_share");
  refused([](DataOptions& o) { o.bin_share = {-0.5, 1.5}; }, "data.bin_share");
  refused([](DataOptions& o) { o.bin_share = {std::nan(""), 1}; }, "data.bin_share");
  refused([](DataOptions& o) { o.bin_tokens = {20, 10}; }, "ascend");
  refused([](DataOptions& o) { o.bin_tokens = {20, 20}; }, "ascend");
  refused([](DataOptions& o) { o.bin_tokens = {0, 20}; }, "data.min_tokens");
  refused([](DataOptions& o) { o.samples = 0; }, "data.samples");
}

TEST_F(Needle, TrainingAndHeldOutSamples) {
  DataOptions options;
  options.source = DataSource::needle;
  options.needle.lengths = {64, 128};
  options.needle.pairs = {4, 9};
  options.needle.questions = {4, 8};
  options.needle.keys = 12;
  options.needle.values = 5;
  options.needle.value_tokens = 2;
  options.vocabulary = 40;
  options.seed = test_seed();
  options.samples = 300;
  options.needle_held_out = 100;
  const auto data = open_dataset(options);
  ASSERT_EQ(data->samples(), 400);
  EXPECT_EQ(data->held_out(), 100);
  for (std::int64_t s = 0; s < 400; ++s) {
    const std::int64_t length = data->length(s);
    const auto targets = targets_of(*data, s, 0, length), tokens = tokens_of(*data, s, 0, length);
    ASSERT_EQ(data->loss_tokens(s), length - std::count(targets.begin(), targets.end(), -1));
    const auto questions = data->questions(s);
    ASSERT_EQ(questions.size(), length == 64 ? 4u : 8u);
    for (const NeedleQuestion& q : questions)
      for (std::int64_t t = q.first; t < q.last; ++t)
        ASSERT_EQ(targets[static_cast<std::size_t>(t)], tokens[static_cast<std::size_t>(t) + 1])
            << "seed " << test_seed();
  }
  // More training samples go on where the others end, and leave the held-out ones alone.
  options.samples = 350;
  const auto more = open_dataset(options);
  for (std::int64_t s = 0; s < 300; ++s)
    ASSERT_EQ(tokens_of(*more, s, 0, more->length(s)), tokens_of(*data, s, 0, data->length(s)));
  for (std::int64_t s = 0; s < 100; ++s)
    ASSERT_EQ(tokens_of(*more, 350 + s, 0, more->length(350 + s)),
              tokens_of(*data, 300 + s, 0, data->length(300 + s)));
  EXPECT_NE(more->fingerprint(), data->fingerprint());
  std::vector<std::int32_t> out(1);
  EXPECT_THROW(data->tokens(400, 0, 1, out), Error);
  options.max_tokens = 100;
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("never cut"), std::string::npos);
  options.max_tokens = *std::ranges::max_element(options.needle.lengths);
  EXPECT_EQ(open_dataset(options)->samples(), more->samples());
  options.max_tokens = 0;
  options.samples = 0;
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("data.samples"), std::string::npos);
  options.samples = 1;
  options.needle.lengths = {20};
  EXPECT_NE(error_of([&] { open_dataset(options); }).find("data.needle_pairs"), std::string::npos);
}

}  // namespace
}  // namespace ballast

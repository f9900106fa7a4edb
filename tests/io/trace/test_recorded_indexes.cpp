// Recorded indexes on disk: what was written is read, damage is named.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/base/error.hpp"
#include "io/trace/recorded_indexes.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {

using RecordedIndexFiles = TemporaryFolder;

IndexRow row_of(int layer, int head, std::int64_t tokens) {
  IndexRow row;
  row.step = 5;
  row.layer = layer;
  row.head = head;
  row.tokens = tokens;
  row.stretches = {{0, false, {0, 3}, {}}, {2, true, {0, 1}, {7, 90}}};
  return row;
}

TEST_F(RecordedIndexFiles, ReadsWhatRanksWrote) {
  const std::string at = dir + "/indexes";
  append_indexes(at, 1, std::vector<IndexRow>{row_of(1, 0, 640)});
  append_indexes(at, 0, std::vector<IndexRow>{row_of(0, 0, 640), row_of(0, 1, 640)});
  append_indexes(at, 0, std::vector<IndexRow>{row_of(0, 0, 1280)});
  std::string line;
  std::getline(std::ifstream(at + "/rank_00000.jsonl"), line);
  EXPECT_NE(line.find("\"step\":6,"), std::string::npos) << "counted from 1 as in logs: " << line;
  const RecordedIndexes read = read_indexes(at);
  EXPECT_EQ(read.layers(), 2);
  EXPECT_EQ(read.heads(), 2);
  EXPECT_EQ(read.at(0, 0, 2000).tokens, 1280);
  const RecordedHead& head = read.at(0, 1, 640);
  ASSERT_EQ(head.stretches.size(), 2u);
  EXPECT_FALSE(head.stretches[0].local);
  EXPECT_EQ(head.stretches[0].choice.slashes, (std::vector<std::int32_t>{0, 3}));
  EXPECT_EQ(head.stretches[1].first, 2);
  EXPECT_TRUE(head.stretches[1].local);
  EXPECT_EQ(head.stretches[1].choice.columns, (std::vector<std::int64_t>{7, 90}));
}

// Of a run that recorded while it learned the last step counts; of a branch that was given up none.
TEST_F(RecordedIndexFiles, TheLastRecordedStepIsReplayed) {
  const auto recorded = [&](int rank, std::int64_t step, int head, std::int32_t slash) {
    IndexRow row = row_of(0, head, 640);
    row.step = step;
    row.stretches = {{0, false, {0, slash}, {}}};
    append_indexes(dir, rank, std::vector<IndexRow>{row});
  };
  const auto slash = [&](int head) {
    return read_indexes(dir).at(0, head, 640).stretches.front().choice.slashes.back();
  };
  for (int rank = 0; rank < 2; ++rank) {
    recorded(rank, 0, rank, 1);
    recorded(rank, 30, rank, 2);
    recorded(rank, 60, rank, 3);
  }
  EXPECT_EQ(slash(0), 3);
  for (int rank = 0; rank < 2; ++rank) recorded(rank, 30, rank, 4);  // went back to step 20
  EXPECT_EQ(slash(0), 4);
  EXPECT_EQ(slash(1), 4);
  recorded(0, 60, 0, 5);  // rank 1 has not written that step yet
  EXPECT_EQ(slash(0), 4);
  recorded(1, 60, 1, 5);
  EXPECT_EQ(slash(0), 5);
}

TEST_F(RecordedIndexFiles, ATornLineIsNone) {
  append_indexes(dir, 0, std::vector<IndexRow>{row_of(0, 0, 64)});
  const std::string name = dir + "/rank_00000.jsonl";
  std::ofstream(name, std::ios::app) << R"({"step":9,"layer":0,"he)";
  EXPECT_EQ(read_indexes(dir).at(0, 0, 64).tokens, 64);
  append_indexes(dir, 0, std::vector<IndexRow>{row_of(0, 0, 128)});
  EXPECT_EQ(read_indexes(dir).at(0, 0, 128).tokens, 128);
  std::ifstream file(name);
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(file), {}, '\n'), 2);
}

TEST_F(RecordedIndexFiles, DamageIsNamedWithItsLine) {
  EXPECT_THROW(read_indexes(dir + "/none"), Error);
  EXPECT_THROW(read_indexes(dir), Error) << "no recording in it";
  for (const char* text :
       {"{", "[]", R"({"layer":0,"head":0,"tokens":0,"stretches":[[0,false,[0],[]]]})",
        R"({"layer":0,"head":0,"tokens":64,"stretches":[]})",
        R"({"layer":0,"head":0,"tokens":64,"stretches":[[1,false,[0],[]]]})",
        R"({"layer":0,"head":0,"tokens":64,"stretches":[[0,false,[1,0],[]]]})",
        R"({"layer":0,"head":0,"tokens":64,"stretches":[[0,false,[0],[-3]]]})",
        R"({"layer":-1,"head":0,"tokens":64,"stretches":[[0,false,[0],[]]]})"}) {
    append_indexes(dir, 0, std::vector<IndexRow>{row_of(0, 0, 64)});
    std::ofstream(dir + "/rank_00000.jsonl", std::ios::app) << text << '\n';
    try {
      read_indexes(dir);
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank_00000.jsonl:2:"), std::string::npos)
          << error.what();
    }
    std::ofstream(dir + "/rank_00000.jsonl", std::ios::trunc).flush();
  }
}

}  // namespace
}  // namespace ballast

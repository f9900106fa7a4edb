// Recorded indexes on disk: what was written is read, damage is named.
#include <gtest/gtest.h>

#include <fstream>

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

// What the folder of a run holds when training starts again: files that cannot be read or belong to
// another version stay, damage is told from them, and a branch that was left is no new start.
#include "tests/io/checkpoint/checkpoint_test.hpp"

namespace ballast {
namespace {
using namespace checkpoint_test;

void put(const std::string& path, std::uint64_t offset, const void* data, std::size_t count) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(count));
}

TEST_F(Checkpoint, FilesOfALaterFormatEndTheStartAndStay) {
  const auto table = small_table();
  write(table, 1);
  const std::string newest = write(table, 2);
  const auto set_version = [&](std::uint64_t version) {
    world.barrier();
    if (world.rank() == 0) put(newest, 16, &version, sizeof version);
    world.barrier();
  };
  set_version(kCheckpointVersion + 1);
  std::vector<std::string> warnings;
  const std::string message = error_of([&] { latest(warnings); });
  for (const char* part : {"format version 3", "step_00000002.h5", "stays as it is"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000001.h5", "step_00000002.h5"}));
  set_version(kCheckpointVersion);
  EXPECT_EQ(latest(warnings), newest);
}

TEST_F(Checkpoint, ALinkThatLeadsNowhereIsPassedOver) {
  const std::string good = write(small_table(), 1), link = dir + "/step_00000002.h5";
  if (world.rank() == 0) fs::create_symlink(dir + "/gone/step_00000002.h5", link);
  world.barrier();
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), good);
  EXPECT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(fs::is_symlink(link));
}

TEST_F(Checkpoint, AnElementThatBecameNotFiniteIsDamage) {
  const auto table = small_table();
  const std::string path = write(table, 3);
  if (world.rank() == 0) {
    const std::uint32_t nan = 0x7fc00000;
    put(path, CheckpointFile(path).datasets().front().offset, &nan, sizeof nan);
  }
  world.barrier();
  CheckpointShard shard = make_shard(table, 0, numel(table), DType::f32, false);
  const std::string message = error_of([&] { read_checkpoint(path, world, shard); });
  EXPECT_NE(message.find("(checksum)"), std::string::npos) << message;
}

TEST_F(Checkpoint, ABranchThatWasLeftIsNoNewStart) {
  const auto table = small_table();
  const std::string path = write(table, 3);
  if (world.rank() == 0) {
    fs::create_directory(dir + "/overtaken_1");
    fs::rename(path, dir + "/overtaken_1/step_00000003.h5");
  }
  world.barrier();
  std::vector<std::string> warnings;
  const std::string message = error_of([&] { latest(warnings); });
  EXPECT_NE(message.find("overtaken_1"), std::string::npos) << message;
}

TEST_F(Checkpoint, WhatIsWrittenAtOnceIsWaitedForWhole) {
  const auto table = small_table();
  const auto [begin, end] = cut(numel(table), world.rank(), world.size(), 0);
  CheckpointWriter writer(world, dir, 3, 0);
  const CheckpointOutcome outcome =
      writer.begin(make_shard(table, begin, end, DType::f32, true), some_state(5));
  EXPECT_TRUE(outcome.synchronous);
  EXPECT_GT(outcome.write_s, 0);
  EXPECT_GE(outcome.waited_s, outcome.write_s);
}

}  // namespace
}  // namespace ballast

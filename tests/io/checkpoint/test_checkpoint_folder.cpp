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

TEST_F(Checkpoint, AVersionThatNoProgramHasIsDamage) {
  const auto table = small_table();
  const std::string good = write(table, 1), newest = write(table, 2);
  const std::uint64_t version = kCheckpointVersion | std::uint64_t{1} << 34;  // a flipped bit
  if (world.rank() == 0) put(newest, 16, &version, sizeof version);
  world.barrier();
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), good);
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000001.h5", "step_00000002.h5.damaged"}));
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
  world.barrier();
  if (world.rank() == 0) fs::remove(dir + "/overtaken_1/step_00000003.h5");
  world.barrier();
  EXPECT_EQ(latest(warnings), "") << "an empty folder is of no branch";
}

TEST_F(Checkpoint, AFileThatGetsItsOwnNameBackLeavesNoBranch) {
  const std::string path = write(small_table(), 4);
  if (world.rank() == 0) {
    const std::string named = dir + "/step_00000009.h5";
    fs::rename(path, named);
    EXPECT_EQ(take_up(dir, named, 4).left, "");
    EXPECT_EQ(names(), std::vector<std::string>{"step_00000004.h5"});
  }
}

TEST_F(Checkpoint, ALinkThatAKilledStartLeftGoes) {
  if (world.rank() == 0) {
    fs::create_symlink(dir + "/elsewhere.h5", dir + "/step_00000004.h5.new");
    std::ofstream(dir + "/notes.new") << "not ours";
  }
  world.barrier();
  write(small_table(), 5);
  EXPECT_EQ(names(), (std::vector<std::string>{"notes.new", "step_00000005.h5"}));
}

/// An attempt of step 5 in the checkpoint folder of a run, and the folder of another run, with an
/// attempt of step 5 of its own, that takes its place.
class AttemptInFlight : public Checkpoint {
 protected:
  void SetUp() override {
    Checkpoint::SetUp();
    run = dir + "/run";
    other = dir + "/other";
    if (world.rank() == 0) {
      fs::create_directory(run);
      fs::create_directory(other);
      for (const std::string& name : theirs) std::ofstream(other + "/" + name) << "of " << name;
    }
    world.barrier();
  }
  CheckpointOutcome begin(CheckpointWriter& writer, const std::vector<Parameter>& table) {
    const auto [first, last] = cut(numel(table), world.rank(), world.size(), 0);
    return writer.begin(make_shard(table, first, last, DType::f32, true), some_state(5));
  }
  void swap() {
    world.barrier();
    if (world.rank() == 0) {
      fs::rename(run, kept());
      fs::rename(other, run);
    }
    world.barrier();
  }
  void expect_theirs() {
    world.barrier();
    EXPECT_EQ(names(run), theirs);
    for (const std::string& name : theirs) {
      std::ifstream file(run + "/" + name);
      EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "of " + name);
    }
    world.barrier();
  }
  std::string kept() const { return dir + "/kept"; }
  const std::vector<std::string> theirs = {"step_00000001.h5", "step_00000002.h5",
                                           "step_00000003.h5", "step_00000004.h5",
                                           "step_00000005.h5.partial"};
  std::string run, other;
};

TEST_F(AttemptInFlight, GivenUpItRemovesItsOwnFileAlone) {
  {
    CheckpointWriter writer(world, run, 2, std::int64_t{1} << 30);
    EXPECT_EQ(begin(writer, small_table()).kind, CheckpointOutcome::Kind::none);
    swap();
  }
  expect_theirs();
  EXPECT_EQ(names(kept()), std::vector<std::string>{});
}

TEST_F(AttemptInFlight, WaitedForItFailsAndLeavesTheOtherRunAlone) {
  CheckpointWriter writer(world, run, 2, std::int64_t{1} << 30);
  begin(writer, small_table());
  swap();
  const CheckpointOutcome outcome = writer.finish();
  EXPECT_EQ(outcome.kind, CheckpointOutcome::Kind::failed);
  EXPECT_NE(outcome.problem.find("step_00000005.h5.partial"), std::string::npos) << outcome.problem;
  expect_theirs();
  EXPECT_EQ(names(kept()), std::vector<std::string>{});
}

TEST_F(AttemptInFlight, CheckedItGetsItsNameInItsOwnFolder) {
  // Long enough to read back that the folder can go meanwhile.
  const std::vector<Parameter> table = {parameter("large", {1 << 21})};
  const auto sealed = [&] {
    char magic[8] = {};
    if (world.rank() == 0)
      std::ifstream(run + "/step_00000005.h5.partial", std::ios::binary)
          .read(magic, sizeof magic - 1);
    return world.all_reduce(std::int64_t{magic == std::string("Ballast")}, Reduction::max) != 0;
  };
  for (int attempt = 0; attempt < 50; ++attempt) {
    CheckpointWriter writer(world, run, 2, std::int64_t{1} << 30);
    CheckpointOutcome outcome = begin(writer, table);
    while (writer.in_flight() && !sealed()) outcome = writer.poll();
    if (!writer.in_flight()) continue;  // it was read back before anybody looked
    swap();
    outcome = writer.finish();
    EXPECT_EQ(outcome.kind, CheckpointOutcome::Kind::failed);
    EXPECT_NE(outcome.problem.find("its folder was moved"), std::string::npos) << outcome.problem;
    expect_theirs();
    EXPECT_EQ(names(kept()), std::vector<std::string>{"step_00000005.h5"});
    verify_checkpoint(kept() + "/step_00000005.h5", world);
    return;
  }
  ADD_FAILURE() << "no attempt was in flight while it was read back";
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

// Checkpoints: any sharding reads what another wrote, damaged files are refused by name, failed
// writes leave the last good file alone.
#include <bit>

#include "tests/io/checkpoint/checkpoint_test.hpp"

namespace ballast {
namespace {

using namespace checkpoint_test;

TEST_F(Checkpoint, EveryRangeIsCheckedByOneRank) {
  std::vector<CheckpointDataset> datasets;
  for (std::int64_t i = 0; i < 9; ++i)
    datasets.push_back({"p" + std::to_string(i),
                        "master",
                        {1 + i * i * 300000},
                        i % 2 ? DType::f32 : DType::f64,
                        0});
  const auto ranges = checksum_ranges(datasets);
  for (int size : {1, 2, 3, 8, 200}) {
    std::size_t next = 0;
    for (int rank = 0; rank < size; ++rank) {
      const auto [first, last] = ranges_of_rank(datasets, ranges, rank, size);
      ASSERT_LE(first, last);
      if (first == last) continue;
      ASSERT_EQ(first, next) << "rank " << rank << " of " << size;
      next = last;
    }
    EXPECT_EQ(next, ranges.size()) << size;
  }
}

TEST_F(Checkpoint, AnyShardingReadsWhatAnotherWrote) {
  const auto table = small_table();
  for (const DType type : {DType::f32, DType::f64}) {
    for (int writer = type == DType::f32 ? 0 : 2; writer < 4; ++writer) {
      const std::string path = write(table, 10 * writer, writer, type);
      for (int reader = type == DType::f32 ? 0 : 3; reader < 4; ++reader) {
        const auto [begin, end] = cut(numel(table), world.rank(), world.size(), reader);
        CheckpointShard shard = make_shard(table, begin, end, type, false);
        const CheckpointState state = read_checkpoint(path, world, shard);
        expect_state(state, some_state(10 * writer));
        ASSERT_EQ(mismatches(shard), 0)
            << "written " << writer << ", read " << reader << ", seed " << test_seed();
      }
      // Replicated readers: every rank reads all of it.
      CheckpointShard whole = make_shard(table, 0, numel(table), type, false);
      read_checkpoint(path, world, whole);
      ASSERT_EQ(mismatches(whole), 0);
    }
  }
}

TEST_F(Checkpoint, FilesDoNotDependOnTheSharding) {
  const auto table = small_table();
  std::string first;
  for (int style = 0; style < 4; ++style) {
    if (style == 3) ::usleep(1100000);  // nor on the time
    std::ifstream in(write(table, 1, style), std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), {});
    if (style == 0) first = bytes;
    EXPECT_TRUE(bytes == first) << "sharding " << style;
    world.barrier();
  }
}

TEST_F(Checkpoint, SlicesOfBucketsAreAShardingLikeOthers) {
  std::vector<Parameter> table = small_table();
  table.push_back(parameter("large", {1100, 1000}));  // more than one checksum range
  table.push_back(parameter("last", {5}));
  const std::int64_t total = numel(table);
  const std::string whole = write(table, 1, 0);
  const auto bytes_of = [](const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(in)), {});
  };
  const std::string expected = bytes_of(whole);
  world.barrier();
  for (std::uint64_t salt = 0; salt < 3; ++salt) {
    const std::vector<ShardRun> mine = slices_of_buckets(table, world.rank(), world.size(), salt),
                                read =
                                    slices_of_buckets(table, world.rank(), world.size(), salt + 10);
    const std::string path =
        write_checkpoint(dir, world, make_shard(table, mine, DType::f32, true), some_state(1), 9);
    EXPECT_TRUE(bytes_of(path) == expected) << "seed " << test_seed() << ", " << salt;
    CheckpointShard back = make_shard(table, read, DType::f32, false);
    read_checkpoint(path, world, back);
    EXPECT_EQ(mismatches(back), 0) << "seed " << test_seed() << ", " << salt;
    for (std::size_t i = 1; i < read.size(); ++i)
      for (std::int64_t at = read[i - 1].at + read[i - 1].count(); at < read[i].at; ++at)
        ASSERT_EQ(back.fields["moment1"].data<float>()[at], -7) << "padding stays as it is";
    CheckpointShard replicated = make_shard(table, 0, total, DType::f32, false);
    read_checkpoint(path, world, replicated);
    EXPECT_EQ(mismatches(replicated), 0);
    world.barrier();
  }
}

TEST_F(Checkpoint, SpansManyChecksumRanges) {
  const std::vector<Parameter> table = {parameter("a", {1 << 10, 1500}), parameter("b", {3}),
                                        parameter("c", {1100000})};
  const std::string path = write(table, 5, 2);
  const auto [begin, end] = cut(numel(table), world.rank(), world.size(), 3);
  CheckpointShard shard = make_shard(table, begin, end, DType::f32, false);
  read_checkpoint(path, world, shard);
  EXPECT_EQ(mismatches(shard), 0);
  // Damage in the second range of one dataset is found and placed.
  if (world.rank() == 0) {
    hdf5::Handle file = hdf5::open_file(path, true);
    const hdf5::Handle dataset = hdf5::open_dataset(file, "/parameters/c/moment1");
    const haddr_t offset = H5Dget_offset(dataset);
    std::fstream raw(path, std::ios::binary | std::ios::in | std::ios::out);
    raw.seekp(static_cast<std::streamoff>(offset) + 4 * 1099999);
    raw.put('\x7f');
  }
  world.barrier();
  CheckpointShard again = make_shard(table, begin, end, DType::f32, false);
  const std::string message = error_of([&] { read_checkpoint(path, world, again); });
  EXPECT_NE(message.find(path), std::string::npos) << message;
  EXPECT_NE(message.find("/parameters/c/moment1"), std::string::npos) << message;
  EXPECT_NE(message.find("[1048576, 1100000)"), std::string::npos) << message;
}

TEST_F(Checkpoint, StagesWithTheirOwnTables) {
  // Two pipeline stages: the second one's table ends with the tied copy of the embedding, which is
  // stored once.
  if (world.size() < 2) GTEST_SKIP() << "needs 2 ranks";
  std::vector<Parameter> first = {parameter("embed", {11, 3}), parameter("layer0", {7, 5})},
                         second = {parameter("layer1", {7, 5}), parameter("embed", {11, 3})};
  second.back().tied_copy = true;
  const int stage = world.rank() % 2, members = (world.size() + 1 - stage) / 2,
            member = world.rank() / 2;
  const auto& table = stage == 0 ? first : second;
  const auto [begin, end] = cut(numel(table), member, members, 0);
  CheckpointShard shard =
      make_shard(table, begin, end, DType::f32, true, static_cast<std::uint64_t>(stage));
  const std::string path = write_checkpoint(dir, world, shard, some_state(2), 1);
  CheckpointShard back = make_shard(table, 0, numel(table), DType::f32, false);
  read_checkpoint(path, world, back);
  for (std::int64_t i = 0; i < numel(table); ++i) {
    const bool tied = stage == 1 && i >= 35;
    const float expected =
        static_cast<float>(tied ? value_of("master", i - 35, 0)
                                : value_of("master", i, static_cast<std::uint64_t>(stage)));
    ASSERT_EQ(back.fields["master"].data<float>()[i], expected)
        << "stage " << stage << " element " << i;
  }
}

TEST_F(Checkpoint, BadShardsAreRefusedOnEveryRank) {
  const auto table = small_table();
  const std::int64_t total = numel(table);
  const int rank = world.rank(), size = world.size();
  auto shard_of = [&](std::int64_t begin, std::int64_t end) {
    return make_shard(table, begin, end, DType::f32, true);
  };
  const auto refused = [&](const CheckpointShard& shard) {
    return error_of([&] { write_checkpoint(dir, world, shard, some_state(1), 1); });
  };
  EXPECT_NE(refused(rank == 0 ? shard_of(0, total - 1) : shard_of(0, 0)).find("offered by no rank"),
            std::string::npos);
  EXPECT_NE(refused(shard_of(0, 0)).find("every rank's shard is empty"), std::string::npos);
  if (size > 1) {
    EXPECT_NE(refused(shard_of(0, total)).find("two ranks"), std::string::npos);
  }
  CheckpointShard wrong = shard_of(rank == 0 ? 0 : total, total);
  if (rank == 0) wrong.fields["moment1"] = Tensor::zeros({3}, DType::f32);
  EXPECT_NE(refused(wrong).find("moment1"), std::string::npos);
  EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoint, AnotherModelOrPrecisionIsRefused) {
  const auto table = small_table();
  const std::string path = write(table, 1);
  const auto read_with = [&](std::vector<Parameter> other, DType type) {
    CheckpointShard shard = make_shard(other, 0, numel(other), type, false);
    return error_of([&] { read_checkpoint(path, world, shard); });
  };
  EXPECT_NE(read_with(table, DType::f64).find("holds f32"), std::string::npos);
  auto other = table;
  other[1].shape = {31, 23};
  EXPECT_NE(read_with(other, DType::f32).find("q_proj.weight"), std::string::npos);
  other = table;
  other.push_back(parameter("more", {2}));
  EXPECT_NE(read_with(other, DType::f32).find("/parameters/more/master"), std::string::npos);
  other = table;
  other.pop_back();
  EXPECT_NE(read_with(other, DType::f32).find("model.norm.weight"), std::string::npos);
}

TEST_F(Checkpoint, MomentsAreReadAsFp32OrBf16) {
  const auto table = small_table();
  const std::int64_t total = numel(table);
  const CheckpointShard wide = make_shard(table, 0, total, DType::f32, true);
  const auto nearest = [](float value) {  // by comparing distances to both neighbours
    const std::uint32_t low = std::bit_cast<std::uint32_t>(value) & 0xFFFF0000u;
    const float a = std::bit_cast<float>(low), b = std::bit_cast<float>(low + 0x10000u);
    return std::fabs(value - a) <= std::fabs(b - value) ? a : b;
  };
  const auto with_bf16 = [&](bool filled) {
    CheckpointShard shard = make_shard(table, 0, total, DType::f32, filled);
    for (const char* field : {"moment1", "moment2"})
      shard.fields[field] = Tensor::zeros({total}, DType::bf16);
    return shard;
  };
  CheckpointShard narrow = with_bf16(false);
  read_checkpoint(write(table, 1), world, narrow);
  CheckpointShard held = narrow;  // what a file in bf16 is made of
  if (world.rank() != 0) held.runs.clear();
  const std::string path = write_checkpoint(dir, world, held, some_state(2), 2);
  CheckpointShard again = make_shard(table, 0, total, DType::f32, false), same = with_bf16(false);
  read_checkpoint(path, world, again);
  read_checkpoint(path, world, same);
  for (const char* field : {"moment1", "moment2"})
    for (std::int64_t i = 0; i < total; ++i) {
      const float expected = nearest(wide.fields.at(field).data<float>()[i]);
      const std::uint16_t bits = narrow.fields.at(field).data<bf16>()[i].bits;
      ASSERT_EQ(std::bit_cast<float>(std::uint32_t{bits} << 16), expected) << field << " " << i;
      ASSERT_EQ(again.fields.at(field).data<float>()[i], expected) << field << " " << i;
      ASSERT_EQ(same.fields.at(field).data<bf16>()[i].bits, bits) << field << " " << i;
    }
  CheckpointShard other = make_shard(table, 0, total, DType::f64, false);
  const std::string said = error_of([&] { read_checkpoint(path, world, other); });
  EXPECT_NE(said.find("holds f32"), std::string::npos) << "weights do not change: " << said;
  other.fields["master"] = Tensor::zeros({total}, DType::f32);
  read_checkpoint(path, world, other);
  for (std::int64_t i = 0; i < total; ++i)
    ASSERT_EQ(other.fields.at("moment1").data<double>()[i],
              again.fields.at("moment1").data<float>()[i]);
}

TEST_F(Checkpoint, FieldsThatTheFirstParametersLack) {
  const auto table = small_table();
  const std::int64_t total = numel(table), first = table[0].numel() + table[1].numel();
  const auto lacking = [&](std::int64_t begin, std::int64_t end, bool filled) {
    CheckpointShard shard = make_shard(table, begin, end, DType::f64, filled);
    shard.field_begin["moment2"] = first;
    const std::int64_t from = std::min(std::max<std::int64_t>(0, first - begin), end - begin);
    shard.fields["moment2"] = shard.fields["moment2"].rows(from, end - begin).clone();
    return shard;
  };
  for (int style = 0; style < 4; ++style) {
    const auto [begin, end] = cut(total, world.rank(), world.size(), style);
    const std::string path =
        write_checkpoint(dir, world, lacking(begin, end, true), some_state(1 + style), 9);
    world.barrier();
    const auto [a, b] = cut(total, world.rank(), world.size(), (style + 1) % 4);
    CheckpointShard back = lacking(a, b, false);
    expect_state(read_checkpoint(path, world, back), some_state(1 + style));
    const std::int64_t from = std::max(a, first);
    for (std::int64_t i = from; i < b; ++i)
      ASSERT_EQ(back.fields["moment2"].data<double>()[i - from], value_of("moment2", i)) << i;
    EXPECT_EQ(CheckpointFile(path).datasets().size(), 3 * table.size() - 2);
    CheckpointShard whole = make_shard(table, 0, total, DType::f64, false);
    EXPECT_NE(error_of([&] { read_checkpoint(path, world, whole); }).find("optimizer.kind"),
              std::string::npos);
  }
}

TEST_F(Checkpoint, KeepsTheNewestAndRemovesLeftovers) {
  const auto table = small_table();
  if (world.rank() == 0) {
    std::ofstream(dir + "/step_00000007.h5.partial") << "killed";
    std::ofstream(dir + "/notes.partial") << "not ours";
    std::ofstream(dir + "/step_7.h5") << "not ours";
  }
  world.barrier();
  for (std::int64_t step : {1, 2, 3, 100000000}) write(table, step, 0, DType::f32, 2);
  world.barrier();
  EXPECT_EQ(names(), (std::vector<std::string>{"notes.partial", "step_00000003.h5",
                                               "step_100000000.h5", "step_7.h5"}));
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), dir + "/step_100000000.h5");
  EXPECT_TRUE(warnings.empty());
  world.barrier();
  // A run that went back leaves later steps where they do not count, and they stay.
  if (world.rank() == 0) {
    const std::string file = dir + "/step_00000003.h5";
    EXPECT_EQ(take_up(dir, file, 3).left, dir + "/overtaken_1");
    EXPECT_EQ(take_up(dir, file, 3).left, "");
  }
  world.barrier();
  write(table, 50, 0, DType::f32, 1);
  world.barrier();
  EXPECT_EQ(names(), (std::vector<std::string>{"notes.partial", "overtaken_1", "step_00000003.h5",
                                               "step_00000050.h5", "step_7.h5"}));
  EXPECT_TRUE(fs::exists(dir + "/overtaken_1/step_100000000.h5"));
  EXPECT_EQ(latest(warnings), dir + "/step_00000050.h5");
  CheckpointState state;
  CheckpointShard shard = make_shard(table, 0, 0, DType::f32, false);
  EXPECT_EQ(read_latest(dir + "/absent", world, shard, state, warnings, true), "");
}

TEST_F(Checkpoint, DamagedFilesAreSkippedByName) {
  const auto table = small_table();
  const std::string good = write(table, 1), bad = write(table, 2);
  if (world.rank() == 0) fs::resize_file(bad, fs::file_size(bad) - 1);
  world.barrier();
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), good);
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_NE(warnings[0].find(bad), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[1].find(bad + ".damaged"), std::string::npos) << warnings[1];
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000001.h5", "step_00000002.h5.damaged"}));
  // Nothing sound is left: that is no new start, now and when asked again.
  world.barrier();
  if (world.rank() == 0) fs::resize_file(good, 100);
  world.barrier();
  for (int i = 0; i < 2; ++i) {
    warnings.clear();
    EXPECT_NE(error_of([&] { latest(warnings); }).find("no checkpoint is sound"),
              std::string::npos);
  }
}

TEST_F(Checkpoint, RenamedFilesAreSkippedByName) {
  const auto table = small_table();
  const std::string good = write(table, 2), wrong = dir + "/step_00000009.h5";
  const std::string moved = write(table, 4);
  if (world.rank() == 0) fs::rename(moved, wrong);
  world.barrier();
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), good);
  ASSERT_EQ(warnings.size(), 1u);
  for (const std::string& part : {wrong, std::string("step 9"), std::string("says 4")})
    EXPECT_NE(warnings[0].find(part), std::string::npos) << warnings[0];
  // Nothing is wrong with what it holds.
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000002.h5", "step_00000009.h5"}));
  CheckpointShard shard = make_shard(table, 0, numel(table), DType::f32, false);
  expect_state(read_checkpoint(wrong, world, shard), some_state(4));
  EXPECT_EQ(mismatches(shard), 0);
  world.barrier();
  if (world.rank() == 0) fs::remove(good);
  world.barrier();
  warnings.clear();
  const std::string message = error_of([&] { latest(warnings); });
  EXPECT_NE(message.find("-r FILE continues from it"), std::string::npos) << message;
}

TEST_F(Checkpoint, WhatIsContinuedIsTheNewestUnderAnyName) {
  const auto table = small_table();
  struct Case {
    std::string name;               ///< of the file that holds step 4
    std::vector<std::string> left;  ///< in the folder afterwards
    std::vector<std::string> overtaken;
  };
  const std::string two = "step_00000002.h5", four = "step_00000004.h5", six = "step_00000006.h5";
  int run = 0;
  for (const Case& c :
       {Case{four, {two, four}, {six}}, Case{"step_00000009.h5", {two, four}, {six}},
        Case{"step_00000003.h5", {two, four}, {six}},
        Case{"mine.h5", {"mine.h5", two, four}, {six}}, Case{"../theirs.h5", {four}, {two, six}}}) {
    const std::string folder = fmt::format("{}/run_{}", dir, ++run);
    if (world.rank() == 0) fs::create_directory(folder);
    world.barrier();
    for (std::int64_t step : {4, 2, 6}) {
      const std::string path = write(table, step);
      if (world.rank() == 0)
        fs::rename(path, folder + "/" + (step == 4 ? c.name : checkpoint_name(step)));
      world.barrier();
    }
    if (world.rank() == 0) {
      const TakenUp taken = take_up(folder, folder + "/" + c.name, 4);
      EXPECT_EQ(taken.left, folder + "/overtaken_1") << c.name;
      EXPECT_EQ(taken.unlinked, "") << c.name;
      EXPECT_EQ(names(folder + "/overtaken_1"), c.overtaken) << c.name;
      fs::remove_all(taken.left);
      EXPECT_EQ(names(folder), c.left) << c.name;
    }
    world.barrier();
    CheckpointState state;
    CheckpointShard shard = make_shard(table, 0, numel(table), DType::f32, false);
    std::vector<std::string> warnings;
    EXPECT_EQ(read_latest(folder, world, shard, state, warnings, false), folder + "/" + four);
    EXPECT_EQ(state.step, 4) << c.name;
    EXPECT_TRUE(warnings.empty()) << c.name;
  }
}

TEST_F(Checkpoint, FiftyDamagedFilesAreRefused) {
  const auto table = small_table();
  const std::string good = write(table, 1), bad = dir + "/step_00000002.h5";
  std::mt19937_64 random(test_seed());
  const auto bytes = static_cast<std::int64_t>(fs::file_size(good));
  for (int i = 0; i < 50; ++i) {
    const int kind = i % 5;
    const auto place = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bytes));
    const auto more = random();
    if (world.rank() == 0) {
      fs::copy_file(good, bad, fs::copy_options::overwrite_existing);
      std::fstream file(bad, std::ios::binary | std::ios::in | std::ios::out);
      file.seekg(place);
      const char old = static_cast<char>(file.get());
      file.seekp(place);
      if (kind == 0) file.put(static_cast<char>(old ^ (1 << (more % 8))));      // one bit anywhere
      if (kind == 1) fs::resize_file(bad, static_cast<std::uintmax_t>(place));  // truncated
      if (kind == 2) {  // a page of noise, at least one byte of it different
        file.put(static_cast<char>(~old));
        for (int k = 1; k < 512 && place + k < bytes; ++k)
          file.put(static_cast<char>(more >> (k % 56)));
      }
      if (kind == 3) {  // one bit in the header
        file.seekg(static_cast<std::streamoff>(more % 700));
        const char byte = static_cast<char>(file.get());
        file.seekp(static_cast<std::streamoff>(more % 700));
        file.put(static_cast<char>(byte ^ 4));
      }
      if (kind == 4) {  // longer than written
        file.seekp(0, std::ios::end);
        file.put('\0');
      }
    }
    world.barrier();
    CheckpointShard shard = make_shard(table, 0, numel(table), DType::f32, false);
    const std::string message = error_of([&] { read_checkpoint(bad, world, shard); });
    EXPECT_NE(message.find(bad), std::string::npos)
        << message << "; damage " << kind << " at " << place << ", seed " << test_seed();
    world.barrier();
  }
  CheckpointShard shard = make_shard(table, 0, 0, DType::f32, false);
  EXPECT_NE(error_of([&] { read_checkpoint(dir + "/absent.h5", world, shard); }).find("absent.h5"),
            std::string::npos);
}

TEST_F(Checkpoint, EveryByteCounts) {
  // The smallest file, each of its bytes altered in turn would take too long: a random sample of
  // them, without HDF5 in the way.
  if (world.size() > 1) GTEST_SKIP() << "one rank is enough";
  const std::vector<Parameter> table = {parameter("w", {5, 3})};
  CheckpointState state;
  state.step = 1;
  const std::string path =
      write_checkpoint(dir, world, make_shard(table, 0, 15, DType::f32, true), state, 1);
  std::ifstream in(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), {});
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 400; ++i) {
    const std::size_t place = random() % bytes.size();
    std::string altered = bytes;
    altered[place] = static_cast<char>(altered[place] ^ (1 << (random() % 8)));
    std::ofstream(path, std::ios::binary) << altered;
    CheckpointShard shard = make_shard(table, 0, 15, DType::f32, false);
    EXPECT_THROW(read_checkpoint(path, world, shard), Error)
        << "byte " << place << ", seed " << test_seed();
  }
}

TEST_F(Checkpoint, AFullDiskLeavesTheLastFile) {
  const auto table = small_table();
  const std::string good = write(table, 1);
  const auto before = names();
  // A limit on file sizes fails as a full disk does: writes return an error.  Once below the whole
  // file, once below its first bytes.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  for (rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{4096}, rlim_t{100000}}) {
    rlimit tight = old;
    tight.rlim_cur = limit;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
    const std::string message = error_of([&] { write(table, 2); });
    setrlimit(RLIMIT_FSIZE, &old);
    EXPECT_NE(message.find("step_00000002.h5"), std::string::npos) << message;
    world.barrier();
    EXPECT_EQ(names(), before);
    world.barrier();
  }
  std::vector<std::string> warnings;
  EXPECT_EQ(latest(warnings), good);
  // And the next write, with room again, works.
  EXPECT_EQ(write(table, 2), dir + "/step_00000002.h5");
}

TEST_F(Checkpoint, ADirectoryThatCannotBeMadeIsNamed) {
  const auto table = small_table();
  if (world.rank() == 0) std::ofstream(dir + "/file") << "x";
  world.barrier();
  const auto [begin, end] = cut(numel(table), world.rank(), world.size(), 0);
  const CheckpointShard shard = make_shard(table, begin, end, DType::f32, true);
  EXPECT_NE(error_of([&] {
              write_checkpoint(dir + "/file", world, shard, some_state(1), 1);
            }).find(dir + "/file"),
            std::string::npos);
}

TEST_F(Checkpoint, ASnapshotIsWrittenWhileTheStateGoesOn) {
  const auto table = small_table();
  const auto [begin, end] = cut(numel(table), world.rank(), world.size(), 2);
  CheckpointWriter writer(world, dir, 2, std::int64_t{1} << 30);
  for (std::int64_t step = 1; step <= 3; ++step) {
    const auto salt = static_cast<std::uint64_t>(step);
    CheckpointShard shard = make_shard(table, begin, end, DType::f32, true, salt);
    if (step == 1) writer.prepare(shard);
    CheckpointOutcome outcome = writer.begin(shard, some_state(step));
    EXPECT_EQ(outcome.kind, CheckpointOutcome::Kind::none) << outcome.problem;
    EXPECT_TRUE(writer.in_flight());
    writer.release();
    for (auto& [field, tensor] : shard.fields) tensor.zero();  // the next step's update
    if (step == 3) {
      outcome = writer.finish();
    } else {
      while (outcome.kind == CheckpointOutcome::Kind::none) outcome = writer.poll();
    }
    ASSERT_EQ(outcome.kind, CheckpointOutcome::Kind::written) << outcome.problem;
    EXPECT_FALSE(outcome.synchronous);
    EXPECT_FALSE(writer.in_flight());
    CheckpointShard back = make_shard(table, 0, numel(table), DType::f32, false);
    expect_state(read_checkpoint(outcome.path, world, back), some_state(step));
    EXPECT_EQ(mismatches(back, salt), 0) << "step " << step << ", seed " << test_seed();
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000002.h5", "step_00000003.h5"}));
}

TEST_F(Checkpoint, AStateThatIsNotFiniteIsNeitherWrittenNorRead) {
  const auto table = small_table();
  const auto [begin, end] = cut(numel(table), world.rank(), world.size(), 0);
  CheckpointShard shard = make_shard(table, begin, end, DType::f32, true);
  const bool last = world.rank() == world.size() - 1;
  if (last) shard.fields["moment1"].data<float>()[end - begin - 1] = HUGE_VALF;
  const std::string message =
      error_of([&] { write_checkpoint(dir, world, shard, some_state(1), 2); });
  EXPECT_NE(message.find("not finite"), std::string::npos) << message;
  EXPECT_TRUE(names().empty());
  world.barrier();
  // Nothing stops another program from writing one: a negative second moment stands for it.
  if (last) {
    shard.fields["moment1"].data<float>()[end - begin - 1] = 0;
    shard.fields["moment2"].data<float>()[0] = -1;
  }
  const std::string path = write_checkpoint(dir, world, shard, some_state(1), 2);
  CheckpointShard back = make_shard(table, begin, end, DType::f32, false);
  EXPECT_NE(error_of([&] { read_checkpoint(path, world, back); }).find("second moments below zero"),
            std::string::npos);
}

TEST_F(Checkpoint, DatasetsBeginAtPagesAndHdf5ReadsThem) {
  const auto table = small_table();
  const std::string path = write(table, 1, 2);
  const CheckpointFile file(path);
  EXPECT_EQ(file.version(), kCheckpointVersion);
  const auto handle = hdf5::open_file(path);
  std::int64_t flat = 0;
  for (const Parameter& p : table) {
    for (const std::string& field : kFields) {
      const CheckpointDataset* d = find_dataset(file.datasets(), p.name, field);
      ASSERT_NE(d, nullptr);
      EXPECT_EQ(d->offset % kCheckpointPage, 0u) << d->path();
      std::vector<float> values(static_cast<std::size_t>(p.numel()));
      hdf5::check(H5Dread(hdf5::open_dataset(handle, d->path()), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL,
                          H5P_DEFAULT, values.data()),
                  "reading");
      for (std::int64_t i = 0; i < p.numel(); ++i)
        ASSERT_EQ(values[static_cast<std::size_t>(i)],
                  static_cast<float>(value_of(field, flat + i)));
    }
    flat += p.numel();
  }
}

}  // namespace
}  // namespace ballast

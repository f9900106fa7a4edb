// What the tests of checkpoints share: small tables with values made from names, shards cut in
// several ways, and the fixture that writes and reads them.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/base/random.hpp"
#include "io/checkpoint/checkpoint.hpp"
#include "io/checkpoint/checkpoint_file.hpp"
#include "io/checkpoint/checkpoint_folder.hpp"
#include "io/checkpoint/checkpoint_layout.hpp"
#include "io/checkpoint/checkpoint_writer.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "parallel/comm/waits.hpp"
#include "tests/seed.hpp"

namespace ballast::checkpoint_test {

namespace fs = std::filesystem;

inline Parameter parameter(const std::string& name, Shape shape) {
  Parameter p;
  p.name = name;
  p.shape = std::move(shape);
  return p;
}

/// Ranks 1 to 3, sizes that divide nothing, and one dataset of more than one checksum range.
inline std::vector<Parameter> small_table() {
  return {parameter("model.embed_tokens.weight", {37, 19}),
          parameter("model.layers.0.self_attn.q_proj.weight", {23, 31}),
          parameter("model.layers.0.self_attn.q_proj.bias", {23}),
          parameter("odd.cube", {3, 5, 7}),
          parameter("one", {1}),
          parameter("model.norm.weight", {41})};
}

inline std::int64_t numel(const std::vector<Parameter>& table) {
  std::int64_t total = 0;
  for (const Parameter& p : table) total += p.numel();
  return total;
}

/// Value of flat element i of a field: any shard of any rank can tell what belongs there.
inline double value_of(const std::string& field, std::int64_t i, std::uint64_t salt = 0) {
  const double u =
      random_uniform(test_seed() + salt, stream_of(field.c_str()), static_cast<std::uint64_t>(i));
  return field == "moment2" ? u : u - 0.5;
}

const std::vector<std::string> kFields = {"master", "moment1", "moment2"};

/// A shard of these runs; places between them hold -7, which no file should show.
inline CheckpointShard make_shard(const std::vector<Parameter>& table, std::vector<ShardRun> runs,
                                  DType type, bool filled, std::uint64_t salt = 0) {
  CheckpointShard shard;
  shard.table = &table;
  shard.runs = std::move(runs);
  for (const std::string& field : kFields) {
    Tensor t = Tensor::zeros({shard.places()}, type);
    dispatch_float(type, [&](auto zero) {
      using T = decltype(zero);
      std::fill_n(t.data<T>(), t.numel(), static_cast<T>(-7));
      for (const ShardRun& run : shard.runs)
        for (std::int64_t i = run.begin; i < run.end; ++i)
          t.data<T>()[run.at + i - run.begin] =
              filled ? static_cast<T>(value_of(field, i, salt)) : T{0};
    });
    shard.fields[field] = t;
  }
  return shard;
}
inline CheckpointShard make_shard(const std::vector<Parameter>& table, std::int64_t begin,
                                  std::int64_t end, DType type, bool filled,
                                  std::uint64_t salt = 0) {
  const std::vector<ShardRun> runs(begin < end ? 1 : 0, ShardRun{begin, end, 0});
  return make_shard(table, runs, type, filled, salt);
}

/// A rank's equal slices of buckets that end after parameters drawn by seed, padded to whole
/// slices.
inline std::vector<ShardRun> slices_of_buckets(const std::vector<Parameter>& table, int rank,
                                               int size, std::uint64_t salt) {
  std::vector<ShardRun> runs;
  std::int64_t begin = 0, end = 0, at = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    end += table[i].numel();
    if (i + 1 < table.size() && random_bits(test_seed() + salt, 91, i) % 2 == 0) continue;
    const std::int64_t part = (end - begin + size - 1) / size,
                       first = std::min(end, begin + part * rank),
                       last = std::min(end, first + part);
    if (first < last) runs.push_back({first, last, at});
    at += part;
    begin = end;
  }
  return runs;
}

inline std::int64_t mismatches(const CheckpointShard& shard, std::uint64_t salt = 0) {
  std::int64_t wrong = 0;
  for (const auto& [field, tensor] : shard.fields) {
    dispatch_float(tensor.dtype(), [&, &field = field, &tensor = tensor](auto zero) {
      using T = decltype(zero);
      for (const ShardRun& run : shard.runs)
        for (std::int64_t i = run.begin; i < run.end; ++i)
          wrong += tensor.template data<T>()[run.at + i - run.begin] !=
                   static_cast<T>(value_of(field, i, salt));
    });
  }
  return wrong;
}

/// Cuts [0, total) into one piece a rank; `style` 0: equal, 1: all on the last rank, 2: random cuts
/// with empty pieces, 3: reversed ranks.
inline std::pair<std::int64_t, std::int64_t> cut(std::int64_t total, int rank, int size,
                                                 int style) {
  if (style == 1)
    return rank == size - 1 ? std::pair{std::int64_t{0}, total}
                            : std::pair{std::int64_t{0}, std::int64_t{0}};
  if (style == 2) {
    std::vector<std::int64_t> cuts{0, total};
    for (int i = 1; i < size; ++i)
      cuts.push_back(
          static_cast<std::int64_t>(random_bits(test_seed(), 77, static_cast<std::uint64_t>(i)) %
                                    static_cast<std::uint64_t>(total)));
    if (size > 2) cuts.back() = cuts[cuts.size() - 2];
    std::sort(cuts.begin(), cuts.end());
    return {cuts[static_cast<std::size_t>(rank)], cuts[static_cast<std::size_t>(rank) + 1]};
  }
  if (style == 3) rank = size - 1 - rank;
  return {total * rank / size, total * (rank + 1) / size};
}

inline CheckpointState some_state(std::int64_t step) {
  CheckpointState s;
  s.step = step;
  s.sampler = {3, 12345678901};
  s.tokens_seen = 987654321012;
  s.seconds_trained = 1234.5678;
  s.seed = 0xFEDCBA9876543210ull;
  s.deck = "# deck\n[run]\nsteps = 3\n" + std::string(100000, 'x');
  s.git_hash = "0123abc";
  s.run = "8f0e";
  s.parent = "step_00000001.h5 (run 77aa)";
  s.extra["sab.average"] = {1.5, -2.25, 1e300};
  s.extra["empty"] = {};
  return s;
}

inline void expect_state(const CheckpointState& a, const CheckpointState& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_TRUE(a == b);
}

/// A folder that all ranks share, removed at the end of the test.
class Checkpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name(256, '\0');
    if (world.rank() == 0) {
      std::string pattern = (fs::temp_directory_path() / "ballast_checkpoint_XXXXXX").string();
      ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
      name = pattern;
    }
    dir = world.broadcast(name, 0);
  }
  void TearDown() override {
    world.barrier();
    if (world.rank() == 0) fs::remove_all(dir);
    world.barrier();
  }
  std::string write(const std::vector<Parameter>& table, std::int64_t step, int style = 0,
                    DType type = DType::f32, int keep = 3, std::uint64_t salt = 0) {
    const auto [begin, end] = cut(numel(table), world.rank(), world.size(), style);
    return write_checkpoint(dir, world, make_shard(table, begin, end, type, true, salt),
                            some_state(step), keep);
  }
  std::vector<std::string> names(const std::string& folder = "") {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder.empty() ? dir : folder))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }
  /// The newest sound checkpoint; its contents go nowhere.
  std::string latest(std::vector<std::string>& warnings) {
    const auto table = small_table();
    CheckpointShard shard = make_shard(table, 0, 0, DType::f32, false);
    CheckpointState state;
    const std::string path = read_latest(dir, world, shard, state, warnings, true);
    world.barrier();
    return path;
  }
  /// The Error text of `work` on this rank; fails the test when there is none.
  template <class F>
  std::string error_of(F&& work) {
    try {
      work();
    } catch (const CollectiveError& error) {
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }
  Communicator world = Communicator::world();
  std::string dir;
};

}  // namespace ballast::checkpoint_test

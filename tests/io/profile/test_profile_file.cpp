// Profile tables as files: what is written is read; damaged files and other identities are refused
// by name.
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "io/profile/profile_file.hpp"
#include "parallel/comm/comm.hpp"
#include "tests/io/temporary_folder.hpp"
#include "tests/seed.hpp"

using namespace ballast;

namespace {

ProfileTable random_table(std::mt19937_64& random) {
  ProfileTable t;
  t.identity = {
      {"hardware", "a GPU"}, {"kernels", "0123456789ab"}, {"layer", "hidden 8"}, {"note", ""}};
  t.block_tokens = 256;
  for (int i = 0; i < 40; ++i) {
    ProfileRow r;
    r.part = static_cast<ProfilePart>(random() % 3);
    if (r.part == ProfilePart::attention)
      r.pattern = random() % 2 ? PatternKind::moba : PatternKind::dense;
    r.query_tokens = static_cast<std::int64_t>(random() % 100000);
    r.prefix_tokens = static_cast<std::int64_t>(random() % 1000);
    r.budget = static_cast<std::int64_t>(random() % 100);
    r.sp = 1 + static_cast<int>(random() % 4);
    r.recompute = random() % 2 ? Recompute::full : Recompute::none;
    r.pass = static_cast<ProfilePass>(random() % 2);
    r.median_s = std::uniform_real_distribution<>(1e-6, 1)(random);
    r.spread_s = r.median_s / 10;
    r.bytes = static_cast<std::int64_t>(random());
    t.rows.push_back(r);
  }
  t.links = {{"inner", 3e-6, 3e11}, {"outer", 2e-5, 5e9}};
  t.groups = {{{{"data", "9 samples, a=b"}, {"ranks", "4"}},
               {{static_cast<std::int64_t>(1 + random() % 100), 1, 0}, {128, 4, -1}}},
              {{}, {{64, 1, 2}}}};
  return t;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class F>
std::string refusal(F&& work) {
  try {
    work();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

class ProfileFile : public TemporaryFolder {};

TEST_F(ProfileFile, ANewNameWithoutAFolderIsWritable) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(dir);
  EXPECT_NO_THROW(require_writable_profile("fresh.h5"));
  EXPECT_TRUE(std::filesystem::is_empty("."));
  std::filesystem::current_path(before);
}

}  // namespace

TEST_F(ProfileFile, ReadsWhatWasWrittenAndRefusesDamage) {
  if (Communicator::world().rank() != 0) return;
  std::mt19937_64 random(test_seed());
  const std::string path = dir + "/deep/table.h5";
  const ProfileTable table = random_table(random);
  write_profile(path, table);
  EXPECT_EQ(read_profile(path), table);
  ProfileTable empty;
  empty.rows = {table.rows.front()};
  write_profile(dir + "/small.h5", empty);
  EXPECT_EQ(read_profile(dir + "/small.h5"), empty);

  // Every truncation and every altered byte is refused by name (bytes of the user block beyond the
  // envelope hold nothing).
  const std::string whole = bytes_of(path), other = dir + "/other.h5";
  const auto write = [&](const std::string& bytes) {
    std::ofstream(other, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  };
  for (int i = 0; i < 300; ++i) {
    std::string bytes = whole;
    if (i % 3 == 0)
      bytes.resize(random() % whole.size());
    else
      bytes[i % 3 == 1 ? random() % 40 : 512 + random() % (whole.size() - 512)] ^=
          static_cast<char>(1 << (random() % 8));
    write(bytes);
    EXPECT_NE(refusal([&] { read_profile(other); }).find(other), std::string::npos) << i;
  }
  EXPECT_NE(refusal([&] { read_profile(dir + "/none.h5"); }).find("does not exist"),
            std::string::npos);
}

TEST_F(ProfileFile, OtherHardwareIsRefusedWithBothSides) {
  if (Communicator::world().rank() != 0) return;
  std::mt19937_64 random(1);
  const ProfileTable table = random_table(random);
  EXPECT_TRUE(identity_differences("t.h5", table,
                                   {{"hardware", "a GPU"}, {"kernels", "0123456789ab"}}, false)
                  .empty());
  const std::string message = refusal([&] {
    identity_differences("t.h5", table, {{"hardware", "another GPU"}, {"dtype", "bf16"}}, false);
  });
  for (const char* part : {"t.h5", "hardware of the table: a GPU; here: another GPU",
                           "dtype of the table: not stated; here: bf16", "profile.allow_mismatch"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(identity_differences("t.h5", table, {{"hardware", "another GPU"}}, true).size(), 1u);
}

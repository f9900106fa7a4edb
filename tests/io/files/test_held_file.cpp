// A held file is renamed and removed where its folder is, and no other file in its stead.
#include <gtest/gtest.h>

#include <filesystem>

#include "core/base/error.hpp"
#include "io/files/held_file.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {
namespace fs = std::filesystem;

using Held = TemporaryFolder;

TEST_F(Held, FollowsItsFolder) {
  fs::create_directory(dir + "/a");
  HeldFile file(dir + "/a/new");
  EXPECT_TRUE(file.is_at(dir + "/a/new"));
  fs::rename(dir + "/a", dir + "/b");
  write("a/new", "another");
  EXPECT_FALSE(file.is_at(dir + "/a/new"));
  file.rename("named");
  EXPECT_TRUE(file.is_at(dir + "/b/named"));
  EXPECT_EQ(read(dir + "/a/new"), "another");
  EXPECT_FALSE(fs::exists(dir + "/a/named"));
  file.remove();
  EXPECT_TRUE(fs::is_empty(dir + "/b"));
}

TEST_F(Held, LeavesAnotherFileOfItsName) {
  HeldFile file(dir + "/new");
  fs::remove(dir + "/new");
  EXPECT_THROW(file.rename("named"), Error);
  write("new", "another");
  EXPECT_THROW(file.rename("named"), Error);
  file.remove();
  EXPECT_EQ(read(dir + "/new"), "another");
}

TEST_F(Held, MakesItsFileAndReplacesNone) {
  write("there", "another");
  EXPECT_THROW(HeldFile(dir + "/there"), Error);
  EXPECT_EQ(read(dir + "/there"), "another");
  EXPECT_THROW(HeldFile(dir + "/nowhere/new"), Error);
  { const HeldFile file(dir + "/new"); }
  EXPECT_TRUE(fs::exists(dir + "/new"));
}

}  // namespace
}  // namespace ballast

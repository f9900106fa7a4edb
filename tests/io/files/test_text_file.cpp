// A text is there whole or the old one stays; links, pipes and folders that take no new file.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <future>

#include "core/base/error.hpp"
#include "io/files/text_file.hpp"
#include "tests/io/temporary_folder.hpp"

namespace ballast {
namespace {
namespace fs = std::filesystem;

using TextFile = TemporaryFolder;

TEST_F(TextFile, ReplacesWholeTextsAndLeavesNothingBeside) {
  const std::string path = dir + "/a.json";
  EXPECT_EQ(unwritable(path), "");
  EXPECT_FALSE(fs::exists(path)) << "asking leaves nothing";
  EXPECT_EQ(write_text(path, "first"), "");
  EXPECT_EQ(write_text(path, "2"), "");
  EXPECT_EQ(read(path), "2");
  EXPECT_EQ(unwritable(path), "");
  EXPECT_EQ(read(path), "2") << "asking changes nothing";
  fs::create_symlink(path, dir + "/link");
  EXPECT_EQ(write_text(dir + "/link", "by the link"), "");
  EXPECT_TRUE(fs::is_symlink(dir + "/link"));
  EXPECT_EQ(read(path), "by the link");
  fs::create_symlink(dir + "/later", dir + "/ahead");
  EXPECT_EQ(unwritable(dir + "/ahead"), "");
  EXPECT_TRUE(fs::is_symlink(dir + "/ahead")) << "a link to nothing stays one";
  EXPECT_FALSE(fs::exists(dir + "/later"));
  fs::create_symlink("ahead", dir + "/further");
  EXPECT_EQ(write_text(dir + "/further", "by two links"), "");
  EXPECT_TRUE(fs::is_symlink(dir + "/further") && fs::is_symlink(dir + "/ahead"));
  EXPECT_EQ(read(dir + "/later"), "by two links");
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(write_text(path, "mine"), "");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  fs::remove(dir + "/further");
  fs::remove(dir + "/later");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 3);
}

TEST_F(TextFile, TheOldTextStaysWhereTheNewOneFails) {
  const std::string path = dir + "/a.json";
  require_written(path, "old");
  fs::create_directories(path + ".new/full");  // in the way of the new one
  EXPECT_EQ(write_text(path, "new"), "Is a directory");
  EXPECT_EQ(read(path), "old");
  EXPECT_THROW(require_written(path, "new"), Error);
  EXPECT_EQ(write_text(path, "new", ".other"), "");
  EXPECT_EQ(write_text(dir + "/none/a.json", "new"), "No such file or directory");
  EXPECT_EQ(unwritable(dir + "/none/a.json"), "No such file or directory");
  EXPECT_EQ(unwritable(path + ".new"), "Is a directory");
}

TEST_F(TextFile, DevicesAndPipesTakeTheText) {
  EXPECT_EQ(write_text("/dev/null", "text"), "");
  EXPECT_EQ(write_text("/dev/full", "text"), "No space left on device");
  const std::string pipe = dir + "/pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(unwritable(pipe), "it is a named pipe");
  EXPECT_EQ(write_text(pipe, "text"), "it is a pipe that nobody reads");
  auto reader = std::async(std::launch::async, [&] { return read(pipe); });
  const std::string text(1 << 20, 'x');  // more than the pipe holds at once
  while (write_text(pipe, text) != "") {
  }
  EXPECT_EQ(reader.get(), text);
}

}  // namespace
}  // namespace ballast

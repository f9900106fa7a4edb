#include "io/files/text_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"

namespace ballast {
namespace fs = std::filesystem;
namespace {

/// Writes all of `text` to what `flags` open at `path`; returns an errno, or 0.  `mode`: rights of
/// a file that is made.
int write_to(const std::string& path, int flags, std::string_view text, mode_t mode = 0666) {
  // O_NONBLOCK: a pipe that nobody reads would hold the program up.
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK | flags, mode);
  if (descriptor < 0) return errno;
  int code = ::fcntl(descriptor, F_SETFL, 0) == 0 ? 0 : errno;
  while (code == 0 && !text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno != EINTR) code = errno;
    if (count > 0) text.remove_prefix(static_cast<std::size_t>(count));
  }
  return ::close(descriptor) != 0 && code == 0 ? errno : code;
}

/// What `path` leads to by links, though that may not be there.
std::string target_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  fs::path target = path;
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(fs::symlink_status(target, error)); ++i) {
    const fs::path next = fs::read_symlink(target, error);
    if (error) break;
    target = target.parent_path() / next;  // `next` alone, where it begins at the root
  }
  return target.string();
}

bool is_other(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return fs::exists(status) && !fs::is_regular_file(status);
}

std::string said(int code) {
  return code == ENXIO ? "it is a pipe that nobody reads" : std::strerror(code);
}

}  // namespace

std::string write_text(const std::string& path, std::string_view text, const std::string& suffix) {
  if (is_other(path)) {
    const int code = write_to(path, 0, text);
    return code == 0 ? "" : said(code);
  }
  const std::string target = target_of(path), fresh = target + suffix;
  std::error_code error, ignored;
  const fs::file_status before = fs::status(target, error);
  const bool there = fs::is_regular_file(before);
  const auto mode = there ? static_cast<mode_t>(before.permissions()) & 0777 : 0666;
  int code = write_to(fresh, O_CREAT | O_TRUNC, text, mode);
  if (code == 0 && there) fs::permissions(fresh, before.permissions(), ignored);
  if (code == 0 && (fs::rename(fresh, target, error), !error)) return "";
  if (code == 0) code = error.value();
  const bool closed = code == EACCES || code == EROFS || code == EPERM;
  fs::remove(fresh, ignored);
  if (closed && fs::is_regular_file(target, ignored)) code = write_to(target, O_TRUNC, text);
  return code == 0 ? "" : said(code);
}

void require_written(const std::string& path, std::string_view text) {
  const std::string why = write_text(path, text);
  require(why.empty(), "{}: cannot be written: {}", path, why);
}

void drop_torn_line(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(fs::status(path, error))) return;
  std::ifstream file(path, std::ios::binary);
  std::uintmax_t kept = fs::file_size(path, error);
  const std::uintmax_t size = kept;
  for (char last = 0; kept > 0; --kept) {
    file.seekg(static_cast<std::streamoff>(kept - 1));
    if (!file.get(last) || last == '\n') break;
  }
  if (file && kept < size) fs::resize_file(path, kept, error);
}

std::string unwritable(const std::string& path) {
  std::error_code ignored;
  // Its reader would take an opening that writes nothing for the end.
  if (fs::is_fifo(path, ignored)) return path.starts_with("/dev/") ? "" : "it is a named pipe";
  const bool there = fs::exists(path, ignored);
  const int code = write_to(path, O_CREAT, "");
  if (code == 0 && !there) fs::remove(target_of(path), ignored);
  return code == 0 ? "" : said(code);
}

}  // namespace ballast

#include "io/files/raw_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/base/error.hpp"

namespace ballast {
namespace {

/// Bytes of one call: large enough for any file system, small enough to see progress.
constexpr std::size_t kCallBytes = std::size_t{16} << 20;

void add(std::atomic<std::int64_t>* progress, ssize_t bytes) {
  if (progress != nullptr) progress->fetch_add(bytes, std::memory_order_relaxed);
}

/// fsync, continued where a signal interrupts it.  Returns 0 or the error.
int synced(int descriptor) {
  while (::fsync(descriptor) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

std::optional<FilePlace> place_in(const struct stat& status, int code) {
  if (code != 0) return std::nullopt;
  return FilePlace{status.st_dev, status.st_ino};
}

}  // namespace

std::optional<FilePlace> place_of(const std::string& path) {
  struct stat status {};
  const int code = ::stat(path.c_str(), &status);
  return place_in(status, code);
}

std::optional<FilePlace> place_of(int descriptor) {
  struct stat status {};
  const int code = ::fstat(descriptor, &status);
  return place_in(status, code);
}

RawFile::RawFile(const std::string& path, bool writable)
    : path_(path),
      descriptor_(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK)) {
  require(descriptor_ >= 0, "{} cannot be opened: {}", path, std::strerror(errno));
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    fail("{} is not a regular file", path);
  }
}

RawFile::~RawFile() { ::close(descriptor_); }

std::uint64_t RawFile::bytes() const {
  struct stat status {};
  require(::fstat(descriptor_, &status) == 0, "{}: {}", path_, std::strerror(errno));
  return static_cast<std::uint64_t>(status.st_size);
}

FilePlace RawFile::place() const {
  const auto place = place_of(descriptor_);
  require(place.has_value(), "{}: {}", path_, std::strerror(errno));
  return *place;
}

void RawFile::read(std::uint64_t offset, void* to, std::size_t count,
                   std::atomic<std::int64_t>* progress) const {
  for (std::size_t done = 0; done < count;) {
    const ssize_t n =
        ::pread(descriptor_, static_cast<char*>(to) + done, std::min(kCallBytes, count - done),
                static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    require(n > 0, "{}: reading bytes [{}, {}): {}", path_, offset, offset + count,
            n == 0 ? "the file ends before" : std::strerror(errno));
    done += static_cast<std::size_t>(n);
    add(progress, n);
  }
}

void RawFile::write(std::uint64_t offset, const void* from, std::size_t count,
                    std::atomic<std::int64_t>* progress) const {
  for (std::size_t done = 0; done < count;) {
    const ssize_t n =
        ::pwrite(descriptor_, static_cast<const char*>(from) + done,
                 std::min(kCallBytes, count - done), static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    require(n > 0, "{}: writing bytes [{}, {}): {}", path_, offset, offset + count,
            n == 0 ? "nothing was taken" : std::strerror(errno));
    done += static_cast<std::size_t>(n);
    add(progress, n);
  }
}

void RawFile::start_sync(std::uint64_t offset, std::size_t count) const {
  // A hint: sync reports what goes wrong.
  ::sync_file_range(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(count),
                    SYNC_FILE_RANGE_WRITE);
}

void RawFile::sync() const {
  const int code = synced(descriptor_);
  require(code == 0, "{}: fsync: {}", path_, std::strerror(code));
}

void RawFile::drop_cache(std::uint64_t offset, std::uint64_t count) const {
  ::posix_fadvise(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(count),
                  POSIX_FADV_DONTNEED);
}

void reserve_space(const std::string& path, std::uint64_t bytes, bool create,
                   const SpaceRemedy& remedy) {
  const int descriptor = ::open(
      path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_TRUNC : 0), 0666);
  require(descriptor >= 0, "{} cannot be {}: {}", path, create ? "created" : "opened",
          std::strerror(errno));
  int code = 0;
  // Not posix_fallocate: where the file system has no such call, that writes every block.
  while (bytes > 0 && ::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) != 0)
    if (code = errno; code != EINTR) break;
  if (code == EINTR || code == EOPNOTSUPP || code == EINVAL || code == ENOSYS) code = 0;
  ::close(descriptor);
  require(code == 0, "{}: {} bytes are refused: {}; {}", path, bytes, std::strerror(code),
          code == EFBIG ? remedy.too_large : remedy.full);
}

void sync_directory(const std::string& dir) {
  const int descriptor = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  require(descriptor >= 0, "{} cannot be opened: {}", dir, std::strerror(errno));
  const int code = synced(descriptor);
  ::close(descriptor);
  require(code == 0 || code == EINVAL, "{}: fsync: {}", dir,
          std::strerror(code));  // EINVAL: the file system has none for directories
}

std::string set_aside(const std::string& path) {
  std::string name = path + kDamaged;
  for (int i = 2; std::filesystem::exists(name); ++i)
    name = fmt::format("{}{}.{}", path, kDamaged, i);
  std::error_code error;
  std::filesystem::rename(path, name, error);
  require(!error, "{} cannot be renamed to {}: {}", path, name, error.message());
  return name;
}

}  // namespace ballast

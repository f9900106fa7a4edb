#include "io/files/held_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/base/error.hpp"

namespace ballast {

HeldFile::HeldFile(const std::string& path)
    : name_(std::filesystem::path(path).filename().string()),
      folder_(::open(std::filesystem::path(path).parent_path().c_str(),
                     O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  const int descriptor =
      folder_ < 0 ? -1 : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    const int code = errno;
    if (folder_ >= 0) ::close(folder_);
    fail("{} cannot be created: {}", path, std::strerror(code));
  }
  file_ = std::make_unique<RawFile>(path, descriptor);
}

HeldFile::~HeldFile() { ::close(folder_); }

bool HeldFile::stands() const {
  struct stat there {};
  return ::fstatat(folder_, name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         FilePlace{there.st_dev, there.st_ino} == file_->place();
}

void HeldFile::rename(const std::string& name) {
  require(stands(), "{}: another file has this name by now, or none", file_->path());
  require(::renameat(folder_, name_.c_str(), folder_, name.c_str()) == 0,
          "{} cannot be renamed to {}: {}", file_->path(), name, std::strerror(errno));
  name_ = name;
}

void HeldFile::remove() noexcept {
  try {
    if (stands()) ::unlinkat(folder_, name_.c_str(), 0);
  } catch (const Error&) {  // its storage is away
  }
}

}  // namespace ballast

#include "io/data/dataset_source.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/error.hpp"

namespace ballast {

void DocumentSource::mask(std::int64_t, std::int64_t begin, std::int64_t end,
                          std::uint8_t* out) const {
  std::fill(out, out + (end - begin), std::uint8_t{1});
}

OpenedFile::OpenedFile(std::string path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor), then_(now()) {}

struct stat OpenedFile::now() const {
  struct stat status {};
  require(::fstat(descriptor_, &status) == 0, "{} cannot be looked at: {}", path_,
          std::strerror(errno));
  return status;
}

void OpenedFile::check_unchanged() const {
  const struct stat found = now();
  const bool resized = found.st_size != then_.st_size;
  require(!resized && found.st_mtim.tv_sec == then_.st_mtim.tv_sec &&
              found.st_mtim.tv_nsec == then_.st_mtim.tv_nsec,
          "{} had {} bytes when it was opened and {}; restore the file and continue from the last "
          "checkpoint (-r latest), or train on a copy that nobody writes to",
          path_, then_.st_size,
          resized ? fmt::format("has {} now", found.st_size) : "was written to since");
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe that nobody writes must not hang; it is refused just below.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(descriptor_ >= 0, "{} cannot be opened: {}", path, std::strerror(errno));
  opened_.emplace(path, descriptor_);
  const bool regular = opened_->regular();
  size_ = opened_->size();
  if (regular && size_ > 0)
    map_ = ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ, MAP_SHARED, descriptor_, 0);
  if (!regular || map_ == MAP_FAILED) {
    const std::string reason = regular ? std::strerror(errno) : "it is not a regular file";
    ::close(descriptor_);
    fail("{} cannot be mapped: {}", path, reason);
  }
}

MappedFile::~MappedFile() {
  if (map_ != nullptr) ::munmap(map_, static_cast<std::size_t>(size_));
  ::close(descriptor_);
}

const std::byte* MappedFile::at(std::int64_t offset, std::int64_t count) const {
  require(offset >= 0 && count >= 0 && offset <= size_ && count <= size_ - offset,
          "{} has {} bytes; bytes [{}, {} + {}) were asked for", path_, size_, offset, offset,
          count);
  return static_cast<const std::byte*>(map_) + offset;
}

const std::byte* MappedFile::bytes(std::int64_t offset, std::int64_t count) const {
  opened_->check_unchanged();
  return at(offset, count);
}

Fingerprint& Fingerprint::add(const void* data, std::size_t bytes) {
  value_ = XXH64(data, bytes, value_ + 1);
  return *this;
}

Fingerprint& Fingerprint::add(const std::string& text) { return add(text.data(), text.size()); }

}  // namespace ballast

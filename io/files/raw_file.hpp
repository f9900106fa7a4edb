// A file by its descriptor: whole reads and writes at given places, from any thread, with errors
// that name the file.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace ballast {

/// Device and inode: which file or folder it is, by whatever name.  Devices are numbered by each
/// machine for itself.
using FilePlace = std::pair<std::uint64_t, std::uint64_t>;
/// Of what stands at `path`, or is open; nothing where that cannot be told, with errno.
std::optional<FilePlace> place_of(const std::string& path);
std::optional<FilePlace> place_of(int descriptor);

class RawFile {
 public:
  /// Opens a regular file; a FIFO or a device is an error at once, not a wait.
  RawFile(const std::string& path, bool writable);
  /// Takes over the descriptor of an open file.
  RawFile(const std::string& path, int descriptor) : path_(path), descriptor_(descriptor) {}
  ~RawFile();
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;
  const std::string& path() const { return path_; }
  std::uint64_t bytes() const;
  /// Errors: the storage does not tell.
  FilePlace place() const;
  /// All of bytes [offset, offset + count); short transfers and interruptions are continued.
  /// `progress`, where given, counts the bytes as they are done.
  void read(std::uint64_t offset, void* to, std::size_t count,
            std::atomic<std::int64_t>* progress = nullptr) const;
  void write(std::uint64_t offset, const void* from, std::size_t count,
             std::atomic<std::int64_t>* progress = nullptr) const;
  /// Hands what was written there to the storage now and does not wait for it: a later sync finds
  /// little left.
  void start_sync(std::uint64_t offset, std::size_t count) const;
  /// Until the storage has it.
  void sync() const;
  /// Asks the system to forget what it holds in memory of bytes [offset, offset + count), or of the
  /// whole file, so that reads come from the storage.  What was not synced stays.  Takes a second
  /// for some tens of GB.
  void drop_cache(std::uint64_t offset, std::uint64_t count) const;
  void drop_cache() const { drop_cache(0, 0); }

 private:
  std::string path_;
  int descriptor_;
};

/// What a user can do where the disk is full, and where a file is larger than the process or the
/// file system may make one.
struct SpaceRemedy {
  std::string full, too_large;
};
/// Takes disk space for bytes [0, bytes) of a file before anybody writes there: a full disk then
/// shows here.  File systems without such a call leave it to the writes.  Creates and empties the
/// file when `create` is set.  Errors: there is no room; they end with what `remedy` says.
void reserve_space(const std::string& path, std::uint64_t bytes, bool create,
                   const SpaceRemedy& remedy);
/// Until the storage has the names in a folder.
void sync_directory(const std::string& dir);
/// Ends the name of a file that was found damaged.
inline constexpr const char* kDamaged = ".damaged";
/// Renames a file to NAME.damaged (or NAME.damaged.2 ...) and returns the new name.
std::string set_aside(const std::string& path);

}  // namespace ballast

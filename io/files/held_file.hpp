// A new file that is held, with its folder, by descriptors: whatever happens to its path, it is
// given its name and removed in its own folder, and another's file is never taken for it.
#pragma once
#include <memory>
#include <string>

#include "io/files/raw_file.hpp"

namespace ballast {

class HeldFile {
 public:
  /// Makes `path`.  Errors: something stands there, or it cannot be made.
  explicit HeldFile(const std::string& path);
  /// The file stays.
  ~HeldFile();
  HeldFile(const HeldFile&) = delete;
  HeldFile& operator=(const HeldFile&) = delete;
  const RawFile& file() const { return *file_; }
  /// Whether it is what stands at `path`.
  bool is_at(const std::string& path) const { return place_of(path) == file_->place(); }
  /// Gives it the name `name` in its folder, in place of what has it there.  Errors: its own name
  /// is another file's by now.
  void rename(const std::string& name);
  /// Removes it, unless its name is another file's by now.
  void remove() noexcept;

 private:
  /// Whether its name in its folder is its own.
  bool stands() const;
  std::string name_;
  int folder_ = -1;
  std::unique_ptr<RawFile> file_;
};

}  // namespace ballast

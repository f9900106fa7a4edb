#include "core/base/lfs_pointer.hpp"

#include <filesystem>
#include <fstream>
#include <string_view>

#include "core/base/error.hpp"

namespace ballast {
namespace {

// Twin: app/data/errors.py.
constexpr std::string_view kBegin = "version https://git-lfs.github.com/spec";

}  // namespace

bool is_lfs_pointer(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  std::string first(kBegin.size(), '\0');
  std::ifstream(path, std::ios::binary)
      .read(first.data(), static_cast<std::streamsize>(first.size()));
  return first == kBegin;
}

void refuse_lfs_pointer(const std::string& path) {
  require(!is_lfs_pointer(path),
          "{}: is a Git LFS pointer, not the file itself; `git lfs pull` there fetches it", path);
}

}  // namespace ballast

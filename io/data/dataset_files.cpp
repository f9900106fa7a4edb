// data.source = "files": any files, one document each, a token a byte.
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <list>
#include <set>
#include <unordered_map>

#include "core/base/error.hpp"
#include "core/base/lfs_pointer.hpp"
#include "io/data/dataset_source.hpp"

namespace ballast {

namespace fs = std::filesystem;

namespace {

/// Maps that stay open at once: far below any limit of open files, enough for the samples of a
/// step.
constexpr std::size_t kOpenFiles = 64;
constexpr std::int64_t kPointerBytes = 1024;  ///< pointers of Git LFS are shorter

struct File {
  std::string path;
  std::int64_t bytes = 0;
};

/// Collects regular files under their real paths.  A file reached twice (two entries, symbolic
/// links) counts once, and directories that link back to a parent end the walk, because real paths
/// are visited once.
class FileFinder {
 public:
  explicit FileFinder(const DataOptions& options) {
    for (const std::string& extension : options.extensions) {
      extensions_.insert(extension.empty() || extension.front() == '.' ? extension
                                                                       : "." + extension);
    }
    for (const std::string& entry : options.paths) find(entry);
    std::sort(files_.begin(), files_.end(),
              [](const File& a, const File& b) { return a.path < b.path; });
    files_.erase(std::unique(files_.begin(), files_.end(),
                             [](const File& a, const File& b) { return a.path == b.path; }),
                 files_.end());
  }
  std::vector<File> take() { return std::move(files_); }
  std::int64_t unreadable() const { return static_cast<std::int64_t>(unreadable_.size()); }
  std::int64_t empty() const { return static_cast<std::int64_t>(empty_.size()); }

 private:
  void find(const std::string& entry) {
    std::error_code error;
    const fs::file_status status = fs::status(entry, error);
    if (fs::is_directory(status)) {
      walk(entry, true, false);
    } else if (fs::exists(status)) {
      const std::string problem = add(entry, false);
      require(problem.empty(), "data.paths: {}: {}", entry, problem);
    } else if (entry.find_first_of("*?[") != std::string::npos) {
      expand(entry);
    } else {
      fail("data.paths: {}: {}", entry, error ? error.message() : "no such file or directory");
    }
  }

  void expand(const std::string& pattern) {
    glob_t matches{};
    const int code = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &matches);
    const std::vector<std::string> paths(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
    ::globfree(&matches);
    require(code == 0, "data.paths: nothing matches the pattern {}", pattern);
    for (const std::string& path : paths) visit(path, false);
  }

  /// A path that was found, not named: filtered, and skipped where it cannot be read.  A `real` one
  /// leads through no link.
  void visit(const fs::path& path, bool real) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (fs::is_directory(status)) {
      walk(path, false, real);
    } else if (fs::is_regular_file(status)) {
      if (!extensions_.empty() && extensions_.count(path.extension().string()) == 0) return;
      if (!add(path, real).empty()) unreadable_.insert(path.string());
    } else if (!fs::exists(status)) {
      unreadable_.insert(path.string());  // a dangling link, or one that circles
    }
  }

  void walk(const fs::path& directory, bool named, bool real) {
    std::error_code error;
    const fs::path place = real ? directory : fs::canonical(directory, error);
    if (!error && !directories_.insert(place.string()).second) return;
    fs::directory_iterator entries;
    if (!error) entries = fs::directory_iterator(place, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      std::error_code unknown;
      visit(entries->path(), !entries->is_symlink(unknown) && !unknown);
    }
    if (!error) return;
    require(!named, "data.paths: {}: {}", directory.string(), error.message());
    unreadable_.insert(directory.string());
  }

  /// What stands in the way of reading a file, or "".
  std::string add(const fs::path& path, bool real) {
    std::error_code error;
    const fs::path place = real ? path : fs::canonical(path, error);
    if (error) return error.message();
    const int descriptor = ::open(place.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return std::strerror(errno);
    struct stat status {};
    const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    ::close(descriptor);
    if (!regular) return "not a regular file";
    if (status.st_size < kPointerBytes && is_lfs_pointer(place.string()))
      return "a Git LFS pointer; `git lfs pull` there fetches the file";
    if (status.st_size == 0)
      empty_.insert(place.string());
    else
      files_.push_back({place.string(), status.st_size});
    return "";
  }

  std::set<std::string> extensions_, directories_, unreadable_, empty_;
  std::vector<File> files_;
};

class FilesSource final : public DocumentSource {
 public:
  explicit FilesSource(const DataOptions& options) {
    require(!options.paths.empty(),
            "data.source = \"files\" needs data.paths: files, directories or globs");
    FileFinder finder(options);
    files_ = finder.take();
    Fingerprint fingerprint;
    std::int64_t bytes = 0, longest = 0;
    for (const File& file : files_) {
      fingerprint.add(file.path).add(file.bytes);
      bytes += file.bytes;
      longest = std::max(longest, file.bytes);
    }
    fingerprint_ = fingerprint.value();
    description_ =
        fmt::format("files: {} files, {} bytes, longest {}", files_.size(), bytes, longest);
    if (finder.empty() > 0) description_ += fmt::format(", {} empty skipped", finder.empty());
    if (finder.unreadable() > 0)
      description_ += fmt::format(", {} unreadable skipped", finder.unreadable());
    require(!files_.empty(), "{}: data.paths = {} hold no text{}", description_,
            fmt::join(options.paths, ", "),
            options.extensions.empty() ? ""
                                       : fmt::format(" in files that end in {} (data.extensions)",
                                                     fmt::join(options.extensions, ", ")));
  }

  std::int64_t documents() const override { return static_cast<std::int64_t>(files_.size()); }
  std::int64_t length(std::int64_t document) const override { return file(document).bytes; }
  void tokens(std::int64_t document, std::int64_t begin, std::int64_t end,
              std::int32_t* out) const override {
    const auto* bytes =
        reinterpret_cast<const unsigned char*>(map(document).bytes(begin, end - begin));
    std::copy(bytes, bytes + (end - begin), out);
  }
  std::int64_t vocabulary() const override { return 256; }
  std::string place(std::int64_t document) const override { return file(document).path; }
  std::string description() const override { return description_; }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  using Recent = std::list<std::pair<std::int64_t, std::unique_ptr<MappedFile>>>;

  const File& file(std::int64_t document) const {
    return files_.at(static_cast<std::size_t>(document));
  }

  /// The file's map, from the recently used ones if it is there.
  const MappedFile& map(std::int64_t document) const {
    if (const auto found = open_.find(document); found != open_.end()) {
      recent_.splice(recent_.begin(), recent_, found->second);
    } else {
      auto mapped = std::make_unique<MappedFile>(file(document).path);
      require(mapped->size() == file(document).bytes,
              "{} had {} bytes when the dataset was opened and has {} now", mapped->path(),
              file(document).bytes, mapped->size());
      recent_.emplace_front(document, std::move(mapped));
      open_[document] = recent_.begin();
      if (recent_.size() > kOpenFiles) {
        open_.erase(recent_.back().first);
        recent_.pop_back();
      }
    }
    return *recent_.front().second;
  }

  std::vector<File> files_;
  std::uint64_t fingerprint_ = 0;
  std::string description_;
  mutable Recent recent_;
  mutable std::unordered_map<std::int64_t, Recent::iterator> open_;
};

}  // namespace

std::unique_ptr<DocumentSource> open_files(const DataOptions& options) {
  return std::make_unique<FilesSource>(options);
}

}  // namespace ballast

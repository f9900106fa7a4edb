// Where documents come from: one implementation per data.source, each in its own
// dataset_SOURCE.cpp.  dataset.cpp cuts documents into samples and makes targets, so a source only
// says how long its documents are and reads tokens.
#pragma once
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "io/data/dataset.hpp"

namespace ballast {

class DocumentSource {
 public:
  virtual ~DocumentSource() = default;
  virtual std::int64_t documents() const = 0;
  virtual std::int64_t length(std::int64_t document) const = 0;  ///< tokens
  /// Tokens [begin, end) of a document, a valid range, not empty.  Errors name the file and the
  /// document.
  virtual void tokens(std::int64_t document, std::int64_t begin, std::int64_t end,
                      std::int32_t* out) const = 0;
  /// Whether some tokens are no targets; mask() is called only then and gives 0 for such a token.
  virtual bool masked() const { return false; }
  virtual void mask(std::int64_t document, std::int64_t begin, std::int64_t end,
                    std::uint8_t* out) const;
  virtual std::int64_t vocabulary() const = 0;
  /// What a document was cut from: those of one origin belong on one side of a validation split.
  virtual std::int64_t origin(std::int64_t document) const { return document; }
  virtual std::string place(std::int64_t document) const = 0;  ///< for messages
  virtual std::string description() const = 0;
  virtual std::uint64_t fingerprint() const = 0;
};

std::unique_ptr<DocumentSource> open_files(const DataOptions& options);
std::unique_ptr<DocumentSource> open_megatron(const DataOptions& options);
std::unique_ptr<DocumentSource> open_hdf5(const DataOptions& options);
std::unique_ptr<DocumentSource> open_lengths(const DataOptions& options);
std::unique_ptr<DocumentSource> open_distribution(const DataOptions& options);
/// Not a source of documents: samples of the needle task are whole, their loss is known, and some
/// are held out.
std::unique_ptr<Dataset> open_needle(const DataOptions& options);

/// A file of data as it was when it was opened.
class OpenedFile {
 public:
  /// `descriptor` stays open as long as this.
  OpenedFile(std::string path, int descriptor);
  /// Errors: the file has another size or another time of its last write.
  void check_unchanged() const;
  std::int64_t size() const { return then_.st_size; }  ///< bytes
  bool regular() const { return S_ISREG(then_.st_mode); }

 private:
  struct stat now() const;
  std::string path_;
  int descriptor_ = -1;
  struct stat then_ {};
};

/// A file mapped for reading.  bytes() checks that the file is as it was, because one that shrinks
/// under a map would end the program with SIGBUS; at() leaves that out, for many small reads after
/// one bytes().
class MappedFile {
 public:
  /// Errors: cannot be opened, is no regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::int64_t size() const { return size_; }  ///< bytes
  const std::string& path() const { return path_; }
  /// `count` bytes from `offset`.  Errors: beyond the end, or the file has changed.
  const std::byte* bytes(std::int64_t offset, std::int64_t count) const;
  const std::byte* at(std::int64_t offset, std::int64_t count) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
  std::optional<OpenedFile> opened_;
  void* map_ = nullptr;
};

/// Order-sensitive hash of texts and numbers (xxHash64), for fingerprints.
class Fingerprint {
 public:
  Fingerprint& add(const void* data, std::size_t bytes);
  Fingerprint& add(const std::string& text);
  Fingerprint& add(std::int64_t value) { return add(&value, sizeof value); }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

}  // namespace ballast

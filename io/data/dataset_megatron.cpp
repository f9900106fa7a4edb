// data.source = "megatron": an indexed dataset, PREFIX.idx and PREFIX.bin (Megatron-LM,
// megatron/core/datasets/indexed_dataset.py).
//
// Index, little endian: magic "MMIDIDX\0\0", version u64 = 1, dtype code u8, sequences u64,
// document entries u64, then i32 length in tokens and i64 byte offset of each sequence, and i64
// first sequence of each document with the number of sequences at the end; multimodal files append
// an i8 mode a sequence.  A document is one sample here, whatever sequences it was written in.
#include <array>
#include <cstring>

#include "core/base/error.hpp"
#include "core/base/lfs_pointer.hpp"
#include "io/data/dataset_source.hpp"

namespace ballast {

namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
constexpr std::int64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;

template <class T>
T load(const std::byte* from) {  // the arrays are not aligned
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::string without_suffix(const std::string& path) {
  const auto ends = [&](const char* suffix) {
    return path.size() > 4 && path.compare(path.size() - 4, 4, suffix) == 0;
  };
  return ends(".bin") || ends(".idx") ? path.substr(0, path.size() - 4) : path;
}

template <class Stored>
void widen(const std::byte* from, std::int64_t count, std::int32_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = load<Stored>(from + i * static_cast<std::int64_t>(sizeof(Stored)));
    // An id that 32 bits cannot hold becomes -1, which no vocabulary has.
    out[i] = static_cast<std::int64_t>(value) == static_cast<std::int32_t>(value)
                 ? static_cast<std::int32_t>(value)
                 : -1;
  }
}

struct StoredType {
  const char* name = nullptr;
  std::int64_t bytes = 0;
  void (*read)(const std::byte* from, std::int64_t count,
               std::int32_t* out) = nullptr;  ///< null: no token type
};
const std::array<StoredType, 9> kTypes = {{{},
                                           {"uint8", 1, widen<std::uint8_t>},
                                           {"int8", 1, widen<std::int8_t>},
                                           {"int16", 2, widen<std::int16_t>},
                                           {"int32", 4, widen<std::int32_t>},
                                           {"int64", 8, widen<std::int64_t>},
                                           {"float64", 8, nullptr},
                                           {"float32", 4, nullptr},
                                           {"uint16", 2, widen<std::uint16_t>}}};

/// One .idx and .bin pair, checked whole at open and read through maps.
class IndexedFile {
 public:
  explicit IndexedFile(const std::string& path)
      : index_(without_suffix(path) + ".idx"), data_(without_suffix(path) + ".bin") {
    check();
  }

  std::int64_t documents() const { return document_entries_ - 1; }
  std::int64_t sequences() const { return sequences_; }
  const MappedFile& index() const { return index_; }
  const MappedFile& data() const { return data_; }
  const StoredType& type() const { return *type_; }
  std::int64_t tokens() const { return data_.size() / type_->bytes; }
  std::int64_t sequence_tokens(std::int64_t sequence) const {
    return load<std::int32_t>(index_.at(lengths_at_ + 4 * sequence, 4));
  }
  std::int64_t first_sequence(std::int64_t document) const {
    return load<std::int64_t>(index_.at(documents_at_ + 8 * document, 8));
  }
  /// First token of a document in the whole file; `documents()` gives the end.
  std::int64_t first_token(std::int64_t document) const {
    const std::int64_t sequence = first_sequence(document);
    return sequence == sequences_
               ? tokens()
               : load<std::int64_t>(index_.at(pointers_at_ + 8 * sequence, 8)) / type_->bytes;
  }
  /// Errors: the index has changed.
  std::int64_t length(std::int64_t document) const {
    index_.bytes(0, 0);
    return first_token(document + 1) - first_token(document);
  }
  void read(std::int64_t document, std::int64_t begin, std::int64_t end, std::int32_t* out) const {
    type_->read(bytes(document, begin, end), end - begin, out);
  }
  /// As stored.  Errors: one of the files has changed.
  const std::byte* bytes(std::int64_t document, std::int64_t begin, std::int64_t end) const {
    index_.bytes(0, 0);
    return data_.bytes((first_token(document) + begin) * type_->bytes,
                       (end - begin) * type_->bytes);
  }
  std::string place(std::int64_t document) const {
    return fmt::format("{}, document {}", data_.path(), document);
  }

 private:
  void check() {
    const std::string& name = index_.path();
    refuse_lfs_pointer(name);
    refuse_lfs_pointer(data_.path());
    require(index_.size() >= kHeaderBytes, "{}: {} bytes are too few for the header of {}", name,
            index_.size(), kHeaderBytes);
    const std::byte* header = index_.bytes(0, kHeaderBytes);
    require(std::memcmp(header, kMagic, sizeof kMagic) == 0,
            "{}: bytes 0 to 8 are not the magic MMIDIDX of an indexed dataset", name);
    const auto version = load<std::uint64_t>(header + 9);
    require(version == 1, "{}: format version {} at byte 9; only version 1 is known", name,
            version);
    const auto code = load<std::uint8_t>(header + 17);
    require(code >= 1 && code < kTypes.size(), "{}: dtype code {} at byte 17 is unknown (1 to 8)",
            name, code);
    type_ = &kTypes[code];
    require(type_->read != nullptr, "{}: dtype code {} at byte 17 is {}; tokens are whole numbers",
            name, code, type_->name);

    const auto sequences = load<std::uint64_t>(header + 18),
               entries = load<std::uint64_t>(header + 26);
    const std::uint64_t room = static_cast<std::uint64_t>(index_.size() - kHeaderBytes);
    require(sequences <= room / 12 && entries <= room / 8 && entries >= 1,
            "{}: {} sequences at byte 18 and {} document entries at byte 26 do not fit in a file "
            "of {} bytes",
            name, sequences, entries, index_.size());
    const std::uint64_t expected = 12 * sequences + 8 * entries;
    require(room == expected || room == expected + sequences,
            "{}: {} bytes, but {} sequences and {} document entries need {}; the file is truncated "
            "or altered",
            name, index_.size(), sequences, entries, expected + kHeaderBytes);
    sequences_ = static_cast<std::int64_t>(sequences);
    document_entries_ = static_cast<std::int64_t>(entries);
    lengths_at_ = kHeaderBytes;
    pointers_at_ = lengths_at_ + 4 * sequences_;
    documents_at_ = pointers_at_ + 8 * sequences_;
    check_sequences();
    check_documents();
  }

  /// Sequences follow one another in the .bin file and fill it: the format's writer makes no other,
  /// and any altered number shows.
  void check_sequences() const {
    const std::byte* all = index_.bytes(0, index_.size());
    std::int64_t expected = 0;
    for (std::int64_t s = 0; s < sequences_; ++s) {
      const auto tokens = load<std::int32_t>(all + lengths_at_ + 4 * s);
      const auto pointer = load<std::int64_t>(all + pointers_at_ + 8 * s);
      require(tokens >= 0, "{}: sequence {} has the length {} at byte {}", index_.path(), s, tokens,
              lengths_at_ + 4 * s);
      require(pointer == expected,
              "{}: sequence {} begins at byte {} of {}, says byte {}; its predecessors end at {}",
              index_.path(), s, pointer, data_.path(), pointers_at_ + 8 * s, expected);
      expected += tokens * type_->bytes;
      require(
          expected <= data_.size(),
          "{}: sequence {} ends at byte {}, beyond {} with {} bytes; one of the files is truncated",
          index_.path(), s, expected, data_.path(), data_.size());
    }
    require(expected == data_.size(), "{} has {} bytes, but the sequences of {} end at {}",
            data_.path(), data_.size(), index_.path(), expected);
  }

  void check_documents() const {
    const std::byte* entries = index_.bytes(documents_at_, 8 * document_entries_);
    std::int64_t previous = 0;
    for (std::int64_t d = 0; d < document_entries_; ++d) {
      const auto sequence = load<std::int64_t>(entries + 8 * d);
      const bool first_is_zero = d > 0 || sequence == 0;
      require(first_is_zero && sequence >= previous && sequence <= sequences_,
              "{}: document entry {} at byte {} is sequence {}; entries ascend from 0 to {}",
              index_.path(), d, documents_at_ + 8 * d, sequence, sequences_);
      previous = sequence;
    }
    require(previous == sequences_,
            "{}: the last document entry is {}, not the number of sequences {}", index_.path(),
            previous, sequences_);
  }

  MappedFile index_, data_;
  const StoredType* type_ = nullptr;
  std::int64_t sequences_ = 0, document_entries_ = 0;
  std::int64_t lengths_at_ = 0, pointers_at_ = 0, documents_at_ = 0;  ///< byte offsets in the index
};

class MegatronSource final : public DocumentSource {
 public:
  explicit MegatronSource(const DataOptions& options)
      : file_(options.path),
        vocabulary_(options.vocabulary > 0 ? options.vocabulary : std::int64_t{1} << 31) {
    if (options.mask_path.empty()) return;
    mask_ = std::make_unique<IndexedFile>(options.mask_path);
    const std::string& name = mask_->index().path();
    require(mask_->type().bytes == 1, "{}: a loss mask has one byte a token, this file holds {}",
            name, mask_->type().name);
    require(mask_->sequences() == file_.sequences() && mask_->documents() == file_.documents(),
            "{} has {} sequences and {} documents, {} has {} and {}", name, mask_->sequences(),
            mask_->documents(), file_.index().path(), file_.sequences(), file_.documents());
    for (std::int64_t s = 0; s < file_.sequences(); ++s) {
      require(mask_->sequence_tokens(s) == file_.sequence_tokens(s),
              "{}: sequence {} has {} mask bytes for {} tokens", name, s, mask_->sequence_tokens(s),
              file_.sequence_tokens(s));
    }
    for (std::int64_t d = 0; d < file_.documents(); ++d) {
      require(mask_->first_sequence(d) == file_.first_sequence(d),
              "{}: document {} begins with sequence {}, in {} with {}", name, d,
              mask_->first_sequence(d), file_.index().path(), file_.first_sequence(d));
    }
  }

  std::int64_t documents() const override { return file_.documents(); }
  std::int64_t length(std::int64_t document) const override { return file_.length(document); }
  void tokens(std::int64_t document, std::int64_t begin, std::int64_t end,
              std::int32_t* out) const override {
    file_.read(document, begin, end, out);
  }
  bool masked() const override { return mask_ != nullptr; }
  void mask(std::int64_t document, std::int64_t begin, std::int64_t end,
            std::uint8_t* out) const override {
    std::memcpy(out, mask_->bytes(document, begin, end), static_cast<std::size_t>(end - begin));
  }
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::string place(std::int64_t document) const override { return file_.place(document); }
  std::string description() const override {
    return fmt::format("megatron {}: {} documents, {} tokens of {}{}", file_.data().path(),
                       documents(), file_.tokens(), file_.type().name,
                       mask_ ? ", with loss mask" : "");
  }
  std::uint64_t fingerprint() const override {
    Fingerprint fingerprint;
    fingerprint.add(file_.index().bytes(0, file_.index().size()),
                    static_cast<std::size_t>(file_.index().size()));
    if (mask_) fingerprint.add("mask").add(mask_->data().size());
    return fingerprint.value();
  }

 private:
  IndexedFile file_;
  std::unique_ptr<IndexedFile> mask_;
  std::int64_t vocabulary_;
};

}  // namespace

std::unique_ptr<DocumentSource> open_megatron(const DataOptions& options) {
  require(!options.path.empty(),
          "data.source = \"megatron\" needs data.path: the path of the .bin and .idx files");
  return std::make_unique<MegatronSource>(options);
}

}  // namespace ballast

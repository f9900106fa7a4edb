// data.source = "hdf5": /tokens (whole numbers, all documents one after another), /offsets
// (documents + 1 positions in /tokens, from 0 to its size) and optionally /loss_mask (one number a
// token, 0 where it is no target).  Each lies in one piece in the file and is read by range; what
// is chunked or compressed is refused with the command that rewrites it.  Of what ballast-data
// adds, /rows says which documents were cut from one row, attributes mark the tokenizer and pairs
// of a chosen and a rejected answer, and the groups messages and lengths are for readers.
#include <algorithm>
#include <array>
#include <filesystem>

#include "core/base/error.hpp"
#include "core/base/lfs_pointer.hpp"
#include "io/data/dataset_source.hpp"
#include "io/data/token_table.hpp"
#include "io/hdf5/hdf5_support.hpp"

namespace ballast {

namespace {

/// HDF5's own words for these two say little to who mistyped a path.
hdf5::Handle opened(const std::string& path) {
  require(std::filesystem::is_regular_file(path), "data.path: {} is no file", path);
  refuse_lfs_pointer(path);
  hdf5::silence();
  require(H5Fis_hdf5(path.c_str()) > 0,
          "data.path: {} is no HDF5 file; a token file holds /tokens, /offsets and optionally "
          "/loss_mask",
          path);
  // Samples are read in random order: what lies around one (64 KiB by default) is not read too.
  const hdf5::Handle access = hdf5::property_list(H5P_FILE_ACCESS);
  hdf5::check(H5Pset_sieve_buf_size(access, 0), "access to " + path);
  // Named, because descriptor_of asks this driver for its descriptor.
  hdf5::check(H5Pset_fapl_sec2(access), "access to " + path);
  return hdf5::open_file(path, false, access);
}

/// A mask under another name would otherwise train on every token.
void refuse_unknown(const std::string& path, const hdf5::Handle& file) {
  constexpr std::array<const char*, 6> known{"tokens", "offsets",  "loss_mask",
                                             "rows",   "messages", "lengths"};
  for (const std::string& name : hdf5::names_in(file, "/"))
    require(std::find(known.begin(), known.end(), name) != known.end(),
            "{}: /{} is not known here; a token file holds /tokens, /offsets and optionally "
            "/loss_mask",
            path, name);
}

/// The ids mean what the model takes them for, where both sides say which tokenizer is theirs.
void check_tokenizer(const std::string& path, const hdf5::Handle& file, const std::string& folder) {
  if (!hdf5::has_attribute(file, "tokenizer_crc32") || !has_tokenizer(folder)) return;
  require(hdf5::read_uint_attribute(file, "tokenizer_crc32") == token_table_crc32(folder),
          "{} was made with the tokenizer {}, whose tokens are not those of {}/tokenizer.json",
          path, hdf5::read_text_attribute(file, "tokenizer"), folder);
}

/// HDF5's own descriptor, so of the file that it reads.  It gives zeros beyond the end of one that
/// has become shorter, and whatever lies there now in one that was written again in place.
int descriptor_of(const std::string& path, const hdf5::Handle& file) {
  void* handle = nullptr;
  hdf5::check(H5Fget_vfd_handle(file, H5P_DEFAULT, &handle), "descriptor of " + path);
  return *static_cast<const int*>(handle);
}

class Hdf5Source final : public DocumentSource {
 public:
  explicit Hdf5Source(const DataOptions& options)
      : path_(options.path),
        vocabulary_(options.vocabulary > 0 ? options.vocabulary : std::int64_t{1} << 31),
        file_(opened(path_)),
        opened_(path_, descriptor_of(path_, file_)) {
    for (const char* name : {"tokens", "offsets"}) {
      require(
          hdf5::exists(file_, name),
          "{} has no dataset /{}; a token file holds /tokens, /offsets and optionally /loss_mask",
          path_, name);
    }
    refuse_unknown(path_, file_);
    check_tokenizer(path_, file_, options.tokenizer);
    check_pairs(options.pairs);
    tokens_ = open("tokens");
    total_ = size(tokens_, "tokens");
    const hdf5::Handle offsets = open("offsets");
    offsets_.resize(static_cast<std::size_t>(size(offsets, "offsets")));
    read(offsets, "offsets", H5T_NATIVE_INT64, 0, static_cast<std::int64_t>(offsets_.size()),
         offsets_.data());
    require(
        !offsets_.empty() && offsets_.front() == 0 && offsets_.back() == total_,
        "{}: /offsets must begin with 0 and end with the {} tokens of /tokens; it has {} entries",
        path_, total_, offsets_.size());
    for (std::size_t i = 1; i < offsets_.size(); ++i) {
      require(offsets_[i - 1] <= offsets_[i], "{}: /offsets[{}] = {} is below its predecessor {}",
              path_, i, offsets_[i], offsets_[i - 1]);
    }
    if (hdf5::exists(file_, "loss_mask")) {
      mask_ = open("loss_mask");
      require(size(mask_, "loss_mask") == total_, "{}: /loss_mask has {} entries for {} tokens",
              path_, size(mask_, "loss_mask"), total_);
      const hdf5::Handle type(H5Dget_type(mask_), H5Tclose, "type of loss_mask");
      mask_of_bytes_ = H5Tequal(type, H5T_NATIVE_UINT8) > 0;
    }
    if (hdf5::exists(file_, "rows")) {
      const hdf5::Handle rows = open("rows");
      require(size(rows, "rows") == documents(), "{}: /rows has {} entries for {} documents", path_,
              size(rows, "rows"), documents());
      rows_.resize(static_cast<std::size_t>(documents()));
      read(rows, "rows", H5T_NATIVE_INT64, 0, documents(), rows_.data());
    }
  }

  std::int64_t documents() const override { return static_cast<std::int64_t>(offsets_.size()) - 1; }
  std::int64_t length(std::int64_t document) const override {
    return offset(document + 1) - offset(document);
  }
  void tokens(std::int64_t document, std::int64_t begin, std::int64_t end,
              std::int32_t* out) const override {
    // HDF5 clamps a number that the memory type cannot hold, so a wide id stays outside any
    // vocabulary or becomes the largest.
    read(tokens_, "tokens", H5T_NATIVE_INT32, offset(document) + begin, end - begin, out);
  }
  bool masked() const override { return mask_.valid(); }
  void mask(std::int64_t document, std::int64_t begin, std::int64_t end,
            std::uint8_t* out) const override {
    // Without a conversion, for which HDF5 clears a buffer of 1 MiB at every read.
    if (mask_of_bytes_)
      return read(mask_, "loss_mask", H5T_NATIVE_UINT8, offset(document) + begin, end - begin, out);
    // Wide enough that HDF5 need not clamp what is no mask.
    std::vector<std::int16_t> wide(static_cast<std::size_t>(end - begin));
    read(mask_, "loss_mask", H5T_NATIVE_INT16, offset(document) + begin, end - begin, wide.data());
    for (std::size_t i = 0; i < wide.size(); ++i) {
      require(wide[i] >= 0 && wide[i] <= 255, "{}: /loss_mask holds {} at token {}", path_, wide[i],
              offset(document) + begin + static_cast<std::int64_t>(i));
      out[i] = static_cast<std::uint8_t>(wide[i]);
    }
  }
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t origin(std::int64_t document) const override {
    return rows_.empty() ? document : rows_.at(static_cast<std::size_t>(document));
  }
  std::string place(std::int64_t document) const override {
    return fmt::format("{}, document {}", path_, document);
  }
  std::string description() const override {
    std::string mask = masked() ? ", with loss mask" : "";
    if (masked() && hdf5::has_attribute(file_, "loss_tokens")) {
      const auto loss = static_cast<double>(hdf5::read_int_attribute(file_, "loss_tokens"));
      mask += fmt::format(" ({:.1f} % of them carry loss)",
                          100 * loss / static_cast<double>(std::max<std::int64_t>(1, total_)));
    }
    return fmt::format("hdf5 {}: {} documents, {} tokens{}", path_, documents(), total_, mask);
  }
  std::uint64_t fingerprint() const override {
    return Fingerprint()
        .add(offsets_.data(), offsets_.size() * sizeof(std::int64_t))
        .add(masked() ? "mask" : "no mask")
        .value();
  }

 private:
  std::int64_t offset(std::int64_t document) const {
    return offsets_.at(static_cast<std::size_t>(document));
  }

  /// Answers that are taken for pairs, or pairs for answers, would train on another objective.
  void check_pairs(bool wanted) const {
    const bool holds =
        hdf5::has_attribute(file_, "pairs") && hdf5::read_int_attribute(file_, "pairs") > 0;
    require(holds || !wanted,
            "{} holds no pairs for loss.kind = \"dpo\": `ballast-data build --pairs` makes them "
            "(documents 2 i and 2 i + 1, attribute pairs = 1)",
            path_);
    require(wanted || !holds,
            "{} holds pairs of chosen and rejected answers; set loss.kind = \"dpo\"", path_);
  }

  hdf5::Handle open(const std::string& name) const {
    hdf5::Handle dataset = hdf5::open_dataset(file_, name);
    hdf5::plain_offset(dataset, path_ + ":/" + name, std::filesystem::file_size(path_));
    const hdf5::Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
    const H5T_class_t kind = H5Tget_class(type);
    // h5py stores booleans as an enumeration.
    require(kind == H5T_INTEGER || (kind == H5T_ENUM && name == "loss_mask"),
            "{}: /{} does not hold whole numbers", path_, name);
    return dataset;
  }

  std::int64_t size(const hdf5::Handle& dataset, const std::string& name) const {
    const auto dims = hdf5::dims_of(dataset, name);
    require(dims.size() == 1 && dims[0] < (hsize_t{1} << 60), "{}: /{} must have one dimension",
            path_, name);
    return static_cast<std::int64_t>(dims[0]);
  }

  void read(const hdf5::Handle& dataset, const std::string& name, hid_t type, std::int64_t begin,
            std::int64_t count, void* out) const {
    hdf5::read_range(dataset, path_ + ":/" + name, type, static_cast<std::uint64_t>(begin),
                     static_cast<std::uint64_t>(count), out);
    opened_.check_unchanged();  // behind the read, so that a change during it is seen too
  }

  std::string path_;
  std::int64_t vocabulary_;
  hdf5::Handle file_, tokens_, mask_;
  OpenedFile opened_;
  std::vector<std::int64_t> offsets_, rows_;
  std::int64_t total_ = 0;
  bool mask_of_bytes_ = false;  ///< as ballast-data writes it
};

}  // namespace

std::unique_ptr<DocumentSource> open_hdf5(const DataOptions& options) {
  require(!options.path.empty(), "data.source = \"hdf5\" needs data.path");
  return std::make_unique<Hdf5Source>(options);
}

}  // namespace ballast

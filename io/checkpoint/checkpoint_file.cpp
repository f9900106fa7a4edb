#include "io/checkpoint/checkpoint_file.hpp"

#include <xxhash.h>

#include <cmath>
#include <utility>

#include "io/checkpoint/io_threads.hpp"
#include "kernels/ops/element_sum.hpp"

namespace ballast {

namespace {

constexpr const char* kFormat = "Ballast checkpoint";

/// HDF5's own file locks fail on some parallel file systems; a checkpoint is protected by its
/// rename.
hdf5::Handle access_list(bool creates = false) {
  hdf5::Handle access = hdf5::property_list(H5P_FILE_ACCESS);
  hdf5::check(H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_LATEST),
              "setting the HDF5 file format");
  if (creates) {
    // HDF5 keeps all that it has laid out, so that it never reads back what a storage may have
    // lost.
    H5AC_cache_config_t cache{};
    cache.version = H5AC__CURR_CACHE_CONFIG_VERSION;
    hdf5::check(H5Pget_mdc_config(access, &cache), "the HDF5 cache");
    cache.evictions_enabled = false;
    cache.incr_mode = H5C_incr__off;
    cache.flash_incr_mode = H5C_flash_incr__off;
    cache.decr_mode = H5C_decr__off;
    hdf5::check(H5Pset_mdc_config(access, &cache), "setting the HDF5 cache");
  }
#if H5_VERSION_GE(1, 10, 7)
  hdf5::check(H5Pset_file_locking(access, false, true), "switching HDF5 file locks off");
#endif
  return access;
}

/// Little endian, whatever this machine is.
hid_t file_type(DType type) {
  return type == DType::f32   ? H5T_IEEE_F32LE
         : type == DType::f64 ? H5T_IEEE_F64LE
                              : H5T_STD_U16LE;  // bf16's bits: HDF5 has no bf16
}

DType dtype_of_dataset(hid_t dataset, const std::string& name) {
  const hdf5::Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
  for (DType candidate : {DType::f32, DType::f64, DType::bf16}) {
    if (hdf5::check(H5Tequal(type, file_type(candidate)), "type of " + name) > 0) return candidate;
  }
  fail("dataset {} holds neither f32, f64 nor bf16, little endian", name);
}

void write_state(hid_t file, const CheckpointState& state) {
  hdf5::write_attribute(file, "format", std::string(kFormat));
  hdf5::write_attribute(file, "format_version", kCheckpointVersion);
  hdf5::write_attribute(file, "step", state.step);
  hdf5::write_attribute(file, "sampler_epoch", state.sampler.epoch);
  hdf5::write_attribute(file, "sampler_index", state.sampler.index);
  hdf5::write_attribute(file, "tokens_seen", state.tokens_seen);
  hdf5::write_attribute(file, "seconds_trained", state.seconds_trained);
  hdf5::write_attribute(file, "seed", state.seed);
  hdf5::write_attribute(file, "git_hash", state.git_hash);
  hdf5::write_attribute(file, "run", state.run);
  hdf5::write_attribute(file, "parent", state.parent);
  const hdf5::Handle group = hdf5::create_group(file, "state");
  hdf5::write_text(group, "deck", state.deck);
  const hdf5::Handle extra = hdf5::create_group(group, "extra");
  for (const auto& [name, values] : state.extra) {
    require(!name.empty() && name != "." && name.find('/') == std::string::npos,
            "checkpoint state: \"{}\" cannot name a dataset", name);
    hdf5::write_vector<double>(extra, name, values);
  }
}

/// A fixed text of a sane size.
std::string bounded_text(hid_t parent, const std::string& name, std::uint64_t most) {
  const hdf5::Handle dataset = hdf5::open_dataset(parent, name);
  const hdf5::Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
  require(H5Tget_size(type) <= most, "text {} of {} bytes", name, H5Tget_size(type));
  return hdf5::read_text(parent, name);
}

CheckpointState read_state(hid_t file, std::uint64_t version, std::uint64_t file_bytes) {
  require(hdf5::read_text_attribute(file, "format") == kFormat, "attribute format is not \"{}\"",
          kFormat);
  require(hdf5::read_uint_attribute(file, "format_version") == version,
          "attribute format_version is not that of the file's header, {}", version);
  CheckpointState state;
  state.step = hdf5::read_int_attribute(file, "step");
  state.sampler.epoch = hdf5::read_int_attribute(file, "sampler_epoch");
  state.sampler.index = hdf5::read_int_attribute(file, "sampler_index");
  state.tokens_seen = hdf5::read_int_attribute(file, "tokens_seen");
  state.seconds_trained = hdf5::read_real_attribute(file, "seconds_trained");
  state.seed = hdf5::read_uint_attribute(file, "seed");
  state.git_hash = hdf5::read_text_attribute(file, "git_hash");
  if (version > 1) {
    state.run = hdf5::read_text_attribute(file, "run");
    state.parent = hdf5::read_text_attribute(file, "parent");
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  require(state.step >= 0 && state.step <= kMost && state.sampler.epoch >= 0 &&
              state.sampler.epoch <= kMost && state.sampler.index >= 0 && state.tokens_seen >= 0 &&
              std::isfinite(state.seconds_trained) && state.seconds_trained >= 0,
          "a state that no run has: step {}, sampler at {} of epoch {}, {} tokens, {} s",
          state.step, state.sampler.index, state.sampler.epoch, state.tokens_seen,
          state.seconds_trained);
  const hdf5::Handle group = hdf5::open_group(file, "state");
  state.deck = bounded_text(group, "deck", file_bytes);
  const hdf5::Handle extra = hdf5::open_group(group, "extra");
  for (const std::string& name : hdf5::names_in(group, "extra")) {
    hdf5::plain_offset(hdf5::open_dataset(extra, name), "state/extra/" + name, file_bytes);
    state.extra[name] = hdf5::read_vector<double>(extra, name);
  }
  return state;
}

/// The checksum of a range whose elements are `data`.
std::uint64_t checksum(std::uint64_t version, const CheckpointDataset& dataset, std::int64_t begin,
                       std::int64_t end, const void* data) {
  return version == 1
             ? XXH64(data, static_cast<std::size_t>(end - begin) * size_of(dataset.type), 0)
             : element_sum(data, dataset.type, begin, end - begin).sum;
}

/// Runs `work` and puts the file's name before any error.
template <class F>
auto named(const std::string& path, F&& work) {
  try {
    return work();
  } catch (const Error& error) {
    const std::string text = error.what();
    fail("{}{}", text.find(path) == std::string::npos ? path + ": " : "", text);
  }
}

}  // namespace

CheckpointPlaces create_checkpoint_file(const std::string& path,
                                        std::vector<CheckpointDataset>& datasets,
                                        const CheckpointState& state) {
  CheckpointPlaces places{envelope_bytes(datasets.size()), 0};
  const hdf5::Handle creation = hdf5::property_list(H5P_FILE_CREATE), access = access_list(true),
                     dataset = hdf5::property_list(H5P_DATASET_CREATE);
  hdf5::check(H5Pset_userblock(creation, places.block_bytes), "setting the HDF5 user block");
  hdf5::check(H5Pset_obj_track_times(creation, false), "times of the root group");
  hdf5::check(H5Pset_alignment(access, 1, kCheckpointPage), "setting the HDF5 alignment");
  hdf5::check(H5Pset_small_data_block_size(access, 0), "setting the HDF5 data block");
  // Big metadata blocks, so that small pieces do not scatter between the datasets.
  hdf5::check(H5Pset_meta_block_size(access, hsize_t{1} << 18), "setting the HDF5 metadata block");
  // Space now, values later and from many ranks; no time stamps, so that equal states give equal
  // files.
  hdf5::check(H5Pset_layout(dataset, H5D_CONTIGUOUS), "dataset layout");
  hdf5::check(H5Pset_alloc_time(dataset, H5D_ALLOC_TIME_EARLY), "dataset allocation");
  hdf5::check(H5Pset_fill_time(dataset, H5D_FILL_TIME_NEVER), "dataset fill");
  hdf5::check(H5Pset_obj_track_times(dataset, false), "dataset times");

  hdf5::Handle file = hdf5::create_file(path, creation, access);
  write_state(file, state);
  hdf5::create_group(file, "parameters");
  const auto create = [&](const std::string& name, DType type, std::vector<hsize_t> dims,
                          std::uint64_t bytes) {
    const hdf5::Handle made =
        hdf5::create_dataset(file, name, file_type(type), std::move(dims), dataset);
    const haddr_t offset = H5Dget_offset(made);
    require(offset != HADDR_UNDEF && offset % kCheckpointPage == 0,
            "dataset {} of {} bytes was not put at a multiple of {} bytes", name, bytes,
            kCheckpointPage);
    return static_cast<std::uint64_t>(offset);
  };
  for (CheckpointDataset& d : datasets) {
    if (!hdf5::exists(file, d.group())) hdf5::create_group(file, d.group());
    d.offset = create(d.path(), d.type, {d.shape.begin(), d.shape.end()}, d.bytes());
  }
  const hsize_t sums = first_ranges(datasets).back();
  const hdf5::Handle made = hdf5::create_dataset(file, "checksums", H5T_STD_U64LE, {sums}, dataset);
  places.checksums = H5Dget_offset(made);
  return file.close("closing " + path), places;
}

void fail_damaged(const std::string& path, const CheckpointDataset& dataset, std::int64_t begin,
                  std::int64_t end) {
  throw DamagedFile(fmt::format("{}: dataset {} is damaged in elements [{}, {}) (checksum)", path,
                                dataset.path(), begin, end));
}

CheckpointFile::CheckpointFile(const std::string& path) : file_(path, false) {
  named(path, [&] {
    const hdf5::Handle file = hdf5::open_file(path, false, access_list());
    version_ = hdf5::read_uint_attribute(file, "format_version");
    state_ = read_state(file, version_, file_.bytes());
    find_datasets(file);
    const hdf5::Handle sums = hdf5::open_dataset(file, "checksums");
    hdf5::plain_offset(sums, "checksums", file_.bytes());
    checksums_ = hdf5::read_vector<std::uint64_t>(file, "checksums");
    require(checksums_.size() == first_ranges(datasets_).back(), "{} checksums for {} ranges",
            checksums_.size(), first_ranges(datasets_).back());
  });
}

void CheckpointFile::find_datasets(hid_t file) {
  for (const std::string& parameter : hdf5::names_in(file, "/parameters")) {
    for (const std::string& field : hdf5::names_in(file, "/parameters/" + parameter)) {
      CheckpointDataset d{parameter, field, {}, DType::f32, 0};
      const hdf5::Handle dataset = hdf5::open_dataset(file, d.path());
      d.type = dtype_of_dataset(dataset, d.path());
      d.offset = hdf5::plain_offset(dataset, d.path(), file_.bytes());
      for (hsize_t extent : hdf5::dims_of(dataset, d.path()))
        d.shape.push_back(static_cast<std::int64_t>(extent));
      require(!d.shape.empty(), "dataset {} has no dimensions", d.path());
      datasets_.push_back(std::move(d));
    }
  }
}

void CheckpointFile::read(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                          void* to) const {
  const std::size_t width = size_of(dataset.type);
  require(0 <= first && 0 <= count && first + count <= dataset.numel(),
          "{}: elements [{}, {}) of dataset {} of {}", file_.path(), first, first + count,
          dataset.path(), dataset.numel());
  file_.read(dataset.offset + static_cast<std::uint64_t>(first) * width, to,
             static_cast<std::size_t>(count) * width);
}

void CheckpointFile::verify(std::size_t first, std::size_t last,
                            std::atomic<std::int64_t>* progress) const {
  file_.drop_cache();
  const auto ranges = checksum_ranges(datasets_);
  std::vector<std::vector<std::byte>> buffers(io_threads());
  in_io_threads(last - first, [&](std::size_t part, std::size_t thread) {
    const auto& [number, begin, end] = ranges[first + part];
    const CheckpointDataset& dataset = datasets_[number];
    std::vector<std::byte>& buffer = buffers[thread];
    buffer.resize(static_cast<std::size_t>(end - begin) * size_of(dataset.type));
    read(dataset, begin, end - begin, buffer.data());
    if (progress != nullptr) progress->fetch_add(static_cast<std::int64_t>(buffer.size()));
    if (checksum(version_, dataset, begin, end, buffer.data()) != checksums_[first + part])
      fail_damaged(file_.path(), dataset, begin, end);
  });
}

}  // namespace ballast

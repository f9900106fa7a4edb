#include "io/checkpoint/checkpoint_file.hpp"

#include <algorithm>
#include <utility>

namespace ballast {

namespace {

constexpr const char* kFormat = "Ballast checkpoint";

/// HDF5's own file locks fail on some parallel file systems; a checkpoint is protected by its
/// rename.
hdf5::Handle access_list() {
  hdf5::Handle access = hdf5::property_list(H5P_FILE_ACCESS);
  hdf5::check(H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_LATEST),
              "setting the HDF5 file format");
#if H5_VERSION_GE(1, 10, 7)
  hdf5::check(H5Pset_file_locking(access, false, true), "switching HDF5 file locks off");
#endif
  return access;
}

DType dtype_of_dataset(hid_t dataset, const std::string& name) {
  const hdf5::Handle type(H5Dget_type(dataset), H5Tclose, "type of " + name);
  for (DType candidate : {DType::f32, DType::f64, DType::bf16}) {
    if (hdf5::check(H5Tequal(type, hdf5::native_type(candidate)), "type of " + name) > 0)
      return candidate;
  }
  fail("dataset {} holds neither f32, f64 nor bf16 of this machine's byte order", name);
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
  const hdf5::Handle group = hdf5::create_group(file, "state");
  hdf5::write_text(group, "deck", state.deck);
  const hdf5::Handle extra = hdf5::create_group(group, "extra");
  for (const auto& [name, values] : state.extra) {
    require(!name.empty() && name != "." && name.find('/') == std::string::npos,
            "checkpoint state: \"{}\" cannot name a dataset", name);
    hdf5::write_vector<double>(extra, name, values);
  }
}

}  // namespace

std::uint64_t create_checkpoint_file(const std::string& path,
                                     const std::vector<CheckpointDataset>& datasets,
                                     const CheckpointState& state) {
  const std::uint64_t block_bytes = envelope_bytes(datasets.size());
  const hdf5::Handle creation = hdf5::property_list(H5P_FILE_CREATE), access = access_list(),
                     dataset = hdf5::property_list(H5P_DATASET_CREATE);
  hdf5::check(H5Pset_userblock(creation, block_bytes), "setting the HDF5 user block");
  hdf5::check(H5Pset_obj_track_times(creation, false), "times of the root group");
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
  for (const CheckpointDataset& d : datasets) {
    if (!hdf5::exists(file, d.group())) hdf5::create_group(file, d.group());
    hdf5::create_dataset(file, d.path(), hdf5::native_type(d.type),
                         {d.shape.begin(), d.shape.end()}, dataset);
  }
  hdf5::create_dataset(file, "checksums", H5T_NATIVE_UINT64, {checksum_ranges(datasets).size()},
                       dataset);
  file.close("closing " + path);
  return block_bytes;
}

template <class F>
auto CheckpointFile::named(F&& work) const {
  try {
    return work();
  } catch (const Error& error) {
    fail("{}: {}", path_, error.what());
  }
}

CheckpointFile::CheckpointFile(const std::string& path, bool writable)
    : path_(path), file_(hdf5::open_file(path, writable, access_list())) {}

CheckpointFile::CheckpointFile(const std::string& path, const Communicator& world) : path_(path) {
  const hdf5::Handle access = access_list();
  hdf5::check(H5Pset_fapl_mpio(access, world.mpi(), MPI_INFO_NULL), "MPI-IO for " + path);
  file_ = hdf5::open_file(path, true, access);
}

std::vector<CheckpointDataset> CheckpointFile::datasets() const {
  return named([&] {
    std::vector<CheckpointDataset> datasets;
    for (const std::string& parameter : hdf5::names_in(file_, "/parameters")) {
      for (const std::string& field : hdf5::names_in(file_, "/parameters/" + parameter)) {
        CheckpointDataset d{parameter, field, {}, DType::f32};
        const hdf5::Handle dataset = hdf5::open_dataset(file_, d.path());
        d.type = dtype_of_dataset(dataset, d.path());
        for (hsize_t extent : hdf5::dims_of(dataset, d.path()))
          d.shape.push_back(static_cast<std::int64_t>(extent));
        datasets.push_back(std::move(d));
      }
    }
    return datasets;
  });
}

std::vector<DataExtent> CheckpointFile::extents(
    const std::vector<CheckpointDataset>& datasets) const {
  return named([&] {
    std::vector<DataExtent> extents;
    for (const CheckpointDataset& d : datasets) {
      const hdf5::Handle dataset = hdf5::open_dataset(file_, d.path());
      const haddr_t offset = H5Dget_offset(dataset);
      require(offset != HADDR_UNDEF, "dataset {} has no place in the file", d.path());
      extents.push_back({offset, static_cast<std::uint64_t>(d.numel()) * size_of(d.type)});
    }
    return extents;
  });
}

void CheckpointFile::transfer(const CheckpointDataset& dataset, std::int64_t first,
                              std::int64_t count, void* memory, Direction direction) {
  named([&] {
    const std::string name = dataset.path();
    if (open_name_ != name) {
      open_dataset_ = hdf5::open_dataset(file_, name);
      open_name_ = name;
    }
    const hdf5::Handle file_space(H5Dget_space(open_dataset_), H5Sclose, "dataspace of " + name);
    const hid_t type = hdf5::native_type(dataset.type);
    auto* at = static_cast<std::byte*>(memory);
    for (const Hyperslab& box : hyperslabs(dataset.shape, first, first + count)) {
      const std::vector<hsize_t> start(box.start.begin(), box.start.end()),
          extent(box.count.begin(), box.count.end());
      hsize_t elements = 1;
      for (hsize_t e : extent) elements *= e;
      const hdf5::Handle memory_space = hdf5::simple_space({elements});
      hdf5::check(H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start.data(), nullptr,
                                      extent.data(), nullptr),
                  "selecting elements of " + name);
      const bool reading = direction == Direction::read;
      hdf5::check(reading
                      ? H5Dread(open_dataset_, type, memory_space, file_space, H5P_DEFAULT, at)
                      : H5Dwrite(open_dataset_, type, memory_space, file_space, H5P_DEFAULT, at),
                  fmt::format("{} dataset {}, elements [{}, {})", reading ? "reading" : "writing",
                              name, first, first + count));
      at += elements * size_of(dataset.type);
    }
  });
}

void CheckpointFile::write(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                           const void* from) {
  transfer(dataset, first, count, const_cast<void*>(from), Direction::write);
}

void CheckpointFile::read(const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                          void* to) {
  transfer(dataset, first, count, to, Direction::read);
}

CheckpointState CheckpointFile::state() const {
  return named([&] {
    require(hdf5::read_text_attribute(file_, "format") == kFormat, "attribute format is not \"{}\"",
            kFormat);
    CheckpointState state;
    state.step = hdf5::read_int_attribute(file_, "step");
    state.sampler.epoch = hdf5::read_int_attribute(file_, "sampler_epoch");
    state.sampler.index = hdf5::read_int_attribute(file_, "sampler_index");
    state.tokens_seen = hdf5::read_int_attribute(file_, "tokens_seen");
    state.seconds_trained = hdf5::read_real_attribute(file_, "seconds_trained");
    state.seed = hdf5::read_uint_attribute(file_, "seed");
    state.git_hash = hdf5::read_text_attribute(file_, "git_hash");
    const hdf5::Handle group = hdf5::open_group(file_, "state");
    state.deck = hdf5::read_text(group, "deck");
    const hdf5::Handle extra = hdf5::open_group(group, "extra");
    for (const std::string& name : hdf5::names_in(group, "extra"))
      state.extra[name] = hdf5::read_vector<double>(extra, name);
    return state;
  });
}

std::vector<std::uint64_t> CheckpointFile::checksums() const {
  return named([&] { return hdf5::read_vector<std::uint64_t>(file_, "checksums"); });
}

void CheckpointFile::write_checksums(const std::vector<std::uint64_t>& sums) {
  named([&] {
    const hdf5::Handle dataset = hdf5::open_dataset(file_, "checksums");
    require(hdf5::dims_of(dataset, "checksums") == std::vector<hsize_t>{sums.size()},
            "dataset checksums has another size");
    hdf5::check(H5Dwrite(dataset, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, sums.data()),
                "writing checksums");
  });
}

void CheckpointFile::close() {
  open_dataset_ = hdf5::Handle();
  open_name_.clear();
  const herr_t flushed = H5Fflush(file_, H5F_SCOPE_GLOBAL);
  const std::string reason = flushed < 0 ? hdf5::last_error() : "";
  file_.close("closing " +
              path_);  // also after a failed flush: with MPI-IO every rank has to come here
  require(flushed >= 0, "{}: flushing to the disk: {}", path_, reason);
}

}  // namespace ballast

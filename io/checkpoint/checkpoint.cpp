#include "io/checkpoint/checkpoint.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <tuple>

#include "io/checkpoint/checkpoint_file.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPartial = ".partial";
/// Elements of one transfer: big enough for any file system, small enough to stage a device tensor
/// on the host.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 23;

std::string file_name(std::int64_t step) { return fmt::format("step_{:08}.h5", step); }

/// Step of a checkpoint's file name, or nothing for any other name.
std::optional<std::int64_t> step_of(const std::string& name) {
  std::int64_t step = 0;
  if (name.compare(0, 5, "step_") != 0) return std::nullopt;
  std::from_chars(name.data() + 5, name.data() + name.size(), step);
  return file_name(step) == name ? std::optional(step) : std::nullopt;
}

/// Steps with a checkpoint in `dir`, newest first.
std::vector<std::int64_t> steps_in(const std::string& dir) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(dir, error), end; !error && entry != end;
       entry.increment(error)) {
    if (const auto step = step_of(entry->path().filename().string())) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

/// What a killed write left.
void remove_partials(const std::string& dir) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    const std::size_t stem = name.size() - std::min(name.size(), std::strlen(kPartial));
    if (name.substr(stem) == kPartial && step_of(name.substr(0, stem)))
      leftovers.push_back(entry.path());
  }
  for (const fs::path& path : leftovers) fs::remove(path);
}

/// Takes disk space before anybody writes: a full disk then shows here, on one rank, and not inside
/// a collective call.
void reserve(const std::string& path, std::uint64_t bytes, bool create) {
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0666);
  require(descriptor >= 0, "{} cannot be {}: {}", path, create ? "created" : "opened",
          std::strerror(errno));
  int code = bytes == 0 ? 0 : ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (code == EINVAL || code == EOPNOTSUPP)
    code = 0;  // the file system has no such call: then the writes find out
  ::close(descriptor);
  require(code == 0,
          "{}: {} bytes for the checkpoint: {}; free some space, lower checkpoint.keep or name "
          "another run folder",
          path, bytes, std::strerror(code));
}

void sync_directory(const std::string& dir) {
  const int descriptor = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  require(descriptor >= 0, "{} cannot be opened: {}", dir, std::strerror(errno));
  const int code = ::fsync(descriptor);
  const int reason = errno;
  ::close(descriptor);
  require(code == 0 || reason == EINVAL, "{}: fsync: {}", dir,
          std::strerror(reason));  // EINVAL: the file system has none for directories
}

/// The dataset of a parameter's field, or null; `datasets` are sorted.
const CheckpointDataset* find(const std::vector<CheckpointDataset>& datasets,
                              const std::string& parameter, const std::string& field) {
  const auto at = std::lower_bound(datasets.begin(), datasets.end(), std::tie(parameter, field),
                                   [](const CheckpointDataset& d, const auto& wanted) {
                                     return std::tie(d.parameter, d.field) < wanted;
                                   });
  return at != datasets.end() && at->parameter == parameter && at->field == field ? &*at : nullptr;
}

/// Calls transfer(dataset, first, count, host memory) for every piece of the shard that is in the
/// file, through a host buffer for tensors on a device: filled before the call (`to_file`) or
/// copied back after it.
template <class F>
void for_each_piece(const std::vector<CheckpointDataset>& datasets, const CheckpointShard& shard,
                    bool to_file, F&& transfer) {
  std::vector<std::byte> staging;
  for_each_part(shard, [&](const Parameter& parameter, std::int64_t first, std::int64_t count,
                           std::int64_t at) {
    if (to_file && parameter.tied_copy) return;
    for (const auto& [field, tensor] : shard.fields) {
      const CheckpointDataset* dataset = find(datasets, parameter.name, field);
      const std::size_t width = size_of(tensor.dtype());
      for (std::int64_t done = 0; done < count; done += kPieceElements) {
        const std::int64_t piece = std::min(kPieceElements, count - done);
        const std::size_t bytes = static_cast<std::size_t>(piece) * width;
        auto* memory =
            static_cast<std::byte*>(tensor.raw()) + static_cast<std::size_t>(at + done) * width;
        if (tensor.space() == Space::host) {
          transfer(*dataset, first + done, piece, memory);
          continue;
        }
        staging.resize(std::max(staging.size(), bytes));
        Device& device = device_of(tensor.space());
        if (to_file) device.copy(staging.data(), Space::host, memory, tensor.space(), bytes);
        device.synchronize();
        transfer(*dataset, first + done, piece, staging.data());
        if (!to_file) device.copy(memory, tensor.space(), staging.data(), Space::host, bytes);
      }
    }
  });
}

/// All ranks write their shards through MPI-IO.  A rank whose write fails still joins the closing,
/// which is collective.
void write_shards(const std::string& path, const Communicator& world,
                  const std::vector<CheckpointDataset>& datasets, const CheckpointShard& shard) {
  std::optional<CheckpointFile> file;
  on_all_ranks(world, [&] { file.emplace(path, world); });
  on_all_ranks(world, [&] {
    std::string problem;
    try {
      for_each_piece(datasets, shard, true,
                     [&](const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                         void* memory) { file->write(dataset, first, count, memory); });
    } catch (const std::exception& error) {
      problem = error.what();
    }
    file->close();
    require(problem.empty(), "{}", problem);
  });
}

std::uint64_t checksum(CheckpointFile& file, const CheckpointDataset& dataset,
                       const ChecksumRange& range, std::vector<std::byte>& buffer) {
  const std::size_t bytes =
      static_cast<std::size_t>(range.end - range.begin) * size_of(dataset.type);
  buffer.resize(std::max(buffer.size(), bytes));
  file.read(dataset, range.begin, range.end - range.begin, buffer.data());
  return XXH64(buffer.data(), bytes, 0);
}

/// Checksums of all ranges, on every rank; each range is read by one rank.
std::vector<std::uint64_t> compute_checksums(const std::string& path, const Communicator& world,
                                             const std::vector<CheckpointDataset>& datasets) {
  const auto ranges = checksum_ranges(datasets);
  std::vector<std::uint64_t> sums(ranges.size(), 0);
  on_all_ranks(world, [&] {
    CheckpointFile file(path, false);
    std::vector<std::byte> buffer;
    const auto [first, last] = ranges_of_rank(datasets, ranges, world.rank(), world.size());
    for (std::size_t i = first; i < last; ++i)
      sums[i] = checksum(file, datasets[ranges[i].dataset], ranges[i], buffer);
  });
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Iallreduce(MPI_IN_PLACE, sums.data(), static_cast<int>(sums.size()), MPI_UINT64_T,
                           MPI_BOR, world.mpi(), requests.data()),
            "gathering checkpoint checksums");
  wait_all(requests);
  return sums;
}

/// Verifies a whole file, every byte once, spread over the ranks.  Collective.
void verify(const std::string& path, const Communicator& world) {
  on_all_ranks(world, [&] {
    if (world.rank() == 0) check_seal(path);
  });
  on_all_ranks(world, [&] {
    CheckpointFile file(path, false);
    const auto datasets = file.datasets();
    const auto ranges = checksum_ranges(datasets);
    const auto sums = file.checksums();
    require(sums.size() == ranges.size(), "{}: {} checksums for {} ranges", path, sums.size(),
            ranges.size());
    std::vector<std::byte> buffer;
    const auto [first, last] = ranges_of_rank(datasets, ranges, world.rank(), world.size());
    for (std::size_t i = first; i < last; ++i) {
      const CheckpointDataset& dataset = datasets[ranges[i].dataset];
      require(checksum(file, dataset, ranges[i], buffer) == sums[i],
              "{}: dataset {} is damaged in elements [{}, {}) (checksum)", path, dataset.path(),
              ranges[i].begin, ranges[i].end);
    }
  });
}

/// The shard's parameters and fields must be in the file as they are in memory.
void check_match(const std::string& path, const std::vector<CheckpointDataset>& datasets,
                 const CheckpointShard& shard) {
  for_each_part(shard, [&](const Parameter& parameter, std::int64_t, std::int64_t, std::int64_t) {
    for (const auto& [field, tensor] : shard.fields) {
      const CheckpointDataset* dataset = find(datasets, parameter.name, field);
      require(dataset != nullptr,
              "{}: no dataset /parameters/{}/{}; the checkpoint is of another model", path,
              parameter.name, field);
      require(dataset->shape == parameter.shape, "{}: dataset {} has shape {}, the model's is {}",
              path, dataset->path(), to_string(dataset->shape), to_string(parameter.shape));
      require(
          dataset->type == tensor.dtype(),
          "{}: dataset {} holds {}, this run keeps {}; use the precision that it was written with",
          path, dataset->path(), name(dataset->type), name(tensor.dtype()));
    }
  });
}

/// Every parameter in the file must be in some rank's table: a smaller model than the one written
/// is refused too.
void check_all_wanted(const std::string& path, const Communicator& world,
                      const std::vector<CheckpointDataset>& datasets,
                      const CheckpointShard& shard) {
  std::vector<std::uint8_t> wanted(datasets.size(), 0);
  for (std::size_t d = 0; d < datasets.size(); ++d) {
    wanted[d] = std::any_of(shard.table->begin(), shard.table->end(),
                            [&](const Parameter& p) { return p.name == datasets[d].parameter; });
  }
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Iallreduce(MPI_IN_PLACE, wanted.data(), static_cast<int>(wanted.size()),
                           MPI_UINT8_T, MPI_BOR, world.mpi(), requests.data()),
            "comparing a checkpoint with the model");
  wait_all(requests);
  on_all_ranks(world, [&] {
    const auto missing = std::find(wanted.begin(), wanted.end(), 0);
    require(missing == wanted.end(),
            "{}: the model has no parameter {}; the checkpoint is of another model", path,
            datasets[static_cast<std::size_t>(missing - wanted.begin())].parameter);
  });
}

}  // namespace

std::string write_checkpoint(const std::string& dir, const Communicator& world,
                             const CheckpointShard& shard, const CheckpointState& state, int keep) {
  const auto datasets = agree_layout(world, shard);
  const std::string path = dir + "/" + file_name(state.step), partial = path + kPartial;
  const bool first_rank = world.rank() == 0;
  std::uint64_t block_bytes = 0;
  try {
    on_all_ranks(world, [&] {
      require(state.step >= 0 && keep >= 1,
              "checkpoint of step {} with checkpoint.keep = {}: neither can be negative, and keep "
              "is at least 1",
              state.step, keep);
      if (!first_rank) return;
      fs::create_directories(dir);
      remove_partials(dir);
      // Once with an estimate, so that HDF5 itself does not meet the full disk, and once with the
      // size that the file has got.
      std::uint64_t bytes = (std::uint64_t{1} << 20) + state.deck.size();
      for (const CheckpointDataset& d : datasets)
        bytes += static_cast<std::uint64_t>(d.numel()) * size_of(d.type) + 4096;
      reserve(partial, bytes, true);
      block_bytes = create_checkpoint_file(partial, datasets, state);
      reserve(partial, fs::file_size(partial), false);
    });
    write_shards(partial, world, datasets, shard);
    const auto sums = compute_checksums(partial, world, datasets);
    on_all_ranks(world, [&] {
      if (!first_rank) return;
      CheckpointFile file(partial, true);
      const auto extents = file.extents(datasets);
      file.write_checksums(sums);
      file.close();
      seal(partial, block_bytes, extents);
      fs::rename(partial, path);
      sync_directory(dir);
    });
  } catch (...) {
    std::error_code ignored;
    if (first_rank) fs::remove(partial, ignored);
    throw;
  }
  if (first_rank) {
    // Later steps belong to a run that this one has overtaken or to damaged files: they are not
    // counted and not touched.
    int kept = 0;
    for (std::int64_t step : steps_in(dir)) {
      std::error_code ignored;
      if (step <= state.step && ++kept > keep) fs::remove(dir + "/" + file_name(step), ignored);
    }
  }
  return path;
}

CheckpointState read_checkpoint(const std::string& path, const Communicator& world,
                                CheckpointShard& shard) {
  on_all_ranks(world, [&] { check_shard(shard); });
  verify(path, world);
  std::optional<CheckpointFile> file;
  std::vector<CheckpointDataset> datasets;
  CheckpointState state;
  on_all_ranks(world, [&] {
    file.emplace(path, false);
    datasets = file->datasets();
    state = file->state();
    check_match(path, datasets, shard);
  });
  check_all_wanted(path, world, datasets, shard);
  on_all_ranks(world, [&] {
    for_each_piece(datasets, shard, false,
                   [&](const CheckpointDataset& dataset, std::int64_t first, std::int64_t count,
                       void* memory) { file->read(dataset, first, count, memory); });
  });
  return state;
}

CheckpointState verify_checkpoint(const std::string& path, const Communicator& world) {
  verify(path, world);
  CheckpointState state;
  on_all_ranks(world, [&] { state = CheckpointFile(path, false).state(); });
  return state;
}

std::string latest_checkpoint(const std::string& dir, const Communicator& world,
                              std::vector<std::string>& warnings) {
  std::string list;
  if (world.rank() == 0) {
    for (std::int64_t step : steps_in(dir)) list += file_name(step) + "\n";
  }
  list = world.broadcast(list, 0);
  for (std::size_t begin = 0, end; (end = list.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    const std::string path = dir + "/" + list.substr(begin, end - begin);
    try {
      verify(path, world);
      return path;
    } catch (const Error& error) {  // the same on every rank
      warnings.push_back(fmt::format("checkpoint skipped: {}", error.what()));
    }
  }
  return "";
}

}  // namespace ballast

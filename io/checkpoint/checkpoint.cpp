#include "io/checkpoint/checkpoint.hpp"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "core/base/bf16.hpp"
#include "io/checkpoint/checkpoint_file.hpp"
#include "io/checkpoint/checkpoint_folder.hpp"
#include "io/files/raw_file.hpp"
#include "kernels/ops/element_sum.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Elements of one read: few calls, and little memory to stage a device tensor on the host.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 22;

/// Ranks that read a file together, and whether this one found it damaged.
struct Readers {
  /// As together() of parallel/comm/waits.  Collective.
  void together(const std::function<void()>& work) {
    ballast::together(world, [&] {
      try {
        work();
      } catch (const DamagedFile&) {
        damaged = true;
        throw;
      }
    });
  }
  const Communicator& world;
  bool damaged = false;
};

/// Verifies every element of a file whose envelope was checked, spread over the ranks.  Collective.
void verify_elements(const CheckpointFile& file, Readers& readers) {
  readers.together([&] {
    const Communicator& world = readers.world;
    const auto [first, last] = ranges_of_rank(file.datasets(), checksum_ranges(file.datasets()),
                                              world.rank(), world.size());
    file.verify(first, last);
  });
}

/// Opens a file on all ranks after its envelope was checked.  Collective.
std::unique_ptr<CheckpointFile> open_checked(const std::string& path, Readers& readers) {
  readers.together([&] {
    if (readers.world.rank() == 0) check_seal(path);
  });
  std::unique_ptr<CheckpointFile> file;
  readers.together([&] { file = std::make_unique<CheckpointFile>(path); });
  return file;
}

/// Whether a file's elements of `from` are read into a tensor of `to`: as they are, moments to bf16
/// and from it (optimizer.moments), and fp32 to fp64 where the shard says so.
bool readable(const CheckpointShard& shard, const std::string& field, DType from, DType to) {
  return from == to || (shard.widens && from == DType::f32 && to == DType::f64) ||
         ((field == "moment1" || field == "moment2") && (from == DType::bf16 || to == DType::bf16));
}

/// bf16 to fp32 or fp64 and fp32 to fp64 exactly, these to the nearest bf16 (of fp32, ties to
/// even); finite values.
void convert(const std::byte* from, DType type, std::int64_t count, std::byte* to, DType wanted) {
  const auto n = static_cast<std::size_t>(count);
  if (type == DType::f32 && wanted == DType::f64) {
    std::copy_n(reinterpret_cast<const float*>(from), n, reinterpret_cast<double*>(to));
    return;
  }
  const auto* narrow = reinterpret_cast<const bf16*>(from);
  const auto as = [&](auto value) {
    using T = decltype(value);
    if (type == DType::bf16) {
      for (std::size_t i = 0; i < n; ++i)
        reinterpret_cast<T*>(to)[i] = from_bf16_bits(narrow[i].bits);
      return;
    }
    for (std::size_t i = 0; i < n; ++i)
      reinterpret_cast<bf16*>(to)[i].bits =
          to_bf16_bits(static_cast<float>(reinterpret_cast<const T*>(from)[i]));
  };
  dispatch_float(type == DType::bf16 ? wanted : type, as);
}

/// The shard's parameters and fields must be in the file as they are in memory, or readable().
void check_match(const std::string& path, const std::vector<CheckpointDataset>& datasets,
                 const CheckpointShard& shard) {
  std::set<std::string> read, whole;
  for_each_part(shard, [&](const ShardPart& part) {
    const Parameter& parameter = part.parameter;
    const CheckpointDataset* dataset = find_dataset(datasets, parameter.name, part.field);
    require(dataset != nullptr, "{}: no dataset /parameters/{}/{}; the checkpoint is of {}", path,
            parameter.name, part.field,
            find_dataset(datasets, parameter.name, "master") != nullptr
                ? "another optimizer (optimizer.kind)"
                : "another model");
    require(dataset->shape == parameter.shape, "{}: dataset {} has shape {}, the model's is {}",
            path, dataset->path(), to_string(dataset->shape), to_string(parameter.shape));
    require(
        readable(shard, part.field, dataset->type, part.tensor.dtype()),
        "{}: dataset {} holds {}, this run keeps {}; use the precision that it was written with",
        path, dataset->path(), name(dataset->type), name(part.tensor.dtype()));
    read.insert(dataset->path());
    whole.insert(parameter.name);
  });
  for (const CheckpointDataset& dataset : datasets)
    require(!whole.contains(dataset.parameter) || read.contains(dataset.path()),
            "{}: dataset {} has no place in this run; the checkpoint is of another optimizer "
            "(optimizer.kind)",
            path, dataset.path());
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
  together(world, [&] {
    const auto missing = std::find(wanted.begin(), wanted.end(), 0);
    require(missing == wanted.end(),
            "{}: the model has no parameter {}; the checkpoint is of another model", path,
            datasets[static_cast<std::size_t>(missing - wanted.begin())].parameter);
  });
}

/// Sums of what a rank loads, range by range.
class LoadedSums {
 public:
  LoadedSums(const CheckpointFile& file, const std::string& path)
      : file_(file),
        path_(path),
        ranges_(checksum_ranges(file.datasets())),
        first_(first_ranges(file.datasets())),
        loaded_(ranges_.size()),
        elements_(ranges_.size(), 0),
        counted_(ranges_.size(), 0) {}

  /// Elements [begin, end) of a dataset were loaded from `data`; those of [from, to) count among
  /// all ranks' elements.
  void add(const CheckpointDataset& dataset, std::int64_t begin, std::int64_t end,
           const std::byte* data, std::int64_t from, std::int64_t to) {
    const auto number = static_cast<std::size_t>(&dataset - file_.datasets().data());
    for (std::int64_t at = begin; at < end;) {
      const std::size_t range = first_[number] + static_cast<std::size_t>(at / kChecksumElements);
      const std::int64_t stop = std::min(end, ranges_[range].end);
      const auto sum = [&](std::int64_t a, std::int64_t b) {
        return element_sum(data + static_cast<std::size_t>(a - begin) * size_of(dataset.type),
                           dataset.type, a, b - a);
      };
      const ElementSum part = sum(at, stop);
      loaded_[range] += part;
      elements_[range] += stop - at;
      const std::int64_t a = std::max(at, from), b = std::min(stop, to);
      if (a < b) counted_[range] += a == at && b == stop ? part.sum : sum(a, b).sum;
      at = stop;
    }
  }

  /// Ranges that this rank loaded whole are compared here, so that every copy of them is checked.
  void compare_own() const {
    for (std::size_t i = 0; i < ranges_.size(); ++i)
      if (elements_[i] == ranges_[i].end - ranges_[i].begin &&
          loaded_[i].sum != file_.checksums()[i])
        fail_range(i);
  }
  /// All ranges, summed over the ranks.  Collective.
  void compare_all(Readers& readers) {
    const Communicator& world = readers.world;
    std::vector<MPI_Request> requests(1);
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, counted_.data(), static_cast<int>(counted_.size()),
                             MPI_UINT64_T, MPI_SUM, world.mpi(), requests.data()),
              "adding up checkpoint sums");
    wait_all(requests);
    readers.together([&] {
      for (std::size_t i = 0; i < ranges_.size(); ++i)
        if (counted_[i] != file_.checksums()[i]) fail_range(i);
    });
  }
  /// Errors: values, loaded as they were written, that no training state holds.
  void require_values() const {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      const CheckpointDataset& dataset = file_.datasets()[ranges_[i].dataset];
      const ElementSum& part = loaded_[i];
      require_sound(part.nonfinite == 0 && (part.negative == 0 || dataset.field != "moment2"),
                    "{}: dataset {} holds {} in elements [{}, {}); training diverged before it was "
                    "written: continue an earlier checkpoint",
                    path_, dataset.path(),
                    part.nonfinite > 0 ? "values that are not finite" : "second moments below zero",
                    ranges_[i].begin, ranges_[i].end);
    }
  }

 private:
  [[noreturn]] void fail_range(std::size_t i) const {
    fail_damaged(path_, file_.datasets()[ranges_[i].dataset], ranges_[i].begin, ranges_[i].end);
  }
  const CheckpointFile& file_;
  const std::string& path_;
  std::vector<ChecksumRange> ranges_;
  std::vector<std::size_t> first_;
  std::vector<ElementSum> loaded_;
  std::vector<std::int64_t> elements_;
  std::vector<std::uint64_t> counted_;
};

/// Reads the shard's elements, through host buffers for tensors on a device or of another dtype,
/// and sums them as they are in the file.
void load(const CheckpointFile& file, CheckpointShard& shard, const CountedPart& counted,
          LoadedSums& sums) {
  std::vector<std::byte> staging, converted;
  for_each_part(shard, [&](const ShardPart& part) {
    // The counted part in elements of this parameter; a tied copy is another parameter's.
    const bool counts = !part.parameter.tied_copy;
    const std::int64_t shift = part.first - part.element;
    const auto& [begin, end] = counted.runs.at(part.run);
    const std::int64_t from = counts ? begin + shift : 0, to = counts ? end + shift : 0;
    const CheckpointDataset& dataset =
        *find_dataset(file.datasets(), part.parameter.name, part.field);
    const Tensor& tensor = part.tensor;
    const std::size_t width = size_of(tensor.dtype());
    for (std::int64_t done = 0; done < part.count; done += kPieceElements) {
      const std::int64_t piece = std::min(kPieceElements, part.count - done);
      auto* memory =
          static_cast<std::byte*>(tensor.raw()) + static_cast<std::size_t>(part.at + done) * width;
      const bool on_host = tensor.space() == Space::host, same = dataset.type == tensor.dtype();
      const auto bytes = static_cast<std::size_t>(piece) * width;
      if (!on_host || !same)
        staging.resize(static_cast<std::size_t>(piece) * size_of(dataset.type));
      std::byte* target = on_host && same ? memory : staging.data();
      file.read(dataset, part.first + done, piece, target);
      sums.add(dataset, part.first + done, part.first + done + piece, target, from, to);
      if (!same) {
        converted.resize(on_host ? 0 : bytes);
        std::byte* in_place = on_host ? memory : converted.data();
        convert(std::exchange(target, in_place), dataset.type, piece, in_place, tensor.dtype());
      }
      if (!on_host)
        device_of(tensor.space()).copy(memory, tensor.space(), target, Space::host, bytes);
    }
  });
}

/// Error text of `work` if it throws what all ranks throw together, else "".
template <class F>
std::string collective_problem(F&& work) {
  try {
    work();
  } catch (const CollectiveError& error) {
    return error.what();
  }
  return "";
}

/// Why a file was not read, or "" for one that is sound; `damaged`: what it holds is at fault.
struct Unsound {
  std::string problem;
  bool damaged = false;
};

/// Reads a file into the shard.  A sound file of another model or precision is an error.
/// Collective.
Unsound read_sound(const std::string& path, const Communicator& world, CheckpointShard& shard,
                   CheckpointState& state, const MisfitNote& note) {
  Readers readers{world};
  const auto found = [&](std::string problem) -> Unsound {
    return {std::move(problem),
            world.all_reduce(std::int64_t{readers.damaged}, Reduction::max) != 0};
  };
  std::unique_ptr<CheckpointFile> file;
  if (std::string problem = collective_problem([&] { file = open_checked(path, readers); });
      !problem.empty())
    return found(std::move(problem));
  if (std::string misfit = collective_problem([&] {
        together(world, [&] { check_match(path, file->datasets(), shard); });
        check_all_wanted(path, world, file->datasets(), shard);
      });
      !misfit.empty()) {
    together(world, [&] {
      if (note) misfit += note(path, file->state());
    });
    check_all(world, false, misfit);
  }
  const CountedPart counted = counted_part(world, shard);
  const bool sums_apply = file->version() > 1 && counted.complete;
  return found(collective_problem([&] {
    if (!sums_apply) verify_elements(*file, readers);
    LoadedSums sums(*file, path);
    readers.together([&] {
      load(*file, shard, counted, sums);
      if (sums_apply) sums.compare_own();
    });
    if (sums_apply) sums.compare_all(readers);
    readers.together([&] { sums.require_values(); });
    state = file->state();
  }));
}

/// Whether nothing that could be a checkpoint stands at `path`: a link that leads nowhere, a pipe.
bool is_no_file(const std::string& path) {
  using Type = std::filesystem::file_type;
  std::error_code ignored;
  const Type type = std::filesystem::status(path, ignored).type();
  return type != Type::regular && type != Type::none && type != Type::unknown;
}

/// Sets a damaged file aside; returns the line for the log, "" where nothing was renamed.
/// Collective.  Errors: it could not be read, and training would go on over what may be sound.
std::string left_aside(const std::string& path, const Unsound& found, const Communicator& world) {
  std::string name;
  together(world, [&] {
    if (world.rank() != 0 || is_no_file(path)) return;
    require(found.damaged,
            "{}; it may be sound all the same, and stays as it is: continue once it can be read, "
            "or name another checkpoint with -r",
            found.problem);
    name = set_aside(path);
  });
  name = world.broadcast(name, 0);
  return name.empty() ? "" : fmt::format("{} is now {}", path, name);
}

}  // namespace

std::optional<BestCheckpoint> best_checkpoint(const CheckpointState& state) {
  const auto found = state.extra.find("best");
  if (found == state.extra.end() || found->second.size() != 2) return std::nullopt;
  return BestCheckpoint{found->second[0], static_cast<std::int64_t>(found->second[1])};
}

void set_best_checkpoint(CheckpointState& state, const BestCheckpoint& best) {
  state.extra["best"] = {best.loss, static_cast<double>(best.step)};
}

CheckpointState read_checkpoint(const std::string& path, const Communicator& world,
                                CheckpointShard& shard, const MisfitNote& note) {
  together(world, [&] { check_shard(shard); });
  CheckpointState state;
  const std::string problem = read_sound(path, world, shard, state, note).problem;
  check_all(world, problem.empty(), problem);
  return state;
}

CheckpointState verify_checkpoint(const std::string& path, const Communicator& world) {
  Readers readers{world};
  const std::unique_ptr<CheckpointFile> file = open_checked(path, readers);
  verify_elements(*file, readers);
  return file->state();
}

std::string read_latest(const std::string& dir, const Communicator& world, CheckpointShard& shard,
                        CheckpointState& state, std::vector<std::string>& warnings, bool aside,
                        const MisfitNote& note) {
  together(world, [&] { check_shard(shard); });
  std::string list;
  bool unsound = false;
  together(world, [&] {
    if (world.rank() != 0) return;
    for (std::int64_t step : checkpoint_steps(dir)) list += fmt::format("{}\n", step);
    unsound = holds_damaged(dir);
    const std::string left = list.empty() && !unsound ? overtaken(dir) : "";
    require(left.empty(),
            "{}: no checkpoint stands there, but those of a branch that was left, in {}: name the "
            "one to continue with -r, or choose another run folder with -d to begin anew",
            dir, left);
  });
  list = world.broadcast(list, 0);
  unsound = world.all_reduce(std::int64_t{unsound}, Reduction::max) != 0 || !list.empty();
  for (std::size_t begin = 0, end; (end = list.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    const std::int64_t step = std::stoll(list.substr(begin, end - begin));
    const std::string path = dir + "/" + checkpoint_name(step);
    const Unsound found = read_sound(path, world, shard, state, note);
    const std::string& problem = found.problem;
    if (problem.empty() && state.step == step) return path;
    if (problem.empty()) {
      // The run would count on from the step inside, and take this file for a later one's.
      warnings.push_back(
          fmt::format("checkpoint skipped: {}: its name says step {}, its attribute `step` says "
                      "{}; -r FILE continues from it all the same",
                      path, step, state.step));
      continue;
    }
    warnings.push_back("checkpoint skipped: " + problem);
    if (!aside) continue;
    if (const std::string line = left_aside(path, found, world); !line.empty())
      warnings.push_back(line);
  }
  check_all(world, !unsound,
            fmt::format("{}: no checkpoint is sound{}{}; name a sound one of elsewhere with -r, or "
                        "choose another run folder with -d to begin anew",
                        dir, warnings.empty() ? "" : ": ", fmt::join(warnings, "; ")));
  return "";
}

}  // namespace ballast

#include "io/checkpoint/checkpoint_writer.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <system_error>
#include <utility>

#include "core/base/wait_clock.hpp"
#include "io/checkpoint/checkpoint_file.hpp"
#include "io/checkpoint/checkpoint_folder.hpp"
#include "io/checkpoint/io_threads.hpp"
#include "io/checkpoint/shared_pages.hpp"
#include "io/files/held_file.hpp"
#include "kernels/ops/element_sum.hpp"
#include "parallel/comm/host_copy.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kSmallestBuffer = std::int64_t{64} << 20;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Elements of the file in host memory.
struct Piece {
  std::size_t dataset = 0;
  std::int64_t first = 0, count = 0;
  const std::byte* data = nullptr;
};

}  // namespace

struct CheckpointWriter::Job {
  std::vector<CheckpointDataset> datasets;
  CheckpointPlaces places;
  CheckpointState state;
  std::string path, partial;
  std::unique_ptr<HeldFile> own;  ///< on rank 0: the partial file, until it has its name
  std::uint64_t inode = 0;        ///< of the partial file, as every rank must find it
  std::vector<Piece> pieces;      ///< of this rank, in the snapshot or the shard
  SharedPages pages;
  std::vector<std::uint64_t> sums;
  std::unique_ptr<CheckpointFile> file;  ///< while it is read back
  std::uint64_t structure = 0;           ///< hash of what is neither envelope nor elements nor sums
  Fence copied;
  double began_s = 0, thread_s = 0;  ///< start of all, seconds of this phase's threads
  CheckpointOutcome outcome;

  /// Where the elements lie, and `with_sums` their sums.
  std::vector<DataExtent> elements(bool with_sums) const {
    std::vector<DataExtent> extents;
    for (const CheckpointDataset& d : datasets) extents.push_back({d.offset, d.bytes()});
    if (with_sums)
      extents.push_back({places.checksums, first_ranges(datasets).back() * sizeof(std::uint64_t)});
    return extents;
  }
};

namespace {

/// Elements [begin, end) of a piece's dataset, under one checksum.
struct Part {
  const Piece* piece = nullptr;
  std::int64_t begin = 0, end = 0;
};

std::vector<Part> parts_of(const std::vector<Piece>& pieces) {
  std::vector<Part> parts;
  for (const Piece& piece : pieces)
    for (std::int64_t at = piece.first, end = piece.first + piece.count; at < end;) {
      const std::int64_t stop = std::min(end, (at / kChecksumElements + 1) * kChecksumElements);
      parts.push_back({&piece, at, stop});
      at = stop;
    }
  return parts;
}

/// Sums the pieces, writes them and syncs.  Drops them from memory as well: they are read back from
/// the storage, and training would wait while all ranks' pages are dropped at once.
void write_pieces(const std::string& path, std::uint64_t inode,
                  const std::vector<CheckpointDataset>& datasets, const std::vector<Piece>& pieces,
                  const SharedPages& pages, std::vector<std::uint64_t>& sums,
                  std::atomic<std::int64_t>& progress) {
  const RawFile file(path, true);
  require(file.place().second == inode, "{}: another file stands there by now", path);
  const std::vector<std::size_t> first_range = first_ranges(datasets);
  const std::vector<Part> parts = parts_of(pieces);
  in_io_threads(parts.size(), [&](std::size_t i, std::size_t) {
    const auto& [piece, begin, end] = parts[i];
    const CheckpointDataset& dataset = datasets[piece->dataset];
    const std::size_t width = size_of(dataset.type);
    const std::byte* data = piece->data + static_cast<std::size_t>(begin - piece->first) * width;
    const ElementSum found = element_sum(data, dataset.type, begin, end - begin);
    require(found.nonfinite == 0,
            "dataset {} has {} values that are not finite in elements [{}, {}): such a state is "
            "not saved",
            dataset.path(), found.nonfinite, begin, end);
    // Two pieces may share a range.
    std::atomic_ref(
        sums[first_range[piece->dataset] + static_cast<std::size_t>(begin / kChecksumElements)]) +=
        found.sum;
    const std::uint64_t place = dataset.offset + static_cast<std::uint64_t>(begin) * width,
                        last = dataset.offset + static_cast<std::uint64_t>(end) * width;
    const auto [from, to] = pages.own_part(place, last);
    if (from >= to) return;
    file.write(from, data + (from - place), to - from, &progress);
    file.start_sync(from, to - from);
  });
  pages.write(file);
  file.sync();
  for (const Piece& piece : pieces) {
    const CheckpointDataset& dataset = datasets[piece.dataset];
    const std::size_t width = size_of(dataset.type);
    file.drop_cache(dataset.offset + static_cast<std::uint64_t>(piece.first) * width,
                    static_cast<std::uint64_t>(piece.count) * width);
  }
}

/// Pieces of a shard whose fields are in host memory.
std::vector<Piece> pieces_of(const std::vector<CheckpointDataset>& datasets,
                             const CheckpointShard& shard) {
  std::vector<Piece> pieces;
  for_each_part(shard, [&](const ShardPart& part) {
    if (part.parameter.tied_copy) return;
    const CheckpointDataset* dataset = find_dataset(datasets, part.parameter.name, part.field);
    pieces.push_back({static_cast<std::size_t>(dataset - datasets.data()), part.first, part.count,
                      static_cast<const std::byte*>(part.tensor.raw()) +
                          static_cast<std::size_t>(part.at) * size_of(part.tensor.dtype())});
  });
  return pieces;
}

std::int64_t bytes_of(const CheckpointShard& shard) {
  std::int64_t bytes = 0;
  for (const auto& [field, tensor] : shard.fields)
    bytes += static_cast<std::int64_t>(tensor.bytes());
  return shard.empty() ? 0 : bytes;
}

/// The elements at places [begin, end) of a shard, copied to host memory.
CheckpointShard places_on_host(const CheckpointShard& shard, std::int64_t begin, std::int64_t end) {
  CheckpointShard part = shard;
  part.runs.clear();
  for (const ShardRun& run : shard.runs) {
    const std::int64_t first = std::max(begin, run.at), last = std::min(end, run.at + run.count());
    if (first < last)
      part.runs.push_back({run.begin + first - run.at, run.begin + last - run.at, first - begin});
  }
  for (auto& [field, tensor] : part.fields) {
    const std::int64_t skipped = shard.skipped(field), first = std::max(begin, skipped) - skipped,
                       last = std::max(begin, std::max(end, skipped)) - skipped;
    const Tensor from = tensor.rows(std::min(first, last), last);
    tensor = Tensor::empty({from.numel()}, from.dtype());
    if (from.numel() > 0) tensor.copy_from(from);
  }
  if (begin < end) device_of(shard.fields.begin()->second.space()).synchronize();
  return part;
}

bool on_host(const CheckpointShard& shard) {
  return shard.fields.empty() || shard.fields.begin()->second.space() == Space::host;
}

/// One core moves fewer bytes a second than the memory does.
void copy_on_host(const Tensor& to, const Tensor& from) {
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  auto* target = static_cast<std::byte*>(to.raw());
  const auto* source = static_cast<const std::byte*>(from.raw());
  in_io_threads((from.bytes() + kBytes - 1) / kBytes, [&](std::size_t part, std::size_t) {
    const std::size_t begin = part * kBytes, count = std::min(kBytes, from.bytes() - begin);
    std::memcpy(target + begin, source + begin, count);
  });
}

}  // namespace

CheckpointWriter::CheckpointWriter(const Communicator& world, std::string dir, int keep,
                                   std::int64_t snapshot_bytes)
    : world_(world), dir_(std::move(dir)), keep_(keep), snapshot_bytes_(snapshot_bytes) {}

CheckpointWriter::~CheckpointWriter() {
  if (thread_.joinable()) thread_.join();
  if (job_ && job_->own) job_->own->remove();  // nobody finishes it
}

CheckpointOutcome CheckpointWriter::guarded(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const CollectiveError& error) {  // on every rank alike
    if (thread_.joinable()) thread_.join();
    if (!job_->copied.empty()) cuda_device()->wait(job_->copied);  // the next snapshot lies there
    CheckpointOutcome failed = job_->outcome;
    failed.kind = CheckpointOutcome::Kind::failed;
    failed.problem = error.what();
    if (job_->own) job_->own->remove();
    job_.reset();
    phase_ = Phase::idle;
    return failed;
  }
}

CheckpointOutcome CheckpointWriter::begin(const CheckpointShard& shard,
                                          const CheckpointState& state) {
  require(phase_ == Phase::idle, "a checkpoint is in flight");
  job_ = std::make_unique<Job>();
  job_->began_s = now_s();
  job_->outcome.step = state.step;
  job_->outcome.path = dir_ + "/" + checkpoint_name(state.step);
  CheckpointOutcome outcome = guarded([&] {
    const std::int64_t most = world_.all_reduce(bytes_of(shard), Reduction::max);
    job_->outcome.synchronous = most > snapshot_bytes_;
    if (job_->outcome.synchronous) {
      lay_out(shard, state);
      return write_in_rounds(shard);
    }
    // A GPU copies while the file is laid out.
    const CheckpointShard copy = take_snapshot(shard);
    lay_out(shard, state);
    job_->pieces = pieces_of(job_->datasets, copy);
    phase_ = Phase::copying;
    if (on_host(shard)) release();
  });
  if (outcome.kind == CheckpointOutcome::Kind::failed) return outcome;
  job_->outcome.waited_s = now_s() - job_->began_s;
  return job_->outcome.synchronous ? finish() : CheckpointOutcome{};
}

void CheckpointWriter::lay_out(const CheckpointShard& shard, const CheckpointState& state) {
  Job& job = *job_;
  job.state = state;
  job.path = job.outcome.path;
  job.partial = job.path + ".partial";
  job.datasets = agree_layout(world_, shard);
  for (const CheckpointDataset& d : job.datasets)
    job.outcome.bytes += static_cast<std::int64_t>(d.bytes());
  std::string places;
  together(world_, [&] {
    require(state.step >= 0 && keep_ >= 1,
            "checkpoint of step {} with checkpoint.keep = {}: neither can be negative, and keep is "
            "at least 1",
            state.step, keep_);
    if (world_.rank() != 0) return;
    fs::create_directory(dir_);  // alone: a run folder that went is not made again
    remove_partials(dir_);
    create_file();
    places = fmt::format("{} ", job.inode);
    for (const CheckpointDataset& d : job.datasets) places += fmt::format("{} ", d.offset);
  });
  places = world_.broadcast(places, 0);
  const char* at = places.c_str();
  const auto take = [&](std::uint64_t& number) {
    char* next = nullptr;
    number = std::strtoull(at, &next, 10);
    at = next;
  };
  take(job.inode);
  for (CheckpointDataset& d : job.datasets) take(d.offset);
  job.sums.assign(first_ranges(job.datasets).back(), 0);
  job.pages = share_pages(world_, job.datasets, shard);
}

void CheckpointWriter::create_file() {
  Job& job = *job_;
  // Once with an estimate, so that HDF5 itself does not meet the full disk, and once with the size
  // that the file has got.
  std::uint64_t bytes = (std::uint64_t{1} << 20) + job.state.deck.size();
  for (const CheckpointDataset& d : job.datasets) bytes += d.bytes() + 2 * kCheckpointPage;
  const SpaceRemedy remedy = space_remedy(dir_);
  job.own = std::make_unique<HeldFile>(job.partial);
  job.inode = job.own->file().place().second;
  reserve_space(job.partial, bytes, false, remedy);
  // HDF5 comes down on a structure of which a write was lost or altered.  So it is laid out twice,
  // and what the storage gives back must be the same both times, before HDF5 reads any of it.
  std::uint64_t found[2];
  for (std::uint64_t& hash : found) {
    job.places = create_checkpoint_file(job.partial, job.datasets, job.state);
    job.own->file().sync();
    hash = structure_hash(job.partial, job.places.block_bytes, job.elements(true));
  }
  require(found[0] == found[1],
          "{}: the storage does not give back the structure that was written to it", job.partial);
  job.structure = found[0];
  reserve_space(job.partial, job.own->file().bytes(), false, remedy);
  job.own->file().sync();
}

void CheckpointWriter::prepare(const CheckpointShard& shard) {
  const std::int64_t bytes = bytes_of(shard);
  if (world_.all_reduce(bytes, Reduction::max) <= snapshot_bytes_) hold_snapshot(bytes);
}

void CheckpointWriter::hold_snapshot(std::int64_t bytes) {
  together(world_, [&] {
    if (snapshot_.defined() && static_cast<std::int64_t>(snapshot_.bytes()) >= bytes) return;
    snapshot_ = Tensor();
    snapshot_ = Tensor::empty({bytes}, DType::u8, pinned_device(), MemoryCategory::offloaded);
    // Pages come with the first touch, which must not happen while training waits.
    if (bytes > 0) std::memset(snapshot_.raw(), 0, static_cast<std::size_t>(bytes));
  });
}

CheckpointShard CheckpointWriter::take_snapshot(const CheckpointShard& shard) {
  const std::int64_t bytes = bytes_of(shard);
  hold_snapshot(bytes);
  CheckpointShard copy = shard;
  std::int64_t at = 0;
  for (auto& [field, tensor] : copy.fields) {
    const Tensor& from = shard.fields.at(field);
    tensor =
        Tensor::wrap(static_cast<std::byte*>(snapshot_.raw()) + at, from.shape(), from.dtype());
    if (bytes > 0) at += static_cast<std::int64_t>(from.bytes());
    if (bytes == 0 || from.bytes() == 0) continue;
    if (on_host(shard))
      copy_on_host(tensor, from);
    else
      job_->copied =
          copy_beside(device_of(from.space()), Queue::to_host, {{tensor, from}}, nullptr);
  }
  return copy;
}

void CheckpointWriter::release() {
  if (phase_ != Phase::copying) return;
  const double began = now_s();
  if (!job_->copied.empty()) {
    Device& device = *cuda_device();
    wait_for_copy(device, job_->copied, nullptr);
    device.wait(job_->copied);
  }
  job_->outcome.waited_s += now_s() - began;
  phase_ = Phase::writing;
  start_writing();
}

void CheckpointWriter::start_writing() {
  start_thread([this] {
    write_pieces(job_->partial, job_->inode, job_->datasets, job_->pieces, job_->pages, job_->sums,
                 progress_);
  });
}

void CheckpointWriter::write_in_rounds(const CheckpointShard& shard) {
  phase_ = Phase::writing;
  const auto write = [&](const CheckpointShard& part) {
    job_->pieces = pieces_of(job_->datasets, part);
    start_writing();
  };
  // In host memory nothing changes while training waits, so no copy is needed.
  if (world_.all_reduce(std::int64_t{on_host(shard)}, Reduction::min) != 0) return write(shard);
  std::int64_t width = 0;  // of an element that has all fields
  for (const auto& [field, tensor] : shard.fields)
    width += static_cast<std::int64_t>(size_of(tensor.dtype()));
  const std::int64_t places = shard.places(), room = std::max(kSmallestBuffer, snapshot_bytes_) /
                                                     std::max<std::int64_t>(1, width);
  const std::int64_t rounds =
      world_.all_reduce((places + room - 1) / std::max<std::int64_t>(room, 1), Reduction::max);
  for (std::int64_t r = 0; r < rounds; ++r) {
    CheckpointShard part;
    together(world_, [&] {
      part = places_on_host(shard, std::min(places, r * room), std::min(places, (r + 1) * room));
    });
    write(part);
    threads_done(true);
    if (r + 1 < rounds) join_all();
  }
}

void CheckpointWriter::start_thread(std::function<void()> work) {
  if (thread_.joinable()) thread_.join();
  thread_problem_.clear();
  thread_done_ = false;
  const auto run = [this, work = std::move(work), began = now_s()] {
    try {
      work();
    } catch (const std::exception& error) {
      thread_problem_ = *error.what() ? error.what() : "unknown error";
    }
    job_->thread_s += now_s() - began;
    thread_done_ = true;
  };
  try {
    thread_ = std::thread(run);
  } catch (const std::system_error&) {  // a limit on processes: the step waits
    run();
  }
}

bool CheckpointWriter::threads_done(bool wait) {
  const auto all_done = [&] {
    return world_.all_reduce(std::int64_t{thread_done_.load()}, Reduction::min) != 0;
  };
  if (!wait) return all_done();
  std::int64_t before = -1;
  WaitClock clock(now_s());
  while (!all_done()) {
    clock.waited_s(now_s());  // read between two exchanges too, so that no gap is long
    // Ranks that are done wait with the others, so only the sum over all of them tells a slow
    // storage from one that hangs.
    const std::int64_t total = world_.all_reduce(progress_.load());
    if (total != before) clock.restart(now_s());
    before = total;
    if (const double waited_s = clock.waited_s(now_s()); waited_s > wait_limit())
      fail_here(fmt::format("checkpoint {}: {} for {:.1f} s without progress (run.hang_timeout_s)",
                            job_->path,
                            thread_done_ ? "waited for the storage of other ranks"
                                         : "this rank's storage has not answered",
                            waited_s));
    ::usleep(1000);
  }
  return true;
}

void CheckpointWriter::join_all() {
  if (thread_.joinable()) thread_.join();
  together(world_, [&] { require(thread_problem_.empty(), "{}", thread_problem_); });
}

void CheckpointWriter::begin_check() {
  Job& job = *job_;
  join_all();
  job.outcome.write_s = world_.all_reduce(std::exchange(job.thread_s, 0), Reduction::max);
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Iallreduce(MPI_IN_PLACE, job.sums.data(), static_cast<int>(job.sums.size()),
                           MPI_UINT64_T, MPI_SUM, world_.mpi(), requests.data()),
            "adding up checkpoint sums");
  wait_all(requests);
  together(world_, [&] {
    if (world_.rank() != 0) return;
    const RawFile& file = job.own->file();
    require(job.own->is_at(job.partial), "{} is no longer there: its folder was moved",
            job.partial);
    file.write(job.places.checksums, job.sums.data(), job.sums.size() * sizeof(std::uint64_t));
    seal(file, job.places.block_bytes, job.elements(false));
    file.drop_cache();
    check_seal(job.partial);
    require(
        structure_hash(job.partial, job.places.block_bytes, job.elements(true)) == job.structure,
        "{}: the file's structure is not what was written", job.partial);
  });
  // What the storage gives back, structure and state included, must be what the ranks hold.
  together(world_, [&] {
    job.file = std::make_unique<CheckpointFile>(job.partial);
    const CheckpointFile& file = *job.file;
    bool same = file.checksums() == job.sums && (world_.rank() != 0 || file.state() == job.state) &&
                file.datasets().size() == job.datasets.size();
    for (std::size_t d = 0; same && d < job.datasets.size(); ++d)
      same = file.datasets()[d] == job.datasets[d];
    require(same, "{}: what was read back is not what was written", job.partial);
  });
  phase_ = Phase::checking;
  const auto [first, last] =
      ranges_of_rank(job.datasets, checksum_ranges(job.datasets), world_.rank(), world_.size());
  start_thread([this, first = first, last = last] { job_->file->verify(first, last, &progress_); });
}

void CheckpointWriter::publish() {
  Job& job = *job_;
  join_all();
  job.outcome.check_s = world_.all_reduce(std::exchange(job.thread_s, 0), Reduction::max);
  job.file.reset();
  together(world_, [&] {
    if (world_.rank() != 0) return;
    job.own->rename(checkpoint_name(job.state.step));
    const bool there = job.own->is_at(job.path);
    job.own.reset();
    require(there, "{} is no longer there: its folder was moved, and holds it", job.path);
    sync_directory(dir_);
    const auto best = best_checkpoint(job.state);
    if (best && best->step == job.state.step) job.outcome.warning = link_best(dir_, best->step);
    prune(dir_, job.state.step, keep_, best ? best->step : -1);
  });
}

CheckpointOutcome CheckpointWriter::advance(bool wait) {
  if (phase_ == Phase::idle) return {};
  const double began = now_s();
  CheckpointOutcome outcome;
  const CheckpointOutcome failed = guarded([&] {
    if (phase_ == Phase::copying && wait) release();
    while (phase_ != Phase::idle && phase_ != Phase::copying && threads_done(wait)) {
      if (phase_ == Phase::writing) {
        begin_check();
        continue;
      }
      publish();
      outcome = job_->outcome;
      outcome.kind = CheckpointOutcome::Kind::written;
      phase_ = Phase::idle;
    }
  });
  if (failed.kind == CheckpointOutcome::Kind::failed) outcome = failed;
  if (outcome.kind != CheckpointOutcome::Kind::none) {
    outcome.waited_s += now_s() - began;
    job_.reset();
  } else if (job_) {
    job_->outcome.waited_s += now_s() - began;
  }
  return outcome;
}

CheckpointOutcome CheckpointWriter::poll() { return advance(false); }
CheckpointOutcome CheckpointWriter::finish() { return advance(true); }

std::string write_checkpoint(const std::string& dir, const Communicator& world,
                             const CheckpointShard& shard, const CheckpointState& state, int keep) {
  CheckpointWriter writer(world, dir, keep, 0);
  const CheckpointOutcome outcome = writer.begin(shard, state);
  check_all(world, outcome.kind == CheckpointOutcome::Kind::written, outcome.problem);
  return outcome.path;
}

}  // namespace ballast

// Writes checkpoints beside training: a snapshot of this rank's shard, a thread that writes it, and
// agreement of all ranks between steps.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/checkpoint/checkpoint.hpp"

namespace ballast {

/// What became of a checkpoint.
struct CheckpointOutcome {
  enum class Kind { none, written, failed } kind = Kind::none;
  std::string path;     ///< of the file, written or not
  std::string problem;  ///< why it failed
  std::string warning;  ///< on rank 0: of the link to the best checkpoint
  std::int64_t step = 0;
  std::int64_t bytes = 0;    ///< of all ranks' elements
  double write_s = 0;        ///< of the slowest rank, syncing included
  double check_s = 0;        ///< reading it back
  double waited_s = 0;       ///< that training stood still for, snapshot included
  bool synchronous = false;  ///< training waited for the whole of it
};

/// Files are DIR/step_XXXXXXXX.h5.  One rank lays the file out; every rank writes its elements at
/// their places and syncs (no collective I/O, nothing waits inside a library).  The sums over what
/// the ranks hold go into the file; it is read back from the storage and compared with them before
/// it gets its name, and only then older files are removed.  A call that fails on any rank ends
/// that checkpoint on all of them and leaves older files alone.  Where DIR is moved while one is in
/// flight, it fails, and what stands in DIR's place by then stays as it is.  The thread calls
/// neither MPI nor HDF5.
class CheckpointWriter {
 public:
  /// `keep` newest files stay, and at least one older than the newest.  A shard of more than
  /// `snapshot_bytes` is written while training waits.
  CheckpointWriter(const Communicator& world, std::string dir, int keep,
                   std::int64_t snapshot_bytes);
  /// Waits for this rank's thread; what was not finished goes.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Takes the memory of a shard's snapshot, so that no checkpoint waits for it.  Collective.
  /// Errors: there is not enough.
  void prepare(const CheckpointShard& shard);
  /// Collective; no checkpoint may be in flight.  Returns with a snapshot taken (of tensors on a
  /// GPU: under way, see release) or, where no snapshot is made, when all is done.  `none`: in
  /// flight.
  CheckpointOutcome begin(const CheckpointShard& shard, const CheckpointState& state);
  bool in_flight() const { return phase_ != Phase::idle; }
  /// Before the shard's tensors may change: orders the change behind the snapshot's copies.
  void release();
  /// Looks whether the checkpoint in flight is done.  Collective, one small reduction while one is.
  CheckpointOutcome poll();
  /// Waits for the checkpoint in flight.  Collective.  Errors: a rank whose storage makes no
  /// progress for the wait limit (waits.hpp).
  CheckpointOutcome finish();

 private:
  enum class Phase { idle, copying, writing, checking };
  struct Job;
  CheckpointOutcome guarded(const std::function<void()>& work);
  CheckpointOutcome advance(bool wait);
  void lay_out(const CheckpointShard& shard, const CheckpointState& state);
  /// Rank 0: the file with its structure, which was seen to come back from the storage.
  void create_file();
  void hold_snapshot(std::int64_t bytes);
  /// The shard in host memory; of tensors on a GPU the copies are under way.
  CheckpointShard take_snapshot(const CheckpointShard& shard);
  void write_in_rounds(const CheckpointShard& shard);
  void start_thread(std::function<void()> work);
  void start_writing();
  /// Whether the threads of all ranks have ended; with `wait` it returns true only.
  bool threads_done(bool wait);
  /// Joins, and throws CollectiveError when a thread of any rank failed.
  void join_all();
  void begin_check();
  void publish();

  Communicator world_;
  std::string dir_;
  int keep_;
  std::int64_t snapshot_bytes_;
  Phase phase_ = Phase::idle;
  std::unique_ptr<Job> job_;
  Tensor snapshot_;  ///< u8, host; allocated once
  std::thread thread_;
  std::atomic<bool> thread_done_{true};
  std::atomic<std::int64_t> progress_{0};
  std::string thread_problem_;
};

/// Writes one checkpoint and waits for it.  Collective.  Throws Error on every rank when it fails.
/// Returns the path.
std::string write_checkpoint(const std::string& dir, const Communicator& world,
                             const CheckpointShard& shard, const CheckpointState& state, int keep);

}  // namespace ballast

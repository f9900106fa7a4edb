// Communicators, waits and errors on many ranks.  One type carries host tensors by MPI and device
// tensors by NCCL.
#pragma once
#include <mpi.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/tensor.hpp"
#include "core/observe/events.hpp"

namespace ballast {

enum class Reduction { sum, max, min };

/// One direction of a neighbour transfer.
struct Transfer {
  Tensor tensor;  ///< contiguous; sent or overwritten
  int peer = 0;
  bool send = true;
};

/// Transfers in flight; complete() before touching the tensors.  Holds the tensors alive.  Empty:
/// nothing in flight.  complete() of host tensors returns when the bytes are there; of device
/// tensors it returns at once, and work queued later on the compute stream begins after the
/// transfer.  The destructor completes them, except while an exception unwinds: then the peers may
/// never answer, so the transfers are abandoned (their buffers stay allocated) and the rank can
/// leave.
class Pending {
 public:
  Pending() = default;
  /// `done`: whether `complete` would not wait.
  Pending(std::function<void()> complete, std::function<bool()> done)
      : complete_(std::move(complete)), done_(std::move(done)) {}
  Pending(Pending&& other) noexcept { *this = std::move(other); }
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();
  void complete();
  /// Completes the transfers if nothing has to be waited for, and says whether none are left in
  /// flight.  Lets host transfers progress.
  bool test();
  bool active() const { return static_cast<bool>(complete_); }

 private:
  void finish() noexcept;
  std::function<void()> complete_;
  std::function<bool()> done_;
};

/// A group of ranks; handles share it.  Collectives are called by all of them in the same order,
/// with contiguous tensors. Reductions of host tensors run element by element in rank order (f32
/// summed in f64, rounded once; a NaN wins min and max): the bits depend on the values and the
/// group size alone, not on the call, the position or the algorithm.  Device tensors travel by
/// NCCL; the first call with one sets NCCL up and is collective, exchange() included.  Errors:
/// Error for shapes that do not fit, for failed transfers and for device tensors in a program
/// without NCCL.
///
/// What waits: collectives of host tensors, numbers and texts return when this rank's result is
/// there.  Those of device tensors are queued after the compute stream's work so far and before its
/// later work, and return at once; the host learns nothing of their end.  exchange() returns at
/// once for both.
class Communicator {
 public:
  Communicator();  ///< a group of one
  /// `owned`: frees `comm` with the last handle.  Sets its error handler to MPI_ERRORS_RETURN.
  explicit Communicator(MPI_Comm comm, bool owned = false);
  static Communicator world();
  int rank() const;
  int size() const;
  MPI_Comm mpi() const;
  /// Sub-group of ranks with equal `color` (>= 0), ordered by `key`.  Collective.
  Communicator split(int color, int key) const;
  /// Sub-group of ranks that share memory (MPI_COMM_TYPE_SHARED), in rank order; made once.
  /// Collective.
  Communicator split_by_machine() const;

  /// Posts all transfers of a step at once and returns immediately.  Two transfers between the same
  /// pair of ranks and on the same channel match in the order given.  Channels do not wait for one
  /// another: on GPUs each has its own NCCL communicator and stream, so a slow link holds up its
  /// own channel only.  The ranks open channels (first use) in the same order.
  Pending exchange(std::span<const Transfer> transfers, int channel = 0) const;
  void all_reduce(Tensor& tensor, Reduction reduction = Reduction::sum) const;
  /// Makes channel 0 of a device ready now.  NCCL is set up by its first call, which takes long and
  /// needs every rank, also one that will have nothing to send.
  void set_up(Device& device) const;
  /// In place, value by value.
  void all_reduce(std::span<double> values, Reduction reduction = Reduction::sum) const;
  double all_reduce(double value, Reduction reduction = Reduction::sum) const;
  std::int64_t all_reduce(std::int64_t value, Reduction reduction = Reduction::sum) const;
  /// `input` [size() * n] -> `output` [n], sum; and back.  In place: `output` (`input`) may be this
  /// rank's block of the other.
  void reduce_scatter(const Tensor& input, Tensor& output) const;
  void all_gather(const Tensor& input, Tensor& output) const;
  /// The same, started now and complete with the result, as exchange(): on GPUs they run beside
  /// later computation, behind the compute stream's work so far.  All ranks start them in one order
  /// and complete them in that order.  A communicator that has some in flight serves nothing else
  /// meanwhile.  Sums have the bits of the calls that wait; all_reduce_beside's tensor divides into
  /// size() blocks.  On the host sums that find no room for what they receive (32 MiB in flight)
  /// begin when they are completed.
  Pending all_reduce_beside(Tensor& tensor) const;
  Pending reduce_scatter_beside(const Tensor& input, Tensor& output) const;
  Pending all_gather_beside(const Tensor& input, Tensor& output) const;
  /// `input` [size(), n] -> `output` [size(), n]: block p goes to rank p.
  void all_to_all(const Tensor& input, Tensor& output) const;
  void broadcast(Tensor& tensor, int root) const;
  std::string broadcast(const std::string& text, int root) const;
  /// Texts of all ranks, on every rank.
  std::vector<std::string> all_gather(const std::string& text) const;
  void barrier() const;

 private:
  /// On the host; `all`: every rank gets the whole sum in `input`, `output` is its own block.
  Pending start_reduction(const Tensor& input, const Tensor& output, bool all) const;
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ballast

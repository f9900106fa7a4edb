#include "parallel/comm/nccl_group.hpp"

#include "parallel/comm/library_watch.hpp"
#include "parallel/comm/waits.hpp"

#ifdef BALLAST_HAVE_NCCL
#include <nccl.h>

#include <array>
#include <cstdlib>
#include <set>
#include <vector>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "kernels/cuda/runtime/device.hpp"

namespace ballast {
namespace {

void check_nccl(ncclResult_t code, const char* what, ncclComm_t comm = nullptr) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  fail("NCCL: {} failed: {} ({}); see NCCL_DEBUG=INFO", what, ncclGetErrorString(code),
       comm ? ncclGetLastError(comm) : "");
}

/// Communicators of this process.
std::vector<ncclComm_t>& live() {
  static std::vector<ncclComm_t> list;
  return list;
}

ncclDataType_t type_of(const Tensor& t) {
  switch (t.dtype()) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
      return ncclUint8;
  }
  return ncclUint8;
}

ncclRedOp_t operation(Reduction reduction) {
  return reduction == Reduction::sum ? ncclSum : reduction == Reduction::max ? ncclMax : ncclMin;
}

void require_dense(const Tensor& t) {
  require(t.contiguous() && t.space() == Space::cuda,
          "NCCL needs contiguous GPU tensors, got shape {}", to_string(t.shape()));
}

}  // namespace

struct NcclGroup::Impl {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  int rank = 0, size = 1;
  std::vector<cudaEvent_t> free_events;
  // Behind a peer that stopped, transfers wait on the device for ever.  A host that goes on
  // launching work fills the launch queue (about a thousand entries) and then blocks inside the
  // driver, where no time limit reaches it.  So it runs at most this many transfers ahead.
  static constexpr std::size_t kAhead = kTransfersAhead;
  std::array<cudaEvent_t, kAhead> ends{};
  std::size_t transfers = 0;

  /// Waits, by polling, until the transfer kAhead before this one is done.
  void begin_transfer() {
    if (cudaEvent_t end = ends[transfers % kAhead]) cuda::wait_for(end, "a transfer between GPUs");
  }
  void end_transfer() {
    cudaEvent_t& end = ends[transfers++ % kAhead];
    if (!end)
      cuda::check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "cudaEventCreate");
    cuda::check(cudaEventRecord(end, stream), "cudaEventRecord");
  }

  cudaEvent_t event() {
    if (free_events.empty()) {
      free_events.emplace_back();
      cuda::check(cudaEventCreateWithFlags(&free_events.back(), cudaEventDisableTiming),
                  "cudaEventCreate");
    }
    cudaEvent_t e = free_events.back();
    free_events.pop_back();
    return e;
  }
  /// `later` waits for all work that `earlier` holds now.
  void order(cudaStream_t earlier, cudaStream_t later) {
    cudaEvent_t e = event();
    cuda::check(cudaEventRecord(e, earlier), "cudaEventRecord");
    cuda::check(cudaStreamWaitEvent(later, e, 0), "cudaStreamWaitEvent");
    free_events.push_back(
        e);  // the wait holds the recorded state, so the event may be recorded again
  }
  template <class F>
  void collective(const char* what, F&& call) {
    begin_transfer();
    order(cuda::stream(), stream);
    check_nccl(call(), what, comm);
    end_transfer();
    order(stream, cuda::stream());
  }
  /// The same, ordered before later computation when the result is completed.
  template <class F>
  Pending beside(const char* what, std::vector<Tensor> alive, F&& call) {
    begin_transfer();
    order(cuda::stream(), stream);
    check_nccl(call(), what, comm);
    end_transfer();
    return pending(std::move(alive));
  }
  /// What lies on the stream now.  The tensors live until the compute stream has been told to wait,
  /// so the pool cannot hand their memory on too early.
  Pending pending(std::vector<Tensor> alive) {
    cudaEvent_t done = event();
    cuda::check(cudaEventRecord(done, stream), "cudaEventRecord");
    return Pending(
        [this, done, alive = std::move(alive)] {
          cuda::check(cudaStreamWaitEvent(cuda::stream(), done, 0), "cudaStreamWaitEvent");
          free_events.push_back(done);
        },
        [done] {
          const cudaError_t state = cudaEventQuery(done);
          if (state == cudaErrorNotReady) {
            cudaGetLastError();  // it is no error, but a later launch would report it as one
            return false;
          }
          cuda::check(state, "cudaEventQuery");
          return true;
        });
  }
};

NcclGroup::NcclGroup(MPI_Comm mpi) : impl_(std::make_unique<Impl>()) {
  check_mpi(MPI_Comm_rank(mpi, &impl_->rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(mpi, &impl_->size), "MPI_Comm_size");
  // Transfers of a ring go beside computation, whose multiprocessors NCCL's blocks take.  Half as
  // many blocks as by default carry nine tenths as much (docs/performance.md).
  setenv("NCCL_MAX_P2P_NCHANNELS", "16", 0);
  ncclUniqueId id;
  if (impl_->rank == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<MPI_Request> request(1);
  check_mpi(MPI_Ibcast(&id, sizeof id, MPI_BYTE, 0, mpi, request.data()), "MPI_Ibcast");
  wait_all(request);
  {
    const CallWatch watch("ncclCommInitRank");
    check_nccl(ncclCommInitRank(&impl_->comm, impl_->size, id, impl_->rank), "ncclCommInitRank");
  }
  live().push_back(impl_->comm);
  watch_gpu_waits();
  // Transfers go first: the compute stream has work for later, the wire is what a ring waits for.
  int least = 0, greatest = 0;
  cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
              "cudaDeviceGetStreamPriorityRange");
  cuda::check(cudaStreamCreateWithPriority(&impl_->stream, cudaStreamNonBlocking, greatest),
              "cudaStreamCreate");
}

NcclGroup::~NcclGroup() {
  std::erase(live(), impl_->comm);
  if (impl_->comm)
    ncclCommAbort(impl_->comm);  // unlike ncclCommDestroy it does not wait for peers that failed
  if (impl_->stream) cudaStreamDestroy(impl_->stream);
  for (cudaEvent_t e : impl_->free_events) cudaEventDestroy(e);
  for (cudaEvent_t e : impl_->ends)
    if (e) cudaEventDestroy(e);
}

Pending NcclGroup::exchange(std::span<const Transfer> transfers) {
  Impl& g = *impl_;
  g.begin_transfer();
  g.order(cuda::stream(), g.stream);
  check_nccl(ncclGroupStart(), "ncclGroupStart");
  std::vector<Tensor> alive;
  for (const Transfer& t : transfers) {
    require_dense(t.tensor);
    alive.push_back(t.tensor);
    const auto count = static_cast<std::size_t>(t.tensor.numel());
    if (count == 0) continue;
    check_nccl(t.send
                   ? ncclSend(t.tensor.raw(), count, type_of(t.tensor), t.peer, g.comm, g.stream)
                   : ncclRecv(t.tensor.raw(), count, type_of(t.tensor), t.peer, g.comm, g.stream),
               t.send ? "ncclSend" : "ncclRecv", g.comm);
  }
  check_nccl(ncclGroupEnd(), "ncclGroupEnd", g.comm);
  g.end_transfer();
  return g.pending(std::move(alive));
}

void NcclGroup::all_reduce(Tensor& tensor, Reduction reduction) {
  require_dense(tensor);
  impl_->collective("ncclAllReduce", [&] {
    return ncclAllReduce(tensor.raw(), tensor.raw(), tensor.numel(), type_of(tensor),
                         operation(reduction), impl_->comm, impl_->stream);
  });
}

void NcclGroup::reduce_scatter(const Tensor& input, Tensor& output) {
  require_dense(input);
  require_dense(output);
  impl_->collective("ncclReduceScatter", [&] {
    return ncclReduceScatter(input.raw(), output.raw(), output.numel(), type_of(output), ncclSum,
                             impl_->comm, impl_->stream);
  });
}

void NcclGroup::all_gather(const Tensor& input, Tensor& output) {
  require_dense(input);
  require_dense(output);
  impl_->collective("ncclAllGather", [&] {
    return ncclAllGather(input.raw(), output.raw(), input.numel(), type_of(input), impl_->comm,
                         impl_->stream);
  });
}

Pending NcclGroup::all_reduce_beside(Tensor& tensor) {
  require_dense(tensor);
  return impl_->beside("ncclAllReduce", {tensor}, [&] {
    return ncclAllReduce(tensor.raw(), tensor.raw(), tensor.numel(), type_of(tensor), ncclSum,
                         impl_->comm, impl_->stream);
  });
}

Pending NcclGroup::reduce_scatter_beside(const Tensor& input, Tensor& output) {
  require_dense(input);
  require_dense(output);
  return impl_->beside("ncclReduceScatter", {input, output}, [&] {
    return ncclReduceScatter(input.raw(), output.raw(), output.numel(), type_of(output), ncclSum,
                             impl_->comm, impl_->stream);
  });
}

Pending NcclGroup::all_gather_beside(const Tensor& input, Tensor& output) {
  require_dense(input);
  require_dense(output);
  return impl_->beside("ncclAllGather", {input, output}, [&] {
    return ncclAllGather(input.raw(), output.raw(), input.numel(), type_of(input), impl_->comm,
                         impl_->stream);
  });
}

void NcclGroup::all_to_all(const Tensor& input, Tensor& output) {
  require_dense(input);
  require_dense(output);
  const std::size_t count = static_cast<std::size_t>(input.numel()) / impl_->size,
                    bytes = count * size_of(input.dtype());
  impl_->collective("all-to-all", [&] {
    ncclGroupStart();
    for (int p = 0; p < impl_->size; ++p) {
      ncclSend(static_cast<const char*>(input.raw()) + p * bytes, count, type_of(input), p,
               impl_->comm, impl_->stream);
      ncclRecv(static_cast<char*>(output.raw()) + p * bytes, count, type_of(output), p, impl_->comm,
               impl_->stream);
    }
    return ncclGroupEnd();
  });
}

void NcclGroup::broadcast(Tensor& tensor, int root) {
  require_dense(tensor);
  impl_->collective("ncclBroadcast", [&] {
    return ncclBroadcast(tensor.raw(), tensor.raw(), tensor.numel(), type_of(tensor), root,
                         impl_->comm, impl_->stream);
  });
}

std::string NcclGroup::let_ranks_share_gpus(const Communicator& world, const Communicator& machine,
                                            const std::string& gpu) {
  const std::vector<std::string> of_ranks = machine.all_gather(gpu);
  const int gpus = static_cast<int>(std::set(of_ranks.begin(), of_ranks.end()).size());
  if (machine.size() == gpus) return "";
  setenv("NCCL_HOSTID", fmt::format("{}-{}", host_name(), machine.rank()).c_str(), 0);
  if (machine.size() == world.size()) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  return fmt::format(
      "{} ranks share {} GPU{} of {}: transfers go through sockets, good for trying a mesh and "
      "useless for timing",
      machine.size(), gpus, gpus == 1 ? "" : "s", host_name());
}

void NcclGroup::check_health() {
  for (ncclComm_t comm : live()) {
    ncclResult_t state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm);
    check_nccl(state, "an earlier transfer", comm);
  }
}

}  // namespace ballast
#endif

// NCCL behind Communicator: the same collectives and neighbour transfers for tensors in GPU memory.
#pragma once
#include <mpi.h>

#include <memory>
#include <span>
#include <string>

#include "parallel/comm/comm.hpp"

namespace ballast {

/// One NCCL communicator and its own stream.  Every call is ordered after the compute stream's work
/// so far; transfers of exchange() and the calls ..._beside run beside later computation until
/// completed, the others are ordered before it.  Nothing waits on the host.  The destructor does
/// not wait for peers, which may have failed.
class NcclGroup {
 public:
  /// Collective over `comm`; bootstrapped with one broadcast.  Throws Error where NCCL cannot
  /// start, with its reason.
  explicit NcclGroup(MPI_Comm comm);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  Pending exchange(std::span<const Transfer> transfers);
  void all_reduce(Tensor& tensor, Reduction reduction);
  void reduce_scatter(const Tensor& input, Tensor& output);
  void all_gather(const Tensor& input, Tensor& output);
  Pending all_reduce_beside(Tensor& tensor);
  Pending reduce_scatter_beside(const Tensor& input, Tensor& output);
  Pending all_gather_beside(const Tensor& input, Tensor& output);
  void all_to_all(const Tensor& input, Tensor& output);
  void broadcast(Tensor& tensor, int root);
  /// Throws Error when any group of this process has met an asynchronous error (a peer died, a link
  /// failed).  Polled by every wait of the host: for other ranks (parallel/comm/waits.cpp) and for
  /// the GPU.
  static void check_health();
  /// NCCL refuses two ranks on one GPU of a host.  Where ranks of `machine` name the same `gpu`
  /// (CudaDevice::identity: launchers may show each rank its own GPU as number 0), each rank is
  /// made a host of its own, so that any mesh can be tried on one GPU: transfers go through sockets
  /// (loopback where `world` is this machine), and times mean nothing.  Every rank calls it before
  /// the first group is made.  Returns one line that says so, "" where each rank has its own GPU.
  /// Variables that the user set (NCCL_HOSTID, NCCL_SOCKET_IFNAME) stay.
  static std::string let_ranks_share_gpus(const Communicator& world, const Communicator& machine,
                                          const std::string& gpu);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

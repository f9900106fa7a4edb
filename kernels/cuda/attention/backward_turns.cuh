// Backward whose dQ warps of their own send away: its additions have an order
// (QueryGradient::turns), or whoever comes first stores (firsts).  Then the turns of parts that add
// to the same dK and dV, and the roles of a CTA's warps.
//
// A job is what the consumers have staged of a tile's dQ, 64 columns each.  In turns at head dims
// 96 and 128 both share a job, and two warps take the jobs in turn: one may begin while the other
// waits until the additions of the job before are complete.  At head dim 64, where a job is a
// consumer's own block of queries, at 256, where it has two jobs a tile, and where no order holds
// anyone up, each has a warp of its own (at 256 jobs of both are 3 to 5 % slower, without an order
// 2 to 5 %).
//
// Named barriers of a sender: consumers arrive at kJobFull + sender, where it waits; it arrives at
// job_free(), where they wait before they stage the next job.  (mbarriers in their place: 3 to 12 %
// slower.)
#pragma once
#include "kernels/cuda/attention/backward_tiles.cuh"

namespace ballast::cuda {

inline constexpr int kJobFree = 10, kJobFull = 14, kJobFreeThreads = 128 + 32;
/// Whether a job is of both consumers.
template <int D, QueryGradient kDq>
inline constexpr bool kJointJobs =
    kDq == QueryGradient::turns&& D <= 128 && BackwardShared<D>::kTileBlocks == 1;
template <int D, QueryGradient kDq>
inline constexpr int kJobFullThreads = (kJointJobs<D, kDq> ? 256 : 128) + 32;
template <int D, QueryGradient kDq>
__device__ __forceinline__ int job_free(int sender, int consumer) {
  return kJobFree + (kJointJobs<D, kDq> ? 2 * sender + consumer : consumer);
}
/// racecheck does not follow barriers at which threads only arrive: its build orders what says the
/// job by mbarriers too.
inline constexpr bool kVisibleJobs = kWarpArrivals > 1;

/// Waits until all units before this one have added to a block of dQ; kFirstTurn where there are
/// none.  Units are given out in the order of the turns, so whoever is waited for has begun, and
/// waits only for those before it.
__device__ __forceinline__ int await_turn(const int* turn, int own) {
  int now;
  do {
    now = load_acquire(turn);
  } while ((now & ~kFirstTurn) != own);
  return now & kFirstTurn;
}
/// Whether this job is the first of a block of dQ, which others then wait for.  Whoever is waited
/// for waits for nobody: a claim, its store and what tells of it are one warp's.  (Claims by the
/// consumers, who would tell a tile later: 6 to 8 % slower.)
__device__ __forceinline__ bool claim_first(int* progress) {
  int now = claim(progress, kHoldsNothing, kIsStored);
  while (now == kIsStored) now = load_acquire(progress);
  return now == kHoldsNothing;
}

/// Sends job after job: the first of a block of dQ is stored (stores_first()), others are added.
template <int D, QueryGradient kDq>
__device__ void send_query_gradients(BackwardShared<D>& sh, const BackwardMaps& maps,
                                     const BackwardParams& p, int sender) {
  using Shared = BackwardShared<D>;
  constexpr bool kTurns = kDq == QueryGradient::turns, kJoint = kJointJobs<D, kDq>;
  constexpr int kSlices = backward_slices(D, kDq), kBoxes = Shared::kSliceColumns / 32;
  const bool first = threadIdx.x % 32 == 0;
  const int first_consumer = kJoint ? 0 : sender, end_consumer = kJoint ? 2 : sender + 1;
  const auto give_back = [&] {
    for (int c = first_consumer; c < end_consumer; ++c)
      named_arrive(job_free<D, kDq>(sender, c), kJobFreeThreads);
  };
  if (!kJoint || sender == 1) give_back();
  for (int phase = 0;; phase ^= 1) {
    named_barrier(kJobFull + sender, kJobFullThreads<D, kDq>);
    if (kVisibleJobs) barrier_wait(&sh.job_full[sender], phase);
    const QueryGradientJob job = sh.job[sender];
    if (kVisibleJobs) warp_arrive(&sh.job_free[sender]);
    if (job.head < 0) break;
    int* turn =
        p.turns + (job.head * p.index.shape.q_blocks() + job.query_block) * kSlices + job.slice;
    bool tell = false;
    if (first) {
      const bool earliest = kTurns ? await_turn(turn, job.turn) != 0 : claim_first(turn),
                 stores = stores_first(kDq, D) && earliest;
      tell = kTurns || stores;
      fence_async_global();
      for (int c = first_consumer; c < end_consumer; ++c) {
        for (int b = 0; b < kBoxes; ++b) {
          const int column = (kJoint ? c : job.slice) * Shared::kSliceColumns + b * 32;
          if (column >= D) continue;
          if (stores) {
            tma_store(&maps.dq, sh.dq[c] + b * kBlock * 128, column, job.head,
                      job.query_block * kBlock);
          } else {
            tma_reduce_add(&maps.dq, sh.dq[c] + b * kBlock * 128, column, job.head,
                           job.query_block * kBlock);
          }
        }
      }
      bulk_commit();
      bulk_wait_read();
    }
    __syncwarp();
    give_back();
    if (first && tell) {
      bulk_wait();
      fence_async_global();
      store_release(turn, kTurns ? job.turn + 1 : kHolds);
    }
    __syncwarp();
  }
  if (first) bulk_wait();
}
/// One consumer's part in job `number` of the CTA, or of the consumer where it has its own.
template <int D, QueryGradient kDq>
struct JobSide {
  static constexpr bool kJoint = kJointJobs<D, kDq>;
  BackwardShared<D>& sh;
  const int consumer, thread;

  __device__ __forceinline__ int sender(int number) const { return kJoint ? number & 1 : consumer; }
  /// Until what was staged for the job before has been read.
  __device__ __forceinline__ void wait(int number) const {
    named_barrier(job_free<D, kDq>(sender(number - 1), consumer), kJobFreeThreads);
  }
  __device__ __forceinline__ void give(int number, const QueryGradientJob& job) const {
    const int to = sender(number), phase = (kJoint ? number >> 1 : number) & 1;
    if (thread == 0 && (!kJoint || consumer == 0)) {
      if (kVisibleJobs) barrier_wait(&sh.job_free[to], phase ^ 1);
      sh.job[to] = job;
      if (kVisibleJobs) barrier_arrive(&sh.job_full[to]);
    }
    named_arrive(kJobFull + to, kJobFullThreads<D, kDq>);
  }
  /// After `number` jobs.
  __device__ __forceinline__ void end(int number) const {
    wait(number);
    for (int i = 0; i < (kJoint ? 2 : 1); ++i) give(number + i, {-1, 0, 0, 0});
  }
};

/// The turns of parts that add to the same keys: one consumer warpgroup waits for those before it.
__device__ __forceinline__ int* part_turn(const BackwardParams& p, const WorkUnit& u,
                                          int consumer) {
  return p.part_turns + (u.first_row / kBlock * p.index.shape.kv_heads + u.kv_head) * 2 + consumer;
}
__device__ __forceinline__ void await_part(const BackwardParams& p, const WorkUnit& u, int consumer,
                                           int thread) {
  if (u.part == 0) return;
  if (thread == 0) {
    const int* turn = part_turn(p, u, consumer);
    while (load_acquire(turn) != u.part) {
    }
  }
  named_barrier(2 + consumer, 128);
}
__device__ __forceinline__ void pass_part(const BackwardParams& p, const WorkUnit& u, int consumer,
                                          int thread) {
  if (u.part + 1 >= u.parts) return;
  named_barrier(2 + consumer, 128);
  if (thread == 0) count_release(part_turn(p, u, consumer));
}

/// The kernel's body: roles by warpgroup.
template <int D, QueryGradient kDq, class Consumer>
__device__ __forceinline__ void backward_roles(unsigned char* raw, const BackwardMaps& maps,
                                               const BackwardParams& p) {
  using Shared = BackwardShared<D>;
  static_assert(
      sizeof(Shared) <= 232448 &&
      (!sends_jobs(kDq) || backward_slices(D, kDq) == (kJointJobs<D, kDq> ? 1 : Shared::kBoxes)));
  auto& sh = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) sh.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_release<40>();
    if (threadIdx.x == 0) BackwardProducer<D, kDq>(sh, maps, p).run();
    if constexpr (sends_jobs(kDq)) {
      const int warp = threadIdx.x / 32;
      if (warp == 1 || warp == 2) send_query_gradients<D, kDq>(sh, maps, p, warp - 1);
    }
  } else {
    registers_claim<232>();
    Consumer(sh, maps, p, threadIdx.x / 128 - 1).run();
  }
}

}  // namespace ballast::cuda

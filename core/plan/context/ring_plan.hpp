// RingPlan: for each step of ring attention, which KV shard a rank holds, and what it sends to whom
// on which ring. Ranks are context-parallel ranks 0..outer*inner-1; rank = outer_index * inner +
// inner_index (a node is one inner ring). Source: MTraining Algorithm 2; in
// backward the gradients of a shard follow its keys and values one step later, and a rank computes
// with its own shard last, not first: that hides the way home of the sums (fp32, and between nodes
// the slowest hop of all), while the first hop of keys, half as many bytes inside a node, has
// nothing to hide it.
//
// How to execute a list of steps (forward or backward), step t from 0:
//   1. post every hop of step t: KV hops first, inner before outer, then dKV hops, inner before
//   outer;
//   2. if shard >= 0, compute attention of the rank's queries against that KV shard;
//   3. complete every hop, of this or an earlier step, whose `complete` equals t;
//   4. drop the KV buffers of the shards in `release`.
// At most one hop of each of the four kinds is in flight, so an executor needs one slot per kind.
// Both ends of a hop post it at the same step.
//
// Buffers are known by shard:
//   * KV.  A rank starts with its own shard (shard == rank) and keeps it.  A KV hop sends the
//   buffer of `send_shard`, which
//     stays readable, and fills a new buffer for `recv_shard`, ready once the hop is complete.
//   * dKV (backward).  A rank holds at most one accumulator per shard.  The partial computed at a
//   step is added to the accumulator of `shard` if the rank holds one, else it becomes that
//   accumulator.  Posting a dKV hop takes the accumulator of `send_shard` away from the rank; that
//   buffer is free once the hop is complete.  When the hop completes, what arrived is joined by the
//   same rule to the accumulator of `recv_shard`; hops that are completed at the same step are
//   joined in the order of posting.  A rank's partial of its own shard stays with it: the other
//   ranks' sum comes home to it, in one hop less than a sum that began there.  After the last step
//   the only accumulator left is that of the rank's own shard: its whole dKV.
// `kv_buffers` and `dkv_buffers` say how many such buffers live at once at most.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

enum class RingLevel { inner, outer };

/// One paired transfer: this rank sends shard `send_shard` to rank `to` and receives shard
/// `recv_shard` from rank `from`.
struct RingHop {
  RingLevel level = RingLevel::inner;
  int to = 0, from = 0;
  int send_shard = 0, recv_shard = 0;
  int complete = 0;  ///< step of the list after whose compute the hop is completed
  bool operator==(const RingHop&) const = default;
};

/// One step of one rank.
struct RingStep {
  int outer = 0,
      inner = 0;   ///< ring step indices; the epilogue (hops home, and the own shard's compute in
                   ///< backward) uses outer = outer ranks
  int shard = -1;  ///< KV shard computed at this step; -1: communication only
  std::optional<RingHop> kv_inner;  ///< completed at the same step
  std::optional<RingHop>
      kv_outer;  ///< posted at an outer step's first inner step, completed at its last
  /// Backward only.  dKV (fp32) of the shard computed at the previous step travels while this step
  /// computes, from the second rank that computes with it on, the owner not counted.  At the first
  /// step of an outer step it is the other ranks' sum that goes back to the rank which entered with
  /// that shard.
  std::optional<RingHop> dkv_inner;  ///< completed at the same step
  /// Backward only.  The sum over the nodes so far, without the owner's; with an inner ring, posted
  /// at an outer step's second inner step (when the node's sum of the outer step before is whole)
  /// and completed at the next outer step's first.
  std::optional<RingHop> dkv_outer;
  std::vector<int>
      release;  ///< shards whose KV buffer this rank needs no more after this step; never its own
  bool operator==(const RingStep&) const = default;
};

struct RingPlan {
  int rank = 0, outer = 1, inner = 1;
  std::vector<RingStep> forward, backward;
  int kv_buffers = 0;  ///< received KV shards alive at once, at most (the rank's own not counted)
  int dkv_buffers =
      0;  ///< dKV accumulators alive at once in backward, at most: held, being sent, being received
  int ranks() const { return outer * inner; }
  std::uint64_t hash() const;
};

/// Plan of `rank`.  outer == 1 (or inner == 1) is the flat ring.  Every rank computes with every
/// shard exactly once; every dKV contribution reaches the shard's owner exactly once.  Throws Error
/// for sizes below 1 or a rank outside.
RingPlan plan_ring(int rank, int outer, int inner);

/// Buffers of KV, the own among them, and of dKV that live at once in backward, at most: what
/// received KV leaves behind holds sums, where both have one type.
int backward_buffers(const RingPlan& plan);

/// Replays the plans of all ranks (plans[r] is that of rank r) by the rules above, with sets of
/// contributions in place of numbers, and returns what is wrong (unmatched hops, a shard computed
/// twice or never, KV used before it is there or after its release, a dKV sum that misses a
/// contribution, has one twice or ends on the wrong rank, more buffers than promised), or an empty
/// string.
std::string problems(const std::vector<RingPlan>& plans);

/// Component times of one ring pass on one rank, in seconds (MTraining Table 4 names them).
struct RingCosts {
  double indexing_s = 0, host_s = 0;        ///< once per call
  double compute_s = 0;                     ///< attention of one step
  double inner_hop_s = 0, outer_hop_s = 0;  ///< one KV hop
  double inner_dkv_hop_s = 0,
         outer_dkv_hop_s = 0;  ///< one dKV hop (backward); 0 when counted with KV
};
/// Time until `rank`'s last step ends, hops overlapped with compute as posted.  All ranks alike.
/// Each ring is one link: hops of a level go one after another in the order of posting.
double simulate(const std::vector<RingStep>& steps, const RingCosts& costs);

}  // namespace ballast

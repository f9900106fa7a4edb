// RingPlan: for each step of ring attention, which KV shard a rank holds, and what it sends to whom on which ring.
// Ranks are context-parallel ranks 0..outer*inner-1; rank = outer_index * inner + inner_index (a node is one inner ring).
// Source: MTraining Algorithm 2; DESIGN "ring attention" fixes backward.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {

enum class RingLevel { inner, outer };

/// One paired transfer: this rank sends shard `send_shard` to rank `to` and receives shard `recv_shard` from rank `from`.
struct RingHop {
  RingLevel level = RingLevel::inner;
  int to = 0, from = 0;
  int send_shard = 0, recv_shard = 0;
  bool operator==(const RingHop&) const = default;
};

/// One step of one rank.  Order of execution: post every hop of the step, compute, then complete the hops that end here.
/// A KV hop posted at step t delivers the shard that a later step computes with.
struct RingStep {
  int outer = 0, inner = 0;  ///< ring step indices; the epilogue (hops home) uses outer = outer ranks
  int shard = -1;            ///< KV shard computed at this step; -1: communication only
  std::optional<RingHop> kv_inner;    ///< posted before compute, completed after it
  std::optional<RingHop> kv_outer;    ///< posted before compute of an outer step's first inner step, completed after its last
  /// Backward only.  dKV (fp32) of the shard computed at the previous step travels while this step computes.
  std::optional<RingHop> dkv_inner;   ///< posted before compute, completed after it
  std::optional<RingHop> dkv_outer;   ///< posted at an outer step's first inner step, completed after its last
  bool operator==(const RingStep&) const = default;
};

struct RingPlan {
  int rank = 0, outer = 1, inner = 1;
  std::vector<RingStep> forward, backward;
  int ranks() const { return outer * inner; }
  std::uint64_t hash() const;
};

/// Plan of `rank`.  outer == 1 (or inner == 1) is the flat ring.  Every rank computes with every shard exactly once;
/// every dKV contribution reaches the shard's owner exactly once.
RingPlan plan_ring(int rank, int outer, int inner);

/// Replays the plans of all ranks and returns what is wrong (unmatched hops, a shard computed twice or never, a dKV sum
/// that misses a contribution or ends on the wrong rank), or an empty string.
std::string problems(const std::vector<RingPlan>& plans);

/// Component times of one ring pass on one rank, in seconds (MTraining Table 4 names them).
struct RingCosts {
  double indexing_s = 0, host_s = 0;  ///< once per call
  double compute_s = 0;               ///< attention of one step
  double inner_hop_s = 0, outer_hop_s = 0;          ///< one KV hop
  double inner_dkv_hop_s = 0, outer_dkv_hop_s = 0;  ///< one dKV hop (backward); 0 when counted with KV
};
/// Time until `rank`'s last step ends, hops overlapped with compute as posted.  All ranks alike.
double simulate(const std::vector<RingStep>& steps, const RingCosts& costs);

}  // namespace ballast

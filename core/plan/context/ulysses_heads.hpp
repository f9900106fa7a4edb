// HeadSplit: which attention heads each rank of a Ulysses group computes, and which tokens it holds
// outside attention (DeepSpeed-Ulysses, Jacobs et al. 2023).  Plain arithmetic; the executor is
// parallel/context/ulysses.hpp.
#pragma once
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

namespace ballast {

/// Heads of a layer over `ranks` ranks.  Rank r computes query heads [r Hq / ranks, (r + 1) Hq /
/// ranks).  Key/value heads are repeated up to lcm(Hkv, ranks), which divides Hq, and cut likewise:
/// none is repeated when ranks divides Hkv, each rank has one when Hkv divides ranks.
struct HeadSplit {
  int ranks = 1;
  std::int64_t query_heads = 1, kv_heads = 1;

  std::int64_t local_query_heads() const { return query_heads / ranks; }
  /// Key/value heads that a rank computes with, repeated ones included.
  std::int64_t local_kv_heads() const {
    return std::lcm(kv_heads, static_cast<std::int64_t>(ranks)) / ranks;
  }
  /// Head of the model that local key/value head `local` of `rank` is.
  std::int64_t kv_head(int rank, std::int64_t local) const {
    return (rank * local_kv_heads() + local) / (local_kv_heads() * ranks / kv_heads);
  }
  bool repeats() const { return local_kv_heads() * ranks > kv_heads; }
};

/// Why `ranks` ranks cannot share a layer of `query_heads` heads, with the arithmetic; empty when
/// they can.
std::string head_split_problem(std::int64_t query_heads, int ranks);

/// Tokens [begin, end) that part `part` of `parts` has of `tokens`: a rank's local tokens of a
/// micro-batch, cut for its Ulysses group.
inline std::pair<std::int64_t, std::int64_t> even_part(std::int64_t tokens, int part, int parts) {
  return {tokens * part / parts, tokens * (part + 1) / parts};
}

}  // namespace ballast

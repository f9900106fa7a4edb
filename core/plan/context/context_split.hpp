// ContextSplit: how the ranks of a group share a micro-batch, over its heads and over its tokens.
// Plain arithmetic; the communicators are parallel/comm/mesh.hpp.
#pragma once
#include <cstdint>

#include "core/plan/context/mesh_shape.hpp"

namespace ballast {

/// Ulysses over heads times a ring of two levels.  sp * ring_outer * ring_inner is the group's
/// data-parallel ranks times the mesh's cp and sp.
struct ContextSplit {
  int sp = 1, ring_outer = 1, ring_inner = 1;
  int ring() const { return ring_outer * ring_inner; }
  int ranks() const { return sp * ring(); }
  bool operator==(const ContextSplit&) const = default;
};

/// Ulysses over `sp` ranks inside a ring of `ring`, a multiple of the mesh's own, which is inside:
/// a ring of two levels gets longer on its outer one.
ContextSplit context_split(const MeshShape& mesh, int sp, int ring);
/// The mesh's own: of micro-batches that no data-parallel ranks share.
inline ContextSplit own_split(const MeshShape& mesh) {
  return {mesh.sp, mesh.cp_outer, mesh.cp_inner};
}

/// The split of a micro-batch that `ranks` adjacent data-parallel ranks [d, d + ranks) share:
/// Ulysses over the mesh's sp and the largest divisor of `ranks` that then divides the query heads
/// (0 heads: all of them), neighbours together; the ring goes round the rest.
ContextSplit joined_split(const MeshShape& mesh, int ranks, std::int64_t query_heads);

}  // namespace ballast

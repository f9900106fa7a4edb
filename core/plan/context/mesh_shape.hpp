// MeshShape: degrees of the rank mesh dp x pp x cp_outer x cp_inner x sp x tp, and where a rank
// stands in it.  Plain arithmetic, no MPI; communicators are parallel/comm/mesh.hpp.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/problem.hpp"

namespace ballast {

/// Degrees of every dimension.  Rank order, fastest first: tp, sp, cp_inner, cp_outer, pp, dp:
/// neighbours on a node share tensor, sequence and inner context parallel groups.
struct MeshShape {
  int dp = 1, pp = 1, cp_outer = 1, cp_inner = 1, sp = 1, tp = 1;
  int ranks_per_node = 0;  ///< 0: as the machine says (MPI_COMM_TYPE_SHARED)
  int cp() const { return cp_outer * cp_inner; }
  int size() const { return dp * pp * cp_outer * cp_inner * sp * tp; }
  /// Ranks that hold the same parameters: gradients are summed over them, ZeRO shards over them.
  int replicas() const { return dp * cp_outer * cp_inner * sp; }
  bool operator==(const MeshShape&) const = default;
};

struct MeshCoordinates {
  int dp = 0, pp = 0, cp_outer = 0, cp_inner = 0, sp = 0, tp = 0;
  int cp(const MeshShape& shape) const { return cp_outer * shape.cp_inner + cp_inner; }
  bool operator==(const MeshCoordinates&) const = default;
};

/// Coordinates of rank 0 <= rank < shape.size(), and back.
MeshCoordinates coordinates(const MeshShape& shape, int rank);
int rank_of(const MeshShape& shape, const MeshCoordinates& at);

/// "dp 2 x pp 1 x cp_outer 2 x cp_inner 2 x sp 1 x tp 1 = 8".
std::string describe(const MeshShape& shape);

/// Problems of a mesh on `ranks` ranks (0: any number), each with the arithmetic shown; empty when
/// the mesh exists.  Refuses degrees below 1, a product other than `ranks`, nodes that do not
/// divide the ranks, and a two-level ring whose inner ring leaves its node.
std::vector<Problem> problems(const MeshShape& shape, int ranks);

}  // namespace ballast

// Rank mesh: coordinates and communicators of dp x pp x cp_outer x cp_inner x sp x tp.
#pragma once
#include <string>
#include <vector>

#include "parallel/comm.hpp"

namespace ballast {

/// Degrees of every dimension.  Rank order, fastest first: tp, sp, cp_inner, cp_outer, pp, dp: neighbours on a node
/// share tensor, sequence and inner context parallel groups.
struct MeshShape {
  int dp = 1, pp = 1, cp_outer = 1, cp_inner = 1, sp = 1, tp = 1;
  int ranks_per_node = 0;  ///< 0: as found by MPI_COMM_TYPE_SHARED
  int cp() const { return cp_outer * cp_inner; }
  int size() const { return dp * pp * cp_outer * cp_inner * sp * tp; }
};

struct MeshCoordinates {
  int dp = 0, pp = 0, cp_outer = 0, cp_inner = 0, sp = 0, tp = 0;
  int cp(const MeshShape& shape) const { return cp_outer * shape.cp_inner + cp_inner; }
};
MeshCoordinates coordinates(const MeshShape& shape, int rank);
int rank_of(const MeshShape& shape, const MeshCoordinates& at);

/// Problems of a mesh on `ranks` ranks, each with the arithmetic shown; empty when it can run.  Needs no MPI.
std::vector<std::string> problems(const MeshShape& shape, int ranks);

class Mesh {
 public:
  /// Collective over `world`; throws Error (on all ranks) with all problems when the shape does not fit.
  Mesh(const Communicator& world, const MeshShape& shape);
  MeshShape shape;
  MeshCoordinates at;
  Communicator world, dp, pp, cp, cp_outer, cp_inner, sp, tp;
  Communicator replica;   ///< ranks that hold the same parameters (dp x cp x sp): gradient reduction and ZeRO shards
  Communicator node;      ///< ranks on this machine, or of this emulated node
  int local_rank = 0, node_index = 0;
  /// rank / host / node / device / coordinates, one line a rank, on every rank.
  std::vector<std::string> table;
};

}  // namespace ballast

// Rank mesh: communicators of dp x pp x cp_outer x cp_inner x sp x tp
// (core/plan/context/mesh_shape.hpp has the arithmetic).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/plan/context/mesh_shape.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

class Mesh {
 public:
  /// Collective over `world`; throws CollectiveError with all problems when the shape does not fit
  /// its size.  `joined`: numbers of neighbouring data-parallel ranks that share some micro-batches
  /// (adaptive sequence parallelism, HBP Section 4.3), divisors of dp.
  Mesh(const Communicator& world, const MeshShape& shape, const std::vector<int>& joined = {});
  /// Ulysses group of this rank for micro-batches of degree `degree` (MicroBatch::sp): degree 1 is
  /// the mesh's own `sp`; above that, `degree` neighbouring data-parallel ranks at the same place
  /// otherwise, in dp order.  Made at start.  Throws Error for another degree.
  const Communicator& sequence(int degree) const;
  MeshShape shape;
  MeshCoordinates at;
  /// Groups along each dimension, ranked by the coordinate: cp by cp_outer * shape.cp_inner +
  /// cp_inner.  Groups of the same ranks are one communicator.
  Communicator world, dp, pp, cp, cp_outer, cp_inner, sp, tp;
  Communicator replica;  ///< ranks that hold the same parameters (dp x cp x sp, in world order):
                         ///< gradient reduction and ZeRO shards
  Communicator node;     ///< ranks on this machine, or of this emulated node (shape.ranks_per_node)
  int node_index = 0;    ///< nodes count by their lowest world rank
  /// rank / host / node / coordinates, one line a rank in world order, on every rank.
  std::vector<std::string> table;
  /// What runs, but not as fast as it could, such as inner rings that leave their machine.  On
  /// every rank.
  std::vector<std::string> warnings;

 private:
  std::map<int, Communicator> joined_;
};

}  // namespace ballast

// Rank mesh: communicators of dp x pp x cp_outer x cp_inner x sp x tp
// (core/plan/context/mesh_shape.hpp has the arithmetic).
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/plan/context/context_split.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

class Mesh {
 public:
  /// Collective over `world`; throws CollectiveError with all problems when the shape does not fit
  /// its size.  `joined`: numbers of neighbouring data-parallel ranks that share some micro-batches
  /// (adaptive sequence parallelism, HBP Section 4.3), divisors of dp, which split them by
  /// joined_split with these `query_heads`.
  Mesh(const Communicator& world, const MeshShape& shape, const std::vector<int>& joined = {},
       std::int64_t query_heads = 0);
  /// How micro-batches of degree `degree` (MicroBatch::sp) are shared, and this rank's groups for
  /// them: the ranks with the other heads of the same tokens, and the ring of those with the same
  /// heads, in the order of its plan.  Degree 1 has the mesh's own; above that, neighbouring
  /// data-parallel ranks at the same place otherwise share heads, and the ring is that of the mesh
  /// in each of their blocks, one block after another.  Made at start.  Throws Error for another
  /// degree.
  const ContextSplit& split(int degree) const { return group(degree).split; }
  const Communicator& sequence(int degree) const { return group(degree).sequence; }
  const Communicator& ring(int degree) const { return group(degree).ring; }
  /// The degrees, ascending from 1.
  std::vector<int> degrees() const;
  MeshShape shape;
  MeshCoordinates at;
  /// Groups along each dimension, ranked by the coordinate: cp by cp_outer * shape.cp_inner +
  /// cp_inner.  Groups of the same ranks are one communicator.
  Communicator world, dp, pp, cp, cp_outer, cp_inner, sp, tp;
  Communicator replica;  ///< ranks that hold the same parameters (dp x cp x sp, in world order):
                         ///< gradient reduction and ZeRO shards
  Communicator node;     ///< ranks on this machine, or of this emulated node (shape.ranks_per_node)
  /// rank / host / node / coordinates, one line a rank in world order, on every rank.
  std::vector<std::string> table;
  /// What runs, but not as fast as it could, such as inner rings that leave their machine.  On
  /// every rank.
  std::vector<std::string> warnings;

 private:
  struct Group {
    ContextSplit split;
    Communicator sequence, ring;
  };
  const Group& group(int degree) const;
  std::map<int, Group> groups_;  ///< by degree
};

}  // namespace ballast

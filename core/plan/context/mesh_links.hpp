// Which link the transfers of a mesh take: inside a node, or between nodes.  Nodes are blocks of
// adjacent ranks, so this follows from the order of ranks alone (mesh_shape.hpp).  Plain
// arithmetic.
#pragma once
#include "core/plan/context/context_split.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/context/ring_plan.hpp"

namespace ballast {

enum class Link { node, network };

/// mesh.ranks_per_node, else 8: no plan knows the machine.
int node_ranks(const MeshShape& mesh);

// Each is the slowest link that any group of the mesh takes: groups of a kind run side by side, and
// who shares micro-batches waits for the slowest.  A group of one rank takes none: node.

/// Ulysses' all-to-alls: the ranks with the other heads of the same tokens, those of joined
/// data-parallel ranks among them (Mesh::sequence).
Link exchange_link(const MeshShape& mesh, const ContextSplit& split);
/// Hops of a ring, to the next rank of a level (Mesh::ring, RingPlan).
Link ring_link(const MeshShape& mesh, const ContextSplit& split, RingLevel level);
/// From a pipeline stage to the next one, and back.
Link stage_link(const MeshShape& mesh, int stage);
/// Sums and gathers of all ranks that hold a stage's parameters (Mesh::replica).
Link replica_link(const MeshShape& mesh, int stage);
/// Between the first and the last stage: a tied embedding.
Link tied_link(const MeshShape& mesh);
/// Sums over all ranks.
Link world_link(const MeshShape& mesh);

}  // namespace ballast

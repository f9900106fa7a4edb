// The rings that a rank computes micro-batches in: the mesh's own, and those of data-parallel ranks
// that join for some of them.
#pragma once
#include <map>
#include <memory>

#include "core/plan/step_plan.hpp"
#include "parallel/comm/mesh.hpp"
#include "parallel/context/ring_attention.hpp"

namespace ballast {

class MeshRings {
 public:
  /// Made once; `mesh` must outlive it.
  explicit MeshRings(const Mesh& mesh);
  /// The ring of a micro-batch that this rank has a part in.  Throws Error where the plan splits it
  /// in another way than the mesh was made for.
  const RingGroup& of(const PlannedMicroBatch& micro_batch) const;
  const RingGroup& of_mesh() const { return rings_.at(1); }
  /// Of all rings; Ulysses exchanges take from them too.
  RingBuffers& buffers() const { return *of_mesh().buffers; }
  /// Connects the ranks of joined groups on `device`, so that their first exchange in training
  /// costs no more than a later one.  Collective over the mesh.
  void connect_joined(Device& device) const;

 private:
  const Mesh& mesh_;
  std::map<int, RingGroup> rings_;  ///< by degree
};

}  // namespace ballast

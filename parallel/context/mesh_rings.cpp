#include "parallel/context/mesh_rings.hpp"

#include <set>
#include <tuple>

#include "core/base/error.hpp"
#include "parallel/context/ulysses.hpp"

namespace ballast {
namespace {

/// One element on every hop that a pass round the ring takes.
void connect(const RingGroup& ring, Device& device) {
  const Tensor sent = Tensor::zeros({1}, DType::f32, device, MemoryCategory::communication),
               received = Tensor::zeros({1}, DType::f32, device, MemoryCategory::communication);
  std::set<std::tuple<RingLevel, int, int>> known;
  for (const RingStep& step : ring.plan.backward)
    for (const auto* hop : {&step.kv_inner, &step.kv_outer, &step.dkv_inner, &step.dkv_outer}) {
      if (!*hop || !known.emplace((*hop)->level, (*hop)->to, (*hop)->from).second) continue;
      const HopTransfers transfers = hop_transfers(**hop, received, sent);
      ring.cp.exchange(transfers.list, transfers.channel).complete();
    }
  device.synchronize();
}

}  // namespace

MeshRings::MeshRings(const Mesh& mesh) : mesh_(mesh) {
  const auto buffers = std::make_shared<RingBuffers>();
  for (const int degree : mesh.degrees()) {
    const ContextSplit& split = mesh.split(degree);
    const Communicator& ring = mesh.ring(degree);
    rings_[degree] = {ring, plan_ring(ring.rank(), split.ring_outer, split.ring_inner), buffers};
  }
}

const RingGroup& MeshRings::of(const PlannedMicroBatch& m) const {
  const ContextSplit& made = mesh_.split(m.group.ranks);
  require(m.split == made,
          "a micro-batch of {} data-parallel ranks is split into sp {} x ring {} x {}, its groups "
          "were made for sp {} x ring {} x {}",
          m.group.ranks, m.split.sp, m.split.ring_outer, m.split.ring_inner, made.sp,
          made.ring_outer, made.ring_inner);
  return rings_.at(m.group.ranks);
}

void MeshRings::connect_joined(Device& device) const {
  for (const auto& [degree, ring] : rings_) {
    if (degree == 1) continue;
    ballast::connect(mesh_.sequence(degree), device);
    connect(ring, device);
  }
}

}  // namespace ballast

// Links of transfers, against every rank of the mesh and the node that it lies on.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/plan/context/mesh_links.hpp"

namespace ballast {
namespace {

using Peer = std::function<MeshCoordinates(MeshCoordinates)>;

/// network where any rank for which `takes_part` lies on another node than its `peer`.
Link slowest(
    const MeshShape& mesh, const Peer& peer,
    const std::function<bool(const MeshCoordinates&)>& takes_part = [](const auto&) {
      return true;
    }) {
  const int node = mesh.ranks_per_node > 0 ? mesh.ranks_per_node : 8;
  for (int r = 0; r < mesh.size(); ++r) {
    const MeshCoordinates at = coordinates(mesh, r);
    if (takes_part(at) && rank_of(mesh, peer(at)) / node != r / node) return Link::network;
  }
  return Link::node;
}

/// [place on the ring] Where its hops of a level go; itself where it has none.
std::vector<int> hops(const ContextSplit& split, RingLevel level) {
  std::vector<int> to;
  for (int place = 0; place < split.ring(); ++place) {
    to.push_back(place);
    for (const RingStep& step : plan_ring(place, split.ring_outer, split.ring_inner).forward)
      for (const auto& hop : {step.kv_inner, step.kv_outer})
        if (hop && hop->level == level) to.back() = hop->to;
  }
  return to;
}

/// Joined groups, as Mesh makes them: `ranks` neighbours from a multiple of it on, of which each
/// `heads` share heads.
void check_joined(const MeshShape& mesh, int ranks, std::int64_t query_heads) {
  const ContextSplit split = joined_split(mesh, ranks, query_heads);
  const int heads = split.sp / mesh.sp, cp = mesh.cp();
  const Peer first_head = [&](MeshCoordinates at) {
    at.sp = 0, at.dp -= at.dp % heads;
    return at;
  };
  EXPECT_EQ(exchange_link(mesh, split), slowest(mesh, first_head))
      << ranks << " joined, " << query_heads << " heads";
  for (const RingLevel level : {RingLevel::inner, RingLevel::outer}) {
    const std::vector<int> to = hops(split, level);
    const Peer next = [&](MeshCoordinates at) {
      const int first = at.dp / ranks * ranks + at.dp % heads,
                place = (at.dp - first) / heads * cp + at.cp(mesh),
                peer = to[static_cast<std::size_t>(place)];
      at.dp = first + peer / cp * heads;
      at.cp_outer = peer % cp / mesh.cp_inner, at.cp_inner = peer % mesh.cp_inner;
      return at;
    };
    EXPECT_EQ(ring_link(mesh, split, level), slowest(mesh, next))
        << ranks << " joined, " << query_heads << " heads, outer " << (level == RingLevel::outer);
  }
}

void check_stages(const MeshShape& mesh) {
  const Peer first_replica = [](MeshCoordinates at) {
    return MeshCoordinates{0, at.pp, 0, 0, 0, at.tp};
  };
  const Peer next_stage = [](MeshCoordinates at) {
    ++at.pp;
    return at;
  };
  const Peer last_stage = [&](MeshCoordinates at) {
    at.pp = mesh.pp - 1;
    return at;
  };
  for (int stage = 0; stage < mesh.pp; ++stage) {
    const auto here = [&](const MeshCoordinates& at) { return at.pp == stage; };
    EXPECT_EQ(replica_link(mesh, stage), slowest(mesh, first_replica, here)) << "stage " << stage;
    if (stage + 1 < mesh.pp) {
      EXPECT_EQ(stage_link(mesh, stage), slowest(mesh, next_stage, here)) << "stage " << stage;
    }
  }
  EXPECT_EQ(tied_link(mesh), slowest(mesh, last_stage, [](const auto& at) { return at.pp == 0; }));
  EXPECT_EQ(world_link(mesh), slowest(mesh, [](const auto&) { return MeshCoordinates(); }));
}

TEST(MeshLinks, AreThoseOfTheSlowestPairOfRanks) {
  for (const int node : {0, 2, 3, 4, 6})
    for (const int dp : {1, 2, 3, 4, 8})
      for (const int pp : {1, 2, 3})
        for (const int outer : {1, 2})
          for (const int inner : {1, 2, 3})
            for (const int sp : {1, 2})
              for (const int tp : {1, 2}) {
                const MeshShape mesh{dp, pp, outer, inner, sp, tp, node};
                if (mesh.size() > 24) continue;
                SCOPED_TRACE(describe(mesh) + " on nodes of " + std::to_string(node));
                for (int ranks = 1; ranks <= dp; ++ranks)
                  for (const int query_heads : {2, 6})
                    if (dp % ranks == 0) check_joined(mesh, ranks, query_heads);
                check_stages(mesh);
                if (testing::Test::HasFailure()) return;
              }
}

TEST(MeshLinks, OneNodeHasNoNetwork) {
  for (const MeshShape& mesh : {MeshShape{2, 2, 1, 2, 1, 1, 0}, MeshShape{2, 2, 2, 2, 2, 1, 32},
                                MeshShape{3, 5, 1, 2, 1, 1, 30}, MeshShape{1, 8, 1, 1, 1, 1, 8}}) {
    EXPECT_EQ(world_link(mesh), Link::node);
    EXPECT_EQ(tied_link(mesh), Link::node);
    EXPECT_EQ(replica_link(mesh, mesh.pp - 1), Link::node);
    for (int stage = 0; stage + 1 < mesh.pp; ++stage)
      EXPECT_EQ(stage_link(mesh, stage), Link::node);
    for (const int ranks : {1, mesh.dp}) {
      const ContextSplit split = joined_split(mesh, ranks, 0);
      EXPECT_EQ(exchange_link(mesh, split), Link::node);
      EXPECT_EQ(ring_link(mesh, split, RingLevel::inner), Link::node);
      EXPECT_EQ(ring_link(mesh, split, RingLevel::outer), Link::node);
    }
  }
}

// dp is the slowest dimension: its neighbours lie a pipeline apart, and stages side by side.
TEST(MeshLinks, APipelineFillsANodeBeforeReplicasDo) {
  const MeshShape mesh{4, 8, 1, 1, 1, 1, 8};
  EXPECT_EQ(replica_link(mesh, 0), Link::network);
  EXPECT_EQ(exchange_link(mesh, joined_split(mesh, 2, 8)), Link::network);
  for (int stage = 0; stage < 7; ++stage) EXPECT_EQ(stage_link(mesh, stage), Link::node);
  const MeshShape longer{2, 16, 1, 1, 1, 1, 8};
  for (int stage = 0; stage < 15; ++stage)
    EXPECT_EQ(stage_link(longer, stage), stage == 7 ? Link::network : Link::node);
}

}  // namespace
}  // namespace ballast

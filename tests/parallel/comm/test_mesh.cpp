// Mesh: every group holds the ranks that its definition names; nodes; problems; stops and clocks
// agreed on over all ranks.
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <set>

#include "core/plan/context/mesh_links.hpp"
#include "parallel/comm/clock_alignment.hpp"
#include "parallel/comm/mesh.hpp"
#include "parallel/comm/signals.hpp"
#include "parallel/comm/waits.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

/// World ranks of a group, in the group's order.
std::vector<int> members(const Communicator& group) {
  std::vector<int> list;
  for (const auto& text : group.all_gather(std::to_string(Communicator::world().rank())))
    list.push_back(std::stoi(text));
  return list;
}

/// World ranks whose coordinates are those of `at` after `free` has zeroed the dimensions of the
/// group.
std::vector<int> expected(const MeshShape& shape, MeshCoordinates at,
                          const std::function<void(MeshCoordinates&)>& free) {
  free(at);
  std::vector<int> list;
  for (int r = 0; r < shape.size(); ++r) {
    MeshCoordinates other = coordinates(shape, r);
    free(other);
    if (other == at) list.push_back(r);
  }
  return list;
}

void check_groups(const MeshShape& shape) {
  SCOPED_TRACE(describe(shape));
  const Communicator world = Communicator::world();
  const Mesh& mesh = testing::mesh_of(shape);
  EXPECT_EQ(mesh.at, coordinates(shape, world.rank()));
  EXPECT_EQ(members(mesh.dp), expected(shape, mesh.at, [](auto& c) { c.dp = 0; }));
  EXPECT_EQ(members(mesh.pp), expected(shape, mesh.at, [](auto& c) { c.pp = 0; }));
  EXPECT_EQ(members(mesh.cp),
            expected(shape, mesh.at, [](auto& c) { c.cp_outer = c.cp_inner = 0; }));
  EXPECT_EQ(members(mesh.cp_outer), expected(shape, mesh.at, [](auto& c) { c.cp_outer = 0; }));
  EXPECT_EQ(members(mesh.cp_inner), expected(shape, mesh.at, [](auto& c) { c.cp_inner = 0; }));
  EXPECT_EQ(members(mesh.sp), expected(shape, mesh.at, [](auto& c) { c.sp = 0; }));
  EXPECT_EQ(members(mesh.tp), expected(shape, mesh.at, [](auto& c) { c.tp = 0; }));
  EXPECT_EQ(members(mesh.replica),
            expected(shape, mesh.at, [](auto& c) { c.dp = c.cp_outer = c.cp_inner = c.sp = 0; }));
  EXPECT_EQ(mesh.dp.rank(), mesh.at.dp);
  EXPECT_EQ(mesh.cp.rank(), mesh.at.cp(shape));
  EXPECT_EQ(mesh.cp_outer.rank(), mesh.at.cp_outer);
  EXPECT_EQ(mesh.cp_inner.rank(), mesh.at.cp_inner);
  ASSERT_EQ(static_cast<int>(mesh.table.size()), world.size());
  EXPECT_NE(mesh.table[world.rank()].find(host_name()), std::string::npos);
  EXPECT_EQ(mesh.replica.size(), shape.replicas());
}

TEST(Mesh, GroupsOfEveryShape) {
  const int ranks = Communicator::world().size();
  for (const MeshShape& shape : testing::data_and_context_meshes(ranks)) check_groups(shape);
  MeshShape pipeline;
  pipeline.pp = ranks;
  check_groups(pipeline);
  if (ranks % 4) return;
  MeshShape all;
  all.dp = ranks / 4;
  all.sp = 2;
  all.cp_inner = 2;
  check_groups(all);
}

/// Neighbours share heads, the ranks at their places in the blocks of a group share a ring.
void check_joined(const MeshShape& shape, std::int64_t query_heads) {
  SCOPED_TRACE(fmt::format("{}, {} heads", describe(shape), query_heads));
  std::vector<int> joined;
  for (int ranks = 2; ranks <= shape.dp; ++ranks)
    if (shape.dp % ranks == 0) joined.push_back(ranks);
  const Mesh& mesh = testing::mesh_of(shape, joined, query_heads);
  EXPECT_EQ(members(mesh.sequence(1)), members(mesh.sp));
  EXPECT_EQ(members(mesh.ring(1)), members(mesh.cp));
  for (const int ranks : joined) {
    const ContextSplit split = mesh.split(ranks);
    EXPECT_EQ(split, joined_split(shape, ranks, query_heads));
    EXPECT_EQ(members(mesh.sequence(ranks)),
              expected(shape, mesh.at, [&](auto& c) { c.dp -= c.dp % split.sp; }));
    EXPECT_EQ(members(mesh.ring(ranks)), expected(shape, mesh.at, [&](auto& c) {
                c.dp = c.dp / ranks * ranks + c.dp % split.sp;
                c.cp_outer = c.cp_inner = 0;
              }));
  }
  EXPECT_THROW(mesh.sequence(shape.dp + 1), Error);
}

TEST(Mesh, JoinedRanksShareHeadsAndARing) {
  const int ranks = Communicator::world().size();
  for (const MeshShape& shape : testing::data_and_context_meshes(ranks))
    for (const std::int64_t heads : {0, 1, 2, 12}) check_joined(shape, heads);
}

TEST(Mesh, EmulatedNodes) {
  const Communicator world = Communicator::world();
  for (int per_node = 1; per_node <= world.size(); per_node *= 2) {
    MeshShape shape;
    shape.cp_inner = per_node;
    shape.cp_outer = world.size() / per_node;
    shape.ranks_per_node = per_node;
    const Mesh& mesh = testing::mesh_of(shape);
    EXPECT_EQ(mesh.node.size(), per_node);
    EXPECT_EQ(mesh.node.rank(), world.rank() % per_node);
    EXPECT_TRUE(mesh.warnings.empty());
    EXPECT_EQ(members(mesh.node), members(mesh.cp_inner));
  }
}

/// Whether the ranks of any group that takes part lie on several nodes.
bool leaves_node(const Mesh& mesh, const std::vector<int>& group, bool takes_part = true) {
  bool leaves = false;
  for (const int rank : group)
    leaves =
        leaves || rank / mesh.shape.ranks_per_node != group.front() / mesh.shape.ranks_per_node;
  return mesh.world.all_reduce(std::int64_t{leaves && takes_part}, Reduction::max) > 0;
}

/// What plans say of links, by the ranks that the communicators hold.
void check_links(const MeshShape& shape, std::int64_t query_heads) {
  SCOPED_TRACE(fmt::format("{}, {} heads", describe(shape), query_heads));
  const Mesh& mesh = testing::mesh_of(
      shape, shape.dp > 1 ? std::vector<int>{shape.dp} : std::vector<int>{}, query_heads);
  const auto link = [](bool leaves) { return leaves ? Link::network : Link::node; };
  for (const int degree : mesh.degrees()) {
    const ContextSplit split = mesh.split(degree);
    EXPECT_EQ(exchange_link(shape, split), link(leaves_node(mesh, members(mesh.sequence(degree)))));
    EXPECT_EQ(ring_link(shape, split, RingLevel::inner),
              link(leaves_node(mesh, members(mesh.ring(degree)))));
  }
  const std::vector<int> stages = members(mesh.pp), replicas = members(mesh.replica);
  for (int s = 0; s < shape.pp; ++s) {
    EXPECT_EQ(replica_link(shape, s), link(leaves_node(mesh, replicas, mesh.at.pp == s)));
    if (s + 1 == shape.pp) continue;
    const auto at = static_cast<std::size_t>(s);
    EXPECT_EQ(stage_link(shape, s), link(leaves_node(mesh, {stages[at], stages[at + 1]})));
  }
  EXPECT_EQ(tied_link(shape), link(leaves_node(mesh, {stages.front(), stages.back()})));
}

TEST(Mesh, LinksAreThoseOfItsGroups) {
  const int ranks = Communicator::world().size();
  if (ranks % 2 != 0) return;
  const int half = ranks / 2;
  for (const std::int64_t heads : {1, 0}) {
    check_links({2, half, 1, 1, 1, 1, half}, heads);
    check_links({half, 2, 1, 1, 1, 1, half}, heads);
    check_links({2, 1, 1, half, 1, 1, half}, heads);
  }
  check_links({1, 2, 1, half, 1, 1, half}, 1);
}

TEST(Mesh, FlatRingOverNodesIsWarnedOf) {
  const Communicator world = Communicator::world();
  MeshShape shape;
  shape.cp_inner = world.size();
  shape.ranks_per_node = 1;
  const Mesh mesh(world, shape);
  EXPECT_EQ(mesh.warnings.size(), world.size() > 1 ? 1u : 0u);
}

TEST(Mesh, ImpossibleShapesAreRefusedOnAllRanks) {
  const Communicator world = Communicator::world();
  MeshShape shape;
  shape.dp = world.size() + 1;
  try {
    Mesh mesh(world, shape);
    ADD_FAILURE() << "a mesh of too many ranks was made";
  } catch (const CollectiveError& e) {
    EXPECT_NE(std::string(e.what()).find(std::to_string(world.size())), std::string::npos)
        << e.what();
  }
  shape.dp = world.size();
  shape.tp = 0;
  EXPECT_THROW(Mesh(world, shape), CollectiveError);
}

/// The machine's clock, wrong by a known amount.
class ShiftedClock final : public Clock {
 public:
  explicit ShiftedClock(double shift) : shift_(shift) {}
  std::int64_t mark(Queue) override { return host_clock().mark(); }
  double seconds(std::int64_t mark) override { return host_clock().seconds(mark) + shift_; }

 private:
  double shift_;
};

TEST(Clocks, ShiftsAreFound) {
  const Communicator world = Communicator::world();
  ShiftedClock clock(100.0 * world.rank());
  // All ranks of a test run on one machine; the bound allows for busy cores.
  EXPECT_NEAR(align_clocks(world, clock), -100.0 * world.rank(), 0.02);
  if (world.rank() == 0) {
    EXPECT_EQ(align_clocks(Communicator(), clock), 0.0);
  }
}

TEST(Stops, AnyRankStopsAll) {
  const Communicator world = Communicator::world();
  EXPECT_EQ(agreed_stop(world, false), StopReason::none);
  for (int r = 0; r < world.size(); ++r)
    EXPECT_EQ(agreed_stop(world, world.rank() == r), StopReason::wall_time);
  EXPECT_EQ(agreed_stop(world, false), StopReason::none);
  catch_stop_signals();
  if (world.rank() == world.size() - 1) std::raise(SIGUSR1);
  EXPECT_EQ(agreed_stop(world, false), StopReason::user_signal);
  EXPECT_EQ(agreed_stop(world, true), StopReason::user_signal);
  if (world.rank() == 0) std::raise(SIGTERM);
  EXPECT_EQ(agreed_stop(world, false), StopReason::terminate);
  EXPECT_STREQ(name(StopReason::terminate), "SIGTERM");
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGUSR1, SIG_DFL);
}

}  // namespace
}  // namespace ballast

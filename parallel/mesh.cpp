#include "parallel/mesh.hpp"

#include <algorithm>
#include <set>

namespace ballast {
namespace {

/// Ranks whose coordinates agree once `vary` has zeroed the dimensions of the group; ranked as in `world`.
template <class Vary> Communicator along(const Communicator& world, const MeshShape& shape, const MeshCoordinates& at, const Vary& vary) {
  MeshCoordinates first = at;
  vary(first);
  return world.split(rank_of(shape, first), world.rank());
}

std::vector<int> node_of_ranks(const Communicator& world, const Communicator& node) {
  // A node is named by its lowest world rank, and counted in that order.
  const int lowest = static_cast<int>(node.all_reduce(std::int64_t{world.rank()}, Reduction::min));
  const auto names = world.all_gather(std::to_string(lowest));
  std::set<int> order;
  for (const auto& name : names) order.insert(std::stoi(name));
  std::vector<int> result;
  for (const auto& name : names) result.push_back(static_cast<int>(std::distance(order.begin(), order.find(std::stoi(name)))));
  return result;
}

}  // namespace

Mesh::Mesh(const Communicator& world_, const MeshShape& shape_) : shape(shape_), world(world_) {
  const std::vector<std::string> wrong = problems(shape, world.size());
  check_all(world, wrong.empty(), fmt::format("{}", fmt::join(wrong, "\n")));
  at = coordinates(shape, world.rank());

  dp = along(world, shape, at, [](MeshCoordinates& c) { c.dp = 0; });
  pp = along(world, shape, at, [](MeshCoordinates& c) { c.pp = 0; });
  cp = along(world, shape, at, [](MeshCoordinates& c) { c.cp_outer = c.cp_inner = 0; });
  cp_outer = along(world, shape, at, [](MeshCoordinates& c) { c.cp_outer = 0; });
  cp_inner = along(world, shape, at, [](MeshCoordinates& c) { c.cp_inner = 0; });
  sp = along(world, shape, at, [](MeshCoordinates& c) { c.sp = 0; });
  tp = along(world, shape, at, [](MeshCoordinates& c) { c.tp = 0; });
  replica = along(world, shape, at, [](MeshCoordinates& c) { c.dp = c.cp_outer = c.cp_inner = c.sp = 0; });

  const Communicator machine = world.split_by_machine();
  local_rank = machine.rank();
  node = shape.ranks_per_node > 0 ? world.split(world.rank() / shape.ranks_per_node, world.rank()) : machine;
  const std::vector<int> nodes = node_of_ranks(world, node);
  node_index = nodes[world.rank()];

  const auto hosts = world.all_gather(host_name());
  std::size_t widest = 0;
  for (const auto& host : hosts) widest = std::max(widest, host.size());
  const auto digits = std::to_string(world.size() - 1).size();
  for (int r = 0; r < world.size(); ++r) {
    const MeshCoordinates c = coordinates(shape, r);
    table.push_back(fmt::format("rank {:>{}}  host {:<{}}  node {}  dp {}  pp {}  cp_outer {}  cp_inner {}  sp {}  tp {}", r, digits, hosts[r], widest, nodes[r], c.dp,
                                c.pp, c.cp_outer, c.cp_inner, c.sp, c.tp));
  }
  for (int r = 0; r < world.size(); ++r) {
    MeshCoordinates first = coordinates(shape, r);
    if (first.cp_inner == 0) continue;
    first.cp_inner = 0;
    if (nodes[rank_of(shape, first)] == nodes[r]) continue;
    warnings.push_back(fmt::format("ring attention: the inner ring of {} ranks (cp_inner {}) leaves its node between ranks {} and {}; {}", shape.cp_inner, shape.cp_inner,
                                   rank_of(shape, first), r, "split it with mesh.cp_outer so that inner rings stay on one node"));
    break;
  }
}

}  // namespace ballast

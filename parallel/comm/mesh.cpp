#include "parallel/comm/mesh.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

enum Dimension : unsigned { kDp = 1, kPp = 2, kCpOuter = 4, kCpInner = 8, kSp = 16, kTp = 32 };

/// Makes the groups along sets of dimensions.  Dimensions of degree 1 add nothing, so equal groups
/// share one communicator, and groups of one rank need none: MPI_Comm_split is slow where ranks
/// share cores.
class Groups {
 public:
  Groups(const Communicator& world, const MeshShape& shape) : world_(world), shape_(shape) {
    made_[effective(~0u)] = world;
    made_[0] = Communicator();
  }
  /// Ranks that differ from this one in `dimensions` only, in world order.  Collective over the
  /// world.
  Communicator along(unsigned dimensions) {
    const unsigned key = effective(dimensions);
    const auto found = made_.find(key);
    if (found != made_.end()) return found->second;
    return made_[key] = world_.split(rank_of(shape_, start(key)), world_.rank());
  }
  /// `count` neighbouring data-parallel ranks, alike otherwise but in sp, in world order.
  /// Collective.
  Communicator heads(int count) {
    return count == 1 ? along(kSp) : count == shape_.dp ? along(kDp | kSp) : block(count, 1, kSp);
  }
  /// Of `ranks` neighbouring data-parallel ranks every `apart`th, and their rings.  Collective.
  Communicator ring(int ranks, int apart) {
    constexpr unsigned kRing = kCpOuter | kCpInner;
    return ranks == apart                     ? along(kRing)
           : ranks == shape_.dp && apart == 1 ? along(kDp | kRing)
                                              : block(ranks, apart, kRing);
  }

 private:
  /// Ranks that differ in `dimensions`, and in dp by multiples of `apart` inside a block of
  /// `ranks`.
  Communicator block(int ranks, int apart, unsigned dimensions) {
    const auto [at, fresh] = blocks_.try_emplace({ranks, apart, effective(dimensions)});
    if (!fresh) return at->second;
    MeshCoordinates first = start(dimensions);
    first.dp -= first.dp % ranks / apart * apart;
    return at->second = world_.split(rank_of(shape_, first), world_.rank());
  }
  /// This rank's place with 0 in `dimensions`.
  MeshCoordinates start(unsigned dimensions) const {
    MeshCoordinates first = coordinates(shape_, world_.rank());
    if (dimensions & kDp) first.dp = 0;
    if (dimensions & kPp) first.pp = 0;
    if (dimensions & kCpOuter) first.cp_outer = 0;
    if (dimensions & kCpInner) first.cp_inner = 0;
    if (dimensions & kSp) first.sp = 0;
    if (dimensions & kTp) first.tp = 0;
    return first;
  }
  unsigned effective(unsigned dimensions) const {
    unsigned wide = 0;
    if (shape_.dp > 1) wide |= kDp;
    if (shape_.pp > 1) wide |= kPp;
    if (shape_.cp_outer > 1) wide |= kCpOuter;
    if (shape_.cp_inner > 1) wide |= kCpInner;
    if (shape_.sp > 1) wide |= kSp;
    if (shape_.tp > 1) wide |= kTp;
    return dimensions & wide;
  }
  const Communicator& world_;
  const MeshShape& shape_;
  std::map<unsigned, Communicator> made_;
  std::map<std::tuple<int, int, unsigned>, Communicator> blocks_;
};

std::vector<int> node_of_ranks(const Communicator& world, const Communicator& node) {
  // A node is named by its lowest world rank, and counted in that order.
  const int lowest = static_cast<int>(node.all_reduce(std::int64_t{world.rank()}, Reduction::min));
  const auto names = world.all_gather(std::to_string(lowest));
  std::set<int> order;
  for (const auto& name : names) order.insert(std::stoi(name));
  std::vector<int> result;
  for (const auto& name : names)
    result.push_back(static_cast<int>(std::distance(order.begin(), order.find(std::stoi(name)))));
  return result;
}

std::vector<std::string> rank_table(const Communicator& world, const MeshShape& shape,
                                    const std::vector<int>& nodes) {
  const auto hosts = world.all_gather(host_name());
  std::size_t widest = 0;
  for (const auto& host : hosts) widest = std::max(widest, host.size());
  const auto digits = std::to_string(world.size() - 1).size();
  std::vector<std::string> table;
  for (int r = 0; r < world.size(); ++r) {
    const MeshCoordinates c = coordinates(shape, r);
    table.push_back(fmt::format(
        "rank {:>{}}  host {:<{}}  node {}  dp {}  pp {}  cp_outer {}  cp_inner {}  sp {}  tp {}",
        r, digits, hosts[r], widest, nodes[r], c.dp, c.pp, c.cp_outer, c.cp_inner, c.sp, c.tp));
  }
  return table;
}

/// Names the first inner ring that leaves its node; empty where none does.
std::vector<std::string> ring_warnings(const MeshShape& shape, const std::vector<int>& nodes) {
  for (int r = 0; r < static_cast<int>(nodes.size()); ++r) {
    MeshCoordinates first = coordinates(shape, r);
    if (first.cp_inner == 0) continue;
    first.cp_inner = 0;
    if (nodes[rank_of(shape, first)] == nodes[r]) continue;
    return {
        fmt::format("ring attention: the inner ring of {} ranks (cp_inner {}) leaves its node "
                    "between ranks {} and {}; {}",
                    shape.cp_inner, shape.cp_inner, rank_of(shape, first), r,
                    "split it with mesh.cp_outer so that inner rings stay on one node")};
  }
  return {};
}

}  // namespace

Mesh::Mesh(const Communicator& world_, const MeshShape& shape_, const std::vector<int>& joined,
           std::int64_t query_heads)
    : shape(shape_), world(world_) {
  const std::vector<Problem> wrong = problems(shape, world.size());
  check_all(world, wrong.empty(), messages(wrong));
  at = coordinates(shape, world.rank());

  Groups groups(world, shape);
  dp = groups.along(kDp);
  pp = groups.along(kPp);
  cp = groups.along(kCpOuter | kCpInner);
  cp_outer = groups.along(kCpOuter);
  cp_inner = groups.along(kCpInner);
  sp = groups.along(kSp);
  tp = groups.along(kTp);
  replica = groups.along(kDp | kCpOuter | kCpInner | kSp);
  groups_[1] = {joined_split(shape, 1, query_heads), sp, cp};
  for (const int degree : std::set<int>(joined.begin(), joined.end())) {
    require(degree > 1 && shape.dp % degree == 0,
            "mesh.dp = {}: {} data-parallel ranks cannot share a micro-batch: {} = {} x {} + {}",
            shape.dp, degree, shape.dp, shape.dp / std::max(1, degree), degree,
            shape.dp % std::max(1, degree));
    const ContextSplit split = joined_split(shape, degree, query_heads);
    const int heads = split.sp / shape.sp;
    groups_[degree] = {split, groups.heads(heads), groups.ring(degree, heads)};
  }

  const Communicator machine = world.split_by_machine();
  if (shape.ranks_per_node == 0)
    node = machine;
  else if (shape.ranks_per_node >= world.size())
    node = world;
  else if (shape.ranks_per_node > 1)
    node = world.split(world.rank() / shape.ranks_per_node, world.rank());
  const std::vector<int> nodes = node_of_ranks(world, node);
  table = rank_table(world, shape, nodes);
  warnings = ring_warnings(shape, nodes);
}

const Mesh::Group& Mesh::group(int degree) const {
  const auto found = groups_.find(degree);
  require(found != groups_.end(), "no group of {} data-parallel ranks was made when the mesh was",
          degree);
  return found->second;
}

std::vector<int> Mesh::degrees() const {
  std::vector<int> list;
  for (const auto& [degree, group] : groups_) list.push_back(degree);
  return list;
}

}  // namespace ballast

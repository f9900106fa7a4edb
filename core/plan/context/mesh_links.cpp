#include "core/plan/context/mesh_links.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

namespace ballast {
namespace {

constexpr int kUsualNodeRanks = 8;

/// `count` places, each `apart` ranks behind the one before.
struct Places {
  std::int64_t count = 1, apart = 1;
  std::int64_t span() const { return (count - 1) * apart; }
};

/// Ranks between neighbours of each dimension.
struct Strides {
  explicit Strides(const MeshShape& mesh)
      : sp(mesh.tp),
        cp_inner(sp * mesh.sp),
        cp_outer(cp_inner * mesh.cp_inner),
        pp(cp_outer * mesh.cp_outer),
        dp(pp * mesh.pp) {}
  std::int64_t sp, cp_inner, cp_outer, pp, dp;
};

/// Of groups whose last rank is `span` behind the first, which is at `first` plus one place of each
/// of `begins`.
Link link_of(const MeshShape& mesh, std::int64_t span, std::int64_t first,
             std::initializer_list<Places> begins) {
  const std::int64_t node = node_ranks(mesh);
  if (span == 0) return Link::node;
  if (span >= node) return Link::network;
  if (node >= mesh.size()) return Link::node;
  // Ranks of a node at which groups begin; places repeat there after `node` of them at the latest.
  std::vector<char> at(static_cast<std::size_t>(node), 0);
  at[static_cast<std::size_t>(first % node)] = 1;
  for (const Places& places : begins) {
    if (places.count <= 1) continue;
    std::vector<char> moved(at.size(), 0);
    for (std::int64_t r = 0; r < node; ++r)
      for (std::int64_t k = 0; at[static_cast<std::size_t>(r)] && k < std::min(places.count, node);
           ++k)
        moved[static_cast<std::size_t>((r + k * places.apart) % node)] = 1;
    at = std::move(moved);
  }
  return std::find(at.begin() + (node - span), at.end(), 1) == at.end() ? Link::node
                                                                        : Link::network;
}

/// Neighbouring data-parallel ranks that share heads in `split`.
std::int64_t joined_heads(const MeshShape& mesh, const ContextSplit& split) {
  return std::max(1, split.sp / mesh.sp);
}

}  // namespace

int node_ranks(const MeshShape& mesh) {
  return mesh.ranks_per_node > 0 ? mesh.ranks_per_node : kUsualNodeRanks;
}

Link exchange_link(const MeshShape& mesh, const ContextSplit& split) {
  const Strides s(mesh);
  const Places heads{joined_heads(mesh, split), s.dp};
  return link_of(mesh, Places{mesh.sp, s.sp}.span() + heads.span(), 0,
                 {{mesh.tp, 1},
                  {mesh.cp_inner, s.cp_inner},
                  {mesh.cp_outer, s.cp_outer},
                  {mesh.pp, s.pp},
                  {mesh.dp / heads.count, heads.count * s.dp}});
}

Link ring_link(const MeshShape& mesh, const ContextSplit& split, RingLevel level) {
  const Strides s(mesh);
  const std::int64_t heads = joined_heads(mesh, split),
                     blocks = std::max(1, split.ring() / mesh.cp());
  // A ring goes round each dimension in turn; the inner level takes what comes first.
  const std::array<Places, 3> ring{
      {{mesh.cp_inner, s.cp_inner}, {mesh.cp_outer, s.cp_outer}, {blocks, heads * s.dp}}};
  std::array<Places, 3> inner, outer;
  std::int64_t left = split.ring_inner, inner_span = 0, outer_span = 0;
  for (std::size_t d = 0; d < ring.size(); ++d) {
    inner[d] = {std::clamp<std::int64_t>(left, 1, ring[d].count), ring[d].apart};
    outer[d] = {ring[d].count / inner[d].count, inner[d].count * ring[d].apart};
    left /= inner[d].count;
    inner_span += inner[d].span(), outer_span += outer[d].span();
  }
  const bool within = level == RingLevel::inner;
  const std::array<Places, 3>& others = within ? outer : inner;
  return link_of(mesh, within ? inner_span : outer_span, 0,
                 {{mesh.tp, 1},
                  {mesh.sp, s.sp},
                  others[0],
                  others[1],
                  others[2],
                  {mesh.pp, s.pp},
                  {heads, s.dp},
                  {mesh.dp / (heads * blocks), heads * blocks * s.dp}});
}

Link stage_link(const MeshShape& mesh, int stage) {
  const Strides s(mesh);
  return link_of(mesh, s.pp, stage * s.pp, {{s.pp, 1}, {mesh.dp, s.dp}});
}

Link replica_link(const MeshShape& mesh, int stage) {
  const Strides s(mesh);
  const Places parts{mesh.cp() * mesh.sp, s.sp}, replicas{mesh.dp, s.dp};
  return link_of(mesh, parts.span() + replicas.span(), stage * s.pp, {{mesh.tp, 1}});
}

Link tied_link(const MeshShape& mesh) {
  const Strides s(mesh);
  return link_of(mesh, Places{mesh.pp, s.pp}.span(), 0, {{s.pp, 1}, {mesh.dp, s.dp}});
}

Link world_link(const MeshShape& mesh) { return link_of(mesh, mesh.size() - 1, 0, {}); }

}  // namespace ballast

#include "core/plan/context/mesh_shape.hpp"

#include <array>
#include <limits>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {
namespace {

/// Largest number of ranks: as many as an MPI rank number can name.
constexpr std::int64_t kMaximumRanks = std::numeric_limits<int>::max();

std::array<std::pair<const char*, int>, 6> degrees(const MeshShape& s) {
  return {{{"dp", s.dp},
           {"pp", s.pp},
           {"cp_outer", s.cp_outer},
           {"cp_inner", s.cp_inner},
           {"sp", s.sp},
           {"tp", s.tp}}};
}

/// The product of all degrees, or -1 when it exceeds kMaximumRanks.
std::int64_t product(const MeshShape& shape) {
  std::int64_t total = 1;
  for (const auto& [name, degree] : degrees(shape)) {
    total *= degree;
    if (total > kMaximumRanks) return -1;
  }
  return total;
}

std::string factors(const MeshShape& shape) {
  std::string text;
  for (const auto& [name, degree] : degrees(shape))
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, degree);
  return text;
}

}  // namespace

MeshCoordinates coordinates(const MeshShape& shape, int rank) {
  require(rank >= 0 && rank < shape.size(), "rank {} is outside the mesh {}", rank,
          describe(shape));
  MeshCoordinates at;
  const auto take = [&rank](int degree) {
    const int index = rank % degree;
    rank /= degree;
    return index;
  };
  at.tp = take(shape.tp);
  at.sp = take(shape.sp);
  at.cp_inner = take(shape.cp_inner);
  at.cp_outer = take(shape.cp_outer);
  at.pp = take(shape.pp);
  at.dp = take(shape.dp);
  return at;
}

int rank_of(const MeshShape& shape, const MeshCoordinates& at) {
  return ((((at.dp * shape.pp + at.pp) * shape.cp_outer + at.cp_outer) * shape.cp_inner +
           at.cp_inner) *
              shape.sp +
          at.sp) *
             shape.tp +
         at.tp;
}

std::string describe(const MeshShape& shape) {
  return fmt::format("{} = {}", factors(shape), product(shape));
}

std::vector<Problem> problems(const MeshShape& shape, int ranks) {
  std::vector<Problem> list;
  for (const auto& [name, degree] : degrees(shape))
    if (degree < 1)
      list.push_back({{std::string("mesh.") + name},
                      fmt::format("mesh.{} = {} must be at least 1", name, degree)});
  if (shape.ranks_per_node < 0)
    list.push_back(
        {{"mesh.ranks_per_node"},
         fmt::format("mesh.ranks_per_node = {} must be at least 0 (0: as the machine says)",
                     shape.ranks_per_node)});
  if (!list.empty()) return list;

  const std::vector<Key> all{"mesh.dp", "mesh.pp", "mesh.cp_outer",      "mesh.cp_inner",
                             "mesh.sp", "mesh.tp", "mesh.ranks_per_node"};
  const std::int64_t size = product(shape);
  if (size < 0)
    return {{all, fmt::format("mesh: {} is more than {} ranks", factors(shape), kMaximumRanks)}};
  if (ranks > 0 && size != ranks)
    list.push_back({all,
                    fmt::format("mesh: {} = {} ranks, but the program was started on {}",
                                factors(shape), size, ranks),
                    fmt::format("start it with mpiexec -n {} or change the degrees", size)});
  const std::int64_t node = shape.ranks_per_node;
  if (node > 0 && size > node) {
    if (size % node != 0)
      list.push_back(
          {all,
           fmt::format("mesh.ranks_per_node = {} does not divide the mesh: {} = {} = {} x {} + {}",
                       node, factors(shape), size, size / node, node, size % node)});
    const std::int64_t ring = std::int64_t{1} * shape.cp_inner * shape.sp * shape.tp;
    if (shape.cp_outer > 1 && node % ring != 0)
      list.push_back(
          {all,
           fmt::format("mesh: inner rings leave their node: cp_inner {} x sp {} x tp {} = {} "
                       "neighbouring ranks do not divide ranks_per_node = {}",
                       shape.cp_inner, shape.sp, shape.tp, ring, node),
           "use a smaller cp_inner, or cp_outer = 1 for a flat ring"});
  }
  return list;
}

}  // namespace ballast

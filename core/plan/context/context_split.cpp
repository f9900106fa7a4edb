#include "core/plan/context/context_split.hpp"

#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {

ContextSplit context_split(const MeshShape& mesh, int sp, int ring) {
  if (mesh.cp_outer > 1 && ring % mesh.cp() == 0) return {sp, ring / mesh.cp_inner, mesh.cp_inner};
  return {sp, 1, ring};
}

ContextSplit joined_split(const MeshShape& mesh, int ranks, std::int64_t query_heads) {
  int heads = ranks;
  while (heads > 1 &&
         (ranks % heads != 0 || !head_split_problem(query_heads, heads * mesh.sp).empty()))
    --heads;
  return context_split(mesh, heads * mesh.sp, ranks / heads * mesh.cp());
}

}  // namespace ballast

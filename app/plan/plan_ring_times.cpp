// ballast plan: one call of ring attention from component times (MTraining Table 4).
#include <tuple>

#include "app/plan/plan.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/context/ring_plan.hpp"

namespace ballast {
namespace {

/// Component times of one pass.  `joined`: KV and dKV of a shard travel as one message.
RingCosts ring_costs(const CostsConfig& costs, const RingPassConfig& pass, bool joined) {
  const RingPassConfig& kv = joined ? pass : costs.forward;
  RingCosts c;
  c.indexing_s = 1e-3 * pass.indexing_ms;
  c.host_s = 1e-3 * pass.host_ms;
  c.compute_s = 1e-3 * pass.compute_ms;
  c.inner_hop_s = 1e-3 * kv.inner_hop_ms;
  c.outer_hop_s = 1e-3 * kv.outer_hop_ms;
  c.inner_dkv_hop_s = 1e-3 * pass.inner_hop_ms - c.inner_hop_s;
  c.outer_dkv_hop_s = 1e-3 * pass.outer_hop_ms - c.outer_hop_s;
  return c;
}

}  // namespace

std::optional<PlanPart> plan_ring_times(const Config& config) {
  const CostsConfig& costs = config.costs;
  if (!config.is_set(&Config::costs, &CostsConfig::forward, &RingPassConfig::compute_ms) &&
      !config.is_set(&Config::costs, &CostsConfig::backward, &RingPassConfig::compute_ms))
    return std::nullopt;
  const MeshShape& mesh = config.mesh;
  PlanPart part;
  part.title = fmt::format("ring attention over {} x {} ranks", mesh.cp_outer, mesh.cp_inner);
  part.header = {"ring", "pass", "steps", "ms", "plan_ms"};
  part.note =
      "ms: as MTraining Table 4 counts, KV and dKV of a shard in one message, the own shard first; "
      "plan_ms: the\nplan that runs, where dKV follows its KV one compute later and comes home "
      "beside the own shard's compute";
  for (const bool hierarchical : {false, true}) {
    // A flat ring through several nodes goes at the pace of the links between them.
    const bool outer_links = mesh.cp_outer > 1;
    const RingPlan plan = hierarchical  ? plan_ring(0, mesh.cp_outer, mesh.cp_inner)
                          : outer_links ? plan_ring(0, mesh.cp(), 1)
                                        : plan_ring(0, 1, mesh.cp());
    for (const auto& [direction, steps, pass] :
         {std::tuple{"forward", &plan.forward, &costs.forward},
          std::tuple{"backward", &plan.backward, &costs.backward}}) {
      const double ms = 1e3 * simulate(plan.forward, ring_costs(costs, *pass, true));
      const double plan_ms = 1e3 * simulate(*steps, ring_costs(costs, *pass, false));
      const std::string ring = hierarchical ? "hierarchical" : "flat";
      part.rows.push_back({ring, direction, fmt::to_string(steps->size()),
                           fmt::format("{:.2f}", ms), fmt::format("{:.2f}", plan_ms)});
      part.values[fmt::format("{}_{}_ms", ring, direction)] = ms;
      part.values[fmt::format("{}_{}_plan_ms", ring, direction)] = plan_ms;
    }
  }
  return part;
}

}  // namespace ballast

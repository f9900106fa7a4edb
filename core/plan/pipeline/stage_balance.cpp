#include "core/plan/pipeline/stage_balance.hpp"

#include "core/base/error.hpp"

namespace ballast {

PartCosts part_costs(const ModelShape& s, double context) {
  const double h = static_cast<double>(s.hidden),
               q = static_cast<double>(s.query_heads * s.head_dim),
               kv = static_cast<double>(s.kv_heads * s.head_dim);
  PartCosts costs;
  costs.layer = 2 * (h * (q + 2 * kv) + q * h + 3 * h * static_cast<double>(s.intermediate)) +
                4 * q * context;
  costs.embedding = h;
  costs.head = 2 * h * static_cast<double>(s.vocabulary);
  return costs;
}

double weight_share(const ModelShape& s) {
  if (!s.lora.enabled()) return 0.5;
  double frozen = 0, adapters = 0;
  for (const Parameter& p : parameter_table(s))
    if (p.name.find("layers.0.") != std::string::npos && p.shape.size() == 2)
      (p.trainable ? adapters : frozen) += static_cast<double>(p.numel());
  return adapters > 0 ? adapters / (frozen + 2 * adapters) : 0.5;
}

std::vector<std::int64_t> balance_stages(std::int64_t layers, int stages, const PartCosts& costs) {
  require(stages >= 1, "{} pipeline stages; must be at least 1", stages);
  require(layers >= stages,
          "{} layers cannot be spread over {} pipeline stages: a stage needs at least one", layers,
          stages);
  std::vector<std::int64_t> count(static_cast<std::size_t>(stages), 1);
  std::vector<double> load(static_cast<std::size_t>(stages), costs.layer);
  load.front() += costs.embedding;
  load.back() += costs.head;
  // All layers cost alike, so the next one goes where the load stays lowest.
  for (std::int64_t left = layers - stages; left > 0; --left) {
    std::size_t least = load.size() - 1;
    for (std::size_t s = load.size(); s-- > 0;)
      if (load[s] < load[least]) least = s;
    ++count[least];
    load[least] += costs.layer;
  }
  std::vector<std::int64_t> begin{0};
  for (std::size_t s = 0; s + 1 < count.size(); ++s) begin.push_back(begin.back() + count[s]);
  return begin;
}

StageTable stage_table(const ModelShape& shape, const std::vector<std::int64_t>& layer_begin,
                       int stage) {
  StageTable part;
  for (Parameter& p : parameter_table(shape, layer_begin)) {
    if (p.stage < stage && !(shape.lora.enabled() && p.trainable)) part.begin += p.numel();
    if (p.stage == stage) part.table.push_back(std::move(p));
  }
  return part;
}

}  // namespace ballast

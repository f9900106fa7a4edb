#include "core/predict/table_costs.hpp"

#include <algorithm>

#include "core/plan/context/ulysses_heads.hpp"
#include "core/plan/pipeline/stage_balance.hpp"

namespace ballast {
namespace {

std::string hardware(const ProfileTable& table) {
  const auto at = table.identity.find("hardware");
  return at == table.identity.end() ? "" : at->second;
}

}  // namespace

TableCosts::TableCosts(std::string name, const ProfileTable& table, PatternKind pattern,
                       const WorkShape& work)
    : name_(std::move(name)),
      pattern_(pattern),
      table_(table),
      work_(work),
      rates_(device_rates(device_kind(hardware(table))), work) {
  if (work.model.layers > 0) weight_share_ = weight_share(work.model);
  for (const ProfileRow& r : table.rows)
    for (int mode = 1; mode < 3; ++mode)
      measured_[mode] = measured_[mode] || r.recompute == static_cast<Recompute>(mode);
  // The series that the others fall back to must be there, unless the table holds one mode alone.
  measured_[0] = std::any_of(table.rows.begin(), table.rows.end(),
                             [](const ProfileRow& r) { return r.recompute == Recompute::none; });
  const int first = measured_[0] ? 0 : measured_[2] ? 2 : 1;
  model({}, static_cast<Recompute>(first));
}

const LatencyModel& TableCosts::model(const ContextSplit& split, Recompute mode) const {
  const std::lock_guard lock(mutex_);  // the next step is planned while others ask
  std::unique_ptr<LatencyModel>& made = models_[{split.sp, split.ring(), mode}];
  if (!made) {
    LatencyOptions options;
    options.pattern = pattern_;
    options.recompute = mode;
    options.sp = split.sp;
    options.cp = split.ring();
    options.exchange_bytes_per_token =
        static_cast<double>(2 * (work_.model.query_heads + work_.model.kv_heads) *
                            work_.model.head_dim * work_.element_bytes);
    made = std::make_unique<LatencyModel>(table_, options);
  }
  return *made;
}

PassTime TableCosts::rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const {
  const bool measured = measured_[static_cast<int>(mode)];
  const LayerTime time = model(split, measured ? mode : Recompute::none).rest(tokens);
  PassTime pass{time.forward_s, time.backward_s, 0, 0};
  // Without a series of its own, recomputation costs one more forward.
  if (mode == Recompute::full) pass.recompute_s = time.forward_s;
  if (!measured) pass.backward_s += pass.recompute_s;
  pass.weight_s = weight_share_ * std::max(0.0, pass.backward_s - pass.recompute_s);
  return pass;
}

PassTime TableCosts::head(std::int64_t tokens, const ContextSplit& split) const {
  const LayerTime time =
      model(split, measured_[0] ? Recompute::none : Recompute::full).head(tokens);
  return {time.forward_s, time.backward_s, 0, 0};
}

PassTime TableCosts::attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                               std::int64_t budget, const ContextSplit& split,
                               Recompute mode) const {
  const bool measured = measured_[static_cast<int>(mode)];
  const double share = pattern() ? pattern()->density(prefix_tokens + query_tokens) : 1;
  const LayerTime time = model(split, measured ? mode : Recompute::none)
                             .attention(query_tokens, prefix_tokens, budget, share);
  PassTime pass{time.forward_s, time.backward_s, 0, mode == Recompute::full ? time.forward_s : 0};
  if (!measured) pass.backward_s += pass.recompute_s;
  return pass;
}

double TableCosts::exchange(std::int64_t tokens, const ContextSplit& split) const {
  if (split.sp == 1) return 0;
  return model(split, measured_[0] ? Recompute::none : Recompute::full).exchange(tokens);
}

double TableCosts::ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level,
                            bool gradients) const {
  const ProfileLink* l = table_.link(level == RingLevel::inner ? "inner" : "outer");
  if (l == nullptr) return rates_.ring_hop(tokens, split, level, gradients);
  const ModelShape& m = work_.model;
  const std::int64_t heads = HeadSplit{split.sp, m.query_heads, m.kv_heads}.local_kv_heads(),
                     element = gradients ? std::max<std::int64_t>(4, work_.element_bytes)
                                         : work_.element_bytes;
  return l->latency_s + static_cast<double>(2 * tokens * heads * m.head_dim * element) /
                            split.ring() / l->bytes_per_s;
}

double TableCosts::stage_hop(std::int64_t tokens, const ContextSplit& split) const {
  const ProfileLink* l = table_.link("stage");
  if (l == nullptr) return rates_.stage_hop(tokens, split);
  return l->latency_s + static_cast<double>(tokens * work_.model.hidden * work_.element_bytes) /
                            split.ranks() / l->bytes_per_s;
}

double TableCosts::activation_bytes(std::int64_t tokens, Recompute mode) const {
  return measured_[static_cast<int>(mode)] ? model({}, mode).activation_bytes(tokens) : 0;
}

}  // namespace ballast

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
  for (const ProfileRow& r : table.rows) measured_[static_cast<int>(r.recompute)] = true;
  fallback_ = measured(Recompute::none)   ? Recompute::none
              : measured(Recompute::full) ? Recompute::full
                                          : Recompute::selective;
  model({}, fallback_);  // must be there
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
    const ModelShape& m = work_.model;
    const HeadSplit heads{split.sp, m.query_heads, m.kv_heads};
    options.exchange_bytes_per_token = static_cast<double>(
        2 * (m.query_heads + heads.local_kv_heads() * split.sp) * m.head_dim * work_.element_bytes);
    made = std::make_unique<LatencyModel>(table_, options);
  }
  return *made;
}

PassTime TableCosts::pass(const LayerTime& time, Recompute mode, double selective_s) const {
  const auto again = [&](Recompute of) {
    return of == Recompute::full ? time.forward_s : of == Recompute::selective ? selective_s : 0;
  };
  PassTime pass{time.forward_s, time.backward_s, 0, again(mode)};
  if (!measured(mode)) pass.backward_s = std::max(0.0, pass.backward_s - again(fallback_));
  if (!measured(mode)) pass.backward_s += again(mode);
  pass.recompute_s = std::min(pass.recompute_s, pass.backward_s);
  return pass;
}

PassTime TableCosts::rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const {
  PassTime time = pass(model(split, measured(mode) ? mode : fallback_).rest(tokens), mode,
                       rates_.rest(tokens, split, Recompute::selective).recompute_s);
  time.weight_s = weight_share_ * (time.backward_s - time.recompute_s);
  return time;
}

PassTime TableCosts::head(std::int64_t tokens, const ContextSplit& split) const {
  const LayerTime time = model(split, fallback_).head(tokens);
  return {time.forward_s, time.backward_s, 0, 0};
}

PassTime TableCosts::attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                               std::int64_t budget, const ContextSplit& split,
                               Recompute mode) const {
  const double share = pattern() ? pattern()->density(prefix_tokens + query_tokens) : 1;
  return pass(model(split, measured(mode) ? mode : fallback_)
                  .attention(query_tokens, prefix_tokens, budget, share),
              mode, 0);
}

double TableCosts::exchange(std::int64_t tokens, const ContextSplit& split, Link link) const {
  if (split.sp == 1) return 0;
  const LatencyModel& times = model(split, fallback_);
  const bool linked = table_.link("inner") != nullptr || table_.link("dp") != nullptr;
  return linked || !times.divides_heads() ? times.exchange(tokens)
                                          : rates_.exchange(tokens, split, link);
}

double TableCosts::ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level,
                            bool gradients, Link link) const {
  const ProfileLink* l = table_.link(level == RingLevel::inner ? "inner" : "outer");
  if (l == nullptr) return rates_.ring_hop(tokens, split, level, gradients, link);
  const ModelShape& m = work_.model;
  const std::int64_t heads = HeadSplit{split.sp, m.query_heads, m.kv_heads}.local_kv_heads(),
                     element = gradients ? std::max<std::int64_t>(4, work_.element_bytes)
                                         : work_.element_bytes;
  return l->latency_s + static_cast<double>(2 * tokens * heads * m.head_dim * element) /
                            split.ring() / l->bytes_per_s;
}

double TableCosts::stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const {
  const ProfileLink* l = table_.link("stage");
  if (l == nullptr) return rates_.stage_hop(tokens, split, link);
  return l->latency_s + static_cast<double>(tokens * work_.model.hidden * work_.element_bytes) /
                            split.ranks() / l->bytes_per_s;
}

double TableCosts::activation_bytes(std::int64_t tokens, Recompute mode) const {
  return measured(mode) ? model({}, mode).activation_bytes(tokens) : 0;
}

}  // namespace ballast

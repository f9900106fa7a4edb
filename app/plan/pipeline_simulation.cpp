#include "app/plan/pipeline_simulation.hpp"

#include <algorithm>
#include <set>

#include "app/plan/latency.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/latency_model.hpp"

namespace ballast {

StageTimes::StageTimes(const Config& config, std::vector<std::string>& notes) {
  if (config.profile.table.empty()) {
    source_ = config.is_set(&Config::costs) ? "stated costs" : "no costs stated: 1 us a token";
    return;
  }
  source_ = "times of " + config.profile.table;
  const ProfileTable table = load_profile(config, notes);
  model_.emplace(table, latency_options(config, config.attention.pattern));
  full_recompute_ = config.recompute.mode == Recompute::full;
  for (const ProfileLink& link : table.links)
    if (link.level == "stage") {
      stage_latency_s_ = link.latency_s;
      stage_byte_s_ = 1 / link.bytes_per_s;
    }
  token_bytes_ =
      static_cast<double>(config.model.hidden) * static_cast<double>(size_of(config.run.type()));
}

std::vector<MicroBatchTimes> StageTimes::measured(const std::vector<MicroBatch>& list,
                                                  const RunOptions& options) const {
  const double weight_share = ballast::weight_share(options.model);
  std::vector<MicroBatchTimes> times;
  for (const MicroBatch& m : list) {
    const LayerTime rest = model_->rest(m.tokens()), layer = model_->predict(m),
                    head = model_->head(m.tokens());
    const double again_s = full_recompute_ ? rest.forward_s : 0;  // a part of backward_s
    times.push_back(
        {layer.forward_s, layer.backward_s, weight_share * std::max(0.0, rest.backward_s - again_s),
         head.forward_s, head.backward_s,
         stage_latency_s_ + stage_byte_s_ * token_bytes_ * static_cast<double>(m.tokens()) /
                                options.mesh.cp() / options.mesh.sp});
  }
  return times;
}

ScheduleCosts StageTimes::of(const std::vector<MicroBatch>& list, const RunOptions& options) const {
  return model_ ? schedule_costs(measured(list, options), list, options)
                : schedule_costs(options.pipeline.costs, list);
}

ScheduleCosts schedule_costs(std::vector<MicroBatchTimes> times,
                             const std::vector<MicroBatch>& list, const RunOptions& options) {
  std::set<int> without_head;  // the first forward of a recomputed chunk skips it
  if (state_aware(options.pipeline.schedule))
    for (const std::vector<int>& group : chunk_groups(list))
      for (std::size_t c = 0; c + static_cast<std::size_t>(options.pipeline.k) < group.size(); ++c)
        without_head.insert(group[c]);
  return {[times = std::move(times), without_head = std::move(without_head),
           begin = options.layer_begin, layers = options.model.layers](int stage, const Op& op) {
    const MicroBatchTimes& t = times[static_cast<std::size_t>(op.micro_batch)];
    const auto s = static_cast<std::size_t>(stage);
    const bool last = s + 1 == begin.size();
    const auto count = static_cast<double>((last ? layers : begin[s + 1]) - begin[s]);
    switch (op.kind) {
      case OpKind::forward:
      case OpKind::recompute:
        return count * t.layer_forward_s +
               (last && (op.kind == OpKind::recompute || without_head.count(op.micro_batch) == 0)
                    ? t.head_forward_s
                    : 0);
      case OpKind::backward:
        return count * t.layer_backward_s + (last ? t.head_backward_s : 0);
      case OpKind::backward_input:
        return count * (t.layer_backward_s - t.weight_s) + (last ? t.head_backward_s : 0);
      case OpKind::backward_weight:
        return count * t.weight_s;
      case OpKind::send:
        return t.hop_s;
      default:
        return 0.0;
    }
  }};
}

}  // namespace ballast

#include "app/train/train_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "app/train/local_batch.hpp"
#include "core/plan/batch/loss_weights.hpp"

namespace ballast {

AdamWOptions adamw_options(const Config& config) {
  return {config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps,
          config.optimizer.weight_decay};
}

TrainStep::TrainStep(Session& session, ShardedOptimizer& optimizer)
    : session_(session),
      optimizer_(optimizer),
      tied_(session.mesh, session.parameters, optimizer, session.config.optimizer.zero) {
  if (session.config.profile.table.empty()) return;
  try {
    times_.emplace(session.config, table_notes_);
  } catch (const Error& e) {  // the table may serve others and lack what schedules need
    table_notes_.push_back(
        fmt::format("schedules are neither predicted nor built by the table: {}", e.what()));
  }
  if (session.mesh.world.all_reduce(std::int64_t{times_.has_value()}, Reduction::min) == 0)
    times_.reset();
}

Schedule TrainStep::schedule(const Batch& batch) const {
  const std::vector<MicroBatch> mine = batch.work_of(session_.mesh.at.dp);
  const RunOptions& options = session_.options;
  if (!times_ || options.mesh.pp == 1 || !state_aware(options.pipeline.schedule))
    return plan_schedule(mine, options.pipeline);
  // All ranks of a pipeline must build one schedule, and the last bits of a prediction may differ
  // between processors: the first rank's times count.
  std::vector<MicroBatchTimes> times = times_->measured(mine, options);
  static_assert(sizeof(MicroBatchTimes) == 6 * sizeof(double));
  Tensor numbers = Tensor::wrap(&times.data()->layer_forward_s,
                                {static_cast<std::int64_t>(times.size()), 6}, DType::f64);
  for (const Communicator* group : {&session_.mesh.sp, &session_.mesh.cp, &session_.mesh.pp})
    if (group->size() > 1 && !times.empty()) group->broadcast(numbers, 0);
  return plan_schedule(mine, options.pipeline, schedule_costs(std::move(times), mine, options));
}

TrainStep::Gradients TrainStep::compute(const Batch& batch, const Schedule& schedule) {
  const std::vector<MicroBatch> mine = batch.work_of(session_.mesh.at.dp);
  std::size_t rounds = 0;
  for (const auto& list : batch.micro_batches) rounds = std::max(rounds, list.size());
  const LossWeights weights(session_.options.normaliser, batch);
  const DType weight_type = session_.parameters.dtype() == DType::f64 ? DType::f64 : DType::f32;
  ChunkStores stores = session_.chunk_stores(mine);
  BudgetTuning* const tuning = session_.tuning.get();
  const auto prepare = [&](int m) {
    MicroBatchWork work = session_.prepare(mine[m], weights.of(mine[m]), stores.at(m),
                                           tuning != nullptr ? tuning->policy(m) : nullptr);
    if (session_.options.model.lora.dropout > 0)
      name_tokens(work.batch, mine[m], batch.step, session_.device);
    work.batch.loss_weights =
        token_weights(weights.segments(mine[m]), work.batch, weight_type, session_.device);
    return work;
  };
  optimizer_.begin_step();
  if (tuning != nullptr) {
    Scope scope(&session_.recorder, EventKind::tuning);
    tuning->begin_step(batch, session_.mesh.at.dp);
  }
  Gradients found;
  found.losses = run_stage(
      schedule, static_cast<int>(mine.size()), session_.model, session_.links,
      {prepare, [&] { optimizer_.after_micro_batch(); }, {}, session_.kv_place.host.get()},
      &session_.recorder);
  for (std::size_t r = mine.size(); r < rounds; ++r)
    optimizer_.after_micro_batch();  // collective: ranks without work join
  optimizer_.reduce_gradients();
  tied_.sum_gradients();
  found.norm = std::sqrt(session_.mesh.pp.all_reduce(optimizer_.squared_norm()));
  // The loss (the last stage has it) and the sums of final budgets travel together.
  std::vector<double> sums(1, 0.0);
  for (std::size_t m = 0; m < mine.size(); ++m) sums[0] += found.losses[m] * weights.of(mine[m]);
  if (tuning != nullptr) {
    const std::vector<double> bins = tuning->bin_sums();
    sums.insert(sums.end(), bins.begin(), bins.end());
  }
  Tensor joined = Tensor::wrap(sums.data(), {static_cast<std::int64_t>(sums.size())}, DType::f64);
  session_.mesh.replica.all_reduce(joined);
  session_.mesh.pp.all_reduce(joined);
  found.loss = sums[0];
  if (tuning != nullptr) {
    Scope scope(&session_.recorder, EventKind::planning);  // of the steps to come
    tuning->end_step(std::span<const double>(sums).subspan(1));
  }
  return found;
}

double TrainStep::update(double norm, std::int64_t step) {
  const Config& config = session_.config;
  const std::int64_t decay_steps = config.optimizer.decay_steps;
  const double rate = cosine_rate(
      step, config.optimizer.warmup_steps, decay_steps > 0 ? decay_steps : config.run.steps,
      config.optimizer.learning_rate, config.optimizer.minimum_learning_rate);
  const double limit = config.optimizer.clip_norm;
  optimizer_.apply(limit > 0 && norm > limit ? limit / norm : 1.0, rate, step);
  return rate;
}

}  // namespace ballast

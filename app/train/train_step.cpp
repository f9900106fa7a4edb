#include "app/train/train_step.hpp"

#include <fmt/format.h>

#include <cmath>
#include <span>
#include <vector>

#include "app/plan/planned_run.hpp"
#include "app/train/local_batch.hpp"
#include "core/plan/batch/loss_weights.hpp"

namespace ballast {
namespace {

/// Reduces buckets inside backwards, where the plan allows it.
GradientsFinal reduces_inside(const StepPlan& plan, ShardedOptimizer& optimizer) {
  if (!plan.meets_in_backward()) return {};
  return [&optimizer](std::int64_t layer) { optimizer.gradients_final(layer); };
}

/// Of the micro-batches of a rank.
double objective(const StepPlan& plan, int dp, const MicroBatchLosses& losses) {
  double sum = 0;
  for (std::size_t m = 0; m < losses.size(); ++m)
    sum += losses[m] * plan.micro_batch(dp, static_cast<int>(m)).loss_weight;
  return sum;
}

/// Reduces what is left of the gradients.  Collective.
double reduced_norm(const Mesh& mesh, const TiedEmbedding& tied, ShardedOptimizer& optimizer) {
  optimizer.reduce_gradients();
  tied.sum_gradients();
  return std::sqrt(mesh.pp.all_reduce(optimizer.squared_norm()));
}

}  // namespace

TrainStep::TrainStep(Session& session, ShardedOptimizer& optimizer)
    : session_(session),
      optimizer_(optimizer),
      tied_(session.mesh, session.parameters, optimizer, session.config.optimizer.zero) {
  predicts_ = !session.config.profile.table.empty();
  try {
    costs_ = plan_costs(session.config, table_notes_);
  } catch (const Error& e) {  // the table may serve others and lack what schedules need
    table_notes_.push_back(
        fmt::format("schedules are neither predicted nor built by the table: {}", e.what()));
  }
  if (session.mesh.world.all_reduce(std::int64_t{costs_ != nullptr}, Reduction::min) == 0)
    costs_.reset();
  predicts_ = predicts_ && costs_ != nullptr;
}

TrainStep::Gradients TrainStep::compute(const StepPlan& plan) {
  const int dp = session_.mesh.at.dp;
  const std::vector<MicroBatch> mine = plan.list(dp);
  const DType weight_type = session_.parameters.dtype() == DType::f64 ? DType::f64 : DType::f32;
  ChunkStores stores = session_.chunk_stores(plan);
  BudgetTuning* const tuning = session_.tuning.get();
  PairSums pairs;
  const auto prepare = [&](int m) {
    MicroBatchWork work =
        session_.prepare(plan, m, plan.micro_batch(dp, m).loss_weight, stores.at(m),
                         tuning != nullptr ? tuning->policy(m) : nullptr);
    if (m == 0) forward_tokens_ = static_cast<double>(work.batch.size());
    if (session_.options.model.lora.dropout > 0)
      name_tokens(work.batch, mine[m], plan.step, session_.device);
    work.batch.loss_weights = token_weights(segment_weights(plan.normaliser, mine[m]),
                                            work.batch.segment, weight_type, session_.device);
    if (session_.pairs)
      work.batch.weigh = [this, &pairs, &micro_batch = mine[m],
                          segment = work.batch.segment](const Tensor& token_loss) {
        return session_.pairs->weigh(micro_batch, segment, token_loss, pairs);
      };
    return work;
  };
  optimizer_.begin_step();
  if (tuning != nullptr) {
    Scope scope(&session_.recorder, EventKind::tuning);
    tuning->begin_step(plan, dp);
  }
  Gradients found;
  found.losses =
      run_stage(plan.schedule(dp), static_cast<int>(mine.size()), session_.model, session_.links,
                {prepare,
                 [&](int) { optimizer_.end_round(); },
                 {},
                 session_.kv_place.host.get(),
                 reduces_inside(plan, optimizer_)},
                &session_.recorder);
  found.norm = reduced_norm(session_.mesh, tied_, optimizer_);
  // The loss (the last stage has it) and the sums of final budgets travel together.
  std::vector<double> sums{objective(plan, dp, found.losses)};
  const std::vector<double> of_pairs = pairs.numbers();
  sums.insert(sums.end(), of_pairs.begin(), of_pairs.end());
  if (tuning != nullptr) {
    const std::vector<double> bins = tuning->bin_sums();
    sums.insert(sums.end(), bins.begin(), bins.end());
  }
  session_.mesh.replica.all_reduce(std::span<double>(sums));
  session_.mesh.pp.all_reduce(std::span<double>(sums));
  found.loss = sums[0];
  if (session_.pairs) {
    found.pairs = PairSums::from(&sums[1]).means();
    found.loss = found.pairs->loss;
  }
  if (tuning != nullptr) {
    Scope scope(&session_.recorder, EventKind::planning);  // of the steps to come
    tuning->end_step(std::span<const double>(sums).subspan(1 + PairSums::kNumbers));
  }
  return found;
}

double TrainStep::update(double norm, std::int64_t step) {
  const Config& config = session_.config;
  const double rate = learning_rate(config).at(step);
  const double limit = config.optimizer.clip_norm;
  optimizer_.apply(limit > 0 && norm > limit ? limit / norm : 1.0, rate, step, forward_tokens_);
  return rate;
}

}  // namespace ballast

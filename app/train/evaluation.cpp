#include "app/train/evaluation.hpp"

namespace ballast {

Evaluation evaluate(Session& session, StepPlanner& planner, std::int64_t samples) {
  Scope scope(&session.recorder, EventKind::validation);
  const OutsideSteps quiet(session.recorder);
  const std::vector<std::int64_t> chosen = session.sampler.evaluated(samples);
  const StepPlan plan = planner.evaluation(chosen);
  const std::vector<MicroBatch> mine = plan.list(session.mesh.at.dp);
  double loss = 0;
  PairSums pairs;
  Evaluation result;
  NeedleJudge judge(*session.dataset, chosen);
  ChunkStores stores = session.chunk_stores(plan);
  const auto prepare = [&](int m) {
    MicroBatchWork work = session.prepare(plan, m, 0, stores.at(m));
    work.batch.judged = judge.has_questions();
    return work;
  };
  const auto take = [&](int m, const LocalBatch& local, const StageOutput& output) {
    if (session.pairs)
      session.pairs->judge(mine[m], local.segment, output.token_loss, pairs);
    else
      loss += output.loss_sum();
    judge.add(mine[m], local, output);
    result.positions.add(local, output);
  };
  run_stage(plan.schedule(session.mesh.at.dp), static_cast<int>(mine.size()), session.model,
            session.links, {prepare, {}, take, nullptr}, nullptr);
  result.positions.reduce(session.mesh.world);
  result.loss_tokens = plan.loss_tokens;
  result.samples = plan.samples();
  loss =
      session.mesh.pp.all_reduce(session.mesh.replica.all_reduce(loss));  // the last stage has it
  result.loss = result.loss_tokens > 0 ? loss / static_cast<double>(result.loss_tokens) : 0;
  if (session.pairs) {
    std::vector<double> sums = pairs.numbers();
    session.mesh.replica.all_reduce(std::span<double>(sums));
    session.mesh.pp.all_reduce(std::span<double>(sums));
    const PairSums means = PairSums::from(sums.data()).means();
    result.pairs = pair_figures(means);
    result.loss = means.loss;
  }
  result.needle = judge.result(session.mesh.world, session.config.eval.depths);
  return result;
}

StepRow Evaluation::scalars() const {
  StepRow row = needle.scalars();
  row["validation_loss"] = loss;
  if (pairs) {
    row["validation_rewards_margin"] = pairs->margin;
    row["validation_rewards_accuracy"] = pairs->accuracy;
  }
  row["validation_tokens"] = static_cast<double>(loss_tokens);
  return row;
}

void Evaluation::write(nlohmann::ordered_json& json) const {
  json["validation_loss"] = loss;
  json["loss_tokens"] = loss_tokens;
  json["samples"] = samples;
  if (pairs) {
    json["rewards_margin"] = pairs->margin;
    json["rewards_accuracy"] = pairs->accuracy;
  }
  json["loss_by_position"] = positions.json();
  if (needle.lengths.empty()) return;
  json["needle_accuracy"] = needle.total().accuracy();
  json["needle"] = needle.json();
}

}  // namespace ballast

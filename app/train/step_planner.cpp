#include "app/train/step_planner.hpp"

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/base/error.hpp"
#include "core/plan/plan_json.hpp"
#include "core/plan/step_problems.hpp"
#include "core/predict/costs.hpp"
#include "io/data/dataset.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Tests name a rank in BALLAST_PERTURB_PLAN whose plans differ by one bit from rank 0's.
void perturb(StepPlan& plan, int rank) {
  const char* named = std::getenv("BALLAST_PERTURB_PLAN");
  if (named == nullptr || named != std::to_string(rank) || plan.micro_batches.empty()) return;
  double& weight = plan.micro_batches.front().loss_weight;
  weight = std::bit_cast<double>(std::bit_cast<std::uint64_t>(weight) ^ 1);
}

/// Likewise for the costs that plans are made by.
double perturbed(double cost, int rank) {
  const char* named = std::getenv("BALLAST_PERTURB_COSTS");
  if (named == nullptr || named != std::to_string(rank)) return cost;
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(cost) ^ 1);
}

void check_equal(const Communicator& world, const StepPlan& plan) {
  if (world.size() == 1) return;
  // The greatest of each half and of its negative: equal on all ranks only if they cancel.
  const std::uint64_t hash = plan.hash();
  const auto high = static_cast<double>(hash >> 32), low = static_cast<double>(hash & 0xffffffffu);
  double halves[] = {high, -high, low, -low};
  Tensor most = Tensor::wrap(halves, {4}, DType::f64);
  world.all_reduce(most, Reduction::max);
  check_all(
      world, halves[0] == -halves[1] && halves[2] == -halves[3],
      fmt::format("step {}: the ranks hold different plans (rank 0: {:016x}); this is a fault "
                  "of the machine or of the program: restart from the last checkpoint",
                  plan.step + 1, hash));
}

}  // namespace

StepPlanner::StepPlanner(Session& session, const Costs* costs)
    : session_(session),
      costs_(costs),
      simulation_(simulation_options(session.config, session.options)) {
  const bool placed = session.options.batching.method == Batching::balanced;
  if (!placed && session.tuning == nullptr) return;
  std::vector<std::string> notes;
  together(session.mesh.world, [&] {
    if (costs == nullptr) {
      own_costs_ = plan_costs(session.config, notes);
      costs_ = own_costs_.get();
    }
    if (!placed || !trains_pairs(session.config)) return;
    // A pair that no group holds whole is refused now, not at the step that it comes in.
    plan_step(0, {widest_sample(*session.dataset, session.options.batching.align)}, options());
  });
}

std::string StepPlanner::waits_for() const {
  if (session_.options.batching.method == Batching::sab)
    return "averages of final budgets, by which samples are balanced";
  if (weighs_by_chunk(session_.options.normaliser))
    return "the data, whose loss tokens are counted chunk by chunk";
  return "";
}

StepOptions StepPlanner::options() const {
  const Session& s = session_;
  StepOptions result = costs_ != nullptr ? step_options(s.config, s.options, simulation_, *costs_)
                                         : step_options(s.config, s.options);
  double& token_s = result.pipeline.costs.token_s;
  token_s = perturbed(token_s, s.mesh.world.rank());
  result.count_loss_tokens = [&s](Batch& batch) { count_loss_tokens(batch, *s.dataset); };
  if (s.tuning == nullptr) return result;
  result.batching.sample_cost = [this, &s](std::int64_t tokens) {
    return sample_seconds(*costs_, tokens, s.tuning->averages().budget(tokens),
                          own_split(s.options.mesh), simulation_.recompute.of(0));
  };
  return result;
}

std::function<StepPlanner::Draft()> StepPlanner::draft(std::int64_t step,
                                                       SamplerPosition position) {
  const auto samples = session_.window.next(
      session_.sampler, position, [&](std::int64_t s) { return session_.dataset->length(s); });
  return [this, step, position, lengths = session_.lengths(samples)] {
    const auto begin = std::chrono::steady_clock::now();
    Draft made{plan_step(step, lengths, options()), position, 0};
    const std::string wrong = problems(made.plan);
    require(wrong.empty(), "step {} cannot run: {}", step + 1, wrong);
    made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return made;
  };
}

PlannedStep StepPlanner::share(std::function<Draft()> make) {
  const Communicator& world = session_.mesh.world;
  PlannedStep step;
  std::string message;
  together(world, [&] {
    if (world.rank() != 0) return;
    Draft made = make();
    step = {std::move(made.plan), "", made.after, made.seconds};
    step.text = to_json(step.plan).dump();
    message = fmt::format("{} {} {} {} {} {}", step.after.epoch, step.after.index,
                          step.after.window_step, step.after.window, step.planning_s, step.text);
  });
  message = world.broadcast(message, 0);
  together(world, [&] {
    if (world.rank() == 0) return;
    std::size_t at = 0;
    const auto field = [&] {
      const std::size_t begin = at, end = message.find(' ', at);
      at = end + 1;
      return message.substr(begin, end - begin);
    };
    step.after.epoch = std::stoll(field());
    step.after.index = std::stoll(field());
    step.after.window_step = std::stoll(field());
    step.after.window = std::stoll(field());
    step.planning_s = std::stod(field());
    step.text = message.substr(at);
    step.plan = step_plan_from_json(nlohmann::ordered_json::parse(step.text));
  });
  perturb(step.plan, world.rank());
  check_equal(world, step.plan);
  return step;
}

PlannedStep StepPlanner::next(std::int64_t step, SamplerPosition position, std::int64_t steps) {
  PlannedStep planned = share([&] {
    if (ahead_ && ahead_->step == step && ahead_->position == position) return ahead_->draft.get();
    return draft(step, position)();
  });
  ahead_.reset();
  if (session_.mesh.world.rank() == 0 && step + 1 < steps && waits_for().empty()) {
    try {
      auto work = draft(step + 1, planned.after);
      ahead_ = {step + 1, planned.after, std::async(std::launch::async, std::move(work))};
    } catch (const Error&) {              // told to all ranks where the step begins
    } catch (const std::system_error&) {  // no more threads: planned where the step begins
    }
  }
  return planned;
}

StepPlan StepPlanner::evaluation(const std::vector<std::int64_t>& samples) {
  return forward(session_.lengths(samples), options());
}

StepPlan StepPlanner::prompts(const std::vector<SampleLength>& sequences) {
  StepOptions plain = options();
  plain.normaliser = LossNormaliser::ave_token;  // no pairs, and nothing to count
  plain.count_loss_tokens = {};
  return forward(sequences, plain);
}

StepPlan StepPlanner::forward(const std::vector<SampleLength>& samples,
                              const StepOptions& options) {
  return share([&] {
           Draft made{plan_evaluation(samples, options), {}, 0};
           const std::string wrong = problems(made.plan);
           require(wrong.empty(), "evaluation cannot run: {}", wrong);
           return made;
         })
      .plan;
}

}  // namespace ballast

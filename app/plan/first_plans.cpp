#include "app/plan/first_plans.hpp"

#include "app/plan/planned_run.hpp"
#include "core/base/error.hpp"
#include "core/plan/plan_json.hpp"
#include "core/plan/step_problems.hpp"

namespace ballast {
namespace {

/// sab weighs samples by averages of the budgets that dst found for them in the steps before; a
/// plan without ranks has simulated ones.
void tell_simulated_budgets(nlohmann::ordered_json& json, const Config& config) {
  if (config.batching.method != Batching::sab || !config.dst.enabled) return;
  json["plans_simulated_from"] = 2;
  json["plans_note"] =
      "from step 2 on by simulated budgets (dst.simulated_coverage); `train` balances by those "
      "that its samples find";
}

}  // namespace

void add_plans(nlohmann::ordered_json& json, const Config& config, std::int64_t count) {
  if (count <= 0) return;
  try {
    std::vector<std::string> notes;
    PlannedRun run(config, plan_costs(config, notes));
    auto plans = nlohmann::ordered_json::array();
    for (std::int64_t step = 0; step < count; ++step) {
      const StepPlan plan = run.next().plan;
      const std::string wrong = problems(plan);
      require(wrong.empty(), "step {} cannot run: {}", step + 1, wrong);
      plans.push_back(to_json(plan));
    }
    json["plans"] = std::move(plans);
    if (config.batching.scope == BatchScope::epoch)
      json["plans_note"] =
          "of batches step by step, as batching.scope = \"step\" makes them; an epoch packed at "
          "once, "
          "which the figures are of, has no step plans and is not trained";
    tell_simulated_budgets(json, config);
  } catch (const Error& e) {
    json["plans_refused"] = e.what();
  }
}

}  // namespace ballast

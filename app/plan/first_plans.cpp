#include "app/plan/first_plans.hpp"

#include "app/plan/planned_run.hpp"
#include "core/base/error.hpp"
#include "core/plan/plan_json.hpp"
#include "core/plan/step_problems.hpp"

namespace ballast {

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
  } catch (const Error& e) {
    json["plans_refused"] = e.what();
  }
}

}  // namespace ballast

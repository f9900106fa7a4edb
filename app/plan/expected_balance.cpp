#include "app/plan/expected_balance.hpp"

#include <fmt/format.h>

#include <vector>

namespace ballast {
namespace {

constexpr double kEven = 0.8;  // load balance above which nothing is said

std::string remedy(const Config& config, const StepPlan& plan, const SimulatedStep& step) {
  if (step.idle_ranks == 0 && step.load_balance >= kEven) return "";
  const BatchingConfig& batching = config.batching;
  std::vector<std::string> ways;
  if (batching.method != Batching::balanced && config.mesh.dp > 1)
    ways.emplace_back("batching.method = \"balanced\"");
  if (batching.window == 1 && step.idle_ranks == 0) ways.emplace_back("batching.window above 1");
  ways.emplace_back(batching.global_samples > 0 ? "more batching.global_samples"
                                                : "more batching.global_tokens");
  if (step.idle_ranks > 0) {
    if (plan.micro_batches.size() < plan.lanes.size() && batching.method != Batching::none)
      ways.emplace_back("fewer batching.micro_batch_tokens");
    ways.emplace_back("a smaller mesh.dp");
  }
  return "; evener with " + fmt::format("{}", fmt::join(ways, ", or "));
}

}  // namespace

std::string expected_balance(const Config& config, const StepPlan& plan,
                             const SimulatedStep& step) {
  return fmt::format(
      "balance of step {}, expected over all {} ranks: {} idle, load balance {:.3f} (mean / max of "
      "useful seconds) with {} micro-batches{}",
      plan.step + 1, plan.mesh.size(), step.idle_ranks, step.load_balance,
      plan.micro_batches.size(), remedy(config, plan, step));
}

}  // namespace ballast

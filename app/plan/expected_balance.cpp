#include "app/plan/expected_balance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace ballast {
namespace {

constexpr double kEven = 0.8;  // load balance above which nothing is said

/// What parts samples that share a micro-batch; "" where none do, or ranks are chosen before it.  A
/// sample's chunks stay on one rank, so that smaller ones fill no other.
std::string finer(const BatchingConfig& batching, const StepPlan& plan) {
  const bool shared = std::any_of(
      plan.micro_batches.begin(), plan.micro_batches.end(), [](const PlannedMicroBatch& m) {
        return std::any_of(m.segments.begin(), m.segments.end(),
                           [&](const Segment& s) { return s.sample != m.segments.front().sample; });
      });
  if (!shared || balances_by_weight(batching.method)) return "";
  switch (batching.method) {
    case Batching::none:
      return "fewer batching.micro_batch_samples";
    case Batching::hbp:
      return batching.groups_from == GroupSource::deck ? "shorter batching.groups" : "";
    case Batching::chunkflow:
      return "fewer chunk.tokens";
    default:
      return "fewer batching.micro_batch_tokens";
  }
}

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
    if (std::string way = finer(batching, plan); !way.empty()) ways.push_back(std::move(way));
    ways.emplace_back("a smaller mesh.dp");
  }
  return "; evener with " + fmt::format("{}", fmt::join(ways, ", or "));
}

}  // namespace

std::string expected_balance(const Config& config, const StepPlan& plan,
                             const SimulatedStep& step) {
  return fmt::format(
      "balance of step {}, expected over all {} ranks: {} idle, load balance {:.3f} (mean / max of "
      "useful seconds) with {} micro-batch{}{}",
      plan.step + 1, plan.mesh.size(), step.idle_ranks, step.load_balance,
      plan.micro_batches.size(), plan.micro_batches.size() == 1 ? "" : "es",
      remedy(config, plan, step));
}

}  // namespace ballast

// ballast plan: balance of a generated or recorded sparse pattern over context-parallel ranks and
// ring steps.
#include "app/plan/plan.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "io/trace/recorded_indexes.hpp"

namespace ballast {

std::optional<PlanPart> plan_balance(const Config& config) {
  const IndexOrigin index = config.attention.index;
  if (index == IndexOrigin::pattern) return std::nullopt;
  const RunOptions options = RunOptions::from(config);
  const MeshShape& mesh = options.mesh;
  GeneratedPattern pattern = options.attention.generator;
  // As a micro-batch is padded.
  pattern.tokens = (options.batching.micro_batch_tokens + kBlock - 1) / kBlock * kBlock;
  // All heads of a dense pattern are alike: one stands for them.
  const std::vector<GeneratedHead> heads =
      index == IndexOrigin::recorded
          ? recorded_heads(read_indexes(config.attention.recorded), pattern.tokens)
      : pattern.density < 1 ? generated_heads(pattern, pattern.tokens)
                            : std::vector<GeneratedHead>{dense_head(pattern.tokens)};

  PlanPart part;
  part.title = "balance over ranks and ring steps";
  part.header = {"tokens",         "index",
                 "ring",           "layout",
                 "density",        "worker_imbalance",
                 "step_imbalance", "computation_ratio",
                 "critical_path",  "lockstep_path"};
  part.note =
      "worker_imbalance: max / mean of work over ranks, mean over steps; step_imbalance: max / "
      "mean over steps, mean over ranks; "
      "computation_ratio:\nwork / largest work of the step; critical_path: time / ideal when ranks "
      "wait for their ring neighbours alone, "
      "lockstep_path: for all ranks at\neach step. shuffled: every round of stripes dealt in an "
      "order of its own (ring.layout = \"shuffled\")";
  const double share = density(heads, pattern.tokens);
  part.values["density"] = share;
  const auto add = [&](const SequenceLayout& at, const std::string& prefix) {
    const RingBalance b =
        ring_balance(ring_work(heads, block_owners(at), mesh.cp_outer, mesh.cp_inner),
                     mesh.cp_outer, mesh.cp_inner);
    const std::string title = deals_stripes(at.kind())
                                  ? fmt::format("{}-{}", name(at.kind()), at.stripe())
                                  : name(at.kind());
    const auto text = [](double value) { return fmt::format("{:.3f}", value); };
    part.rows.push_back({fmt::to_string(pattern.tokens), name(index),
                         fmt::format("{} x {}", mesh.cp_outer, mesh.cp_inner), title, text(share),
                         text(b.worker_imbalance), text(b.step_imbalance),
                         text(b.computation_ratio), text(b.critical_path), text(b.lockstep_path)});
    part.values[prefix + "worker_imbalance"] = b.worker_imbalance;
    part.values[prefix + "step_imbalance"] = b.step_imbalance;
    part.values[prefix + "computation_ratio"] = b.computation_ratio;
    part.values[prefix + "critical_path"] = b.critical_path;
    part.values[prefix + "lockstep_path"] = b.lockstep_path;
  };
  const SequenceLayout layout = options.sequence_layout(pattern.tokens);
  add(layout, "");
  if (layout.kind() == LayoutKind::striped)
    add(SequenceLayout(LayoutKind::shuffled, pattern.tokens, mesh.cp(), layout.stripe(),
                       options.attention.align()),
        "shuffled_");
  return part;
}

}  // namespace ballast

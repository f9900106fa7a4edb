#include "app/observe/step_figures.hpp"

#include <fmt/format.h>

namespace ballast {

std::vector<StepFigure> step_figures(const StepStatistics& s) {
  const StepOutcome& o = s.outcome;
  std::vector<StepFigure> list;
  const auto add = [&](const char* key, const char* group, double value, const char* format) {
    list.push_back({key, group, value, fmt::format(fmt::runtime(format), value)});
  };
  if (s.loss_tokens > 0) add("loss", "train", o.loss, "{:.6f}");
  add("grad_norm", "train", o.norm, "{:.5f}");
  add("lr", "train", o.rate, "{:.4e}");
  if (o.pairs) {
    add("rewards_chosen", "rewards", o.pairs->chosen_reward, "{:.5f}");
    add("rewards_rejected", "rewards", o.pairs->rejected_reward, "{:.5f}");
    add("rewards_margin", "rewards", o.pairs->margin, "{:.5f}");
    add("rewards_accuracy", "rewards", o.pairs->accuracy, "{:.4f}");
    add("logps_chosen", "rewards", o.pairs->chosen_log_probability, "{:.4f}");
    add("logps_rejected", "rewards", o.pairs->rejected_log_probability, "{:.4f}");
  }
  add("step_time_s", "speed", o.seconds, "{:.4f}");
  add("tokens_per_s_per_rank", "speed", s.tokens_per_s(), "{:.1f}");
  add("tflops_per_rank", "speed", s.flops_per_s() * 1e-12, "{:.4f}");
  add("mfu", "speed", s.mfu(), "{:.4f}");
  if (s.recorded) {
    add("exposed_reduction_s", "speed", s.mean_reduction_s, "{:.4f}");
    add("imbalance", "balance", s.imbalance, "{:.4f}");
    add("load_balance", "balance", s.load_balance, "{:.4f}");
  }
  add("idle_ranks", "balance", s.idle_ranks, "{:.0f}");
  add("memory_mib", "memory", static_cast<double>(s.largest_peak_bytes) / (1 << 20), "{:.1f}");
  if (s.schedule) {
    add("schedule_s", "speed", s.schedule->measured_s, "{:.4f}");
    add("predicted_schedule_s", "speed", s.schedule->predicted_s, "{:.4f}");
  }
  if (s.caps) {
    add("cap_share", "balance", s.caps->share, "{:.4f}");
    add("cap_mass", "balance", s.caps->mass, "{:.4f}");
  }
  if (s.drift) add("drift", "balance", *s.drift, "{:.5f}");
  if (s.recall) {
    add("recall", "balance", s.recall->mean, "{:.5f}");
    add("recall_interval", "balance", s.recall->interval, "{:.5f}");
  }
  return list;
}

}  // namespace ballast

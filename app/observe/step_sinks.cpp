#include "app/observe/step_sinks.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ballast {

void TraceSink::step(const StepStatistics& s) {
  const StepOutcome& o = s.outcome;
  StepRow row{{"loss", o.loss},
              {"grad_norm", o.norm},
              {"learning_rate", o.rate},
              {"step_time_s", o.seconds},
              {"plan_s", o.plan_s},
              {"planning_s", s.spent.planning_s},
              {"tuning_s", s.spent.tuning_s},
              {"computation_s", s.compute_s},
              {"imbalance", s.imbalance},
              {"load_balance", s.load_balance},
              {"idle_ranks", static_cast<double>(s.idle_ranks)},
              {"tokens", static_cast<double>(s.tokens)},
              {"loss_tokens", static_cast<double>(s.loss_tokens)},
              {"flops_per_s", s.flops_per_s()},
              {"mfu", s.mfu()},
              {"peak_bytes_total", static_cast<double>(s.memory.peak_total)}};
  for (int c = 0; c < kMemoryCategories; ++c)
    row[fmt::format("peak_bytes_{}", name(static_cast<MemoryCategory>(c)))] =
        static_cast<double>(s.memory.peak[c]);
  if (s.budgets)
    row.insert({{"budget", s.budgets->mean_budget},
                {"coverage_loss", s.budgets->mean_coverage_loss},
                {"largest_coverage_loss", s.budgets->largest_coverage_loss}});
  if (s.caps) row.insert({{"cap_share", s.caps->share}, {"cap_mass", s.caps->mass}});
  if (s.recall) row.insert({{"recall", s.recall->mean}, {"recall_interval", s.recall->interval}});
  if (s.schedule)
    row.insert({{"schedule_s", s.schedule->measured_s},
                {"predicted_schedule_s", s.schedule->predicted_s}});
  trace_.with([&](TraceWriter& trace) {
    trace.step(o.step - 1, row);
    trace.flush();
  });
}

void LogSink::step(const StepStatistics& s) {
  const StepOutcome& o = s.outcome;
  StepFields fields = {
      {"step", fmt::to_string(o.step)},
      {"loss", fmt::format("{:.6f}", o.loss)},
      {"grad_norm", fmt::format("{:.5f}", o.norm)},
      {"lr", fmt::format("{:.4e}", o.rate)},
      {"step_time_s", fmt::format("{:.4f}", o.seconds)},
      {"tokens_per_s_per_rank", fmt::format("{:.1f}", s.tokens_per_s())},
      {"tflops_per_rank", fmt::format("{:.4f}", s.flops_per_s() * 1e-12)},
      {"mfu", fmt::format("{:.4f}", s.mfu())},
      {"imbalance", fmt::format("{:.4f}", s.imbalance)},
      {"load_balance", fmt::format("{:.4f}", s.load_balance)},
      {"idle_ranks", fmt::to_string(s.idle_ranks)},
      {"memory_mib", fmt::format("{:.1f}", static_cast<double>(s.largest_peak_bytes) / (1 << 20))}};
  if (s.schedule) {
    fields.emplace_back("schedule_s", fmt::format("{:.4f}", s.schedule->measured_s));
    fields.emplace_back("predicted_schedule_s", fmt::format("{:.4f}", s.schedule->predicted_s));
  }
  if (s.caps) {
    fields.emplace_back("cap_share", fmt::format("{:.4f}", s.caps->share));
    fields.emplace_back("cap_mass", fmt::format("{:.4f}", s.caps->mass));
  }
  if (s.recall) {
    fields.emplace_back("recall", fmt::format("{:.5f}", s.recall->mean));
    fields.emplace_back("recall_interval", fmt::format("{:.5f}", s.recall->interval));
  }
  if (o.step % std::max<std::int64_t>(1, every_) == 0 || o.step == o.steps || o.step == 1)
    log_.step(fields);
  const double per_step_s = o.trained_s / static_cast<double>(o.step);
  log_.progress(o.step, o.steps, per_step_s * static_cast<double>(o.steps - o.step));
}

void JsonSink::step(const StepStatistics& s) {
  summary_["loss"] = s.outcome.loss;
  summary_["grad_norm"] = s.outcome.norm;
  summary_["step_time_s"] = s.outcome.seconds;
  summary_["tokens_per_s_per_rank"] = s.tokens_per_s();
  summary_["mfu"] = s.mfu();
  summary_["imbalance"] = s.imbalance;
  summary_["load_balance"] = s.load_balance;
  summary_["idle_ranks"] = s.idle_ranks;
  summary_["step"] = s.outcome.step;
  if (s.caps) {
    summary_["cap_share"] = s.caps->share;
    summary_["cap_mass"] = s.caps->mass;
  }
  if (s.recall) {
    summary_["recall"] = s.recall->mean;
    summary_["recall_interval"] = s.recall->interval;
  }
  if (!s.schedule) return;
  summary_["schedule_s"] = s.schedule->measured_s;
  summary_["predicted_schedule_s"] = s.schedule->predicted_s;
}

}  // namespace ballast

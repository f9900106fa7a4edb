#include "app/observe/step_sinks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string_view>

#include "app/observe/step_figures.hpp"
#include "core/base/error.hpp"
#include "io/files/text_file.hpp"

namespace ballast {
namespace {

constexpr std::size_t kColumns = 100;  // of a terminal line

}  // namespace

std::string step_line(const StepStatistics& s, double left_s) {
  const StepOutcome& o = s.outcome;
  std::string line = fmt::format("step {}/{}", o.step, o.steps);
  const std::string left = o.step < o.steps ? fmt::format("  left {}", time_left(left_s)) : "";
  const auto add = [&](const std::string& part) {
    if (line.size() + part.size() + left.size() <= kColumns) line += part;
  };
  add(s.loss_tokens > 0 ? fmt::format("  loss {:.6g}", o.loss) : "  no token carries loss");
  if (o.pairs) {
    add(fmt::format("  margin {:.3g}", o.pairs->margin));
    add(fmt::format("  accuracy {:.2f}", o.pairs->accuracy));
  }
  add(fmt::format("  grad_norm {:.3g}", o.norm));
  add(fmt::format("  lr {:.1e}", o.rate));
  add(fmt::format("  {:.3g} s", o.seconds));
  add(fmt::format("  {:.0f} tok/s/rank", s.tokens_per_s()));
  if (s.recorded) add(fmt::format("  balance {:.2f}", s.load_balance));
  return line + left;
}

void StepSinks::add(const std::string& name,
                    const std::function<std::unique_ptr<StepSink>()>& make) {
  try {
    sinks_.push_back({name, make()});
  } catch (const std::exception& error) {
    warn_(fmt::format("warning: the run goes on without {}: {}", name, error.what()));
  }
}

void StepSinks::each(const std::function<void(StepSink&)>& use) {
  std::erase_if(sinks_, [&](const Named& named) {
    try {
      use(*named.sink);
      return false;
    } catch (const std::exception& error) {
      warn_(fmt::format("warning: the run goes on without {}: {}", named.name, error.what()));
      return true;
    }
  });
}

void StepSinks::step(const StepStatistics& statistics) {
  each([&](StepSink& sink) { sink.step(statistics); });
}

void StepSinks::evaluation(const EvaluationFigures& figures) {
  each([&](StepSink& sink) { sink.evaluation(figures); });
}

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
              {"exposed_reduction_s", s.reduction_s},
              {"imbalance", s.imbalance},
              {"load_balance", s.load_balance},
              {"idle_ranks", static_cast<double>(s.idle_ranks)},
              {"tokens", static_cast<double>(s.tokens)},
              {"loss_tokens", static_cast<double>(s.loss_tokens)},
              {"flops_per_s", s.flops_per_s()},
              {"mfu", s.mfu()},
              {"peak_bytes_total", static_cast<double>(s.memory.peak_total)}};
  if (s.loss_tokens == 0) row.erase("loss");  // of no token is none
  for (int c = 0; c < kMemoryCategories; ++c)
    row[fmt::format("peak_bytes_{}", name(static_cast<MemoryCategory>(c)))] =
        static_cast<double>(s.memory.peak[c]);
  if (s.budgets)
    row.insert({{"budget", s.budgets->mean_budget},
                {"coverage_loss", s.budgets->mean_coverage_loss},
                {"largest_coverage_loss", s.budgets->largest_coverage_loss}});
  if (s.caps) row.insert({{"cap_share", s.caps->share}, {"cap_mass", s.caps->mass}});
  if (s.drift) row.insert({{"drift", *s.drift}});
  if (s.recall) row.insert({{"recall", s.recall->mean}, {"recall_interval", s.recall->interval}});
  if (s.schedule)
    row.insert({{"schedule_s", s.schedule->measured_s},
                {"predicted_schedule_s", s.schedule->predicted_s}});
  if (o.pairs)
    row.insert({{"rewards_chosen", o.pairs->chosen_reward},
                {"rewards_rejected", o.pairs->rejected_reward},
                {"rewards_margin", o.pairs->margin},
                {"rewards_accuracy", o.pairs->accuracy}});
  trace_.with([&](TraceWriter& trace) {
    trace.step(o.step - 1, row);
    trace.flush();
  });
}

void TraceSink::evaluation(const EvaluationFigures& figures) {
  trace_.with([&](TraceWriter& trace) {
    trace.step(figures.step - 1, figures.scalars);
    if (figures.generated.is_null() || !writes_texts_) return;
    const std::string text = figures.generated.dump();
    trace.plan("generated", std::hash<std::string>()(text), text, figures.step - 1);
  });
}

void LogSink::step(const StepStatistics& s) {
  const StepOutcome& o = s.outcome;
  const double left_s =
      o.trained_s / static_cast<double>(o.step) * static_cast<double>(o.steps - o.step);
  if (o.step % std::max<std::int64_t>(1, every_) == 0 || o.step == o.steps || o.step == 1) {
    StepFields fields{{"step", fmt::to_string(o.step)}};
    for (const StepFigure& figure : step_figures(s)) fields.emplace_back(figure.key, figure.text);
    log_.step(fields, step_line(s, left_s));
  }
  log_.progress(o.step, o.steps, left_s);
}

void LogSink::evaluation(const EvaluationFigures& figures) {
  StepFields fields{{"step", fmt::to_string(figures.step)}};
  std::string line = fmt::format("step {}", figures.step);
  for (const char* key : {"validation_loss", "validation_tokens", "validation_rewards_margin",
                          "validation_rewards_accuracy", "needle_accuracy"})
    if (const auto found = figures.scalars.find(key); found != figures.scalars.end()) {
      fields.emplace_back(key, found->second == std::floor(found->second) && found->second > 1
                                   ? fmt::format("{:.0f}", found->second)
                                   : fmt::format("{:.6f}", found->second));
      line += fmt::format("  {} {}", key, fields.back().second);
    }
  log_.step(fields, line);
  for (const std::string& text : figures.texts) log_.comment(text);
}

void JsonSink::step(const StepStatistics& s) {
  for (const std::string& key : told_) summary_.erase(key);  // of the step before
  told_.clear();
  summary_["step"] = s.outcome.step;
  for (const StepFigure& figure : step_figures(s)) {
    summary_[figure.key] = figure.value;
    told_.push_back(figure.key);
  }
  summary_["idle_ranks"] = s.idle_ranks;
}

void JsonSink::evaluation(const EvaluationFigures& figures) {
  summary_["validation_loss"] = figures.scalars.at("validation_loss");
}

JsonLinesSink::JsonLinesSink(const std::string& file) : file_(file) {
  drop_torn_line(file);
  out_.open(file, std::ios::app);
  require(out_.good(), "{} cannot be written", file_);
}

void JsonLinesSink::write(nlohmann::ordered_json line) {
  using namespace std::chrono;
  line["time"] = static_cast<double>(
                     duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count()) *
                 1e-3;
  out_ << line.dump() << std::endl;
  require(out_.good(), "{} cannot be written; is the disk full?", file_);
}

void JsonLinesSink::step(const StepStatistics& s) {
  nlohmann::ordered_json line{{"step", s.outcome.step}};
  for (const StepFigure& figure : step_figures(s)) line[figure.key] = figure.value;
  line["idle_ranks"] = s.idle_ranks;
  line["tokens"] = s.tokens;
  line["loss_tokens"] = s.loss_tokens;
  write(std::move(line));
}

void JsonLinesSink::evaluation(const EvaluationFigures& figures) {
  nlohmann::ordered_json line{{"step", figures.step}};
  for (const auto& [key, value] : figures.scalars) line[key] = value;
  if (!figures.generated.is_null()) line["generated"] = figures.generated;
  write(std::move(line));
}

void TensorBoardSink::step(const StepStatistics& s) {
  std::vector<std::pair<std::string, double>> values;
  for (const StepFigure& figure : step_figures(s))
    values.emplace_back(fmt::format("{}/{}", figure.group, figure.key), figure.value);
  file_.scalars(s.outcome.step, values);
}

void TensorBoardSink::evaluation(const EvaluationFigures& figures) {
  std::vector<std::pair<std::string, double>> values;
  for (const auto& [key, value] : figures.scalars) {
    constexpr std::string_view prefix = "validation_";
    values.emplace_back("eval/" + (key.starts_with(prefix) ? key.substr(prefix.size()) : key),
                        value);
  }
  file_.scalars(figures.step, values);
}

}  // namespace ballast

// ballast plan: what the deck's plans cost before anything runs: ring attention from component
// times, balance of a sparse pattern over ranks and ring steps, pipeline schedules.  Starts no
// ranks.
#include "app/plan/plan.hpp"

#include <array>
#include <cstdio>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/observe/text_table.hpp"
#include "app/plan/first_plans.hpp"
#include "app/plan/opened_files.hpp"
#include "app/plan/stored_groups.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/mesh_shape.hpp"

namespace ballast {
namespace {

using Part = std::optional<PlanPart> (*)(const Config&);
// Groups come first: the other parts plan with those that were selected.
constexpr std::array kParts = {Part{plan_groups},  Part{plan_ring_times},
                               Part{plan_balance}, Part{plan_pipeline},
                               Part{plan_search},  Part{plan_sparsebalance}};

/// The values of every case, with the plans of its first steps.
void write_twin(const CommandLine& line, const std::vector<Config>& configs,
                std::vector<nlohmann::ordered_json> values) {
  for (std::size_t d = 0; d < configs.size(); ++d) add_plans(values[d], configs[d], line.plans);
  if (configs.front().from.case_name.empty()) {
    write_json(line.json, values.front());
    return;
  }
  auto list = nlohmann::ordered_json::array();
  for (std::size_t d = 0; d < configs.size(); ++d) {
    nlohmann::ordered_json one{{"name", configs[d].from.case_name}};
    one.update(values[d]);
    list.push_back(one);
  }
  write_json(line.json, {{"cases", list}});
}

}  // namespace

int plan_command(const CommandLine& line) {
  const DeckNeeds needs{.model = false, .data = false, .groups = false, .executes = false};
  std::vector<Config> configs = line.configs(needs);
  const bool named = !configs.front().from.case_name.empty();
  std::vector<nlohmann::ordered_json> values(configs.size(), nlohmann::ordered_json::object());
  for (const Config& config : configs)
    if (const std::string words = samples_beyond_gpus(config); !words.empty())
      fmt::print(stderr, "note: {}; `train` would stop there\n", words);
  bool any = false;
  for (const Part part_of : kParts) {
    // One table a part, with the rows of all cases.
    std::optional<TextTable> table;
    std::string title, note;
    for (std::size_t d = 0; d < configs.size(); ++d) {
      const std::optional<PlanPart> part = part_of(configs[d]);
      if (part_of == plan_groups && takes_stored_groups(configs[d])) {
        std::vector<std::string> notes;
        take_stored_groups(configs[d], needs, notes);
        for (const std::string& note : notes) fmt::print(stderr, "note: {}\n", note);
      }
      if (part_of == plan_groups && part && lacks_groups(configs[d])) {
        std::vector<PackGroup> groups;
        for (std::size_t g = 0; g < part->values["groups"].size(); ++g)
          groups.push_back({part->values["groups"][g], part->values["group_ranks"][g],
                            part->values["group_recompute"][g]});
        use_groups(configs[d], groups, needs);
      }
      if (!part) continue;
      if (!table) {
        std::vector<std::string> header = part->header;
        if (named) header.insert(header.begin(), "case");
        table.emplace(header);
        title = part->title;
        note = part->note;
      }
      for (std::vector<std::string> row : part->rows) {
        if (named) row.insert(row.begin(), configs[d].from.case_name);
        table->row(row);
      }
      for (const auto& [key, value] : part->values.items()) {
        // Both tables have it, as step_time of the first global batch's pipeline and of the whole
        // run's: the first keeps a name of its own.
        if (const auto earlier = values[d].find(key); earlier != values[d].end())
          values[d]["first_batch_" + key] = *earlier;
        values[d][key] = value;
      }
    }
    if (!table) continue;
    fmt::print("{}{}\n{}{}\n", any ? "\n" : "", title, table->text(), note);
    any = true;
  }
  require(any,
          "{}: nothing to plan; state component times in [costs], attention.index = \"generated\", "
          "a [pipeline], a [dst], or batching.select_lengths with batching.method = \"hbp\"",
          line.deck_file);
  write_twin(line, configs, std::move(values));
  return 0;
}

}  // namespace ballast

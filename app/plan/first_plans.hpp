// Plans of a deck's first steps in the JSON of commands: the values that `train` executes.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>

#include "core/config/config.hpp"

namespace ballast {

/// Adds "plans", the first `count` steps (core/plan/plan_json), or "plans_refused", why there are
/// none.  Where batches follow budgets that ranks find (batching.method = "sab" with dst.enabled),
/// the steps after the first are those of a run that finds what the clock draws:
/// "plans_simulated_from" and "plans_note" say so.
void add_plans(nlohmann::ordered_json& json, const Config& config, std::int64_t count);

}  // namespace ballast

// Plans as JSON: what traces store, commands print and the report loads.  Numbers that many rows
// share stand once; members at their usual value are left out; reading gives the same step plan,
// bit for bit.
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "core/plan/context/ring_plan.hpp"
#include "core/plan/step_plan.hpp"

namespace ballast {

/// {"format": 2, "hash": 16 hex digits, "step" (from 1; 0: no training step), "mesh": {"dp" ...},
/// "ep", "zero", "backward", "normaliser", "loss_tokens", "layer_begin": [stage],
///  "layouts": [{"kind", "stripe", "align"}],
///  "micro_batches": [{"segments": [[sample, begin, end, loss_tokens]], "first", "ranks": 1,
///     "split": [sp, ring_outer, ring_inner], "layout": 0, "round", "chunk": 0,
///     "recompute_layers": -1, "align": 1, "loss_weight", "tuning": [base_budget, anchor_budget,
///     above_anchor]}],
///  "op_kinds": [name], "payloads": [name],
///  "schedules": [[{"kind": [place in op_kinds], "micro_batch": [], "chunk": [], "peer": [],
///     "payload": [place in payloads]} by stage]],
///  "lanes": [{"micro_batches": [id], "schedule"}],
///  "collectives": [[kind, stage, after_round, elements]]}.
/// Where a value follows the name above, a member that has it is left out; so is a split of [ranks,
/// 1, 1] and a tuning without budgets.  A stage's columns have one entry an op; "chunk", "peer" and
/// "payload" are left out where all are 0, -1 or none.
nlohmann::ordered_json to_json(const StepPlan& plan);
/// Error: text that is no such plan, another format, a hash that is not the plan's.
StepPlan step_plan_from_json(const nlohmann::ordered_json& json);

/// {"rank", "outer", "inner", "kv_buffers", "dkv_buffers", "forward": [step], "backward": [step]};
/// a step: {"outer", "inner", "shard", "kv_inner", "kv_outer", "dkv_inner", "dkv_outer": {"to",
/// "from", "send", "recv", "complete"}, "release": [shard]}, without the hops that it has not.
nlohmann::ordered_json to_json(const RingPlan& plan);

}  // namespace ballast

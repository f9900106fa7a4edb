#include "core/plan/plan_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 2;
constexpr int kOpKinds = static_cast<int>(OpKind::collective) + 1, kPayloads = 3;

const char* name_of(Payload payload) {
  return payload == Payload::none         ? "none"
         : payload == Payload::activation ? "activation"
                                          : "gradient";
}
const char* name_of(OpKind kind) { return name(kind); }
const char* name_of(CollectiveKind kind) { return name(kind); }

/// The value among the first `count` that has this name.
template <class E>
E named(const Json& json, int count, const char* what) {
  const auto& text = json.get_ref<const std::string&>();
  for (int i = 0; i < count; ++i)
    if (text == name_of(static_cast<E>(i))) return static_cast<E>(i);
  fail("plan: {} \"{}\" is unknown", what, text);
}

template <class E>
Json names(int count) {
  Json list = Json::array();
  for (int i = 0; i < count; ++i) list.push_back(name_of(static_cast<E>(i)));
  return list;
}

template <class T>
void put(Json& json, const char* key, const T& value, const T& usual) {
  if (!(value == usual)) json[key] = value;
}

template <class T>
void get(const Json& json, const char* key, T& value) {
  if (const auto at = json.find(key); at != json.end()) value = at->get<T>();
}

Json to_json(const PlannedMicroBatch& m) {
  const PlannedMicroBatch usual;
  Json json, segments = Json::array();
  for (const Segment& s : m.segments) {
    segments.push_back({s.sample, s.begin, s.end, s.loss_tokens});
    if (s.origin != 0) segments.back().push_back(s.origin);
  }
  json["segments"] = std::move(segments);
  json["first"] = m.group.first;
  put(json, "ranks", m.group.ranks, usual.group.ranks);
  if (!(m.split == ContextSplit{m.group.ranks, 1, 1}))
    json["split"] = {m.split.sp, m.split.ring_outer, m.split.ring_inner};
  put(json, "layout", m.layout, usual.layout);
  json["round"] = m.round;
  put(json, "chunk", m.chunk, usual.chunk);
  put(json, "recompute_layers", m.recompute_layers, usual.recompute_layers);
  put(json, "align", m.align, usual.align);
  json["loss_weight"] = m.loss_weight;
  if (!(m.tuning == usual.tuning))
    json["tuning"] = {m.tuning.base_budget, m.tuning.anchor_budget, m.tuning.above_anchor};
  return json;
}

PlannedMicroBatch micro_batch_from(const Json& json) {
  PlannedMicroBatch m;
  for (const Json& s : json.at("segments"))
    m.segments.push_back({s.at(0).get<std::int64_t>(), s.at(1).get<std::int64_t>(),
                          s.at(2).get<std::int64_t>(), s.at(3).get<std::int64_t>(),
                          s.size() > 4 ? s.at(4).get<std::int64_t>() : 0});
  get(json, "first", m.group.first);
  get(json, "ranks", m.group.ranks);
  m.split.sp = m.group.ranks;
  if (const auto at = json.find("split"); at != json.end())
    m.split = {at->at(0).get<int>(), at->at(1).get<int>(), at->at(2).get<int>()};
  get(json, "layout", m.layout);
  get(json, "round", m.round);
  get(json, "chunk", m.chunk);
  get(json, "recompute_layers", m.recompute_layers);
  get(json, "align", m.align);
  get(json, "loss_weight", m.loss_weight);
  if (const auto at = json.find("tuning"); at != json.end())
    m.tuning = {at->at(0).get<std::int64_t>(), at->at(1).get<std::int64_t>(),
                at->at(2).get<bool>()};
  return m;
}

Json columns(const std::vector<Op>& ops) {
  Json json;
  const auto column = [&](const char* key, auto&& of, int usual) {
    std::vector<int> values;
    for (const Op& op : ops) values.push_back(of(op));
    const bool all = std::all_of(values.begin(), values.end(), [&](int v) { return v == usual; });
    if (!all || usual < -1) json[key] = std::move(values);
  };
  constexpr int kAlways = -2;
  column(
      "kind", [](const Op& op) { return static_cast<int>(op.kind); }, kAlways);
  column(
      "micro_batch", [](const Op& op) { return op.micro_batch; }, kAlways);
  column(
      "chunk", [](const Op& op) { return op.chunk; }, 0);
  column(
      "peer", [](const Op& op) { return op.peer; }, -1);
  column(
      "payload", [](const Op& op) { return static_cast<int>(op.payload); }, 0);
  return json;
}

/// Enumerators by their place in a file's own table of names.
struct OpNames {
  std::vector<OpKind> kinds;
  std::vector<Payload> payloads;
  explicit OpNames(const Json& json) {
    for (const Json& kind : json.at("op_kinds"))
      kinds.push_back(named<OpKind>(kind, kOpKinds, "op"));
    for (const Json& payload : json.at("payloads"))
      payloads.push_back(named<Payload>(payload, kPayloads, "payload"));
  }
};

std::vector<Op> ops_from(const Json& json, const OpNames& names) {
  const Json& kinds = json.at("kind");
  std::vector<Op> ops(kinds.size());
  const auto column = [&](const char* key, auto&& set) {
    const auto at = json.find(key);
    if (at == json.end()) return;
    require(at->size() == ops.size(), "plan: {} ops with {} entries of {}", ops.size(), at->size(),
            key);
    for (std::size_t i = 0; i < ops.size(); ++i) set(ops[i], at->at(i).template get<int>());
  };
  column("kind", [&](Op& op, int v) { op.kind = names.kinds.at(static_cast<std::size_t>(v)); });
  column("micro_batch", [](Op& op, int v) { op.micro_batch = v; });
  column("chunk", [](Op& op, int v) { op.chunk = v; });
  column("peer", [](Op& op, int v) { op.peer = v; });
  column("payload",
         [&](Op& op, int v) { op.payload = names.payloads.at(static_cast<std::size_t>(v)); });
  return ops;
}

Json stages(const Schedule& schedule) {
  Json list = Json::array();
  for (const auto& ops : schedule.stages) list.push_back(columns(ops));
  return list;
}

Schedule stages_from(const Json& json, const OpNames& names) {
  Schedule schedule;
  for (const Json& ops : json) schedule.stages.push_back(ops_from(ops, names));
  return schedule;
}

/// Whatever is missing or of another type is an error of the plan, not of this program.
template <class F>
auto reading(F&& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception& e) {
    fail("plan: {}", e.what());
  } catch (const std::out_of_range&) {
    fail("plan: a place outside its list");
  }
}

constexpr const char* kDegrees[] = {"dp", "pp", "cp_outer",      "cp_inner",
                                    "sp", "tp", "ranks_per_node"};
constexpr int MeshShape::*kDegree[] = {
    &MeshShape::dp, &MeshShape::pp, &MeshShape::cp_outer,      &MeshShape::cp_inner,
    &MeshShape::sp, &MeshShape::tp, &MeshShape::ranks_per_node};

}  // namespace

Json to_json(const StepPlan& plan) {
  Json json{
      {"format", kFormat}, {"hash", fmt::format("{:016x}", plan.hash())}, {"step", plan.step + 1}};
  for (std::size_t i = 0; i < std::size(kDegrees); ++i)
    json["mesh"][kDegrees[i]] = plan.mesh.*kDegree[i];
  json["ep"] = plan.ep;
  json["zero"] = plan.zero;
  json["backward"] = plan.backward;
  json["normaliser"] = name(plan.normaliser);
  json["loss_tokens"] = plan.loss_tokens;
  json["layer_begin"] = plan.layer_begin;
  for (const char* key : {"layouts", "micro_batches", "schedules", "lanes", "collectives"})
    json[key] = Json::array();
  for (const LayoutRule& l : plan.layouts)
    json["layouts"].push_back({{"kind", name(l.kind)}, {"stripe", l.stripe}, {"align", l.align}});
  for (const PlannedMicroBatch& m : plan.micro_batches) json["micro_batches"].push_back(to_json(m));
  json["op_kinds"] = names<OpKind>(kOpKinds);
  json["payloads"] = names<Payload>(kPayloads);
  for (const Schedule& s : plan.schedules) json["schedules"].push_back(stages(s));
  for (const PlannedLane& l : plan.lanes)
    json["lanes"].push_back({{"micro_batches", l.micro_batches}, {"schedule", l.schedule}});
  for (const PlannedCollective& c : plan.collectives)
    json["collectives"].push_back({name(c.kind), c.stage, c.after_round, c.elements});
  return json;
}

StepPlan step_plan_from_json(const Json& json) {
  return reading([&] {
    require(json.at("format") == kFormat, "plan: format {}; this version reads {}",
            json.at("format").dump(), kFormat);
    StepPlan plan;
    get(json, "step", plan.step);
    --plan.step;  // counted from 1 in JSON
    for (std::size_t i = 0; i < std::size(kDegrees); ++i)
      plan.mesh.*kDegree[i] = json.at("mesh").at(kDegrees[i]).get<int>();
    get(json, "ep", plan.ep);
    get(json, "zero", plan.zero);
    get(json, "backward", plan.backward);
    plan.normaliser =
        parse_or_fail<LossNormaliser>(json.at("normaliser").get<std::string>(), "normaliser");
    get(json, "loss_tokens", plan.loss_tokens);
    plan.layer_begin = json.at("layer_begin").get<std::vector<std::int64_t>>();
    for (const Json& l : json.at("layouts"))
      plan.layouts.push_back({parse_or_fail<LayoutKind>(l.at("kind").get<std::string>(), "layout"),
                              l.at("stripe").get<std::int64_t>(),
                              l.at("align").get<std::int64_t>()});
    for (const Json& m : json.at("micro_batches"))
      plan.micro_batches.push_back(micro_batch_from(m));
    const OpNames names(json);
    for (const Json& s : json.at("schedules")) plan.schedules.push_back(stages_from(s, names));
    for (const Json& l : json.at("lanes"))
      plan.lanes.push_back(
          {l.at("micro_batches").get<std::vector<int>>(), l.at("schedule").get<int>()});
    for (const Json& c : json.at("collectives"))
      plan.collectives.push_back({named<CollectiveKind>(c.at(0), 5, "collective"),
                                  c.at(1).get<int>(), c.at(2).get<int>(),
                                  c.at(3).get<std::int64_t>()});
    const std::string hash = fmt::format("{:016x}", plan.hash());
    require(json.at("hash") == hash, "plan: its hash is {}, the text says {}", hash,
            json.at("hash").dump());
    return plan;
  });
}

namespace {

struct Hop {
  const char* key;
  std::optional<RingHop> RingStep::*member;
};
constexpr Hop kHops[] = {{"kv_inner", &RingStep::kv_inner},
                         {"kv_outer", &RingStep::kv_outer},
                         {"dkv_inner", &RingStep::dkv_inner},
                         {"dkv_outer", &RingStep::dkv_outer}};

Json steps_of(const std::vector<RingStep>& steps) {
  Json list = Json::array();
  for (const RingStep& step : steps) {
    Json json{{"outer", step.outer}, {"inner", step.inner}, {"shard", step.shard}};
    for (const Hop& hop : kHops)
      if (const auto& h = step.*hop.member)
        json[hop.key] = {{"to", h->to},
                         {"from", h->from},
                         {"send", h->send_shard},
                         {"recv", h->recv_shard},
                         {"complete", h->complete}};
    if (!step.release.empty()) json["release"] = step.release;
    list.push_back(std::move(json));
  }
  return list;
}

}  // namespace

Json to_json(const RingPlan& plan) {
  return {{"rank", plan.rank},
          {"outer", plan.outer},
          {"inner", plan.inner},
          {"kv_buffers", plan.kv_buffers},
          {"dkv_buffers", plan.dkv_buffers},
          {"forward", steps_of(plan.forward)},
          {"backward", steps_of(plan.backward)}};
}

}  // namespace ballast

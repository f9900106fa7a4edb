#include "core/plan/step_plan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/base/hash.hpp"

namespace ballast {

MicroBatch PlannedMicroBatch::micro_batch() const {
  return {segments, group.ranks, recompute_layers, align};
}
std::int64_t PlannedMicroBatch::axis_tokens() const {
  return ballast::axis_tokens(segments, align);
}

const char* name(CollectiveKind kind) {
  static const char* names[] = {"gradient_reduce", "tied_sum", "gradient_norm", "optimizer",
                                "parameter_gather"};
  return names[static_cast<int>(kind)];
}

namespace {

constexpr double kInStep = 0.05;  // share by which work of ranks in step may differ

bool alike(double a, double b) { return std::abs(a - b) <= kInStep * std::max(a, b); }

/// Whether two micro-batches take a rank about the same time, as far as tokens and pairs tell.
bool alike(const PlannedMicroBatch& a, const PlannedMicroBatch& b) {
  const MicroBatch first = a.micro_batch(), second = b.micro_batch();
  return alike(static_cast<double>(first.tokens()) / a.group.ranks,
               static_cast<double>(second.tokens()) / b.group.ranks) &&
         alike(first.attention_pairs() / a.group.ranks, second.attention_pairs() / b.group.ranks);
}

}  // namespace

bool StepPlan::lanes_in_step() const {
  for (std::size_t d = 1; d < lanes.size(); ++d) {
    const std::vector<int>&one = lanes[d - 1].micro_batches, &other = lanes[d].micro_batches;
    if (one.size() != other.size()) return false;
    for (std::size_t i = 0; i < one.size(); ++i)
      if (one[i] != other[i] && !alike(micro_batches.at(static_cast<std::size_t>(one[i])),
                                       micro_batches.at(static_cast<std::size_t>(other[i]))))
        return false;
  }
  return true;
}

bool StepPlan::meets_in_backward() const {
  // ZeRO 2 has no memory for what a bucket would wait in.
  if (zero < 2 && !lanes_in_step()) return false;
  std::vector<char> linked(lanes.size(), 0);  // to the lane before
  for (const PlannedMicroBatch& m : micro_batches)
    for (int d = m.group.first + 1; d < m.group.first + m.group.ranks; ++d)
      linked.at(static_cast<std::size_t>(d)) = 1;
  for (std::size_t d = 1; d < lanes.size(); ++d)
    if (linked[d] != 0 && lanes[d].micro_batches != lanes[d - 1].micro_batches) return false;
  return backward;
}

const Schedule& StepPlan::schedule(int dp) const {
  return schedules.at(static_cast<std::size_t>(lanes.at(static_cast<std::size_t>(dp)).schedule));
}

const PlannedMicroBatch& StepPlan::micro_batch(int dp, int place) const {
  const PlannedLane& lane = lanes.at(static_cast<std::size_t>(dp));
  return micro_batches.at(
      static_cast<std::size_t>(lane.micro_batches.at(static_cast<std::size_t>(place))));
}

SequenceLayout StepPlan::layout(const PlannedMicroBatch& micro_batch) const {
  const LayoutRule& rule = layouts.at(static_cast<std::size_t>(micro_batch.layout));
  return SequenceLayout(rule.kind, micro_batch.micro_batch(), micro_batch.split.ring(), rule.stripe,
                        rule.align);
}

std::vector<MicroBatch> StepPlan::list(int dp) const {
  std::vector<MicroBatch> result;
  for (const int id : lanes.at(static_cast<std::size_t>(dp)).micro_batches)
    result.push_back(micro_batches.at(static_cast<std::size_t>(id)).micro_batch());
  return result;
}

int StepPlan::rounds() const {
  int rounds = 0;
  for (const PlannedMicroBatch& m : micro_batches) rounds = std::max(rounds, m.round + 1);
  return rounds;
}

std::int64_t StepPlan::tokens() const {
  std::int64_t sum = 0;
  for (const PlannedMicroBatch& m : micro_batches)
    for (const Segment& s : m.segments) sum += s.tokens();
  return sum;
}

double StepPlan::attention_pairs() const {
  double sum = 0;
  for (const PlannedMicroBatch& m : micro_batches) sum += m.micro_batch().attention_pairs();
  return sum;
}

std::int64_t StepPlan::samples() const {
  std::int64_t sum = 0;
  for (const PlannedMicroBatch& m : micro_batches)
    sum += std::count_if(m.segments.begin(), m.segments.end(),
                         [](const Segment& s) { return s.begins_sample(); });
  return sum;
}

int StepPlan::idle_lanes() const {
  return static_cast<int>(std::count_if(
      lanes.begin(), lanes.end(), [](const PlannedLane& l) { return l.micro_batches.empty(); }));
}

namespace {

void add(Hash& h, const PlannedMicroBatch& m) {
  h.add(m.segments.size());
  for (const Segment& s : m.segments) add(h, s);
  h.add(m.group.first).add(m.group.ranks);
  h.add(m.split.sp).add(m.split.ring_outer).add(m.split.ring_inner);
  h.add(m.layout).add(m.round).add(m.chunk).add(m.recompute_layers).add(m.align);
  h.add(std::bit_cast<std::uint64_t>(m.loss_weight));
  h.add(m.tuning.base_budget).add(m.tuning.anchor_budget).add(m.tuning.above_anchor);
}

}  // namespace

std::uint64_t StepPlan::hash() const {
  Hash h;
  h.add(step).add(mesh.dp).add(mesh.pp).add(mesh.cp_outer).add(mesh.cp_inner).add(mesh.sp);
  h.add(mesh.tp).add(mesh.ranks_per_node).add(ep).add(zero).add(backward).add(normaliser);
  h.add(loss_tokens).add(layer_begin.size());
  for (const std::int64_t layer : layer_begin) h.add(layer);
  h.add(layouts.size());
  for (const LayoutRule& l : layouts) h.add(l.kind).add(l.stripe).add(l.align);
  h.add(micro_batches.size());
  for (const PlannedMicroBatch& m : micro_batches) add(h, m);
  h.add(schedules.size());
  for (const Schedule& s : schedules) h.add(s.stages.size()).add(s.hash());
  h.add(lanes.size());
  for (const PlannedLane& l : lanes) {
    h.add(l.schedule).add(l.micro_batches.size());
    for (const int id : l.micro_batches) h.add(id);
  }
  h.add(collectives.size());
  for (const PlannedCollective& c : collectives)
    h.add(c.kind).add(c.stage).add(c.after_round).add(c.elements);
  return h.value();
}

}  // namespace ballast

#include "core/observe/events.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>

#include "core/base/error.hpp"

namespace ballast {
namespace {

struct KindText {
  const char* name;
  const char* meaning;
};
constexpr KindText kTexts[] = {
    {"forward", "forward of a micro-batch through the rank's stage"},
    {"recompute", "forward of a micro-batch again, from the stored input of the stage"},
    {"backward", "backward of a micro-batch through the stage"},
    {"backward_input", "half of a backward: gradients of inputs"},
    {"backward_weight", "half of a backward: gradients of weights"},
    {"send", "sending to a neighbouring stage, as far as the rank waits for it"},
    {"recv", "receiving from a neighbouring stage, the wait for it included"},
    {"offload", "copy to host memory, beside computation"},
    {"fetch", "copy from host memory, beside computation"},
    {"attention_forward", "attention of a layer, or of one ring step of it"},
    {"attention_backward", "backward of attention, or of one ring step of it"},
    {"ring_wait", "wait of a ring step for its hops, or of a choice of pairs for other ranks"},
    {"copy_wait", "wait of computation for copies to or from host memory"},
    {"sequence_exchange", "all-to-all of heads against sequence (Ulysses)"},
    {"layer_forward", "forward of a layer"},
    {"layer_backward", "backward of a layer"},
    {"head", "final norm, language-model head and loss"},
    {"indexing", "choosing the pairs that sparse attention computes"},
    {"tuning", "dynamic sparsity tuning: targets, coverage and choice of budgets"},
    {"planning", "making the step's plan"},
    {"gradient_reduce", "reduction of gradients over replicas, the wait for them included"},
    {"parameter_gather", "gathering updated parameters, or waiting for their update"},
    {"optimizer", "update of the parameters"},
    {"data", "reading samples"},
    {"checkpoint", "writing a checkpoint"},
    {"validation", "held-out loss"},
    {"step", "a whole training step; what nothing inside covers is idle time"},
    {"idle", "nothing to do"}};
static_assert(std::size(kTexts) == kEventKinds);

/// Nanoseconds of the monotonic clock since the machine started: the same origin for all processes
/// of a node.
class HostClock final : public Clock {
 public:
  std::int64_t mark(Queue) override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  double seconds(std::int64_t mark) override { return static_cast<double>(mark) * 1e-9; }
};

}  // namespace

const char* name(EventKind kind) {
  const auto i = static_cast<std::size_t>(kind);
  return i < std::size(kTexts) ? kTexts[i].name : "unknown";
}

const char* meaning(EventKind kind) {
  const auto i = static_cast<std::size_t>(kind);
  return i < std::size(kTexts) ? kTexts[i].meaning : "";
}

bool computes(EventKind kind) {
  switch (kind) {
    case EventKind::forward:
    case EventKind::recompute:
    case EventKind::backward:
    case EventKind::backward_input:
    case EventKind::backward_weight:
      return true;
    default:
      return false;
  }
}

bool is_schedule_op(EventKind kind) {
  switch (kind) {
    case EventKind::send:
    case EventKind::recv:
    case EventKind::offload:
    case EventKind::fetch:
      return true;
    default:
      return computes(kind);
  }
}

bool useful(EventKind kind) {
  switch (kind) {
    case EventKind::attention_forward:
    case EventKind::attention_backward:
    case EventKind::layer_forward:
    case EventKind::layer_backward:
    case EventKind::head:
    case EventKind::indexing:
    case EventKind::tuning:
    case EventKind::optimizer:
      return true;
    default:
      return computes(kind);
  }
}

Clock& host_clock() {
  static HostClock clock;
  return clock;
}

Recorder::Recorder(Clock& clock) : clock_(clock) { pending_.reserve(4096); }

std::int64_t Recorder::begin(EventKind kind, Queue queue) {
  if (!enabled) return -1;
  Pending& p = pending_.emplace_back();
  p.event = context;
  p.event.kind = kind;
  p.handle = next_;
  p.queue = queue;
  p.begin_mark = clock_.mark(queue);  // last, so that the event does not time its own creation
  return next_++;
}

Recorder::Pending& Recorder::find(std::int64_t handle) {
  const std::int64_t first = next_ - static_cast<std::int64_t>(pending_.size());
  if (handle >= first && handle < next_) return pending_[static_cast<std::size_t>(handle - first)];
  const auto carried = std::find_if(carried_.begin(), carried_.end(),
                                    [&](const Pending& p) { return p.handle == handle; });
  require(carried != carried_.end(),
          "recorder: event {} was ended twice or never begun; pair every begin() with one end()",
          handle);
  return *carried;
}

void Recorder::end(std::int64_t handle, double flops, std::int64_t bytes) {
  if (handle < 0) return;
  Pending& p = find(handle);
  const std::int64_t mark = clock_.mark(p.queue);  // early, for the same reason
  require(p.open, "recorder: event {} ({}) was ended twice; pair every begin() with one end()",
          handle, name(p.event.kind));
  p.end_mark = mark;
  p.open = false;
  p.event.flops = flops;
  p.event.bytes = bytes;
}

double Recorder::now() { return clock_.seconds(clock_.mark()) + offset_s_; }

void Recorder::flush(const std::function<void(std::span<const Event>)>& sink) {
  if (!pending_.empty()) last_ = pending_.back();
  std::vector<Event> closed;
  closed.reserve(carried_.size() + pending_.size());
  std::vector<Pending> open;
  std::int64_t last = -1, first_open = std::numeric_limits<std::int64_t>::max();
  for (auto* list : {&carried_, &pending_}) {
    for (Pending& p : *list) {
      if (p.open) {
        open.push_back(p);
        first_open = std::min(first_open, p.begin_mark);
        continue;
      }
      p.event.begin_s = clock_.seconds(p.begin_mark) + offset_s_;
      p.event.end_s = clock_.seconds(p.end_mark) + offset_s_;
      closed.push_back(p.event);
      last = std::max(last, p.end_mark);
    }
  }
  carried_ = std::move(open);
  clock_.forget(std::min(last, first_open));
  pending_.clear();  // keeps its capacity: the steady state allocates nothing
  if (sink && !closed.empty()) sink(closed);
}

template <class Row>
void Recorder::keep(std::vector<Row>& rows, Row row) const {
  if (!enabled) return;
  row.step = context.step;
  row.micro_batch = context.micro_batch;
  row.chunk = context.chunk;
  rows.push_back(std::move(row));
}
void Recorder::budget(BudgetRow row) { keep(budgets_, row); }
void Recorder::recall(RecallRow row) { keep(recalls_, row); }
void Recorder::coverage(CoverageRow row) { keep(coverage_, row); }
void Recorder::index(IndexRow row) { keep(indexes_, std::move(row)); }

bool Recorder::has_recall(int layer) const {
  return std::any_of(recalls_.begin(), recalls_.end(), [&](const RecallRow& r) {
    return r.step == context.step && r.micro_batch == context.micro_batch &&
           r.chunk == context.chunk && r.layer == layer;
  });
}

std::string Recorder::last_event() const {
  Pending latest = pending_.empty() ? last_ : pending_.back();
  if (latest.handle < 0) return "no event yet";
  if (pending_.empty() && latest.open)
    latest.open = std::any_of(carried_.begin(), carried_.end(), [&](const Pending& p) {
      return p.handle == latest.handle && p.open;
    });
  const Event& e = latest.event;
  std::string text = fmt::format("{} {}", latest.open ? "in" : "after", name(e.kind));
  const std::pair<const char*, std::int32_t> ids[] = {
      {"step", e.step},   {"micro_batch", e.micro_batch},
      {"chunk", e.chunk}, {"layer", e.layer},
      {"stage", e.stage}, {"outer", e.outer},
      {"inner", e.inner}};
  for (const auto& [key, value] : ids)
    if (value >= 0) text += fmt::format(" {}={}", key, value);
  return text;
}

}  // namespace ballast

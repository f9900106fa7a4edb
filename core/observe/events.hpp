// Event recorder: what happened, keyed by the plans' own identifiers.  Kept in memory, handed to a
// sink at step ends.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/device.hpp"

namespace ballast {

/// What an event measured.  The first group mirrors Schedule ops one to one.
enum class EventKind : std::int32_t {
  forward,
  recompute,
  backward,
  backward_input,
  backward_weight,
  send,
  recv,
  offload,
  fetch,  // schedule ops
  attention_forward,
  attention_backward,  // one ring step's computation
  ring_wait,  // time a ring step waited for its hops, or the choice of an index (no ring step) for
              // other ranks
  copy_wait,  // time that computation waited for copies to or from host memory
  sequence_exchange,  // all-to-all of heads against sequence (Ulysses)
  layer_forward,
  layer_backward,
  head,  // parts of a stage
  indexing,
  tuning,    // dynamic sparsity tuning: targets of a step, coverage and choice of a layer's budget
  planning,  // the step's Batch plan, sparsity-aware batching included
  gradient_reduce,
  parameter_gather,
  optimizer,
  data,
  checkpoint,
  validation,
  step,
  idle
};
inline constexpr int kEventKinds = 28;
const char* name(EventKind kind);
/// One line for a reader of a trace.
const char* meaning(EventKind kind);
/// Whether a kind mirrors an op of a Schedule, and whether that op computes.
bool is_schedule_op(EventKind kind);
bool computes(EventKind kind);
/// True for kinds whose time is useful computation (POP): the model's arithmetic, indexing and
/// tuning, recomputation included; not planning, waits, transfers, reading and writing, or the
/// enclosing spans `step` and `validation`.  Kinds nest (an attention step lies inside a layer
/// inside an op; but see beside()), so sums over kinds take exclusive_seconds() of
/// core/observe/metrics.
bool useful(EventKind kind);
/// True for kinds that do not nest: copies to and from host memory run beside computation, and what
/// they cost it is copy_wait.
inline bool beside(EventKind kind) {
  return kind == EventKind::offload || kind == EventKind::fetch;
}

struct Event {
  std::int32_t step = -1, micro_batch = -1, chunk = -1, layer = -1, stage = -1;
  std::int32_t outer = -1, inner = -1;  ///< ring step
  EventKind kind = EventKind::step;
  double begin_s = 0,
         end_s = 0;        ///< seconds since the recorder's origin (clock-aligned across ranks)
  double flops = 0;        ///< useful FLOPs
  std::int64_t bytes = 0;  ///< moved between ranks
};

/// What a sparse pattern chose for one head of one layer, and what this rank computes of it.
struct BudgetRow {
  std::int32_t step = -1, micro_batch = -1, chunk = -1,
               layer = -1;  ///< layer -1: one choice for all layers
  std::int32_t head = 0;    ///< among the heads that this rank computes
  std::int32_t kind = -1;   ///< where heads differ: HeadPattern of most queries; -1: they do not
  double budget =
      0;  ///< in the pattern's unit (parallel/pattern/pattern_source.hpp); NaN where none was set
  double computed_pairs = 0;  ///< (query, key) pairs of this rank's queries
  double visible_pairs = 0;   ///< those that dense attention computes
  std::int64_t overflow = 0;  ///< columns and slashes that caps left out
  double overflow_mass = 0;   ///< share of the observed mass on them
};

/// Recall of one head of one layer: share of the exact softmax over all visible keys that lies on
/// pairs which the index computes, from sampled queries of the micro-batch.
struct RecallRow {
  std::int32_t step = -1, micro_batch = -1, chunk = -1, layer = -1;
  std::int32_t head = 0;  ///< of the layer
  std::int32_t rows = 0;  ///< queries sampled
  double queries = 0;     ///< queries that they stand for
  double mean = 0;
  double error = 0;                                   ///< standard error of the mean
  double low = 0;                                     ///< 10th percentile of the queries
  double sink = 0, own = 0, blocks = 0, columns = 0;  ///< parts of the mean
};

/// A point of a layer's coverage curve, as a BudgetPolicy was told it.
struct CoverageRow {
  std::int32_t step = -1, micro_batch = -1, chunk = -1, layer = -1;
  std::int64_t budget = 0;
  double coverage = 0;
  bool chosen = false;  ///< the policy's answer
};

/// What vertical_slash chose for one head of a layer over one sample, in the units of SlashStretch.
struct IndexRow {
  std::int32_t step = -1, micro_batch = -1, chunk = -1, layer = -1;
  std::int32_t head = 0;  ///< of the layer
  std::int64_t tokens = 0;
  struct Stretch {
    std::int64_t first = 0;
    bool local = false;
    std::vector<std::int32_t> slashes;
    std::vector<std::int64_t> columns;
  };
  std::vector<Stretch> stretches;
};

/// Time source.  mark() is cheap and may be taken on a queue of a device; seconds() may be asked
/// only after the work is done.  The host clock is monotonic and shared by the processes of a node.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t mark(Queue queue = Queue::compute) = 0;
  virtual double seconds(std::int64_t mark) = 0;
  /// Nobody asks for marks before this one any more.
  virtual void forget(std::int64_t before) { static_cast<void>(before); }
};
Clock& host_clock();

class Recorder {
 public:
  explicit Recorder(Clock& clock = host_clock());
  /// Identifiers that later events inherit.
  Event context;
  /// Opens an event that inherits `context`; returns its handle, or -1 while not enabled.  `queue`
  /// is the one whose work it times.
  std::int64_t begin(EventKind kind, Queue queue = Queue::compute);
  /// Closes an event, also after a flush in between.  Handle -1 does nothing; Error for one that is
  /// not open.
  void end(std::int64_t handle, double flops = 0, std::int64_t bytes = 0);
  /// Seconds added to every time so that ranks share an origin (set once after clock alignment).
  void set_offset(double seconds) { offset_s_ = seconds; }
  double now();
  /// Resolves all closed events, passes them to `sink` (if any) in the order they began, and
  /// forgets them.  Open events stay.
  void flush(const std::function<void(std::span<const Event>)>& sink);
  /// Keeps a row, with the context's step, micro-batch and chunk, until take_budgets.
  void budget(BudgetRow row);
  std::vector<BudgetRow> take_budgets() { return std::exchange(budgets_, {}); }
  /// Likewise, until take_recalls and take_coverage.
  void recall(RecallRow row);
  void coverage(CoverageRow row);
  void index(IndexRow row);
  std::vector<RecallRow> take_recalls() { return std::exchange(recalls_, {}); }
  std::vector<CoverageRow> take_coverage() { return std::exchange(coverage_, {}); }
  std::vector<IndexRow> take_indexes() { return std::exchange(indexes_, {}); }
  /// Whether the context's micro-batch and chunk have rows of recall for a layer: a forward that
  /// runs again is not measured again.
  bool has_recall(int layer) const;
  /// The latest event opened, with its identifiers and whether it has ended, for reports about a
  /// rank that hangs.  Reads no clock.
  std::string last_event() const;
  bool enabled = true;

 private:
  struct Pending {
    Event event;
    Queue queue = Queue::compute;
    std::int64_t handle = -1, begin_mark = 0, end_mark = 0;
    bool open = true;
  };
  Pending& find(std::int64_t handle);
  Clock& clock_;
  double offset_s_ = 0;
  std::int64_t next_ = 0;         ///< next handle; pending_ holds the latest pending_.size() ones
  std::vector<Pending> carried_;  ///< events still open at the last flush
  std::vector<Pending> pending_;
  Pending last_;  ///< latest event at the last flush
  template <class Row>
  void keep(std::vector<Row>& rows, Row row) const;
  std::vector<BudgetRow> budgets_;
  std::vector<RecallRow> recalls_;
  std::vector<CoverageRow> coverage_;
  std::vector<IndexRow> indexes_;
};

/// Records a scope; recorder may be null.
class Scope {
 public:
  Scope(Recorder* recorder, EventKind kind, Queue queue = Queue::compute)
      : recorder_(recorder && recorder->enabled ? recorder : nullptr) {
    if (recorder_) handle_ = recorder_->begin(kind, queue);
  }
  ~Scope() {
    if (recorder_) recorder_->end(handle_, flops, bytes);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  double flops = 0;
  std::int64_t bytes = 0;

 private:
  Recorder* recorder_;
  std::int64_t handle_ = 0;
};

/// While it lives, passes that train nothing leave no events, and what is drawn by the step
/// (dst.coverage_rows = "sampled") is drawn alike each time.
class OutsideSteps {
 public:
  explicit OutsideSteps(Recorder& recorder)
      : recorder_(recorder),
        enabled_(std::exchange(recorder.enabled, false)),
        step_(std::exchange(recorder.context.step, -1)) {}
  ~OutsideSteps() {
    recorder_.enabled = enabled_;
    recorder_.context.step = step_;
  }
  OutsideSteps(const OutsideSteps&) = delete;
  OutsideSteps& operator=(const OutsideSteps&) = delete;

 private:
  Recorder& recorder_;
  bool enabled_;
  std::int32_t step_;
};

}  // namespace ballast

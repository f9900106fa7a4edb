// Trace: one HDF5 file a rank, an event a row, flushed so that a killed run stays readable.
//
// Contents of DIR/trace_RRRRR.h5 (RRRRR is the rank), format_version 5:
//   /rows             rows in use of each table below; what lies beyond them is unused space
//   /events, /steps, /plans, /plan_steps, /plan_text, /budgets, /predicted
//                     tables; trace_columns has their columns, docs/trace.md shows them.  Every
//                     data set says what it is in attribute `description`, every table what its
//                     columns are in attribute `columns` ({name, units, description}), and what
//                     event kinds mean in `kinds`; `useful` and `beside` name the kinds of which
//                     that is true (core/observe/events), separated by blanks
//                     Kinds of plans: "step" (core/plan/plan_json, on rank 0), "ring" (likewise),
//                     "budgets" ([[micro-batch, layer, base budget, budget, coverage loss]], each
//                     rank's own), "recall" and "coverage" (app/observe/recall_rows)
//   /sessions/NNN     one group a start or restart: attributes of TraceHeader, started_unix_s, the
//                     first row of each table that the session wrote (first_events, first_steps,
//                     first_plan_steps, first_budgets, first_predicted), and the deck as a text
// Steps count from 1 in files; the writer takes the updates done before a step, as the program
// counts them (events, rows and plans alike), and adds 1.  Up to version 4 files counted from 0.
// Files may lack the descriptions; /budgets came with version 2, /predicted with version 3.
// Versions 1 to 3 hold plans as prose, uncompressed, and no attributes.
//
// How it survives a kill at any moment: tables are contiguous and have spare rows, so appending
// writes data bytes and then the 40 bytes of /rows, never metadata.  When a table is full, or a new
// scalar or session appears, the file is rewritten beside the old one with more room and takes its
// place by rename.  A clean end rewrites it once more without spare rows.  There is no file lock:
// the report may read a live run.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/observe/events.hpp"

namespace ballast {

/// Who wrote the trace and under which plans.
struct TraceHeader {
  int rank = 0, ranks = 1;
  std::string host, device, mesh, deck, git_hash;
  std::map<std::string, std::int64_t> mesh_degrees;  ///< dp, pp, cp_outer, ...
  std::map<std::string, std::int64_t> coordinates;
  int segment = 0;  ///< number of the restart that appends
};

/// Scalars of one step on one rank (loss, tokens, step time, peak bytes per category, attention
/// FLOPs ...), by name.  A name may hold letters, digits, '_', '.' and '-', and is not "step".
using StepRow = std::map<std::string, double>;

class TraceWriter {
 public:
  /// Creates or appends to DIR/trace_RRRRR.h5; DIR is created.  A damaged file is set aside as
  /// NAME.damaged and a new one begun. Not collective: every rank writes its own file.  Errors name
  /// the file.
  TraceWriter(const std::string& dir, const TraceHeader& header);
  /// Flushes and drops the spare rows; errors are swallowed, so call flush() where they matter.
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;
  void events(std::span<const Event> events);
  void budgets(std::span<const BudgetRow> rows);
  /// Simulated ops of the rank's stage: step, micro_batch, chunk, stage, kind, begin_s and end_s of
  /// each.
  void predicted(std::span<const Event> ops);
  /// Scalars of the step that begins after `step` updates; calls with the same step of one session
  /// share a row.
  void step(std::int64_t step, const StepRow& row);
  /// JSON of an executed plan under its kind and hash; each distinct plan is stored once.
  void plan(const std::string& kind, std::uint64_t hash, const std::string& text,
            std::int64_t step);
  /// What was handed over so far survives a kill of this process.
  void flush();
  /// Whether the file is at its path, for what is written beside it: not where its folder is away,
  /// which may come back.  Errors: another file stands there, and the trace is at its end.
  bool in_place() const;
  /// The new name of a damaged file that was in the way; "" where none was.
  const std::string& set_aside() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

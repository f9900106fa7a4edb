// Trace: one HDF5 file a rank, an event a row, flushed so that a killed run stays readable.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/recorder.hpp"

namespace ballast {

/// Who wrote the trace and under which plans.
struct TraceHeader {
  int rank = 0, ranks = 1;
  std::string host, device, mesh, deck, git_hash;
  std::map<std::string, std::int64_t> mesh_degrees;   ///< dp, pp, cp_outer, ...
  std::map<std::string, std::int64_t> coordinates;
  int segment = 0;  ///< number of the restart that appends
};

/// Scalars of one step on one rank (loss, tokens, step time, peak bytes per category, attention FLOPs ...), by name.
using StepRow = std::map<std::string, double>;

class TraceWriter {
 public:
  /// Creates or appends to DIR/trace_RRRRR.h5.  Errors name the file.
  TraceWriter(const std::string& dir, const TraceHeader& header);
  ~TraceWriter();
  void events(std::span<const Event> events);
  void step(std::int64_t step, const StepRow& row);
  /// Text of an executed plan (schedule, batch, ring) under its hash; each distinct plan is stored once.
  void plan(const std::string& kind, std::uint64_t hash, const std::string& text, std::int64_t step);
  void flush();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

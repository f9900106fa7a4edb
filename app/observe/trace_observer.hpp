// The trace of a run as an observation: what it cannot write costs it and one warning, never the
// run.
#pragma once
#include <memory>
#include <string>

#include "io/trace/trace_writer.hpp"

namespace ballast {

class TraceObserver {
 public:
  /// Opens DIR's trace of this rank, or says why there is none.
  void open(const std::string& dir, const TraceHeader& header);
  /// Calls use(writer) while there is a trace.
  template <class F>
  void with(F&& use) {
    if (!writer_) return;
    try {
      use(*writer_);
    } catch (const std::exception& error) {
      lose(error.what());
    }
  }
  explicit operator bool() const { return writer_ != nullptr; }

 private:
  void lose(const std::string& why);
  std::unique_ptr<TraceWriter> writer_;
};

}  // namespace ballast

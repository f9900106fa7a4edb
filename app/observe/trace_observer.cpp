#include "app/observe/trace_observer.hpp"

#include <cstdio>

namespace ballast {

void TraceObserver::open(const std::string& dir, const TraceHeader& header) {
  try {
    writer_ = std::make_unique<TraceWriter>(dir, header);
    if (const std::string& name = writer_->set_aside(); !name.empty())
      std::fprintf(stderr, "ballast: warning: a trace that cannot be continued is now %s\n",
                   name.c_str());
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

void TraceObserver::lose(const std::string& why) {
  std::fprintf(stderr, "ballast: warning: the run goes on without this rank's trace: %s\n",
               why.c_str());
  writer_.reset();
}

}  // namespace ballast

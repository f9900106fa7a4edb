// What this rank sends by MPI_Isend, seen through MPI's profiling interface.
#pragma once
#include <utility>
#include <vector>

namespace ballast::testing {

/// Keeps (destination, tag) of every message that this rank sends while it lives.  One at a time.
class SentTags {
 public:
  SentTags();
  ~SentTags();
  SentTags(const SentTags&) = delete;
  SentTags& operator=(const SentTags&) = delete;
  const std::vector<std::pair<int, int>>& list() const { return list_; }

 private:
  std::vector<std::pair<int, int>> list_;
};

}  // namespace ballast::testing

// Indexes of a run on disk: RUN/indexes/rank_XXXXX.jsonl, a line a step, layer, head and sample:
// {"step", "layer", "head", "tokens", "stretches": [[first, local, [slashes], [columns]], ...]}.
#pragma once
#include <span>
#include <string>

#include "core/observe/events.hpp"
#include "core/plan/attention/recorded_pattern.hpp"

namespace ballast {

/// Adds rows to a rank's file; its folder is made.  Error: a file that cannot be written.
void append_indexes(const std::string& folder, int rank, std::span<const IndexRow> rows);
/// Of the last step that is recorded whole, all files of a folder in the order of their names: not
/// those of a branch that was given up, nor a line that is torn.  Errors, with file and line: none
/// there is, or one that is damaged: slashes or columns that do not ascend from 0 on, stretches
/// that do not.
RecordedIndexes read_indexes(const std::string& folder);

}  // namespace ballast

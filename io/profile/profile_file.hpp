// Profile table as an HDF5 file, and whether it may be used here.
//
// Layout, version 1: /rows and /links hold one dataset a column with its unit as attribute `unit`;
// texts of a row (part, pattern, recompute, pass) are numbers into /names.  /identity: text
// attributes.  /groups, where packing groups were selected: one group a selection, with a column a
// setting and the text made_for (a line "name=value" each).  The HDF5 user block holds the format
// version, the file's size and a checksum of all its bytes.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/predict/profile_table.hpp"

namespace ballast {

inline constexpr std::uint64_t kProfileVersion = 1;

/// Makes the folder of `path` and fails, naming the reason, where no table could be written there:
/// asked before hours of measuring.
void require_writable_profile(const std::string& path);
/// Written to a temporary name, then renamed.  Errors name the file.
void write_profile(const std::string& path, const ProfileTable& table);

/// Errors name the file: missing, truncated, no profile table, another format version, an altered
/// value.  The figures are not judged: that is core's checked().
ProfileTable read_profile(const std::string& path);

/// Compares what a table was measured on with `here`, name by name of `here`.  Differences are
/// refused with both sides printed, or, where `allowed` (profile.allow_mismatch), come back as one
/// note each.
std::vector<std::string> identity_differences(const std::string& path, const ProfileTable& table,
                                              const std::map<std::string, std::string>& here,
                                              bool allowed);

}  // namespace ballast

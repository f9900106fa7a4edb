// The name that was meant, for "did you mean".
#pragma once
#include <string>
#include <vector>

namespace ballast {

/// Nearest of `candidates` by edit distance (a swap of neighbours counts 1, case is ignored), or ""
/// when nothing is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace ballast

// What a GPU can choose of a deck's pattern: a rule that joins keys with the length of the data.
#pragma once
#include <cstdint>
#include <optional>

#include "core/base/problem.hpp"
#include "core/config/config.hpp"
#include "core/plan/attention/head_rules.hpp"

namespace ballast {

/// Why no GPU can choose the deck's sparse pattern of a segment of `tokens`, those of all its
/// chunks and ranks together; nothing where one can, on hosts, and where no segment is too long.
/// Whatever holds for a length holds for all longer ones.  `heads`: of attention.pattern =
/// "by_head"; null: not known, and taken to have no block_sparse head.
std::optional<Problem> segment_problem(const Config& config, std::int64_t tokens,
                                       const HeadTable* heads);

}  // namespace ballast

// How many blocks of keys a segment may have whose sparse pattern a GPU chooses: kernels keep a
// score of each in shared memory.  Those of the whole segment count, stored ones included, so that
// neither rings nor chunks help.
#pragma once
#include <cstdint>

namespace ballast {

inline constexpr std::int64_t kMostRoutedBlocks = 3072;  ///< moba: that queries are routed to
/// That are chosen from for a block of queries: by xattention, and of 64 keys by flexprefill and
/// for block_sparse heads.
inline constexpr std::int64_t kMostScoredBlocks = 16384;

}  // namespace ballast

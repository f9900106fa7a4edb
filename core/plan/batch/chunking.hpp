// Chunk construction of ChunkFlow (Section 4.1, Algorithm 1): samples become chunks of nearly equal
// length.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

/// Fewest bins of `capacity` that hold `lengths`, as found: best fit over decreasing lengths, and
/// where that leaves a gap to the lower bound and at most 64 lengths, a branch-and-bound search of
/// bounded size from the lower bound up.  result[b]: indices in bin b.  Every length must fit a
/// bin; empty lengths share the first bin.  O(n log n).  Errors: capacity < 1, a length that no bin
/// holds.
std::vector<std::vector<std::uint32_t>> fewest_bins(std::span<const std::int64_t> lengths,
                                                    std::int64_t capacity);

/// Bins that no packing can undercut: the total, and the lengths above half a bin together with
/// what their bins cannot take in (Martello and Toth's L2).
std::int64_t least_bins(std::span<const std::int64_t> lengths, std::int64_t capacity);

/// A sample cut every `chunk_tokens` into dependent chunks, in order; one segment where it is no
/// longer.  Its loss tokens are shared out in proportion to tokens, exact in sum.
std::vector<Segment> cut_sample(const SampleLength& sample, std::int64_t chunk_tokens);

/// Algorithm 1.  A sample longer than `chunk_tokens` is cut every `chunk_tokens` into dependent
/// chunks, in order; the others share the fewest chunks.  Dependent chunks come first, then
/// standalone ones by their first sample in the given order.  Lengths in a shared chunk count
/// rounded up to `align`, so that its packed axis holds no more than chunk_tokens.  Errors:
/// chunk_tokens < 1, a negative length.
std::vector<MicroBatch> construct_chunks(const std::vector<SampleLength>& samples,
                                         std::int64_t chunk_tokens, std::int64_t align = 1);

/// The batching method `chunkflow`: chunks of one global batch over data-parallel ranks, heaviest
/// sample or chunk first to the least loaded rank; dependent chunks of a sample stay together and
/// follow each other.  options.micro_batch_tokens is the chunk size.  A rank's list keeps the order
/// of construct_chunks.  Errors: dp < 1 and those above.
Batch plan_chunks(std::int64_t step, const std::vector<SampleLength>& samples,
                  const BatchingOptions& options);

}  // namespace ballast

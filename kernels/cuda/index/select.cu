// The heaviest entries of each list (attention_pattern.hpp), one CTA a list: the threshold
// (heaviest.cuh), then one pass that writes the entries in order.  Nothing depends on the
// order in which threads run.
#include <climits>
#include <cmath>

#include "kernels/cuda/index/heaviest.cuh"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

struct SelectParams {
  const std::int64_t* values;
  PatternAxes axes;
  Selection selection;
  PatternLists lists;
  ListCuts cuts;
};

/// Whether entries are among `found`, of a list that is gone through from its start.
struct Member {
  Found found;
  unsigned equal = 0;  ///< entries so far that equal the threshold
  __device__ bool operator()(unsigned long long x) {
    return x > found.threshold || (x == found.threshold && equal++ < found.ties);
  }
};

/// What is `wanted` and not `kept`, but for entries of v that are computed in any case.
__device__ Tally left_out(const std::int64_t* v, int given, const Found& wanted,
                          const Found& kept) {
  Tally cut = {wanted.sum - kept.sum, wanted.above + wanted.ties - kept.above - kept.ties};
  if (cut.count == 0) return cut;
  Member in_wanted{wanted}, in_kept{kept};
  for (int i = 0; i < given; ++i) {
    const unsigned long long x = v[i];
    const bool asked = in_wanted(x), has = in_kept(x);
    if (!asked || has) continue;
    cut.sum -= x;
    --cut.count;
  }
  return cut;
}

__global__ __launch_bounds__(kThreads) void select_kernel(const SelectParams p) {
  __shared__ Tally shared[kSteps];
  __shared__ unsigned warp_above[kWarps], warp_equal[kWarps];
  const int segments = p.axes.segments, h = static_cast<int>(blockIdx.x) / segments,
            s = static_cast<int>(blockIdx.x) % segments;
  const int first_slot = p.axes.segment_slot[s], slots = p.axes.segment_slot[s + 1] - first_slot,
            width = p.lists.width;
  const std::int64_t at = width * (static_cast<std::int64_t>(h) * p.axes.slots + first_slot);
  const std::int64_t* v = p.values + at;
  std::int32_t* out = p.lists.entries + at;
  const int n = width * slots;
  const bool whole = p.axes.whole[s] != 0;
  if (n == 0 || (whole && !p.selection.first_always)) {
    if (threadIdx.x == 0) {
      p.lists.counts[blockIdx.x] = p.cuts.count[blockIdx.x] = 0;
      p.cuts.share[blockIdx.x] = 0;
    }
    return;
  }
  const bool stated = !whole && p.selection.most_of != nullptr;
  const double share = whole || stated ? 1.0 : p.selection.share;
  const unsigned most = whole
                            ? INT_MAX
                            : static_cast<unsigned>(max(
                                  stated ? p.selection.most_of[blockIdx.x] : p.selection.most, 0));

  const bool everything = share >= 1.0;
  const Whole all = add_list<kThreads>(v, n, shared);
  const unsigned long long target = everything ? ULLONG_MAX : target_of(share, all.sum);
  const int top = all.bits;
  const Found wanted =
      find<kThreads>(v, n, everything, target, stated ? most : INT_MAX, top, shared);
  const Found found = wanted.above + wanted.ties > most
                          ? find<kThreads>(v, n, everything, target, most, top, shared)
                          : wanted;
  const unsigned long long threshold = found.threshold;
  const unsigned ties = found.ties;

  // Each warp writes a contiguous range; ranges before it tell where.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int range = (n + kThreads - 1) / kThreads * 32, begin = min(n, warp * range),
            end = min(n, begin + range);
  unsigned own_above = 0, own_equal = 0;
  for (int i = begin + lane; i < end; i += 32) {
    const unsigned long long x = v[i];
    own_above += x > threshold;
    own_equal += x == threshold;
  }
  for (int step = 16; step > 0; step /= 2) {
    own_above += __shfl_xor_sync(~0u, own_above, step);
    own_equal += __shfl_xor_sync(~0u, own_equal, step);
  }
  if (lane == 0) {
    warp_above[warp] = own_above;
    warp_equal[warp] = own_equal;
  }
  __syncthreads();
  unsigned above_before = 0, equal_before = 0;
  for (int w = 0; w < warp; ++w) {
    above_before += warp_above[w];
    equal_before += warp_equal[w];
  }
  // Entry 0 is forced when it would not be chosen: then everything moves up by one.
  const unsigned long long x0 = v[0];
  const bool forced =
      p.selection.first_always && !(x0 > threshold || (x0 == threshold && ties > 0));
  unsigned written = above_before + min(equal_before, ties) + forced;
  if (forced && threadIdx.x == 0) out[0] = 0;
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const unsigned long long x = i < end ? v[i] : 0;
    const unsigned equal = __ballot_sync(~0u, i < end && x == threshold), below = (1u << lane) - 1;
    const bool chosen =
        i < end &&
        (x > threshold || (x == threshold && equal_before + __popc(equal & below) < ties));
    const unsigned mask = __ballot_sync(~0u, chosen);
    if (chosen) out[written + __popc(mask & below)] = i;
    written += __popc(mask);
    equal_before += __popc(equal);
  }
  if (threadIdx.x == kThreads - 1) {
    p.lists.counts[blockIdx.x] = static_cast<std::int32_t>(written);
    const Tally cut = left_out(v, min(n, p.selection.given), wanted, found);
    p.cuts.count[blockIdx.x] = static_cast<std::int32_t>(cut.count);
    p.cuts.share[blockIdx.x] =
        static_cast<float>(static_cast<double>(cut.sum) / static_cast<double>(max(all.sum, 1ull)));
  }
}

}  // namespace

cudaError_t select_heaviest(const std::int64_t* values, int heads, const PatternAxes& axes,
                            const Selection& selection, const PatternLists& lists,
                            const ListCuts& cuts, cudaStream_t stream) {
  if (!(selection.most_of != nullptr || (selection.share > 0 && selection.share <= 1)) ||
      lists.width < 1)
    return cudaErrorInvalidValue;
  if (heads * axes.segments == 0) return cudaSuccess;
  select_kernel<<<heads * axes.segments, kThreads, 0, stream>>>(
      {values, axes, selection, lists, cuts});
  return cudaGetLastError();
}

}  // namespace ballast::cuda

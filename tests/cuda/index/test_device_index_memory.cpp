// What patterns hold on a GPU, and what running them takes, is what the memory model counts.
#include <algorithm>

#include "core/plan/context/sequence_layout.hpp"
#include "core/predict/gpu_index.hpp"
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

class IndexMemory : public CudaTest {
 protected:
  static constexpr int kHeads = 8, kKvHeads = 2, kDim = 128;

  static AttentionOptions options_of(PatternKind pattern) {
    AttentionOptions o;
    o.pattern = pattern;
    o.max_columns = 512, o.max_slashes = 16;
    o.moba_top_k = 4;
    o.flex_threshold = 0.9;
    return o;
  }
  struct Found {
    std::int64_t held = 0, choosing = 0, kernels = 0;
  };
  /// Of one layer over one rank's keys.  Small scores: attention is nearly even.
  Found measured(const std::vector<std::int64_t>& lengths, const AttentionOptions& options) {
    MicroBatch batch;
    batch.align = options.align();
    for (const std::int64_t n : lengths) {
      batch.segments.push_back({static_cast<std::int64_t>(batch.segments.size()), 0, n, 0});
    }
    const std::int64_t tokens = batch.axis_tokens();
    const SequenceLayout layout(LayoutKind::contiguous, tokens, 1, batch.align, batch.align);
    const auto source =
        pattern_source(Communicator(), attention_axes(batch, layout, 0), options, nullptr, nullptr);
    AttentionInputs in;
    in.q = to_gpu(random({tokens, kHeads, kDim}, 0.05), DType::bf16);
    in.k = in.v = to_gpu(random({tokens, kKvHeads, kDim}, 0.05), DType::bf16);
    in.scale = 0.09;
    cuda::scratch(std::size_t{64} << 20);  // what is shared is not this pattern's
    constexpr auto kWork = static_cast<std::size_t>(MemoryCategory::workspace);
    const std::int64_t before = memory_use().current[kWork];
    reset_peak_memory();
    const AttentionWork work = source->shards(in).front();
    const MemoryUse after = memory_use();
    return {after.current[kWork] - before, after.peak[kWork] - before, kernels(work)};
  }
  std::int64_t kernels(const AttentionWork& work) {
    const cuda::PlacedIndex& placed =
        dynamic_cast<const cuda::PatternTwin&>(*work.device()).placed();
    cuda::AttentionForwardArgs forward;
    cuda::AttentionBackwardArgs backward;
    const auto fill = [&](auto& args) {
      args.index = &placed.index;
      args.routed = placed.routed.get();
      args.q_heads = kHeads, args.kv_heads = kKvHeads, args.head_dim = kDim;
    };
    fill(forward), fill(backward);
    return static_cast<std::int64_t>(std::max({cuda::attention_forward_workspace(forward),
                                               cuda::attention_backward_workspace(backward),
                                               cuda::building_bytes(placed.index.shape)}));
  }
  void compare(const std::vector<std::int64_t>& lengths, const AttentionOptions& options,
               double part) {
    std::vector<Segment> segments;
    std::int64_t tokens = 0;
    for (const std::int64_t n : lengths) {
      segments.push_back({static_cast<std::int64_t>(segments.size()), 0, n, 0});
      tokens += (n + options.align() - 1) / options.align() * options.align();
    }
    const GpuIndexBytes told =
        gpu_index_bytes({options, kHeads, kKvHeads, kDim}, segments, {tokens, 1, 1, {{tokens}}});
    const Found found = measured(lengths, options);
    const auto near = [&](std::int64_t a, std::int64_t b, const char* what) {
      EXPECT_NEAR(static_cast<double>(a), static_cast<double>(b),
                  part * static_cast<double>(b) + (64 << 10))
          << what << ", " << name(options.pattern) << ", " << lengths.size() << " segments, seed "
          << seed;
    };
    near(told.micro_batch + told.layer(0), found.held, "held");
    near(told.micro_batch + told.layer(0) + told.choosing, found.choosing, "while it is chosen");
    near(told.kernels, found.kernels, "kernels");
  }
};

// Offsets of the transposed lists have 32 bits.  No GPU has a part in it: nothing is computed.
TEST(IndexOffsets, MorePairsOfBlocksThanTheyCountAreRefused) {
  cuda::IndexShape shape;
  shape.q_tokens = shape.k_tokens = 64;
  shape.q_heads = shape.index_heads = shape.kv_heads = 1;
  shape.runs = shape.row_masks = 1;
  shape.block_pairs = 1;
  EXPECT_GT(cuda::index_memory(shape, host_device()).numel(), 0);
  shape.block_pairs = std::int64_t{1} << 31;
  try {
    cuda::index_memory(shape, host_device());
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("2147483648 pairs"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("mesh.sp"), std::string::npos) << e.what();
  }
}

TEST_F(IndexMemory, RoutedListsTakeWhatIsCounted) {
  if (!cuda::routed_fits(kDim, 256)) GTEST_SKIP() << "routed lists have kernels for sm_90 alone";
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{8192}, {5000, 300, 3000}})
    compare(lengths, options_of(PatternKind::moba), 0.03);
}

TEST_F(IndexMemory, ListsOfEvenAttentionTakeAboutWhatIsCounted) {
  AttentionOptions blocks = options_of(PatternKind::moba);
  blocks.moba_block = 64;  // no routed lists
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{8192}, {5000, 300, 3000}})
    for (const AttentionOptions& options :
         {blocks, options_of(PatternKind::vertical_slash), options_of(PatternKind::xattention),
          options_of(PatternKind::flexprefill)})
      compare(lengths, options, 0.15);
}

}  // namespace
}  // namespace ballast::test

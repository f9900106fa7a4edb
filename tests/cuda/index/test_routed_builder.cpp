// Attention under MoBA by routed lists against the host's under the same choice, in fp64: packed
// segments with padding, a chunk over stored keys.
#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/index/routed_builder.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

/// Segments [first query, end) whose keys begin at 0, padded to 64.
AttentionAxes axes_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& segments) {
  AttentionAxes axes;
  axes.align = kBlock;
  AxisRanges keys;
  const auto add = [](AxisRanges& to, std::int32_t segment, std::int64_t begin, std::int64_t end) {
    to.push_back({segment, begin, end - begin});
    const std::int64_t padding = (kBlock - (end - begin) % kBlock) % kBlock;
    if (padding > 0) to.push_back({-1, 0, padding});
  };
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto [begin, end] = segments[s];
    axes.first_query.push_back(begin);
    add(axes.queries, static_cast<std::int32_t>(s), begin, end);
    add(keys, static_cast<std::int32_t>(s), 0, end);
  }
  axes.keys = {keys};
  return axes;
}

struct Results {
  Tensor o, lse, dq, dk, dv;
};

class CudaRouted : public CudaTest {
 protected:
  void TearDown() override {
    if (gpu) cuda::set_deterministic(false);
  }
  /// Whole numbers over 4: means of 128 or 256 of them and all their products are exact, so host
  /// and GPU choose the same blocks.
  Tensor whole(const Shape& shape) {
    Tensor t = Tensor::empty(shape, DType::f64);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<double>()[i] = (static_cast<int>(rng() % 13) - 6) / 4.0;
    return t;
  }
  AttentionWork work_of(const AttentionAxes& axes, const AttentionOptions& options, const Tensor& q,
                        const Tensor& k, double scale) {
    const auto source = pattern_source(Communicator(), axes, options, nullptr, nullptr);
    AttentionInputs in;
    in.q = q;
    in.k = in.v = k;
    in.scale = scale;
    return source->shards(in).front();
  }
  /// Host and GPU alike; on the GPU over NaN, with o of `type`.
  Results attend(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& d_o, double scale, DType type) {
    const bool on_gpu = q.space() == Space::cuda;
    const auto make = [&](const Shape& shape, DType t) {
      return on_gpu ? unwritten(shape, t) : Tensor::empty(shape, DType::f64);
    };
    Results r{make(q.shape(), type), make({q.size(1), q.size(0)}, DType::f32),
              make(q.shape(), DType::f32), make(k.shape(), DType::f32),
              make(k.shape(), DType::f32)};
    Tensor delta = make(r.lse.shape(), DType::f32);
    attention_forward(work, q, k, v, scale, r.o, r.lse);
    attention_delta(r.o, d_o, delta);
    attention_backward(work, q, k, v, scale, r.lse, delta, d_o, r.dq, r.dk, r.dv,
                       {.dq = false, .dkv = false});
    return r;
  }
};

TEST_F(CudaRouted, AttentionIsTheHostsUnderTheSameChoice) {
  if (!cuda::routed_fits(128, 256)) GTEST_SKIP() << "routed lists have kernels for sm_90 alone";
  struct Case {
    std::vector<std::pair<std::int64_t, std::int64_t>> segments;
    int block, top_k, heads, kv_heads, dim;
  };
  const std::vector<Case> cases = {{{{0, 3100}, {0, 100}, {0, 1500}}, 256, 3, 4, 2, 128},
                                   {{{1088, 3000}, {0, 700}}, 128, 5, 3, 1, 64},
                                   // Nearly everything: the first 11 of 13 blocks list nothing.
                                   {{{0, 3100}, {0, 500}}, 256, 11, 4, 2, 128}};
  for (const Case& c : cases) {
    const AttentionAxes axes = axes_of(c.segments);
    AttentionOptions options;
    options.pattern = PatternKind::moba;
    options.moba_block = c.block;
    options.moba_top_k = c.top_k;
    const std::int64_t rows = axes.q_tokens(), keys = token_count(axes.keys[0]);
    const double scale = 0.1;
    const Tensor q = whole({rows, c.heads, c.dim}), k = whole({keys, c.kv_heads, c.dim}),
                 v = random(k.shape()), d_o = random(q.shape());
    const auto as_bf16 = [&](const Tensor& t) { return to_gpu(t, DType::bf16); };
    const AttentionWork host = work_of(axes, options, q, k, scale),
                        found = work_of(axes, options, as_bf16(q), as_bf16(k), scale);
    const auto& twin = dynamic_cast<const cuda::PatternTwin&>(*found.device());
    ASSERT_NE(twin.placed().routed, nullptr);
    EXPECT_EQ(found.pairs_per_head(), host.pairs_per_head());
    const Results expected = attend(host, q, k, v, d_o, scale, DType::f64);
    for (const DType type : {DType::bf16, DType::f32}) {
      const Results r =
          attend(found, as_bf16(q), as_bf16(k), as_bf16(v), as_bf16(d_o), scale, type);
      EXPECT_CLOSE(r.o, expected.o, kBf16);
      EXPECT_CLOSE(r.dq, expected.dq, 1e-2);
      EXPECT_CLOSE(r.dk, expected.dk, 1e-2);
      EXPECT_CLOSE(r.dv, expected.dv, 1e-2);
    }
  }
}

TEST_F(CudaRouted, BlockListsRemainWhereTheyMust) {
  if (!cuda::routed_fits(128, 256)) GTEST_SKIP() << "routed lists have kernels for sm_90 alone";
  const auto routed = [&](const AttentionAxes& axes, int block, int top_k) {
    AttentionOptions options;
    options.pattern = PatternKind::moba;
    options.moba_block = block;
    options.moba_top_k = top_k;
    const Tensor q = to_gpu(random({axes.q_tokens(), 2, 64}), DType::bf16),
                 k = to_gpu(random({token_count(axes.keys[0]), 2, 64}), DType::bf16);
    const AttentionWork work = work_of(axes, options, q, k, 0.1);
    return dynamic_cast<const cuda::PatternTwin&>(*work.device()).placed().routed != nullptr;
  };
  const AttentionAxes axes = axes_of({{0, 4096}});
  EXPECT_TRUE(routed(axes, 256, 3));
  EXPECT_TRUE(routed(axes, 256, 15)) << "one row block lists, the others are dense";
  EXPECT_FALSE(routed(axes, 256, 16)) << "every block is chosen: dense";
  EXPECT_FALSE(routed(axes, 192, 3)) << "no kernels for such blocks";
  cuda::set_deterministic(true);
  EXPECT_FALSE(routed(axes, 256, 3)) << "dQ is added in any order";
}

}  // namespace
}  // namespace ballast::test

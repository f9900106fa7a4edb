// Recall measured on a GPU against the host's: computed pairs, queries, maxima and sums.
#include <array>
#include <tuple>

#include "core/plan/attention/head_rules.hpp"
#include "kernels/attention/recall_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "parallel/pattern/recall.hpp"
#include "tests/cuda/index/spread.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

constexpr int kQueryHeads = 4, kKeyHeads = 2;

AttentionOptions options_of(const char* pattern, std::int64_t block) {
  AttentionOptions options;
  options.pattern = parse_or_fail<PatternKind>(pattern, "pattern");
  options.moba_block = block;
  options.moba_top_k = 3;
  options.max_columns = 300;
  auto heads = std::make_shared<HeadTable>(1, kQueryHeads);
  heads->at(0, 0) = {HeadPattern::a_shape, 128, 256};
  heads->at(0, 1) = {HeadPattern::vertical_slash, 0, 0, 100, 3};
  heads->at(0, 2) = {HeadPattern::block_sparse, 0, 0, 0, 0, 4};
  options.heads = heads;
  return options;
}

class CudaRecall : public CudaTest {
 protected:
  struct Side {
    AttentionInputs in;
    std::unique_ptr<IndexSource> source;
    std::vector<AttentionWork> calls;
    std::unique_ptr<RecallScores> scores;
  };
  Side side(const Spread& spread, const AttentionOptions& options, const AxisRanges& rows,
            const Tensor& q, const Tensor& k, bool on_gpu) {
    Side made;
    const AttentionAxes& axes = spread.axes[0];
    const Tensor queries = spread.take(q, axes.queries), keys = spread.take(k, axes.queries);
    made.in.q = on_gpu ? to_gpu(queries, DType::bf16) : as_f32(queries);
    made.in.k = made.in.v = on_gpu ? to_gpu(keys, DType::bf16) : as_f32(keys);
    made.in.scale = 0.125;
    made.source = pattern_source(Communicator(), axes, options, nullptr, nullptr);
    made.calls = made.source->shards(made.in);
    made.scores = recall_scores(axes, spread.axis, rows, on_gpu ? Space::cuda : Space::host);
    return made;
  }
  static std::vector<std::int64_t> numbers(const Tensor& t) {
    const Tensor host = t.to(host_device());
    return {host.data<std::int64_t>(), host.data<std::int64_t>() + host.numel()};
  }
  static double share(const std::int64_t* sums) {
    return static_cast<double>(sums[1] + sums[2] + sums[3] + sums[4]) /
           static_cast<double>(sums[0]);
  }
};

TEST_F(CudaRecall, BitsMaximaAndSumsAreTheHosts) {
  for (const auto& [pattern, dim, block] : {std::tuple{"vertical_slash", 64, 64},
                                            {"vertical_slash", 128, 64},
                                            {"moba", 64, 64},
                                            {"moba", 128, 128},
                                            {"moba", 64, 256},
                                            {"xattention", 96, 64},
                                            {"by_head", 256, 64}}) {
    SCOPED_TRACE(fmt::format("{} {} {} seed {}", pattern, dim, block, seed));
    const AttentionOptions options = options_of(pattern, block);
    const Spread spread({2000, 90, 1500, 0, 513}, LayoutKind::contiguous, 1, options.align());
    AxisRanges rows;
    for (const SampledQuery& query :
         sample_queries(spread.axes[0], spread.axis, 24, options.whole_tokens(), seed, 10, 0))
      rows.push_back({query.segment, query.position, 1});
    ASSERT_GT(rows.size(), 48u);
    const Tensor q = random({spread.rows(), kQueryHeads, dim}, 1.5),
                 k = random({spread.rows(), kKeyHeads, dim});
    Side host = side(spread, options, rows, q, k, false),
         on_gpu = side(spread, options, rows, q, k, true);
    const Tensor bits = host.scores->computed(host.calls);
    const std::vector<std::int64_t> expected = numbers(bits);
    EXPECT_EQ(numbers(on_gpu.scores->computed(host.calls)), expected) << "of the host's pattern";
    const std::vector<std::int64_t> own = numbers(on_gpu.scores->computed(on_gpu.calls));
    ASSERT_EQ(own.size(), expected.size());
    std::int64_t used = 0, apart = 0;
    for (std::size_t i = 0; i < own.size(); ++i)
      used += __builtin_popcountll(expected[i]),
          apart += __builtin_popcountll(own[i] ^ expected[i]);
    EXPECT_LE(apart, used / 100) << "of the GPU's own pattern, ties aside";

    const Tensor queries = host.scores->queries(host.in.q),
                 queries_gpu = on_gpu.scores->queries(on_gpu.in.q);
    EXPECT_EQ(error(queries_gpu, queries), 0);
    const Tensor most = host.scores->maximum(queries, host.in.k, host.in.scale),
                 most_gpu = on_gpu.scores->maximum(queries_gpu, on_gpu.in.k, on_gpu.in.scale);
    EXPECT_CLOSE(most_gpu, most, kFp32);
    const std::vector<std::int64_t> sums = numbers(host.scores->sums(most, bits)),
                                    sums_gpu =
                                        numbers(on_gpu.scores->sums(most_gpu, bits.to(*gpu)));
    ASSERT_EQ(sums.size(), sums_gpu.size());
    for (std::size_t i = 0; i < sums.size(); i += 5) {
      EXPECT_NEAR(share(&sums_gpu[i]), share(&sums[i]), 1e-5) << i / 5;
      for (std::size_t part = 1; part < 5; ++part)
        EXPECT_NEAR(static_cast<double>(sums_gpu[i + part]), static_cast<double>(sums[i + part]),
                    1e-4 * static_cast<double>(sums[i]))
            << i / 5 << " part " << part;
    }
    EXPECT_EQ(numbers(on_gpu.scores->sums(most_gpu, bits.to(*gpu))), sums_gpu)
        << "adding has no order";
  }
}

}  // namespace
}  // namespace ballast::test

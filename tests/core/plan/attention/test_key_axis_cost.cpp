// What planning the attention of a long micro-batch costs one rank: processor time and memory.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <ctime>
#include <new>
#include <vector>

#include "core/plan/attention/key_axis.hpp"

namespace {
std::size_t g_allocated = 0, g_live = 0, g_most = 0;
bool g_counting = false;

void* take(std::size_t bytes) {
  auto* p = static_cast<std::size_t*>(std::malloc(bytes + 16));
  if (p == nullptr) throw std::bad_alloc();
  *p = g_counting ? bytes : 0;
  if (g_counting) {
    g_allocated += bytes;
    g_live += bytes;
    g_most = g_live > g_most ? g_live : g_most;
  }
  return p + 2;
}
void give(void* p) {
  if (p == nullptr) return;
  auto* start = static_cast<std::size_t*>(p) - 2;
  g_live -= *start < g_live ? *start : g_live;
  std::free(start);
}
}  // namespace

void* operator new(std::size_t bytes) { return take(bytes); }
// Sanitizers have one of their own, whose memory the deletes below would not know.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return take(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* p) noexcept { give(p); }
void operator delete(void* p, std::size_t) noexcept { give(p); }

namespace ballast {
namespace {

double cpu_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Cost {
  double cpu_s = 1e9;
  std::size_t bytes = 0;  ///< allocated at once at most
};

/// Axes and the dense patterns of all ring steps of one rank; the least time of five.
Cost plan_cost(const MicroBatch& batch, const SequenceLayout& layout, int rank) {
  Cost cost;
  double pairs = 0;
  for (int trial = 0; trial < 5; ++trial) {
    g_live = g_most = 0;
    g_counting = true;
    const double start = cpu_s();
    {
      const AttentionAxes axes = attention_axes(batch, layout, rank);
      const std::vector<AttentionPattern> patterns = dense_patterns(axes.queries, axes.keys);
      pairs = 0;
      for (const AttentionPattern& pattern : patterns) pairs += pattern.pairs_per_head();
    }
    cost.cpu_s = std::min(cost.cpu_s, cpu_s() - start);
    g_counting = false;
    cost.bytes = g_most;
  }
  double expected = 0;
  for (const auto& [begin, end] : layout.pieces(rank))
    expected += 0.5 * static_cast<double>(end - begin) * static_cast<double>(begin + end + 1);
  if (batch.segments.size() == 1) {
    EXPECT_EQ(pairs, expected);
  }
  return cost;
}

TEST(KeyAxisCost, FourMillionTokensOver64RanksTakeMilliseconds) {
  constexpr std::int64_t tokens = std::int64_t{4} << 20;
  constexpr int ranks = 64;
  const MicroBatch whole{{{0, 0, tokens, 0}}};
  MicroBatch packed;
  for (std::int64_t s = 0; s < 1024; ++s) packed.segments.push_back({s, 0, tokens / 1024, 0});
  const auto cost = [&](const char* what, const MicroBatch& batch, LayoutKind kind) {
    const Cost found = plan_cost(batch, SequenceLayout(kind, tokens, ranks, 64), 17);
    std::printf("%s, %s: %.3f ms, %.0f KiB\n", what, name(kind), 1e3 * found.cpu_s,
                static_cast<double>(found.bytes) / 1024);
    return found;
  };
  const Cost zigzag = cost("one sequence", whole, LayoutKind::zigzag);
  EXPECT_LT(zigzag.cpu_s, 3 * 2e-3);
  EXPECT_LT(zigzag.bytes, std::size_t{1} << 20);
  const Cost documents = cost("1,024 documents", packed, LayoutKind::zigzag);
  EXPECT_LT(documents.cpu_s, 3 * 2e-3);
  EXPECT_LT(documents.bytes, std::size_t{1} << 20);
  // Stripes of 64 are 1,024 ranges a rank: 1.5 MiB for the axes of all, which never lie there
  // together; patterns are shared.
  const Cost striped = cost("one sequence", whole, LayoutKind::striped);
  EXPECT_LT(striped.cpu_s, 3 * 2e-3);
  EXPECT_LT(striped.bytes, std::size_t{1} << 20);
}

}  // namespace
}  // namespace ballast

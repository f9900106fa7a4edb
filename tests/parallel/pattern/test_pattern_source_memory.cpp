// The workspace of choosing patterns is what the memory model counts.
#include <gtest/gtest.h>

#include "core/base/device.hpp"
#include "core/predict/index_workspace.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"

namespace ballast {
namespace {

class PatternMemory : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{71};

  struct Bytes {
    std::int64_t workspace = 0, message = 0;
  };
  struct Case {
    IndexRule rule;
    DType type = DType::f32;
    bool recalls = false;
  };
  Bytes measured(const Data& data, const Case& c, const SequenceLayout& layout) {
    const AttentionInputs in = data.inputs(data.packed(layout, world.rank()), c.type);
    Recorder recorder;
    recorder.enabled = c.recalls;
    recorder.context.step = 0;
    // One of its own, whose receive space nothing has grown.
    const Communicator ring = world.split(0, world.rank());
    const auto source = pattern_source(ring, attention_axes(data.batch, layout, world.rank()),
                                       c.rule.options, nullptr, &recorder);
    constexpr auto kWork = static_cast<std::size_t>(MemoryCategory::workspace);
    constexpr auto kMessage = static_cast<std::size_t>(MemoryCategory::communication);
    const MemoryUse before = memory_use();
    reset_peak_memory();
    source->shards(in);
    // As a stage's memory is that of its fullest rank.
    return {
        world.all_reduce(memory_use().peak[kWork] - before.current[kWork], Reduction::max),
        world.all_reduce(memory_use().peak[kMessage] - before.current[kMessage], Reduction::max)};
  }
  ChoiceBytes told(const Data& data, const Case& c, const SequenceLayout& layout) const {
    return choice_bytes(
        index_work(c.rule, data.batch.segments, world.size(), false),
        {kHeads, kKvHeads, kDim, layout.local_tokens(world.rank()), world.size(), c.type});
  }
  void compare(const std::vector<std::int64_t>& lengths, const Case& c) {
    const Data data(lengths, c.rule.options, draw);
    const SequenceLayout layout(LayoutKind::striped, data.batch.axis_tokens(), world.size(), 64,
                                c.rule.options.align());
    const Bytes found = measured(data, c, layout);
    const ChoiceBytes bytes = told(data, c, layout);
    const auto workspace = static_cast<double>(std::max(bytes.recall, bytes.observed)),
               sent = static_cast<double>(bytes.message + bytes.reduced);
    if (world.size() == 1 && !c.recalls) {
      EXPECT_EQ(found.workspace, bytes.observed);
    }
    // Recall's queries are drawn; of short segments one rank of a ring has more keys than others.
    const double part = world.size() == 1 ? 0.05 : 0.16;
    EXPECT_NEAR(static_cast<double>(found.workspace), workspace, part * workspace);
    EXPECT_NEAR(static_cast<double>(found.message), sent, part * sent);
  }
  static Case case_of(const std::string& pattern, IndexSelection selection) {
    Case c;
    c.rule.options = options_of(pattern);
    c.rule.options.selection = selection;
    c.rule.options.stretch = 128;
    return c;
  }
};

TEST_F(PatternMemory, ObservedRowsTakeWhatIsCounted) {
  SCOPED_TRACE(draw.trace());
  for (const IndexSelection selection : {IndexSelection::last, IndexSelection::causal})
    for (const DType type : {DType::f32, DType::f64}) {
      Case c = case_of("vertical_slash", selection);
      c.type = type;
      compare({2048}, c);
      compare({1900, 40, 577, 700}, c);
    }
}

TEST_F(PatternMemory, ACausalSelectionHoldsFewOfItsScoresAtATime) {
  SCOPED_TRACE(draw.trace());
  const Case c = case_of("vertical_slash", IndexSelection::causal);
  const std::int64_t n = 4096;
  const Data data({n}, c.rule.options, draw);
  const SequenceLayout layout(LayoutKind::striped, n, world.size(), 64, 64);
  const std::int64_t all = kHeads * (n / 128 - 1) * c.rule.options.last_q * n / 2 * 4;
  EXPECT_LT(measured(data, c, layout).workspace, all / world.size() / 4);
}

TEST_F(PatternMemory, RecallTakesWhatIsCounted) {
  SCOPED_TRACE(draw.trace());
  for (const DType type : {DType::f32, DType::f64}) {
    Case c = case_of("moba", IndexSelection::last);
    c.type = type;
    c.recalls = true;
    c.rule.options.recall_every = 1;
    c.rule.options.recall_rows = 64;
    compare({2048, 640}, c);
  }
}

}  // namespace
}  // namespace ballast

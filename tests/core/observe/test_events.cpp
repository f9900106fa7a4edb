// Recorder: identifiers, nesting, flushes with open events, offsets, and its cost.
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "core/base/error.hpp"
#include "core/observe/events.hpp"

namespace ballast {
namespace {

/// Advances one second at each mark, so that every time is known.
class CountingClock final : public Clock {
 public:
  std::int64_t mark(Queue) override { return next_++; }
  double seconds(std::int64_t mark) override { return static_cast<double>(mark); }

 private:
  std::int64_t next_ = 0;
};

std::vector<Event> drain(Recorder& recorder) {
  std::vector<Event> events;
  recorder.flush(
      [&](std::span<const Event> e) { events.insert(events.end(), e.begin(), e.end()); });
  return events;
}

TEST(Recorder, KindNamesAreDistinct) {
  std::set<std::string> names;
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    EXPECT_STRNE(name(kind), "unknown");
    EXPECT_TRUE(names.insert(name(kind)).second) << name(kind);
  }
  EXPECT_EQ(static_cast<int>(EventKind::idle), kEventKinds - 1)
      << "kEventKinds does not count the kinds";
  EXPECT_STREQ(name(static_cast<EventKind>(kEventKinds)), "unknown");
}

TEST(Recorder, EventsInheritTheContextOfTheirBegin) {
  CountingClock clock;
  Recorder recorder(clock);
  recorder.context.step = 3;
  recorder.context.layer = 2;
  const auto outer = recorder.begin(EventKind::layer_forward);  // 0
  recorder.context.inner = 1;
  {
    Scope scope(&recorder, EventKind::attention_forward);  // 1
    scope.flops = 8;
    scope.bytes = 16;
  }                           // 2
  recorder.end(outer, 5, 7);  // 3
  const auto events = drain(recorder);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, EventKind::layer_forward);
  EXPECT_EQ(events[0].step, 3);
  EXPECT_EQ(events[0].inner, -1);
  EXPECT_EQ(events[0].begin_s, 0);
  EXPECT_EQ(events[0].end_s, 3);
  EXPECT_EQ(events[0].flops, 5);
  EXPECT_EQ(events[0].bytes, 7);
  EXPECT_EQ(events[1].inner, 1);
  EXPECT_EQ(events[1].layer, 2);
  EXPECT_EQ(events[1].begin_s, 1);
  EXPECT_EQ(events[1].end_s, 2);
  EXPECT_EQ(events[1].flops, 8);
  EXPECT_EQ(events[1].bytes, 16);
  EXPECT_TRUE(drain(recorder).empty());
}

TEST(Recorder, OpenEventsOutliveFlushes) {
  CountingClock clock;
  Recorder recorder(clock);
  const auto step = recorder.begin(EventKind::step);
  const auto op = recorder.begin(EventKind::forward);
  { Scope inner(&recorder, EventKind::head); }
  EXPECT_EQ(drain(recorder).size(), 1u);
  { Scope inner(&recorder, EventKind::optimizer); }
  EXPECT_EQ(drain(recorder).size(), 1u);
  recorder.end(op);
  recorder.end(step);
  const auto events = drain(recorder);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, EventKind::step);
  EXPECT_EQ(events[1].kind, EventKind::forward);
  EXPECT_LT(events[0].begin_s, events[1].begin_s);
  EXPECT_THROW(recorder.end(op), Error);
  EXPECT_THROW(recorder.end(12345), Error);
  const auto twice = recorder.begin(EventKind::data);
  recorder.end(twice);
  EXPECT_THROW(recorder.end(twice), Error);
}

TEST(Recorder, OffsetShiftsEveryTime) {
  CountingClock clock;
  Recorder recorder(clock);
  recorder.set_offset(100);
  { Scope scope(&recorder, EventKind::data); }
  const auto events = drain(recorder);
  EXPECT_EQ(events.at(0).begin_s, 100);
  EXPECT_EQ(events.at(0).end_s, 101);
  EXPECT_EQ(recorder.now(), 102);
}

TEST(Recorder, DisabledOrAbsentRecordsNothing) {
  Recorder recorder;
  recorder.enabled = false;
  recorder.end(recorder.begin(EventKind::step));
  { Scope scope(&recorder, EventKind::forward); }
  { Scope scope(nullptr, EventKind::forward); }
  EXPECT_TRUE(drain(recorder).empty());
  const auto before = [&] {
    recorder.enabled = true;
    return recorder.begin(EventKind::validation);
  }();
  recorder.enabled = false;  // an event begun while enabled still ends
  recorder.end(before);
  EXPECT_EQ(drain(recorder).size(), 1u);
}

TEST(Recorder, LastEventNamesPlaceAndState) {
  Recorder recorder;
  EXPECT_EQ(recorder.last_event(), "no event yet");
  recorder.context.step = 7;
  recorder.context.layer = 0;
  const auto handle = recorder.begin(EventKind::ring_wait);
  EXPECT_EQ(recorder.last_event(), "in ring_wait step=7 layer=0");
  recorder.flush({});
  EXPECT_EQ(recorder.last_event(), "in ring_wait step=7 layer=0");
  recorder.end(handle);
  EXPECT_EQ(recorder.last_event(), "after ring_wait step=7 layer=0");
  recorder.flush({});
  EXPECT_EQ(recorder.last_event(), "after ring_wait step=7 layer=0");
}

TEST(Recorder, AFailingSinkDoesNotKeepTheEvents) {
  Recorder recorder;
  { Scope scope(&recorder, EventKind::data); }
  EXPECT_THROW(recorder.flush([](std::span<const Event>) { fail("disk full"); }), Error);
  EXPECT_TRUE(drain(recorder).empty());
}

TEST(Recorder, HostClockAdvancesInSeconds) {
  Recorder recorder;
  const double before = recorder.now();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double passed = recorder.now() - before;
  EXPECT_GE(passed, 0.019);
  EXPECT_LT(passed, 5.0);
}

TEST(Recorder, CostsFarLessThanAnyEventItRecords) {
  Recorder recorder;
  constexpr int kEvents = 200000;
  double best = 1;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kEvents; ++i) {
      Scope scope(&recorder, EventKind::layer_forward);
      if (i % 4096 == 4095) recorder.flush({});
    }
    best = std::min(
        best,
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kEvents);
  }
  RecordProperty("ns_per_event", std::to_string(best * 1e9));
  std::printf("recorder: %.0f ns an event, begin, end and flush\n", best * 1e9);
  EXPECT_LT(best, 5e-6);  // generous for a busy machine; docs/metrics.md has the measured figure
}

}  // namespace
}  // namespace ballast

// Plans as JSON: the same plan comes back, damaged text does not, and it compresses.
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/plan_json.hpp"
#include "core/plan/plan_step.hpp"

namespace ballast {
namespace {

using Json = nlohmann::ordered_json;

/// Random values of every field, sound or not.
class RandomValues {
 public:
  explicit RandomValues(std::uint64_t seed) : seed_(seed) {}
  std::int64_t draw(std::int64_t n) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
  }
  int small(int n) { return static_cast<int>(draw(n)); }

  StepPlan plan() {
    StepPlan p;
    p.step = draw(1000) - 1;
    p.mesh = {1 + small(9), 1 + small(9), 1 + small(9), 1 + small(9),
              1 + small(9), 1 + small(9), small(9)};
    p.ep = 1 + small(4);
    p.zero = small(4);
    p.backward = small(2) == 0;
    p.normaliser = static_cast<LossNormaliser>(small(4));
    p.loss_tokens = draw(std::int64_t{1} << 40);
    p.layer_begin.resize(static_cast<std::size_t>(small(4)));
    for (auto& layer : p.layer_begin) layer = draw(100);
    p.layouts.resize(static_cast<std::size_t>(small(3)));
    for (LayoutRule& l : p.layouts) l = {static_cast<LayoutKind>(small(5)), draw(999), draw(99)};
    p.micro_batches.resize(static_cast<std::size_t>(small(6)));
    for (PlannedMicroBatch& m : p.micro_batches) m = micro_batch();
    p.schedules.resize(static_cast<std::size_t>(small(3)));
    for (Schedule& s : p.schedules) s = schedule();
    p.lanes.resize(static_cast<std::size_t>(small(5)));
    for (PlannedLane& l : p.lanes) {
      l.schedule = small(9);
      for (int i = small(4); i > 0; --i) l.micro_batches.push_back(small(99));
    }
    p.collectives.resize(static_cast<std::size_t>(small(5)));
    for (PlannedCollective& c : p.collectives)
      c = {static_cast<CollectiveKind>(small(5)), small(9), small(9) - 1,
           draw(std::int64_t{1} << 50)};
    return p;
  }
  Schedule schedule() {
    Schedule s;
    s.stages.resize(static_cast<std::size_t>(small(4)));
    for (auto& ops : s.stages)
      for (int i = small(7); i > 0; --i)
        ops.push_back({static_cast<OpKind>(small(10)), small(99), small(3), small(3) - 1,
                       static_cast<Payload>(small(3))});
    return s;
  }

 private:
  std::uint64_t bits() { return random_bits(seed_, stream_of("plan_json"), count_++); }
  PlannedMicroBatch micro_batch() {
    PlannedMicroBatch m;
    for (int i = small(4); i > 0; --i)
      m.segments.push_back({draw(std::int64_t{1} << 50), draw(1 << 20), draw(1 << 20), draw(99)});
    m.group = {small(9), 1 + small(4)};
    m.split = {1 + small(4), 1 + small(3), 1 + small(3)};
    m.layout = small(2);
    m.round = small(9);
    m.chunk = small(3);
    m.recompute_layers = small(3) - 1;
    m.align = 1 + small(2) * 63;
    m.loss_weight = random_uniform(seed_, stream_of("weight"), count_++) * 1e-6;
    m.tuning = {draw(3), draw(3), small(2) == 0};
    return m;
  }
  std::uint64_t seed_, count_ = 0;
};

TEST(PlanJson, RandomPlansComeBack) {
  const std::uint64_t plans = std::getenv("BALLAST_TEST_FULL") != nullptr ? 10000 : 1000;
  for (std::uint64_t seed = 0; seed < plans; ++seed) {
    const StepPlan plan = RandomValues(seed).plan();
    const std::string text = to_json(plan).dump();
    const StepPlan back = step_plan_from_json(Json::parse(text));
    ASSERT_EQ(back.hash(), plan.hash()) << text;
    ASSERT_EQ(back.micro_batches, plan.micro_batches);
    ASSERT_EQ(back.lanes, plan.lanes);
    ASSERT_EQ(back.collectives, plan.collectives);
    ASSERT_EQ(to_json(back).dump(), text);
  }
}

/// The steps as to_json writes them.
void expect_written(const std::vector<RingStep>& steps, const Json& list) {
  ASSERT_EQ(list.size(), steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const RingStep& step = steps[i];
    Json expected{{"outer", step.outer}, {"inner", step.inner}, {"shard", step.shard}};
    const auto hop = [&](const char* key, const std::optional<RingHop>& h) {
      if (h)
        expected[key] = Json{{"to", h->to},
                             {"from", h->from},
                             {"send", h->send_shard},
                             {"recv", h->recv_shard},
                             {"complete", h->complete}};
    };
    hop("kv_inner", step.kv_inner), hop("kv_outer", step.kv_outer);
    hop("dkv_inner", step.dkv_inner), hop("dkv_outer", step.dkv_outer);
    if (!step.release.empty()) expected["release"] = step.release;
    EXPECT_EQ(list[i], expected);
  }
}

TEST(PlanJson, RingsAreWrittenWhole) {
  for (const auto& [outer, inner] : {std::pair{1, 1}, {1, 4}, {3, 1}, {2, 4}, {4, 2}})
    for (int rank = 0; rank < outer * inner; ++rank) {
      const RingPlan plan = plan_ring(rank, outer, inner);
      const Json json = Json::parse(to_json(plan).dump());
      EXPECT_EQ(json.at("rank"), rank);
      EXPECT_EQ(json.at("outer"), outer);
      EXPECT_EQ(json.at("inner"), inner);
      EXPECT_EQ(json.at("kv_buffers"), plan.kv_buffers);
      EXPECT_EQ(json.at("dkv_buffers"), plan.dkv_buffers);
      expect_written(plan.forward, json.at("forward"));
      expect_written(plan.backward, json.at("backward"));
    }
}

TEST(PlanJson, RefusesDamagedText) {
  StepPlan plan;
  plan.lanes.resize(1);
  plan.schedules = {{{{Op{OpKind::forward, 0}, Op{OpKind::backward, 0}}}}};
  plan.micro_batches.resize(1);
  plan.micro_batches[0].segments = {{7, 0, 5, 5}};
  const Json whole = to_json(plan);
  const auto refused = [&](const std::string& part, const std::function<void(Json&)>& change) {
    Json json = whole;
    change(json);
    try {
      step_plan_from_json(json);
      ADD_FAILURE() << "accepted without " << part;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  for (const char* key : {"format", "hash", "mesh", "normaliser", "layouts", "micro_batches",
                          "op_kinds", "schedules", "lanes", "collectives"})
    refused(key, [&](Json& json) { json.erase(key); });
  refused("format 1", [](Json& json) { json["format"] = 1; });
  refused("the text says", [](Json& json) { json["step"] = 9; });
  refused("\"jump\" is unknown", [](Json& json) { json["op_kinds"][0] = "jump"; });
  refused("outside its list", [](Json& json) { json["schedules"][0][0]["kind"][0] = 99; });
  refused("entries of micro_batch",
          [](Json& json) { json["schedules"][0][0]["micro_batch"].push_back(0); });
  refused("plan", [](Json& json) { json["lanes"] = "none"; });
}

std::size_t compressed(const std::string& text) {
  uLongf size = compressBound(text.size());
  std::vector<Bytef> out(size);
  EXPECT_EQ(
      compress2(out.data(), &size, reinterpret_cast<const Bytef*>(text.data()), text.size(), 6),
      Z_OK);
  return size;
}

// A store of plans of a long run stays small: at most 100 bytes a segment, also where every rank
// has a schedule of its own and a micro-batch one segment.
TEST(PlanJson, CompressesTo100BytesASegment) {
  for (const Batching method :
       {Batching::none, Batching::packed, Batching::hbp, Batching::chunkflow})
    for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble}) {
      StepOptions options;
      options.mesh.dp = options.batching.dp = 16;
      options.mesh.pp = 4;
      options.batching.method = method;
      options.batching.groups = {{4096, 1, -1}, {16384, 2, 1}, {65536, 4, 2}};
      options.batching.sample_cost = [](std::int64_t t) { return static_cast<double>(t); };
      options.pipeline.schedule = schedule;
      options.pipeline.search = 8;
      options.layer_begin = {0, 1, 2, 3};
      options.stage_elements = {1, 1, 1, 1};
      std::vector<SampleLength> samples;
      for (int i = 0; i < 16 * 8; ++i) {
        const double u = random_uniform(1, stream_of("lengths"), static_cast<std::uint64_t>(i));
        const auto tokens = static_cast<std::int64_t>(1 + u * u * u * 16000);
        samples.push_back({i * 7919 % 100003, tokens, tokens - 1});
      }
      const StepPlan plan = plan_step(12345, samples, options);
      std::size_t segments = 0;
      for (const PlannedMicroBatch& m : plan.micro_batches) segments += m.segments.size();
      const std::size_t bytes = compressed(to_json(plan).dump());
      EXPECT_LE(bytes, 100 * segments) << method << " " << schedule << ": " << segments
                                       << " segments, " << plan.schedules.size() << " schedules";
      std::printf("%s %s: %zu bytes for %zu segments, %zu schedules\n", name(method),
                  name(schedule), bytes, segments, plan.schedules.size());
    }
}

}  // namespace
}  // namespace ballast

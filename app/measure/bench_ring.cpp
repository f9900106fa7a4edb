// bench ring: ring attention over all ranks of the launch, forward and backward, against one rank's
// time of the whole; its communication alone; its results against the whole's, and the whole's
// against a sampled fp64 reference.
#include <algorithm>
#include <cmath>
#include <optional>

#include "app/measure/attention_sample.hpp"
#include "app/measure/bench.hpp"
#include "app/measure/step_profile.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "parallel/comm/waits.hpp"
#include "parallel/context/ring_attention.hpp"
#include "parallel/pattern/fixed_sources.hpp"

namespace ballast {
namespace {

struct RingProblem {
  std::int64_t tokens, q_heads, kv_heads, head_dim;
  DType type;
  std::uint64_t seed;
  DType sums() const { return type == DType::bf16 ? DType::f32 : type; }
};

/// One rank's side of a ring (of one rank: the whole): operands, results and the executor.
struct RingSide {
  RingGroup group;
  MicroBatch batch;
  SequenceLayout layout;
  AttentionInputs in;
  Tensor d_o, o, lse, dq, dk, dv;
  std::unique_ptr<RingAttention> attention;

  RingSide(const RingProblem& p, const RingGroup& group_, LayoutKind kind, std::int64_t stripe,
           Device& device)
      : group(group_),
        batch{{{0, 0, p.tokens, p.tokens}}},
        layout(kind, p.tokens, group.plan.ranks(), stripe) {
    const std::int64_t n = layout.local_tokens(group.plan.rank);
    const auto values = [&](const char* what, std::int64_t heads) {
      return attention_values(p.seed, what, n, heads, p.head_dim, p.type,
                              [&](std::int64_t i) { return layout.global(group.plan.rank, i); })
          .to(device);
    };
    in.q = values("bench q", p.q_heads), in.k = values("bench k", p.kv_heads),
    in.v = values("bench v", p.kv_heads), d_o = values("bench d_o", p.q_heads);
    in.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
    o = Tensor::empty(in.q.shape(), p.type, device),
    lse = Tensor::empty({p.q_heads, n}, p.sums(), device);
    dq = Tensor::empty(in.q.shape(), p.type, device),
    dk = Tensor::empty(in.k.shape(), p.type, device),
    dv = Tensor::empty(in.k.shape(), p.type, device);
    attention = std::make_unique<RingAttention>(
        group, dense_source(batch, layout, group.plan.rank, nullptr), nullptr);
  }
  void forward() { attention->forward(in, o, lse); }
  void backward() { attention->backward(in, o, lse, d_o, dq, dk, dv); }
};

struct Flight {
  int complete;
  RingBuffers::Lease sent, received;
  Pending pending;
};

Flight post(const RingSide& side, const RingHop& hop, DType type, RingBuffers& buffers,
            Device& device) {
  const auto buffer = [&](int shard) {
    return buffers.take({2, side.layout.local_tokens(shard), side.in.k.size(1), side.in.k.size(2)},
                        type, device);
  };
  Flight flight{hop.complete, buffer(hop.send_shard), buffer(hop.recv_shard), {}};
  const HopTransfers transfers = hop_transfers(hop, flight.received.tensor, flight.sent.tensor);
  flight.pending = side.group.cp.exchange(transfers.list, transfers.channel);
  return flight;
}

/// The transfers of one pass with nothing between them: hops are posted and completed at the steps
/// that the plan says.
void transfers_alone(const RingSide& side, const std::vector<RingStep>& steps, DType kv_type,
                     DType dkv_type, RingBuffers& buffers, Device& device) {
  std::vector<Flight> flights;
  const auto post_if = [&](const std::optional<RingHop>& hop, DType type) {
    if (hop) flights.push_back(post(side, *hop, type, buffers, device));
  };
  for (int t = 0; t < static_cast<int>(steps.size()); ++t) {
    post_if(steps[t].kv_inner, kv_type), post_if(steps[t].kv_outer, kv_type),
        post_if(steps[t].dkv_inner, dkv_type), post_if(steps[t].dkv_outer, dkv_type);
    for (Flight& f : flights)
      if (f.complete == t) f.pending.complete();
    std::erase_if(flights, [t](const Flight& f) { return f.complete == t; });
  }
}

/// Largest difference over the largest value of the whole, over this rank's rows of `part`; both
/// [tokens, heads, D].
double difference(const Tensor& part_, const Tensor& whole, const SequenceLayout& layout,
                  int rank) {
  const Tensor part = part_.to(host_device());
  const std::int64_t width = part.size(1) * part.size(2);
  double error = 0, top = 0;
  for (std::int64_t i = 0; i < whole.numel(); ++i) top = larger(std::abs(element(whole, i)), top);
  for (std::int64_t i = 0; i < part.size(0); ++i)
    for (std::int64_t x = 0; x < width; ++x)
      error = larger(std::abs(element(part, i * width + x) -
                              element(whole, layout.global(rank, i) * width + x)),
                     error);
  return error / top;
}

/// Wall times of `work` on all ranks together, each from a barrier to the moment when the last
/// rank's device is done.
Timing time_together(std::int64_t repeats, const Communicator& world, Device& device,
                     const std::function<void()>& work) {
  std::vector<double> times;
  for (std::int64_t i = 0; i <= repeats; ++i) {
    device.synchronize();
    world.barrier();
    const double begin = host_clock().seconds(host_clock().mark());
    work();
    device.synchronize();
    const double seconds =
        world.all_reduce(host_clock().seconds(host_clock().mark()) - begin, Reduction::max);
    if (i > 0) times.push_back(seconds);  // the first round warms up
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

BenchResult described(const RingProblem& p, const RingSide& ring, const BenchSettings& settings,
                      const Device& device) {
  const int ranks = ring.group.plan.ranks(), outer = static_cast<int>(settings.integer("outer"));
  const std::int64_t stripe = settings.integer("stripe");
  const std::string layout = name(ring.layout.kind());
  BenchResult result;
  result.text = fmt::format(
      "ring {} {} ranks ({} x {}) {} stripe={} tokens={} q_heads={} kv_heads={} head_dim={} "
      "seed={} on {}\n",
      name(p.type), ranks, outer, ranks / outer, layout, stripe, p.tokens, p.q_heads, p.kv_heads,
      p.head_dim, p.seed, device.description());
  result.json = {{"benchmark", "ring"},    {"device", device.description()},
                 {"dtype", name(p.type)},  {"ranks", ranks},
                 {"cp_outer", outer},      {"cp_inner", ranks / outer},
                 {"layout", layout},       {"stripe", stripe},
                 {"tokens", p.tokens},     {"q_heads", p.q_heads},
                 {"kv_heads", p.kv_heads}, {"head_dim", p.head_dim},
                 {"seed", p.seed}};
  return result;
}

/// Judges the ring's results by the whole's, and those by the reference.  Collective.
void check(const RingProblem& p, const RingSide& ring, const RingSide& whole, std::int64_t samples,
           const Communicator& world, BenchResult& result) {
  AttentionRun run;
  run.scale = whole.in.scale;
  const auto host = [&](const Tensor& t) { return t.to(host_device()); };
  run.o = host(whole.o), run.lse = host(whole.lse), run.dq = host(whole.dq),
  run.dk = host(whole.dk), run.dv = host(whole.dv);
  AttentionErrors errors;
  if (world.rank() == 0) {
    const AxisRanges axis = local_ranges(whole.batch, whole.layout, 0);
    const AttentionPattern index = dense_pattern(axis, axis);
    run.index = &index;
    run.q = host(whole.in.q), run.k = host(whole.in.k), run.v = host(whole.in.v),
    run.d_o = host(whole.d_o);
    errors = sampled_errors(run, samples, p.seed);
  }
  double apart = 0;
  for (const auto& [part, all] :
       {std::pair{&ring.o, &run.o}, {&ring.dq, &run.dq}, {&ring.dk, &run.dk}, {&ring.dv, &run.dv}})
    apart = larger(difference(*part, *all, ring.layout, world.rank()), apart);
  apart = world.all_reduce(apart, Reduction::max);
  result.json["error"] = to_json(errors);
  result.json["error"]["ring_against_whole"] = apart;
  result.text += fmt::format(
      "  error of the whole against fp64, sampled rows: {};  of the ring against the whole: "
      "{:.1e}\n",
      to_string(errors), apart);
  const double limit = error_limit(p.type), worst = larger(errors.worst(), apart);
  check_all(world, worst <= limit,
            fmt::format("bench ring: error {:.1e} is above {:.0e}: the result is wrong\n{}", worst,
                        limit, result.text));
}

/// Bytes a second of one hop of keys and values on a level of the ring while every rank has one in
/// flight; 0 without such hops.  Collective.
double hop_rate(const RingSide& side, std::optional<RingHop> RingStep::*level, DType type,
                std::int64_t repeats, const Communicator& world, Device& device) {
  const std::vector<RingStep>& steps = side.group.plan.forward;
  const auto first =
      std::find_if(steps.begin(), steps.end(), [&](const RingStep& s) { return s.*level; });
  if (first == steps.end()) return 0;
  const RingHop hop = *((*first).*level);
  RingBuffers buffers;
  const Timing timing = time_together(
      repeats, world, device, [&] { post(side, hop, type, buffers, device).pending.complete(); });
  const std::int64_t values =
      2 * side.layout.local_tokens(hop.send_shard) * side.in.k.size(1) * side.in.k.size(2);
  return static_cast<double>(values) * static_cast<double>(size_of(type)) / timing.median_s;
}

struct RingTimings {
  Timing forward, both, transfers, alone;
  double inner_rate = 0, outer_rate = 0;  ///< bytes a second of a hop
};

/// Collective.
RingTimings timings(const RingProblem& p, RingSide& ring, RingSide& whole, std::int64_t repeats,
                    const Communicator& world, Device& device) {
  RingTimings t;
  t.forward = time_together(repeats, world, device, [&] { ring.forward(); });
  t.both = time_together(repeats, world, device, [&] {
    ring.forward();
    ring.backward();
  });
  RingBuffers buffers;
  t.transfers = time_together(repeats, world, device, [&] {
    transfers_alone(ring, ring.group.plan.forward, p.type, p.sums(), buffers, device);
    transfers_alone(ring, ring.group.plan.backward, p.type, p.sums(), buffers, device);
  });
  t.inner_rate = hop_rate(ring, &RingStep::kv_inner, p.type, repeats, world, device);
  t.outer_rate = hop_rate(ring, &RingStep::kv_outer, p.type, repeats, world, device);
  // Every rank computes the whole at once, so that they share the machine as they do in the ring.
  t.alone = time_together(repeats, world, device, [&] {
    whole.forward();
    whole.backward();
  });
  return t;
}

/// Records `rounds` of forward and backward.  Collective.
void profile(RingSide& ring, std::int64_t rounds, StepProfile& recorded, const Communicator& world,
             Device& device, BenchResult& result) {
  device.synchronize();
  world.barrier();
  recorded.start();
  for (std::int64_t i = 0; i < rounds; ++i) {
    ring.forward();
    ring.backward();
    device.synchronize();
    world.barrier();
  }
  recorded.stop(rounds);
  result.text += recorded.text();
  result.json["profile"] = recorded.json();
}

void report(const RingProblem& p, const RingSide& ring, const RingTimings& t, BenchResult& result) {
  const int ranks = ring.group.plan.ranks();
  const double pairs = static_cast<double>(p.q_heads) * ring.batch.attention_pairs(),
               flops = 14.0 * static_cast<double>(p.head_dim) * pairs,
               efficiency = t.alone.median_s / ranks / t.both.median_s;
  result.text += fmt::format("  {:<20} {:>10} {:>10} {:>10} {:>13}\n", "", "median_s", "min_s",
                             "max_s", "TFLOP/s/rank");
  const auto row = [&](const char* what, const char* key, const Timing& timing, double rate) {
    result.text += fmt::format("  {:<20} {:>10.3e} {:>10.3e} {:>10.3e} {:>13}\n", what,
                               timing.median_s, timing.min_s, timing.max_s,
                               rate > 0 ? fmt::format("{:.3f}", rate * 1e-12) : "");
    result.json[key] = to_json(timing);
    if (rate > 0) result.json[key]["tflops_per_rank"] = rate * 1e-12;
  };
  row("forward", "forward", t.forward, flops * 4 / 14 / ranks / t.forward.median_s);
  row("forward + backward", "both", t.both, flops / ranks / t.both.median_s);
  row("one rank, the whole", "whole", t.alone, flops / t.alone.median_s);
  row("transfers alone", "transfers", t.transfers, 0);
  const auto hop = [&](const char* what, const char* key, double rate) {
    if (rate <= 0) return;
    result.text += fmt::format("  {:<20} {:.3f} GB/s\n", what, rate * 1e-9);
    result.json[key] = rate * 1e-9;
  };
  hop("hop inside a ring", "hop_inner_gb_per_s", t.inner_rate);
  hop("hop between rings", "hop_outer_gb_per_s", t.outer_rate);
  result.text += fmt::format("  efficiency {:.3f}\n", efficiency);
  result.text +=
      "# efficiency: one rank's time of the whole / ranks / the ring's time, forward + backward.  "
      "TFLOP/s of useful work: 14 x head_dim x "
      "visible pairs x q_heads.  Hops: keys and values of a shard, while every rank has one in "
      "flight.\n";
  result.json["efficiency"] = efficiency;
}

/// Collective.  An Error that is no CollectiveError is one rank's alone.
BenchResult measure(const RingProblem& p, const BenchSettings& settings, const Communicator& world,
                    Device& device, std::optional<StepProfile>& recorded) {
  const int ranks = world.size(), outer = static_cast<int>(settings.integer("outer"));
  const auto kind = parse_or_fail<LayoutKind>(settings.text("layout"), "sequence layout");
  RingSide ring(p, {world, plan_ring(world.rank(), outer, ranks / outer)}, kind,
                settings.integer("stripe"), device);
  RingSide whole(p, {Communicator(), plan_ring(0, 1, 1)}, LayoutKind::contiguous, 64, device);
  BenchResult result = described(p, ring, settings, device);
  const RingTimings times = timings(p, ring, whole, settings.integer("repeats"), world, device);
  if (settings.boolean("check")) check(p, ring, whole, settings.integer("samples"), world, result);
  report(p, ring, times, result);
  if (recorded) profile(ring, settings.integer("profile", 0), *recorded, world, device, result);
  return result;
}

BenchResult run_ring(const BenchSettings& settings) {
  const Communicator world = Communicator::world();
  const int ranks = world.size(), outer = static_cast<int>(settings.integer("outer"));
  RingProblem p{settings.integer("tokens", 2),
                settings.integer("q_heads"),
                settings.integer("kv_heads"),
                settings.integer("head_dim"),
                DType::f32,
                settings.seed(world)};
  // Settings are the same on every rank: what is wrong with them is found here, by all.
  for (const char* key : {"repeats", "stripe", "samples"}) settings.integer(key);
  settings.boolean("check");
  parse_or_fail<LayoutKind>(settings.text("layout"), "sequence layout");
  require(p.q_heads % p.kv_heads == 0, "bench ring: q_heads = {} is no multiple of kv_heads = {}",
          p.q_heads, p.kv_heads);
  require(ranks % outer == 0, "bench ring: {} ranks do not divide into outer={} nodes", ranks,
          outer);
  std::unique_ptr<BenchDevice> where;
  std::optional<StepProfile> recorded;
  together(world, [&] {
    where = std::make_unique<BenchDevice>(settings);
    p.type = settings.float_type(where->device().space());
    if (settings.integer("profile", 0) > 0)
      recorded.emplace(where->device(), world, "ring", "backend", "forward + backward");
  });
  return measure(p, settings, world, where->device(), recorded);
}

}  // namespace

Benchmark ring_benchmark() {
  return {
      "ring",
      "ring attention over all ranks, against one rank's time of the whole",
      {{"backend", "host", "host or cuda"},
       {"tokens", "4096", "tokens of the one causal sequence"},
       {"outer", "1", "nodes of a hierarchical ring; 1: flat"},
       {"layout", "zigzag", "contiguous, zigzag, striped or shuffled"},
       {"stripe", "64", "tokens of a stripe (striped, shuffled)"},
       {"q_heads", "8", "query heads"},
       {"kv_heads", "2", "key/value heads"},
       {"head_dim", "64", "head dim"},
       {"dtype", "", "host: f32 (when empty) or f64; cuda: bf16"},
       {"repeats", "5", "timed runs"},
       {"check", "true", "compare with the whole on one rank, and that with fp64 on sampled rows"},
       {"profile", "0",
        "rounds after those that are timed whose GPU kernels are recorded, by group"},
       {"samples", "16", "query rows compared with fp64, and a quarter as many keys"},
       {"seed", "", "of the random data; empty: from the clock"}},
      run_ring};
}

}  // namespace ballast

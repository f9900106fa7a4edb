#include "core/predict/rate_costs.hpp"

#include <algorithm>
#include <array>

#include "core/plan/context/ulysses_heads.hpp"
#include "core/plan/pipeline/stage_balance.hpp"

namespace ballast {
namespace {

// Kernels of a layer's forward without attention: two norms, four products, rotation, SwiGLU and
// the additions.
constexpr double kLayerKernels = 10;

// host_core: one core of an AMD EPYC, fp32, OpenBLAS on one thread and this program's attention,
// measured with `ballast bench gemm` and `ballast bench attention`; MPI in shared memory.
// a100: 312 TFLOP/s dense bf16, 2.0 TB/s and 300 GB/s NVLink each way (NVIDIA A100 80GB data
// sheet); 70 % of them in large products and copies, attention 62 and 50 % (FlashAttention-2,
// Figures 4 to 6, head dim 128, causal).
// h100: products and attention as an H200's, whose multiprocessors are the same; 3.35 TB/s (NVIDIA
// H100 SXM data sheet), 83 % of it as on an H200.
// h200: one training step of Qwen2.5-3B at 8K tokens (`bench step`, profile): 703 TFLOP/s in
// products, 550 and 455 in attention, 3.5 TB/s in the optimizer; 302 GB/s in a ring over NVLink.
// Network of all GPUs: one HDR port each, 200 Gb/s, of which 23 GB/s arrive.  Host copies: PCIe 4
// and 5, 16 lanes, of which 80 % arrive.
// fp8: cuBLASLt 13.1 with blocks of 128, 8,192 tokens of Qwen2.5-3B's layers on an H200, 1,149 to
// 1,324 TFLOP/s forward and 1,003 to 1,037 for weight gradients; the others have no such products.
// generic: about a third of an A100, for devices that nobody measured.
constexpr std::array<DeviceRates, 5> kRates = {{
    {"host core", 70e9, 70e9, 30e9, 25e9, 8e9, 3e9, 3e9, 5e-6, 20e-6, 8e9, 1e-6},
    {"A100", 218e12, 218e12, 193e12, 156e12, 1.6e12, 240e9, 23e9, 8e-6, 15e-6, 25e9, 4e-6},
    {"H100", 703e12, 1100e12, 550e12, 455e12, 2.8e12, 302e9, 23e9, 8e-6, 15e-6, 50e9, 3e-6},
    {"H200", 703e12, 1100e12, 550e12, 455e12, 3.5e12, 302e9, 23e9, 8e-6, 15e-6, 50e9, 3e-6},
    {"generic device", 70e12, 70e12, 60e12, 50e12, 0.6e12, 20e9, 10e9, 10e-6, 20e-6, 12e9, 5e-6},
}};

}  // namespace

const DeviceRates& device_rates(DeviceKind kind) {
  return kRates.at(static_cast<std::size_t>(kind));
}

DeviceKind device_kind(const std::string& description) {
  const auto has = [&](const char* word) { return description.find(word) != std::string::npos; };
  if (has("H200")) return DeviceKind::h200;
  if (has("H100")) return DeviceKind::h100;
  if (has("A100")) return DeviceKind::a100;
  if (has("host") || has("Host") || has("CPU") || has("EPYC") || has("Xeon"))
    return DeviceKind::host_core;
  return DeviceKind::generic;
}

RateCosts::RateCosts(const DeviceRates& rates, const WorkShape& work) : rates_(rates), work_(work) {
  const ModelShape& m = work.model;
  const double h = static_cast<double>(m.hidden), i = static_cast<double>(m.intermediate),
               q = static_cast<double>(m.query_heads * m.head_dim),
               kv = static_cast<double>(m.kv_heads * m.head_dim),
               v = static_cast<double>(m.vocabulary);
  const double element = static_cast<double>(work.element_bytes);
  rest_flops_ = part_costs(m, 0).layer;
  head_flops_ = part_costs(m, 0).head;
  // Two norms read and write a row, two additions read two and write one; rotation reads and writes
  // q and k; SwiGLU reads two rows and writes one.
  rest_bytes_ = element * (10 * h + 2 * (q + kv) + 3 * i);
  head_bytes_ = element * (3 * h + 2 * v);
  if (work.fp8) {
    // Inputs of the four products are rounded along rows in forward and along tokens in backward,
    // gradients of their outputs both ways in one pass.
    const double inputs = 2 * h + q + i, outputs = q + 2 * kv + 2 * h + 2 * i;
    round_forward_bytes_ = (element + 1) * inputs;
    round_backward_bytes_ = (element + 1) * inputs + (element + 2) * outputs;
  }
  weight_share_ = m.layers > 0 ? weight_share(m) : 0.5;
}

std::string RateCosts::source() const {
  return std::string("built-in rates of a") + (rates_.name[0] == 'A' ? "n " : " ") + rates_.name;
}

PassTime RateCosts::rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const {
  if (tokens <= 0) return {};
  const double t = static_cast<double>(tokens) / split.ranks();
  const double product = t * rest_flops_ / (work_.fp8 ? rates_.fp8_flops : rates_.matmul_flops),
               other = t * rest_bytes_ / rates_.memory_bytes + kLayerKernels * rates_.launch_s;
  PassTime time;
  time.forward_s = product + other + t * round_forward_bytes_ / rates_.memory_bytes;
  time.weight_s = 2 * product * weight_share_;
  // Frozen weights beside adapters have no gradient of their own.
  const double input = weight_share_ < 0.5 ? product : 2 * product * (1 - weight_share_);
  time.recompute_s = mode == Recompute::full        ? time.forward_s
                     : mode == Recompute::selective ? 0.5 * other
                                                    : 0;
  time.backward_s = input + time.weight_s + 2 * other +
                    t * round_backward_bytes_ / rates_.memory_bytes + time.recompute_s;
  return time;
}

PassTime RateCosts::head(std::int64_t tokens, const ContextSplit& split) const {
  if (tokens <= 0) return {};
  const double t = static_cast<double>(tokens) / split.ranks();
  const double product = t * head_flops_ / rates_.matmul_flops,
               other = t * head_bytes_ / rates_.memory_bytes + 3 * rates_.launch_s;
  // Beside adapters the head is frozen and has no weight gradient.
  return {product + other, (weight_share_ < 0.5 ? 1 : 2) * product + other, 0, 0};
}

PassTime RateCosts::attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                              std::int64_t budget, const ContextSplit& split,
                              Recompute mode) const {
  if (query_tokens <= 0) return {};
  const ModelShape& m = work_.model;
  const double pairs =
      static_cast<double>(query_tokens) *
      computed_keys(query_tokens, prefix_tokens, budget, work_.block_tokens, pattern()) /
      split.ranks();
  const double flops = 4 * pairs * static_cast<double>(m.query_heads * m.head_dim);
  PassTime time;
  time.forward_s = flops / rates_.attention_forward_flops + rates_.launch_s;
  time.recompute_s = mode == Recompute::full ? time.forward_s : 0;
  // Five products in place of two.
  time.backward_s =
      2.5 * flops / rates_.attention_backward_flops + rates_.launch_s + time.recompute_s;
  return time;
}

double RateCosts::transfer(double bytes, Link link) const {
  return link == Link::node ? rates_.node_latency_s + bytes / rates_.node_bytes
                            : rates_.network_latency_s + bytes / rates_.network_bytes;
}

double RateCosts::exchange(std::int64_t tokens, const ContextSplit& split, Link link) const {
  if (split.sp == 1 || tokens <= 0) return 0;
  const ModelShape& m = work_.model;
  const HeadSplit heads{split.sp, m.query_heads, m.kv_heads};
  const double t = static_cast<double>(tokens) / split.ranks(), away = 1 - 1.0 / split.sp;
  const double kv = static_cast<double>(heads.local_kv_heads() * split.sp * m.head_dim),
               q = static_cast<double>(m.query_heads * m.head_dim),
               element = static_cast<double>(work_.element_bytes);
  return transfer(away * t * element * (q + 2 * kv), link) + transfer(away * t * element * q, link);
}

double RateCosts::ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel,
                           bool gradients, Link link) const {
  const ModelShape& m = work_.model;
  const HeadSplit heads{split.sp, m.query_heads, m.kv_heads};
  const double t = static_cast<double>(tokens) / split.ring();
  const auto element = static_cast<double>(
      gradients ? std::max<std::int64_t>(4, work_.element_bytes) : work_.element_bytes);
  return transfer(2 * t * element * static_cast<double>(heads.local_kv_heads() * m.head_dim), link);
}

double RateCosts::ring_sums(std::int64_t tokens, const ContextSplit& split, bool gradients) const {
  const int ring = split.ring();
  if (ring == 1 || tokens <= 0) return 0;
  const ModelShape& m = work_.model;
  const HeadSplit heads{split.sp, m.query_heads, m.kv_heads};
  const double t = static_cast<double>(tokens) / split.ranks(), shards = ring,
               sum = static_cast<double>(std::max<std::int64_t>(4, work_.element_bytes)),
               element = static_cast<double>(work_.element_bytes);
  if (!gradients) {
    // Each shard's output is written as a sum; every one but the first is read and joins the
    // running one, which is rounded at the end.
    const double bytes = shards * (sum - element) + (shards - 1) * 3 * sum + sum + element;
    return t * static_cast<double>(m.query_heads * m.head_dim) * bytes / rates_.memory_bytes +
           shards * rates_.launch_s;
  }
  // Sums of every shard begin with zeros and are read once more where they meet; the own ones are
  // rounded at the end.
  const double kv = static_cast<double>(2 * heads.local_kv_heads() * split.sp * m.head_dim),
               bytes = shards * 2 * sum + 3 * sum + sum + element;
  return t * kv * bytes / rates_.memory_bytes + 2 * shards * rates_.launch_s;
}

double RateCosts::stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const {
  return transfer(static_cast<double>(tokens) / split.ranks() *
                      static_cast<double>(work_.model.hidden * work_.element_bytes),
                  link);
}

double RateCosts::host_copy(std::int64_t tokens, const ContextSplit& split) const {
  return static_cast<double>(tokens) / split.ranks() *
         static_cast<double>(work_.model.hidden * work_.element_bytes) / rates_.host_bytes;
}

double RateCosts::collective(const Collective& of, double bytes, double passes) const {
  if (of.ranks <= 1 || of.elements <= 0) return 0;
  return transfer(passes * (1 - 1.0 / of.ranks) * bytes, of.link);
}

double RateCosts::reduce(const Collective& sum) const {
  const std::int64_t full = std::max<std::int64_t>(4, work_.element_bytes);
  const auto element = static_cast<double>(work_.bf16_gradients && !sum.full ? 2 : full);
  return collective(sum, element * static_cast<double>(sum.elements), sum.scattered ? 1 : 2);
}

double RateCosts::gather(const Collective& all) const {
  return collective(all, static_cast<double>(work_.element_bytes * all.elements), 1);
}

double RateCosts::optimizer(std::int64_t elements, bool full_gradients) const {
  // Gradient, two moments and the master weight are read, all but the gradient written, and the
  // value.
  const std::int64_t gradient = work_.bf16_gradients && !full_gradients ? 2 : 4,
                     bytes = gradient + 2 * 4 + 4 * work_.moment_bytes + work_.element_bytes;
  return static_cast<double>(elements) * static_cast<double>(bytes) / rates_.memory_bytes;
}

}  // namespace ballast

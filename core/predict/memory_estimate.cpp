#include "core/predict/memory_estimate.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/error.hpp"
#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kReductionBytes = std::int64_t{32}
                                         << 20;  // receive space of a host reduction, at most

}  // namespace

std::int64_t MemoryEstimate::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}) -
         bytes[static_cast<std::size_t>(MemoryCategory::offloaded)];
}

MemoryEstimate estimate_memory(const MemoryInputs& in) {
  const ModelShape& m = in.model;
  const auto element = static_cast<std::int64_t>(size_of(in.type));
  const std::int64_t sum =
      in.type == DType::f64 ? 8 : 4;  // gradients, optimizer state, statistics, partial outputs
  const bool wide = element == sum;   // values themselves serve as master weights and partial sums
  const std::int64_t q = m.query_heads * m.head_dim, kv = m.kv_heads * m.head_dim, t = in.tokens;
  MemoryEstimate estimate;
  const auto at = [&](MemoryCategory category) -> std::int64_t& {
    return estimate.bytes[static_cast<std::size_t>(category)];
  };

  // The flat buffer is padded so that it divides over the shards.
  const std::int64_t shard = (in.parameters + in.replicas - 1) / in.replicas,
                     padded = shard * in.replicas;
  const std::int64_t owned = in.zero == 0 ? padded : shard;
  at(MemoryCategory::parameters) = (padded + in.frozen) * element;
  at(MemoryCategory::gradients) = padded * sum + (in.zero == 2 ? shard * sum : 0);
  at(MemoryCategory::optimizer) = owned * (wide ? 2 : 3) * sum;  // two moments, master weights
  at(MemoryCategory::activations) += in.activation_bytes;
  const std::int64_t stored = in.layers * in.stored_tokens * 2 * kv * (element + sum),
                     inputs = in.stored_inputs * m.hidden * element;
  at(in.window_tokens > 0 ? MemoryCategory::offloaded : MemoryCategory::kv_store) = stored;
  at(in.window_tokens > 0 ? MemoryCategory::offloaded : MemoryCategory::activations) += inputs;
  if (in.window_tokens >
      0) {  // two windows, and two chunk inputs: one leaving, one that came ahead
    at(MemoryCategory::kv_store) = 2 * in.window_tokens * 2 * kv * (element + sum);
    at(MemoryCategory::activations) += std::min(in.stored_inputs, 2 * t) * m.hidden * element;
  }
  at(MemoryCategory::data) = 3 * t * 4;  // tokens, targets, positions

  // Scratch of one layer's backward, which is the widest moment: d, its branch, normed, product and
  // gate_up, attention and q, k, v twice.
  const std::int64_t layer = t * element * (3 * m.hidden + 3 * m.intermediate + 3 * q + 4 * kv);
  const std::int64_t chunk = std::min(in.head_chunk_tokens, t);
  const std::int64_t head =
      in.last_stage ? chunk * element * (2 * m.hidden + m.vocabulary) + t * sum : 0;
  at(MemoryCategory::workspace) = layer + in.recomputed_bytes + head;

  // KV shards in the compute type; partial outputs and dKV sums in the sum type.  A Ulysses rank
  // has its share of the heads of all the group's tokens, repeated key/value heads included, and
  // gathers q, k, v, o and d_o of them.
  const HeadSplit heads{in.sp, m.query_heads, m.kv_heads};
  const std::int64_t kv_shared = heads.local_kv_heads() * in.sp * m.head_dim;
  const std::int64_t partial = in.cp > 1 ? t * sum * ((wide ? 1 : 2) * q + m.query_heads) : 0;
  const std::int64_t backward = t * sum * (m.query_heads + (wide ? 0 : q));
  const std::int64_t shards = in.cp > 1 ? (1 + in.kv_buffers) * 2 * kv_shared * t * element : 0;
  const std::int64_t exchange = in.sp > 1 ? t * element * (2 * (3 * q + 2 * kv_shared) + q) +
                                                t * 2 * (kv_shared + m.query_heads) * sum
                                          : 0;
  const std::int64_t reduction =
      in.host ? std::min<std::int64_t>(kReductionBytes, padded * sum) : 0;
  at(MemoryCategory::communication) = shards + in.dkv_buffers * 2 * kv_shared * t * sum +
                                      std::max(partial, backward) + exchange + reduction;
  return estimate;
}

std::string bytes_text(double bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 6) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes)
                   : fmt::format("{:.{}f} {}", bytes,
                                 bytes < 10    ? 2
                                 : bytes < 100 ? 1
                                               : 0,
                                 units[unit]);
}

}  // namespace ballast

// Lengths and costs that tests of placement share.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/base/random.hpp"
#include "core/plan/batch/placement.hpp"

namespace ballast {

/// Lengths with the tail of a long-context training mix, cut at 128K: median about 2,000, one in a
/// hundred above 16K, one in two thousand at the cut.
inline std::vector<std::int64_t> long_tailed_lengths(std::size_t count, std::uint64_t seed = 3) {
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < count; ++i) {
    const double bulk = 1900 * std::exp(0.75 * random_normal(seed, stream_of("bulk"), i)),
                 tail = 12000 / std::pow(random_uniform(seed, stream_of("tail"), i) + 1e-9, 0.6);
    const bool is_long = random_uniform(seed, stream_of("long"), i) < 0.015;
    lengths.push_back(static_cast<std::int64_t>(std::min(is_long ? tail : bulk, 131072.0)));
  }
  return lengths;
}

/// Times of inputs/hbp/table5.toml: an 8B model at 400 TFLOP/s without recomputation, exchanges at
/// 150 GB/s.  Key/value heads that a group repeats are sent again; a ring's hop carries keys and
/// values in both directions and their gradients in twice the bytes.  A byte of memory is a token.
struct TestCosts : PlacementCosts {
  double token_s = 3 * 4.0e-5, pair_s = 3 * 1.3e-9, exchange_token_s = 1.5e-5, hop_token_s = 6e-6,
         prefix_bytes = 0.1;
  int kv_heads = 8;
  double rest_s(std::int64_t tokens, const PlacementSplit& s) const override {
    return token_s * static_cast<double>(tokens) / (s.sp * s.ring);
  }
  double attention_s(std::int64_t q, std::int64_t p, const PlacementSplit& s) const override {
    const double n = static_cast<double>(q);
    return pair_s * n * (static_cast<double>(p) + (n + 1) / 2) / (s.sp * s.ring);
  }
  double transfer_s(std::int64_t tokens, double attention, const PlacementSplit& s) const override {
    const double part = static_cast<double>(tokens) / (s.sp * s.ring),
                 repeats = static_cast<double>(std::lcm(kv_heads, s.sp)) / kv_heads;
    return exchange_token_s * part * (1 - 1.0 / s.sp) * (0.8 + 0.2 * repeats) +
           std::max(0.0, (s.ring - 1) * (part * hop_token_s - attention / s.ring));
  }
  double bytes(std::int64_t tokens, std::int64_t prefix, const PlacementSplit& s) const override {
    return (static_cast<double>(tokens) + prefix_bytes * static_cast<double>(prefix)) /
           (s.sp * s.ring);
  }
};

}  // namespace ballast

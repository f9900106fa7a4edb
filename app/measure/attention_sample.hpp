// Random operands for attention benchmarks, and a sampled fp64 reference for their results.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_pattern.hpp"

namespace ballast {

/// [tokens, heads, head_dim] in host memory.  Row i holds the values of token `token(i)`: they
/// depend on seed, `what`, token and column alone, so that any rank draws any rows.  Uniform with
/// variance 1; bf16 tensors hold them rounded.
Tensor attention_values(std::uint64_t seed, const char* what, std::int64_t tokens,
                        std::int64_t heads, std::int64_t head_dim, DType type,
                        const std::function<std::int64_t(std::int64_t)>& token);

/// One whole call, all in host memory: operands, and the results to judge (o, dq [tokens, q_heads,
/// D]; lse [q_heads, tokens]).
struct AttentionRun {
  const AttentionPattern* index = nullptr;  ///< without row masks and columns
  double scale = 1;
  Tensor q, k, v, d_o;
  Tensor o, lse, dq, dk, dv;
};

/// Errors of sampled rows: relative L2 of all samples of a tensor together, and for lse the largest
/// difference over max(1, |lse|).
struct AttentionErrors {
  double o = 0, lse = 0, dq = 0, dk = 0, dv = 0;
  double worst() const;  ///< NaN when any is
};
/// Recomputes o, lse and dq of `samples` random (query, head) and dk, dv of samples / 4 random
/// (key, head) in fp64, pair by pair.  A key's gradient takes lse and o of its queries from the
/// run: they are checked by the first samples.
AttentionErrors sampled_errors(const AttentionRun& run, std::int64_t samples, std::uint64_t seed);
std::string to_string(const AttentionErrors& errors);
nlohmann::ordered_json to_json(const AttentionErrors& errors);
/// The largest error of a right result whose operands are of this type.
double error_limit(DType type);

}  // namespace ballast

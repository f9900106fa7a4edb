// Scores that sparse patterns are chosen by (MTraining Algorithm 1; MoBA; XAttention), one
// operation a reduction, so that what must be joined over context-parallel ranks can be joined
// between them.  Arithmetic is fp32; sums that decide a choice are 64-bit fixed point (kMassUnit,
// core/plan/attention/pattern_selection.hpp) and dot products have a fixed order: the same Q and K
// give the same sums on any number of ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"

namespace ballast {

/// q or k as the operations below take them: fp32 on the host, rows may lie apart.  Itself where it
/// is that already, or on a GPU.
Tensor index_operand(const Tensor& t);

/// Observation queries against this rank's keys: row r sees the local keys [key_begin[r],
/// key_end[r]).
struct ObservedRows {
  std::vector<std::int32_t> key_begin, key_end;
  /// Mass of row r on block b of 64 local keys counts for slash slot row_slot[r] - key_block[b].
  std::vector<std::int32_t> row_slot, key_block;
  std::vector<std::int32_t> row_part;  ///< of `columns` that row r's mass goes to
  std::int64_t size() const { return static_cast<std::int64_t>(key_begin.size()); }
  /// Of each row the place of its first key among the keys that all rows see, V of them; V last.
  std::vector<std::int64_t> places() const;
};

/// scores [Hq, V] f32 = scale q . k of the keys that each row sees, row after row; row_max [Hq, R]
/// their maximum (-inf without keys). q [R, Hq, D], k [T, Hkv, D].
void observe_scores(const Tensor& q, const Tensor& k, double scale, const ObservedRows& rows,
                    Tensor& scores, Tensor& row_max);
/// row_sum [Hq, R] i64, in kMassUnit: sum over the local keys of e = exp(score - row_max), row_max
/// being the maximum over all ranks.  Visible scores become e.
void observe_sum(Tensor& scores, const Tensor& row_max, const ObservedRows& rows, Tensor& row_sum);
/// columns [parts, Hq, T] and slashes [Hq, slots], i64 in kMassUnit: softmax mass by key (of the
/// rows of a part) and by slash slot, summed over the observed rows; scores as observe_sum() leaves
/// them, row_sum over all ranks.
void observe_mass(const Tensor& scores, const Tensor& row_sum, const ObservedRows& rows,
                  Tensor& columns, Tensor& slashes);

/// A call's blocks of 64 local rows, each inside one pattern block of all keys.
struct PatternRows {
  std::vector<std::int32_t> first;  ///< [blocks of 64] first pattern block of the row's segment
  std::vector<std::int32_t> own;    ///< [blocks of 64] pattern block that holds it
  std::vector<std::int32_t>
      rows;  ///< [blocks of 64] rows that are tokens, the others being padding at the end
};

/// sums [pattern blocks, Hkv, D] i64, in 2^-32: keys summed over each pattern block's local rows.
/// Components above 2^14 count as that, NaN as 0: such a run diverges, and its loss says so.
void pool_keys(const Tensor& k, const PatternRows& at, Tensor& sums);
/// Of every query the `top_k` pattern blocks with the highest scale q . pooled among those up to
/// its own, which always counts as one: rows [Hq, blocks of 64, width] i64, bit i of word (h, b, j)
/// set when row i of b uses pattern block first[b] + j.  Ties go to the lower block. pooled
/// [pattern blocks, Hkv, D] f32.
void route_queries(const Tensor& q, const Tensor& pooled, double scale, const PatternRows& at,
                   std::int64_t top_k, Tensor& rows);
/// mass [budgets] i64, in kCoverageUnit: summed over heads and the first `told` queries of every
/// 64, the softmax mass over routing scores of the blocks that route_queries() takes at top_k = k,
/// for each k of `budgets` (ascending, from 1).  Scores are rounded to logit_step()s.
void route_coverage(const Tensor& q, const Tensor& pooled, double scale, const PatternRows& at,
                    const std::vector<std::int64_t>& budgets, int told, Tensor& mass);

/// scores [Hq, blocks of 64, pattern blocks] f32, at the block's own column: scale times the mean
/// of a block's queries times pooled, for the pattern blocks up to the one that holds it; the
/// others are left.  pooled [pattern blocks, Hkv, D] f32.
void pooled_scores(const Tensor& q, const Tensor& pooled, double scale, const PatternRows& at,
                   Tensor& scores);
/// The mean of rows [first, last) of one head of q [T, Hq, D]: [D]; zeros where there are none.
std::vector<float> mean_query(const Tensor& q, std::int64_t head, std::int64_t first,
                              std::int64_t last);
/// scale times a mean query times pooled[first, last) of the query head `head` of `heads`.
std::vector<float> score_pooled(const std::vector<float>& query, const Tensor& pooled,
                                std::int64_t head, std::int64_t heads, double scale,
                                std::int64_t first, std::int64_t last);

/// XAttention: antidiagonal sums over strides of `stride` tokens.  q [T, Hq, D] against the keys of
/// one shard: for every row i of `stride` queries and every pattern block of the shard, the maximum
/// and the sum of exp(. - maximum) of
///   scale / stride  sum_r  q[i stride + r] . k[j stride + stride - 1 - r]
/// over the block's strides j that do not lie behind row i.  Written to maximum and sum [Hq, T /
/// stride, pattern blocks] f32 at the block's own column; padding counts as zeros.  A pattern block
/// lies on one shard.
void stride_scores(const Tensor& q, const Tensor& k, double scale, int stride, int block_tokens,
                   const PatternRows& queries, const PatternRows& keys, Tensor& maximum,
                   Tensor& sum);
/// mass [Hq, T / block_tokens, pattern blocks] i64, in kMassUnit: softmax mass of every pattern
/// block, summed over the strides of a block of queries; maximum and sum complete, columns that a
/// row does not see have maximum -inf.
void stride_mass(const Tensor& maximum, const Tensor& sum, int rows_per_block, Tensor& mass);

}  // namespace ballast

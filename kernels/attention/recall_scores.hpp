// Recall of an index: the share of sampled queries' exact softmax that lies on the pairs it
// computes.  On the host, in the precision of K; what the ranks of a ring must join lies between
// the calls, and is maxima, bits and fixed-point sums (kMassUnit), so that the result is the same
// on any of them.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"

namespace ballast {

/// A pair counts in the first that holds it.  A block whose 64 keys are all computed counts as one,
/// also where columns make it up.
enum class RecallPart { sink, own, blocks, columns };
inline constexpr int kRecallParts = 4;

class RecallScores {
 public:
  /// `rows`: single queries (count 1), by segment, then position; on any rank.  `axes` and `axis`
  /// outlive it.
  RecallScores(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& rows);

  /// f64 [rows, Hq, D]: q of the rows that are here, zero elsewhere; the sum over ranks is next.
  Tensor queries(const Tensor& q) const;
  /// i64: of every row and head (one where the pattern is one for all heads) a bit for each key of
  /// the row's segment that `calls` (by call of the axes) compute, of rows that are here; the sum
  /// over ranks is next.
  Tensor computed(const std::vector<AttentionWork>& calls) const;
  /// f64 [Hq, rows], of this rank's k [T, Hkv, D] (fp32 or fp64); the maximum over ranks is next.
  Tensor maximum(const Tensor& queries, const Tensor& k, double scale);
  /// i64 [Hq, rows, 1 + kRecallParts]: sum of exp(score - maximum) over visible keys, then over the
  /// computed ones of each part; the sum over ranks is next.
  Tensor sums(const Tensor& maximum, const Tensor& computed) const;

 private:
  /// Local index of a row; -1 where another rank has it.
  std::vector<std::int64_t> local_rows() const;

  const AttentionAxes& axes_;
  const KeyAxis& axis_;
  const AxisRanges rows_;
  std::vector<std::int64_t> first_word_;  ///< [rows + 1] of one head
  std::vector<std::int32_t> key_block_;   ///< global block of each block of this rank's keys
  std::vector<KeyInterval> visible_;      ///< [rows] of this rank's keys
  std::vector<std::int64_t> place_;       ///< [rows + 1] of a row's scores among a head's
  Tensor scores_;                         ///< [Hq, place_.back()] as K, of visible keys alone
};

}  // namespace ballast

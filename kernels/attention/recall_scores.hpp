// Recall of an index: the share of sampled queries' exact softmax that lies on the pairs it
// computes.  In the precision of K on the host, in fp32 on a GPU; what the ranks of a ring must
// join lies between the calls, and is maxima, bits and fixed-point sums (kMassUnit), so that the
// result is the same on any of them.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"

namespace ballast {

/// A pair counts in the first that holds it.  A block whose 64 keys are all computed counts as one,
/// also where columns make it up.
enum class RecallPart { sink, own, blocks, columns };
inline constexpr int kRecallParts = 4;

/// Where sampled queries and this rank's keys lie.
struct RecallPlaces {
  AxisRanges rows;                       ///< single queries, by segment, then position; on any rank
  std::vector<std::int64_t> local;       ///< [rows] row here; -1 where another rank has it
  std::vector<std::int64_t> first_word;  ///< [rows + 1] a word for each 64 keys of a row's segment
  std::vector<std::int64_t> base, own;   ///< [rows] first block of its segment, and the block of
                                         ///< the segment that it lies on
  std::vector<std::int32_t> key_block;  ///< block of the key axis of each block of this rank's keys
  std::vector<KeyInterval> visible;     ///< [rows] of this rank's keys
  RecallPlaces(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& rows);
};

class RecallScores {
 public:
  virtual ~RecallScores() = default;
  /// [rows, Hq, D] f64 (f32 on a GPU): q of the rows that are here, zero elsewhere; the sum over
  /// ranks is next.
  virtual Tensor queries(const Tensor& q) const = 0;
  /// i64: of every row and head (one where the pattern is one for all heads) a bit for each key of
  /// the row's segment that `calls` (by call of the axes) compute, of rows that are here; the sum
  /// over ranks is next.
  virtual Tensor computed(const std::vector<AttentionWork>& calls) const = 0;
  /// [Hq, rows] f64 (f32 on a GPU), of this rank's k [T, Hkv, D]; the maximum over ranks is next.
  virtual Tensor maximum(const Tensor& queries, const Tensor& k, double scale) = 0;
  /// i64 [Hq, rows, 1 + kRecallParts]: sum of exp(score - maximum) over visible keys, then over the
  /// computed ones of each part; the sum over ranks is next.  Of the k of maximum().
  virtual Tensor sums(const Tensor& maximum, const Tensor& computed) = 0;
};

/// Where q, k and the patterns lie.  `rows`: single queries (count 1), by segment, then position;
/// on any rank.  `axes` and `axis` outlive it.
std::unique_ptr<RecallScores> recall_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                            const AxisRanges& rows, Space space);

}  // namespace ballast

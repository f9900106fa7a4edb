// What a vertical-slash pattern is chosen by, and what builds it: Q and K's device decides where.
// Source: MTraining Algorithm 1.  What the ranks of a ring must join lies between the calls.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/attention/slash_windows.hpp"
#include "core/plan/attention/vertical_slash.hpp"

namespace ballast {

/// Sums over the ranks of a ring, from where communicators are known.
class RingJoin {
 public:
  virtual ~RingJoin() = default;
  virtual void sum(Tensor& tensor) const = 0;
  virtual void maximum(Tensor& tensor) const = 0;
  /// [ranks n] i64 in host memory: every rank's [n], in order.
  virtual Tensor gather(const Tensor& mine) const = 0;
};

/// What depends on the micro-batch alone.
struct SlashSetup {
  const AttentionAxes* axes = nullptr;  ///< outlives the scores
  const KeyAxis* axis = nullptr;        ///< likewise
  AttentionOptions options;
  /// Ascending by segment and begin.  One a segment that is observed to its end, or a causal
  /// selection (on the host alone).
  std::vector<SlashWindow> windows;
  bool budgeted = false;  ///< by coverage(); else by the shares of the options
};

/// What was chosen, per head and window [heads][windows].
struct SlashCounts {
  std::vector<std::int32_t> slashes, columns;
  std::vector<std::int32_t> cut;    ///< slashes and columns that the caps left out
  std::vector<double> cut_mass;     ///< HeadChoice::overflow_mass
  std::vector<HeadChoice> carried;  ///< [heads] of the window without queries; on the host alone
  /// Filled where `keeps_chosen` is set beforehand (on the host always).
  std::vector<SlashStretch> chosen;
  bool keeps_chosen = false;
};

/// What each head of a layer does, where heads differ.
struct HeadChoices {
  std::span<const HeadRule> rules;  ///< [Hq]; none: the shares of the options decide
  Tensor by_blocks;  ///< u8 [Hq, blocks of the key axis], where q lies: 1 at the first block of
                     ///< each segment in which the head goes by blocks; undefined: none does
  Tensor words;      ///< of BlockScores::choose() for those heads
  Tensor blocks;     ///< i64 [Hq], its counts
};

class SlashScores {
 public:
  virtual ~SlashScores() = default;
  /// Whether any row is observed; the same on all ranks.
  virtual bool observes() const = 0;
  /// Q of the observed rows that are here, zero elsewhere: [rows, Hq, D].  Its sum over ranks has
  /// them all.
  virtual Tensor queries(const Tensor& q) = 0;
  /// With `queries` complete, against this rank's k [T, Hkv, D]: f32 [Hq, rows]; the maximum over
  /// ranks is next.
  virtual Tensor maximum(const Tensor& queries, const Tensor& k, double scale) = 0;
  /// i64 [Hq, rows], in kMassUnit; the sum over ranks is next.
  virtual Tensor sum(const Tensor& queries, const Tensor& k, double scale,
                     const Tensor& maximum) = 0;
  /// Takes the mass of every diagonal and column of all ranks.  Collective over the ring.
  virtual void mass(const Tensor& queries, const Tensor& k, double scale, const Tensor& maximum,
                    const Tensor& sum, const RingJoin& ring) = 0;
  /// Whether rows are left that queries() to mass() take next, the same on all ranks: a causal
  /// selection observes a few windows at a time.
  virtual bool more() const { return false; }
  /// i64 [budgets], in kCoverageUnit: SlashPurchases::coverage() of each budget, summed over heads
  /// and over the queries of all windows.  Of a budgeted setup.
  virtual Tensor coverage(int heads, const std::vector<std::int64_t>& budgets) = 0;
  /// The pattern of every call of the axes, for these heads: by the shares of the options, or at
  /// one of the budgets that coverage() was asked for last.  counts.carried, where it is not empty,
  /// is the choice of the window that none of this setup's rows make.
  virtual std::vector<AttentionWork> build(int q_heads, int kv_heads,
                                           std::optional<std::int64_t> budget,
                                           SlashCounts& counts) = 0;

  /// HeadChoices::by_blocks of rules.
  virtual Tensor block_heads(std::span<const HeadRule> rules) const = 0;
  /// The same where the mass that mass() took last diverges by less than options.flex_threshold
  /// from what the mean of its `queries` gives the `means` of keys by block (BlockScores::means()
  /// of blocks of 64).
  virtual Tensor alike(const Tensor& queries, const Tensor& means, double scale) const = 0;
  /// The pattern of every call of the axes.  Slashes and columns of heads by blocks count as 0.
  virtual std::vector<AttentionWork> build(const HeadChoices& choices, int q_heads, int kv_heads,
                                           SlashCounts& counts) = 0;
};

/// Scores where q lies.
std::unique_ptr<SlashScores> slash_scores(const SlashSetup& setup, const Tensor& q);

}  // namespace ballast

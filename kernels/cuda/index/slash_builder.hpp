// Vertical-slash indexes built on the GPU: the device twin of choose_vertical_slash(),
// SlashPurchases and vertical_slash_pattern(), from Q and K to an index a shard whose arrays never
// leave the device. Source: MTraining Algorithm 1.  What the ranks of a ring must join lies between
// the calls, in tensors.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/slash_scores.hpp"

namespace ballast::cuda {

struct SlashOptions {
  double vertical_share = 0.9, slash_share = 0.9;  ///< of the observed mass, (0, 1]
  std::int64_t max_columns = 0, max_slashes = 0;   ///< a head and segment; 0: no cap
  bool budgeted = false;                           ///< chosen by budgets(), not by the shares
};

/// What the budgets of a policy buy: [i] of the i-th budget.
struct SlashBudgets {
  Tensor coverage;  ///< i64 [budgets], in kCoverageUnit: SlashPurchases::coverage() summed over
                    ///< queries and heads
  Tensor most;      ///< i32 [budgets, 2, heads segments]: slashes and columns of a list
  Tensor order;     ///< i64 [65 heads slots]: BudgetPrices::order
};

class SlashBuilder {
 public:
  /// For one micro-batch.  whole [segments]: computed whole, not observed.  Of every other segment
  /// the rows from first_observed[s] (position) to its end are observed.  Errors: as
  /// query_blocks(), global_blocks().
  SlashBuilder(const AttentionAxes& axes, const KeyAxis& axis, const std::vector<char>& whole,
               const std::vector<std::int64_t>& first_observed, const SlashOptions& options,
               Device& device);
  ~SlashBuilder();

  bool observes() const;
  /// Q of the observed rows that are here, zero elsewhere: bf16 [rows, Hq, D].  Its sum over ranks
  /// has them all.
  Tensor queries(const Tensor& q) const;
  /// With `queries` complete, against this rank's k [T, Hkv, D]: f32 [Hq, rows]; the maximum over
  /// ranks is next.
  Tensor maximum(const Tensor& queries, const Tensor& k, double scale) const;
  /// i64 [Hq, rows] fixed point (kMassBits); the sum over ranks is next.
  Tensor sum(const Tensor& queries, const Tensor& k, double scale, const Tensor& maximum) const;
  /// i64 [Hq, slots] mass of the diagonals, then [parts, Hq, 64 slots] of the columns: one part, or
  /// where budgeted one for each block of 64 observed queries of a segment; the sum over ranks is
  /// next.
  Tensor mass(const Tensor& queries, const Tensor& k, double scale, const Tensor& maximum,
              const Tensor& sum) const;
  /// What the budgets (ascending) of 64-key blocks a query row buy.  queries [segments]: those of
  /// all ranks.  `mass`: the sums of all ranks, of a budgeted builder.
  SlashBudgets budgets(const Tensor& mass, int q_heads, const std::vector<std::int64_t>& budgets,
                       const std::vector<std::int64_t>& queries) const;
  /// One index a call of the axes, for these heads.  `mass` may be undefined where nothing is
  /// observed.  `most` [2, heads segments], a row of SlashBudgets::most, takes so many slashes and
  /// columns in place of the shares where it is defined; `mass` is SlashBudgets::order then.  The
  /// host waits for counts and pairs at the end, and, unless the caps (with `most`: `budget`) alone
  /// keep the index below 32 MiB, before for the sizes.  `blocks`: of heads that go by them.
  std::vector<AttentionWork> build(const Tensor& mass, int q_heads, int kv_heads,
                                   SlashCounts& counts, const Tensor& most = {},
                                   std::int64_t budget = 0, const HeadChoices& blocks = {}) const;

  /// What heads differ by: SlashScores::block_heads(), alike() by `mass`, and what static rules
  /// make of the mass, in place (undefined: a new one): returns `most` of build().
  Tensor block_heads(std::span<const HeadRule> rules) const;
  Tensor alike(const Tensor& mass, const Tensor& queries, const Tensor& means, double scale,
               double threshold) const;
  Tensor impose(Tensor& mass, std::span<const HeadRule> rules) const;

 private:
  struct Arrays;
  struct Lists;
  /// Fills lists from the mass, as build() says.
  Lists choose(const Tensor& mass, int q_heads, const Tensor& most, std::int64_t budget,
               const HeadChoices& blocks) const;
  std::shared_ptr<Arrays> arrays_;
  SlashOptions options_;
};

}  // namespace ballast::cuda

#include <algorithm>
#include <numeric>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/ops/elementwise.hpp"
#include "parallel/pattern/pattern_sources.hpp"

namespace ballast {
namespace {

/// The observed queries of all segments: the last ones of each that is not dense anyway.
struct Observation {
  std::vector<AxisToken> rows;
  std::vector<char> dense;  ///< [segments]

  Observation(const AttentionAxes& axes, const KeyAxis& axis, std::int64_t last_q) {
    for (int s = 0; s < axis.segments(); ++s) {
      const std::int64_t end = axis.first_position[s] + axis.count[s];
      dense.push_back(axis.count[s] <= last_q);
      if (dense.back()) continue;
      for (std::int64_t p = std::max(axes.first_query[s], end - last_q); p < end; ++p)
        rows.push_back({s, p});
    }
  }

  /// Q of the observed rows, [rows, Hq, D]: each rank puts in its own, the sum over ranks has them
  /// all.
  Tensor queries(const AttentionAxes& axes, const Tensor& q) const {
    Tensor all = Tensor::zeros({static_cast<std::int64_t>(rows.size()), q.size(1), q.size(2)},
                               DType::f32, device_of(q.space()), MemoryCategory::workspace);
    const auto before = [](const AxisToken& a, const AxisToken& b) {
      return a.segment != b.segment ? a.segment < b.segment : a.position < b.position;
    };
    const auto same = [](const AxisToken& a, const AxisToken& b) {
      return a.segment == b.segment && a.position == b.position;
    };
    const std::int64_t local = static_cast<std::int64_t>(axes.queries.size()),
                       count = static_cast<std::int64_t>(rows.size());
    for (std::int64_t i = 0; i < local;) {
      const auto at = std::lower_bound(rows.begin(), rows.end(), axes.queries[i], before);
      const std::int64_t r = at - rows.begin();
      std::int64_t n = 0;  // neighbours here and there are copied at once
      while (i + n < local && r + n < count && same(axes.queries[i + n], rows[r + n])) ++n;
      if (n > 0) {
        Tensor to = all.rows(r, r + n);
        copy_rows(q.rows(i, i + n), to);
      }
      i += std::max<std::int64_t>(1, n);
    }
    return all;
  }
};

/// Observed mass of all ranks in one gather: slashes are summed, of its columns each rank sends the
/// heaviest.
class MassExchange {
 public:
  /// `most` [lists]: columns that a rank may send of each (head, segment).
  explicit MassExchange(std::vector<std::int64_t> most)
      : columns_(most.size()), most_(std::move(most)) {}
  void add(std::size_t list, MassItem item) {
    if (item.mass > 0) columns_[list].push_back(item);
  }
  /// The lists of all ranks; `slashes` becomes their sum.
  std::vector<std::vector<MassItem>> gather(const Communicator& cp, Tensor& slashes,
                                            Recorder* recorder) {
    for (std::size_t l = 0; l < most_.size(); ++l)
      if (static_cast<std::int64_t>(columns_[l].size()) > most_[l])
        columns_[l] = heaviest(std::move(columns_[l]), most_[l]);
    if (cp.size() == 1) return std::move(columns_);
    std::vector<std::int64_t> message(slashes.data<std::int64_t>(),
                                      slashes.data<std::int64_t>() + slashes.numel());
    for (const auto& list : columns_) {
      message.push_back(static_cast<std::int64_t>(list.size()));
      for (const MassItem& item : list) message.insert(message.end(), {item.index, item.mass});
    }
    const std::int64_t longest = slashes.numel() + static_cast<std::int64_t>(most_.size()) +
                                 2 * std::accumulate(most_.begin(), most_.end(), std::int64_t{0});
    message.resize(static_cast<std::size_t>(longest));
    Tensor all = Tensor::empty({cp.size() * longest}, DType::i64, host_device(),
                               MemoryCategory::communication);
    {
      Scope wait(recorder, EventKind::ring_wait);
      wait.bytes = longest * 8;
      cp.all_gather(Tensor::wrap(message.data(), {longest}, DType::i64), all);
    }
    std::vector<std::vector<MassItem>> lists(most_.size());
    slashes.zero();
    for (int r = 0; r < cp.size(); ++r) {
      const std::int64_t* at = all.data<std::int64_t>() + r * longest;
      for (std::int64_t i = 0; i < slashes.numel(); ++i) slashes.data<std::int64_t>()[i] += *at++;
      for (auto& list : lists)
        for (std::int64_t n = *at++; n > 0; --n, at += 2) list.push_back({at[0], at[1]});
    }
    return lists;
  }

 private:
  std::vector<std::vector<MassItem>> columns_;
  std::vector<std::int64_t> most_;
};

/// [segments] keys of a segment on the rank that has most of them.
std::vector<std::int64_t> widest_shards(const AttentionAxes& axes, int segments) {
  std::vector<std::int64_t> widest(static_cast<std::size_t>(segments), 0), here(widest.size());
  for (const auto& shard : axes.keys) {
    std::fill(here.begin(), here.end(), 0);
    for (const AxisToken& key : shard)
      if (key.segment >= 0) ++here[key.segment];
    for (std::size_t s = 0; s < here.size(); ++s) widest[s] = std::max(widest[s], here[s]);
  }
  return widest;
}

}  // namespace

PatternSource::Built VerticalSlashSource::build(const AttentionInputs& in) {
#ifdef BALLAST_HAVE_CUDA
  if (in.q.space() == Space::cuda) return build_on_gpu(in);
#endif
  const std::int64_t heads = in.q.size(1), slots = axis_.tokens() / kBlock;
  const int segments = axis_.segments();
  const bool full =
      policy_ == nullptr && (options_.vertical_share >= 1 || options_.slash_share >= 1);
  const Observation observed(axes(), axis_, full ? axis_.tokens() : options_.last_q);
  std::vector<HeadMass> mass(static_cast<std::size_t>(segments * heads));  // [segment][head]
  const auto of = [&](int s, std::int64_t h) -> HeadMass& {
    return mass[static_cast<std::size_t>(s * heads + h)];
  };

  if (!observed.rows.empty()) {
    Tensor q = observed.queries(axes(), in.q);
    join(q, Reduction::sum);
    q = index_operand(q);
    const Tensor k = index_operand(in.k);
    Device& device = device_of(k.space());
    const auto& own = axes().keys[axes().rank];
    const AttentionPattern visible =
        split_keys(visible_pattern(observed.rows, axis_, 1), axis_, {own}).front();
    ObservedRows rows{visible.key_begin, visible.key_end, {}, global_blocks(axis_, own)};
    for (const AxisToken& token : observed.rows)
      rows.row_slot.push_back(
          static_cast<std::int32_t>((axis_.global(token) + axis_.offset[token.segment]) / kBlock));
    const auto empty = [&](Shape shape, DType type) {
      return Tensor::empty(std::move(shape), type, device, MemoryCategory::workspace);
    };
    Tensor scores = empty({heads, rows.size(), k.size(0)}, DType::f32),
           row_max = empty({heads, rows.size()}, DType::f32);
    Tensor row_sum = empty(row_max.shape(), DType::i64),
           columns = empty({heads, k.size(0)}, DType::i64),
           slashes = empty({heads, slots}, DType::i64);
    observe_scores(q, k, in.scale, rows, scores, row_max);
    join(row_max, Reduction::max);
    observe_sum(scores, row_max, rows, row_sum);
    join(row_sum, Reduction::sum);
    observe_mass(scores, row_sum, rows, columns, slashes);

    std::vector<std::int64_t> most;
    for (const std::int64_t keys : widest_shards(axes(), segments))
      most.insert(most.end(), static_cast<std::size_t>(heads),
                  options_.max_columns > 0 ? std::min(options_.max_columns, keys) : keys);
    MassExchange exchange(std::move(most));
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::size_t j = 0; j < own.size(); ++j)
        if (own[j].segment >= 0 && !observed.dense[own[j].segment])
          exchange.add(
              static_cast<std::size_t>(own[j].segment * heads + h),
              {axis_.global(own[j]) - axis_.offset[own[j].segment],
               columns.data<std::int64_t>()[h * k.size(0) + static_cast<std::int64_t>(j)]});
    std::vector<std::vector<MassItem>> gathered = exchange.gather(cp_, slashes, recorder_);
    for (std::int64_t h = 0; h < heads; ++h)
      for (int s = 0; s < segments; ++s) {
        const std::int64_t* from = slashes.data<std::int64_t>() + h * slots;
        of(s, h).slashes.assign(from + axis_.offset[s] / kBlock,
                                from + (axis_.offset[s] + axis_.count[s] + kBlock - 1) / kBlock);
        for (std::int64_t m : of(s, h).slashes) of(s, h).total += m;
      }
    for (std::size_t i = 0; i < mass.size(); ++i) mass[i].columns = std::move(gathered[i]);
  }

  const std::vector<double> weight = query_shares();

  std::int64_t budget = 0;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    const std::vector<std::int64_t> budgets = candidates(), queries = query_counts();
    Tensor coverage = Tensor::zeros({static_cast<std::int64_t>(budgets.size())}, DType::i64);
    for (int s = 0; s < segments; ++s)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::vector<std::int64_t> part =
            observed.dense[s] ? std::vector<std::int64_t>(budgets.size(),
                                                          static_cast<std::int64_t>(kCoverageUnit))
                              : vertical_slash_coverage(of(s, h), budgets, options_);
        for (std::size_t i = 0; i < part.size(); ++i)
          coverage.data<std::int64_t>()[i] += queries[s] * part[i];
      }
    budget = choose(in.layer, coverage, heads);
  }

  Built built;
  built.budgets.resize(static_cast<std::size_t>(heads));
  std::vector<std::vector<VerticalSlash>> chosen(static_cast<std::size_t>(segments));
  for (int s = 0; s < segments; ++s) {
    if (axis_.count[s] == 0) continue;
    for (std::int64_t h = 0; h < heads; ++h) {
      HeadChoice choice;
      if (observed.dense[s])
        choice.head = dense_head(axis_.count[s]);
      else
        choice = policy_ != nullptr ? choose_vertical_slash(of(s, h), budget, options_)
                                    : choose_vertical_slash(of(s, h), options_);
      HeadBudget& made = built.budgets[static_cast<std::size_t>(h)];
      made.budget += weight[s] * (static_cast<double>(choice.head.slashes.size()) +
                                  static_cast<double>(choice.head.columns.size()) / kBlock);
      made.overflow += choice.overflow;
      chosen[s].push_back(std::move(choice.head));
    }
  }
  built.index = vertical_slash_pattern(axes().queries, axis_, chosen, true);
  return built;
}

}  // namespace ballast

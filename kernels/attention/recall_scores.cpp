#include "kernels/attention/recall_scores.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/error.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "kernels/attention/index_scores.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/host_view.hpp"
#include "kernels/ops/vector_math.hpp"

namespace ballast {
namespace {

using host::parallel_for;
constexpr std::int64_t kSums = 1 + kRecallParts;

Tensor zeros(Shape shape, DType type) {
  return Tensor::zeros(std::move(shape), type, host_device(), MemoryCategory::workspace);
}

/// Part of the computed pairs of `row` in a block of 64 keys with these bits.
RecallPart part_of(std::int64_t block, std::int64_t own, std::uint64_t bits) {
  if (block == 0) return RecallPart::sink;
  if (block == own) return RecallPart::own;
  return bits == ~std::uint64_t{0} ? RecallPart::blocks : RecallPart::columns;
}

/// exp(score - top) in kMassUnit.
void masses(const double* score, std::int64_t n, double top, std::int64_t* mass) {
  for (std::int64_t j = 0; j < n; ++j) mass[j] = std::llrint(std::exp(score[j] - top) * kMassUnit);
}
void masses(const float* score, std::int64_t n, float top, std::int64_t* mass) {
  float e[kBlock];
  for (std::int64_t j = 0; j < n; ++j) e[j] = host::fast_exp(score[j] - top);
  for (std::int64_t j = 0; j < n; ++j)
    mass[j] = static_cast<std::int64_t>(static_cast<double>(e[j]) * kMassUnit);
}

class HostRecallScores final : public RecallScores {
 public:
  HostRecallScores(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& rows)
      : axes_(axes), axis_(axis), at_(axes, axis, rows), place_{0} {
    for (const KeyInterval& keys : at_.visible)
      place_.push_back(place_.back() + std::max(0, keys.end - keys.begin));
  }
  Tensor queries(const Tensor& q) const override;
  Tensor computed(const std::vector<AttentionWork>& calls) const override;
  Tensor maximum(const Tensor& queries, const Tensor& k, double scale) override;
  Tensor sums(const Tensor& maximum, const Tensor& computed) override;

 private:
  const AttentionAxes& axes_;
  const KeyAxis& axis_;
  const RecallPlaces at_;
  std::vector<std::int64_t> place_;  ///< [rows + 1] of a row's scores among a head's
  Tensor scores_;                    ///< [Hq, place_.back()] as K, of visible keys alone
};

Tensor HostRecallScores::queries(const Tensor& q) const {
  Tensor all =
      zeros({static_cast<std::int64_t>(at_.rows.size()), q.size(1), q.size(2)}, DType::f64);
  for (std::size_t r = 0; r < at_.rows.size(); ++r)
    if (at_.local[r] >= 0) {
      Tensor to = all.rows(static_cast<std::int64_t>(r), static_cast<std::int64_t>(r) + 1);
      copy_rows(q.rows(at_.local[r], at_.local[r] + 1), to);
    }
  return all;
}

Tensor HostRecallScores::computed(const std::vector<AttentionWork>& calls) const {
  const std::int64_t heads = calls.front().index_heads(), words = at_.first_word.back();
  Tensor bits = zeros({heads * words}, DType::i64);
  for (std::size_t c = 0; c < calls.size(); ++c) {
    require(calls[c].host() != nullptr, "recall: q lies on the host, the pattern on a GPU");
    const PatternArrays& x = calls[c].host()->arrays();
    const std::vector<std::int32_t> block = global_blocks(axis_, axes_.calls()[c]);
    for (std::size_t r = 0; r < at_.rows.size(); ++r) {
      if (at_.local[r] < 0) continue;
      const std::int64_t base = at_.base[r], query_block = at_.local[r] / kBlock,
                         end = base + at_.first_word[r + 1] - at_.first_word[r];
      for (std::int64_t h = 0; h < heads; ++h) {
        auto* word = reinterpret_cast<std::uint64_t*>(bits.data<std::int64_t>()) + h * words +
                     at_.first_word[r] - base;
        for (const BlockRun& run : runs_of(x, static_cast<int>(h), query_block))
          if (run.row_mask < 0 || (x.row_masks[run.row_mask] >> (at_.local[r] % kBlock) & 1))
            for (std::int32_t b = run.first; b < run.last; ++b)
              if (block[b] >= base && block[b] < end) word[block[b]] = ~std::uint64_t{0};
        if (!x.has_columns()) continue;
        const std::int64_t list = h * x.segments + x.block_segment[query_block];
        for (std::int64_t i = x.column_offset[list]; i < x.column_offset[list + 1]; ++i)
          word[block[x.columns[i] / kBlock]] |= std::uint64_t{1} << (x.columns[i] % kBlock);
      }
    }
  }
  return bits;
}

Tensor HostRecallScores::maximum(const Tensor& queries, const Tensor& keys_, double scale) {
  const Tensor k = keys_.dtype() == DType::f64 ? keys_ : index_operand(keys_);
  const std::int64_t rows = queries.size(0), heads = queries.size(1), dim = queries.size(2),
                     group = heads / k.size(1), tokens = k.size(0);
  scores_ =
      Tensor::empty({heads, place_.back()}, k.dtype(), host_device(), MemoryCategory::workspace);
  Tensor most = zeros({heads, rows}, DType::f64);
  double* top = most.data<double>();
  dispatch_float(k.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto* keys = k.data<T>();
    auto* scores = scores_.data<T>();
    const std::int64_t stride = tokens > 1 ? k.strides()[0] : 0;
    parallel_for("recall scores", heads * rows, [=, this, &queries](std::int64_t i) {
      const std::int64_t h = i / rows, r = i % rows;
      const double* from = queries.data<double>() + (r * heads + h) * dim;
      const std::vector<T> q(from, from + dim);
      const std::int64_t begin = at_.visible[r].begin;
      T* score = scores + h * place_.back() + place_[r];
      T best = -std::numeric_limits<T>::infinity();
      for (std::int64_t j = begin; j < at_.visible[r].end; ++j) {
        const T* key = keys + j * stride + h / group * dim;
        score[j - begin] = static_cast<T>(
            scale * host::lane_sum<T>(dim, [&](std::int64_t d) { return q[d] * key[d]; }));
        best = std::max(best, score[j - begin]);
      }
      top[i] = best;
    });
  });
  return most;
}

Tensor HostRecallScores::sums(const Tensor& maximum, const Tensor& computed) {
  const std::int64_t heads = scores_.size(0), rows = std::ssize(at_.rows),
                     words = at_.first_word.back(), index_heads = computed.numel() / words;
  Tensor sums = zeros({heads, rows, kSums}, DType::i64);
  const double* most = maximum.data<double>();
  const auto* bits = reinterpret_cast<const std::uint64_t*>(computed.data<std::int64_t>());
  dispatch_float(scores_.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto* scores = scores_.data<T>();
    parallel_for("recall sums", heads * rows, [&](std::int64_t i) {
      const std::int64_t h = i / rows, r = i % rows;
      const auto at = static_cast<std::size_t>(r);
      const std::int64_t base = at_.base[at], own = at_.own[at];
      const std::uint64_t* word = bits + (index_heads > 1 ? h : 0) * words + at_.first_word[r];
      std::int64_t* sum = sums.data<std::int64_t>() + i * kSums;
      const std::int64_t begin = at_.visible[r].begin;
      const T* row_scores = scores + h * place_.back() + place_[r];
      for (std::int64_t j = begin; j < at_.visible[r].end;) {
        const std::int64_t block = at_.key_block[j / kBlock] - base, first = j % kBlock,
                           n = std::min<std::int64_t>(at_.visible[r].end - j, kBlock - first);
        std::int64_t mass[kBlock];
        masses(row_scores + (j - begin), n, static_cast<T>(most[i]), mass);
        const std::uint64_t computed_keys = word[block];
        std::int64_t& part = sum[1 + static_cast<int>(part_of(block, own, computed_keys))];
        for (std::int64_t c = 0; c < n; ++c) sum[0] += mass[c];
        for (std::int64_t c = 0; c < n && computed_keys != 0; ++c)
          part += computed_keys >> (first + c) & 1 ? mass[c] : 0;
        j += n;
      }
    });
  });
  return sums;
}

}  // namespace

RecallPlaces::RecallPlaces(const AttentionAxes& axes, const KeyAxis& axis, const AxisRanges& of)
    : rows(of), local(of.size(), -1), first_word{0} {
  const AxisRanges keys = axes.keys[axes.rank];
  for (const AxisRange& row : rows) {
    first_word.push_back(first_word.back() + (axis.count[row.segment] + kBlock - 1) / kBlock);
    base.push_back(axis.offset[row.segment] / kBlock);
    own.push_back((row.position - axis.first_position[row.segment]) / kBlock);
  }
  key_block = global_blocks(axis, keys);
  visible = split_visible(visible_keys(rows, axis), axis, {keys}).front().expand();
  std::int64_t first = 0;
  for (const AxisRange& have : axes.queries) {
    for (std::size_t r = 0; r < rows.size(); ++r)
      if (rows[r].segment == have.segment && rows[r].position >= have.position &&
          rows[r].position < have.end())
        local[r] = first + rows[r].position - have.position;
    first += have.count;
  }
}

std::unique_ptr<RecallScores> recall_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                            const AxisRanges& rows, Space space) {
#ifdef BALLAST_HAVE_CUDA
  if (space == Space::cuda) return cuda::recall_scores(axes, axis, rows);
#endif
  require(space == Space::host, "recall: q lies on a GPU, which this program was built without");
  return std::make_unique<HostRecallScores>(axes, axis, rows);
}

}  // namespace ballast

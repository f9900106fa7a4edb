// Packed micro-batches dealt over ranks, with Q and K of every rank's rows.
#pragma once
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"

namespace ballast::test {

/// A packed micro-batch over ranks; rows of Q and K by (segment, position).
struct Spread {
  MicroBatch batch;
  std::vector<AttentionAxes> axes;
  KeyAxis axis;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> row;

  Spread(const std::vector<std::int64_t>& lengths, LayoutKind kind, int ranks, std::int64_t align) {
    batch.align = align;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      batch.segments.push_back({static_cast<std::int64_t>(s), 0, lengths[s], 0});
      for (std::int64_t p = 0; p < lengths[s]; ++p)
        row.emplace(std::pair(static_cast<std::int64_t>(s), p),
                    static_cast<std::int64_t>(row.size()));
    }
    const SequenceLayout layout(kind, batch.axis_tokens(), ranks, align, align);
    for (int r = 0; r < ranks; ++r) axes.push_back(attention_axes(batch, layout, r));
    axis = key_axis(axes[0]);
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(row.size()); }
  /// Rows of tokens in their local order, zeros for padding; fp64.
  Tensor take(const Tensor& all, const AxisRanges& axis) const {
    const auto tokens = tokens_of(axis);
    Tensor out = Tensor::zeros({static_cast<std::int64_t>(tokens.size()), all.size(1), all.size(2)},
                               DType::f64);
    const std::int64_t n = all.size(1) * all.size(2);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (tokens[i].segment >= 0)
        std::copy_n(all.data<double>() + row.at({tokens[i].segment, tokens[i].position}) * n, n,
                    out.data<double>() + static_cast<std::int64_t>(i) * n);
    return out;
  }
};

inline Tensor as_f32(const Tensor& t) {
  Tensor out = Tensor::empty(t.shape(), DType::f32);
  for (std::int64_t i = 0; i < t.numel(); ++i)
    out.data<float>()[i] = static_cast<float>(t.data<double>()[i]);
  return out;
}

}  // namespace ballast::test

#include "kernels/attention/attention_host.hpp"

#include <cmath>
#include <limits>

#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace host {

template <class T>
void attention_merge(Tensor& o_, Tensor& lse_, const Tensor& o_part_, const Tensor& lse_part_) {
  const auto o = head_rows<T>(o_);
  const auto o_part = head_rows<const T>(o_part_);
  const auto lse = token_rows<T>(lse_);
  const auto lse_part = token_rows<const T>(lse_part_);
  const std::int64_t heads = o_.size(1), head_dim = o_.size(2);
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  parallel_for("attention merge", o_.size(0), [=](std::int64_t i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      T& a = lse.at(h)[i];
      const T b = lse_part.at(h)[i];
      if (b == nothing) continue;  // also when both are empty
      const T m = std::max(a, b), weight_a = a == nothing ? T(0) : std::exp(a - m),
              weight_b = std::exp(b - m), sum = weight_a + weight_b;
      const T factor_a = weight_a / sum, factor_b = weight_b / sum;
      T* to = o.at(i, h);
      const T* from = o_part.at(i, h);
      for (std::int64_t d = 0; d < head_dim; ++d) to[d] = to[d] * factor_a + from[d] * factor_b;
      a = m + std::log(sum);
    }
  });
}

template <class T>
void attention_delta(const Tensor& o_, const Tensor& d_o_, Tensor& delta_) {
  const auto o = head_rows<const T>(o_), d_o = head_rows<const T>(d_o_);
  const auto delta = token_rows<T>(delta_);
  const std::int64_t heads = o_.size(1), head_dim = o_.size(2);
  parallel_for("attention delta", o_.size(0), [=](std::int64_t i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const T *a = o.at(i, h), *b = d_o.at(i, h);
      delta.at(h)[i] =
          static_cast<T>(lane_sum<T>(head_dim, [=](std::int64_t d) { return a[d] * b[d]; }));
    }
  });
}

}  // namespace host

namespace {

/// [tokens, heads, head_dim] with dense heads and head_dim.
void check_rows(const char* where, const char* what, const Tensor& t, std::int64_t tokens,
                std::int64_t heads, std::int64_t head_dim, DType type) {
  require(t.shape() == Shape{tokens, heads, head_dim}, "{}: {} has shape {}, expected {}", where,
          what, to_string(t.shape()), to_string({tokens, heads, head_dim}));
  require(t.dtype() == type, "{}: {} is {}, expected {} like the other operands", where, what,
          name(t.dtype()), name(type));
  require(t.numel() == 0 || (t.strides()[2] == 1 && t.strides()[1] == head_dim),
          "{}: heads and head dim of {} must be dense", where, what);
}
/// [heads, tokens] with dense tokens.
void check_lines(const char* where, const char* what, const Tensor& t, std::int64_t heads,
                 std::int64_t tokens, DType type) {
  require(t.shape() == Shape{heads, tokens}, "{}: {} has shape {}, expected {}", where, what,
          to_string(t.shape()), to_string({heads, tokens}));
  require(t.dtype() == type, "{}: {} is {}, expected {} like the other operands", where, what,
          name(t.dtype()), name(type));
  require(t.numel() == 0 || t.strides()[1] == 1, "{}: tokens of {} must be dense", where, what);
}
void check_operands(const char* where, const AttentionWork& work, const Tensor& q, const Tensor& k,
                    const Tensor& v) {
  require(q.rank() == 3 && k.rank() == 3, "{}: q {} and k {} must be [tokens, heads, head_dim]",
          where, to_string(q.shape()), to_string(k.shape()));
  const std::int64_t q_heads = q.size(1), kv_heads = k.size(1), head_dim = q.size(2);
  require(kv_heads >= 1 && q_heads % kv_heads == 0,
          "{}: {} query heads are no multiple of {} key/value heads", where, q_heads, kv_heads);
  require(work.index_heads() == 1 || work.index_heads() == q_heads,
          "{}: the pattern has {} heads, expected 1 or {}", where, work.index_heads(), q_heads);
  require(work.host() != nullptr, "{}: the pattern lies on a device, q on the host", where);
  check_rows(where, "q", q, work.q_tokens(), q_heads, head_dim, q.dtype());
  check_rows(where, "k", k, work.k_tokens(), kv_heads, head_dim, q.dtype());
  check_rows(where, "v", v, work.k_tokens(), kv_heads, head_dim, q.dtype());
}

}  // namespace

AttentionWork place_pattern(const AttentionPattern& pattern, const Tensor& q, const Tensor& k) {
  BALLAST_ON_CUDA(q, place_pattern(pattern, q, k));
  (void)k;
  return pattern;
}

void attention_forward(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, Tensor& o, Tensor& lse) {
  BALLAST_ON_CUDA(q, attention_forward(work, q, k, v, scale, o, lse));
  check_operands("attention_forward", work, q, k, v);
  check_rows("attention_forward", "o", o, q.size(0), q.size(1), q.size(2), q.dtype());
  check_lines("attention_forward", "lse", lse, q.size(1), q.size(0), q.dtype());
  if (q.numel() == 0) return;
  dispatch_float(q.dtype(), [&](auto t) {
    host::attention_forward<decltype(t)>(work.host()->arrays(), q, k, v, scale, o, lse);
  });
}

void attention_merge(Tensor& o, Tensor& lse, const Tensor& o_part, const Tensor& lse_part) {
  BALLAST_ON_CUDA(o, attention_merge(o, lse, o_part, lse_part));
  require(o.rank() == 3, "attention_merge: o {} must be [tokens, heads, head_dim]",
          to_string(o.shape()));
  check_rows("attention_merge", "o", o, o.size(0), o.size(1), o.size(2), o.dtype());
  check_rows("attention_merge", "o_part", o_part, o.size(0), o.size(1), o.size(2), o.dtype());
  check_lines("attention_merge", "lse", lse, o.size(1), o.size(0), o.dtype());
  check_lines("attention_merge", "lse_part", lse_part, o.size(1), o.size(0), o.dtype());
  if (o.numel() == 0) return;
  dispatch_float(o.dtype(),
                 [&](auto t) { host::attention_merge<decltype(t)>(o, lse, o_part, lse_part); });
}

void attention_delta(const Tensor& o, const Tensor& d_o, Tensor& delta) {
  BALLAST_ON_CUDA(o, attention_delta(o, d_o, delta));
  require(o.rank() == 3, "attention_delta: o {} must be [tokens, heads, head_dim]",
          to_string(o.shape()));
  check_rows("attention_delta", "o", o, o.size(0), o.size(1), o.size(2), o.dtype());
  check_rows("attention_delta", "d_o", d_o, o.size(0), o.size(1), o.size(2), o.dtype());
  check_lines("attention_delta", "delta", delta, o.size(1), o.size(0), o.dtype());
  if (o.numel() == 0) return;
  dispatch_float(o.dtype(), [&](auto t) { host::attention_delta<decltype(t)>(o, d_o, delta); });
}

void attention_backward(const AttentionWork& work, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const Tensor& lse, const Tensor& delta,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv,
                        const AttentionAdds& adds) {
  BALLAST_ON_CUDA(q, attention_backward(work, q, k, v, scale, lse, delta, d_o, dq, dk, dv, adds));
  constexpr const char* where = "attention_backward";
  check_operands(where, work, q, k, v);
  check_lines(where, "lse", lse, q.size(1), q.size(0), q.dtype());
  check_lines(where, "delta", delta, q.size(1), q.size(0), q.dtype());
  check_rows(where, "d_o", d_o, q.size(0), q.size(1), q.size(2), q.dtype());
  check_rows(where, "dq", dq, q.size(0), q.size(1), q.size(2), q.dtype());
  check_rows(where, "dk", dk, k.size(0), k.size(1), k.size(2), q.dtype());
  check_rows(where, "dv", dv, k.size(0), k.size(1), k.size(2), q.dtype());
  if (!adds.dq) dq.zero();
  if (!adds.dkv) dk.zero(), dv.zero();
  if (q.numel() == 0 || k.numel() == 0) return;
  dispatch_float(q.dtype(), [&](auto t) {
    host::attention_backward<decltype(t)>(work.host()->arrays(), q, k, v, scale, lse, delta, d_o,
                                          dq, dk, dv);
  });
}

}  // namespace ballast

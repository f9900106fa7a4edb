// Attention on tensors in GPU memory: checks, the device twins of patterns, and the launches of
// kernels/cuda/attention/attention.hpp.
#include <memory>
#include <utility>

#include "core/plan/attention/attention_work.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/pattern_twin.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/runtime/device.hpp"

namespace ballast::cuda {
namespace {

bool g_deterministic = false;

const PlacedIndex& index_of(const AttentionWork& work, int q_heads, int kv_heads) {
  const auto* twin = dynamic_cast<const PatternTwin*>(work.device());
  require(twin != nullptr,
          "attention on CUDA: the pattern lies on the host; place_pattern() first");
  const IndexShape& shape = twin->index().shape;
  require(shape.q_heads == q_heads && shape.kv_heads == kv_heads,
          "attention: a pattern placed on the GPU for {} query and {} key heads serves {} and {}",
          shape.q_heads, shape.kv_heads, q_heads, kv_heads);
  return twin->placed();
}

/// [tokens, heads, head_dim] with dense heads: its row stride in elements.
std::int64_t rows_of(const Tensor& t, const char* what) {
  require(t.rank() == 3 && (t.numel() == 0 || (t.strides()[2] == 1 && t.strides()[1] == t.size(2))),
          "attention: heads and head dim of {} must be dense, shape {}", what,
          to_string(t.shape()));
  return t.strides()[0];
}

void check_shapes(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v) {
  require(q.rank() == 3 && k.rank() == 3 && q.size(0) == work.q_tokens() &&
              k.size(0) == work.k_tokens() && k.shape() == v.shape() && q.size(2) == k.size(2),
          "attention: q {}, k {}, v {} do not fit a pattern of {} x {} tokens",
          to_string(q.shape()), to_string(k.shape()), to_string(v.shape()), work.q_tokens(),
          work.k_tokens());
  require(attention_head_dim(static_cast<int>(q.size(2))),
          "attention on CUDA needs a head dim of 64, 96, 128 or 256, got {}; use run.backend = "
          "\"host\"",
          q.size(2));
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0 && q.size(1) / k.size(1) <= 16,
          "attention on CUDA: {} query heads over {} key/value heads", q.size(1), k.size(1));
}

}  // namespace

void set_deterministic(bool on) { g_deterministic = on; }
bool deterministic() { return g_deterministic; }

AttentionWork place_pattern(const AttentionPattern& pattern, const Tensor& q, const Tensor& k) {
  return place_pattern(pattern, static_cast<int>(q.size(1)), static_cast<int>(k.size(1)),
                       static_cast<int>(q.size(2)));
}

AttentionWork place_pattern(const AttentionPattern& pattern, int q_heads, int kv_heads,
                            int head_dim) {
  const IndexShape shape = shape_of(pattern.arrays(), q_heads, kv_heads, head_dim);
  PlacedIndex placed;
  placed.buffer = index_memory(shape, device_of(Space::cuda));
  placed.index = bind_index(shape, placed.buffer.raw(), scratch(building_bytes(shape)));
  const auto send = [](void* to, const void* from, std::size_t bytes) {
    copy_to_gpu(to, from, bytes);
    return cudaSuccess;
  };
  check(upload_index(pattern.arrays(), placed.index, send), "upload of the attention pattern");
  check(derive_index(placed.index, stream()), "preparation of the attention pattern");
  return AttentionWork(std::make_shared<const PatternTwin>(pattern.counts(), std::move(placed)));
}

void attention_forward(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, Tensor& o, Tensor& lse) {
  check_shapes(work, q, k, v);
  if (q.numel() == 0) return;
  AttentionForwardArgs args;
  args.q = q.data<bf16>(), args.k = k.data<bf16>(), args.v = v.data<bf16>();
  args.q_stride = rows_of(q, "q"), args.k_stride = rows_of(k, "k"), args.v_stride = rows_of(v, "v"),
  args.o_stride = rows_of(o, "o");
  args.q_heads = static_cast<int>(q.size(1)), args.kv_heads = static_cast<int>(k.size(1)),
  args.head_dim = static_cast<int>(q.size(2));
  args.scale = static_cast<float>(scale);
  args.o = o.raw();
  args.o_fp32 = o.dtype() == DType::f32;
  args.lse = lse.data<float>();
  const PlacedIndex& placed = index_of(work, args.q_heads, args.kv_heads);
  args.index = &placed.index;
  args.routed = placed.routed.get();
  args.workspace_bytes = attention_forward_workspace(args);
  args.workspace = scratch(args.workspace_bytes);
  check(attention_forward(args, stream()), "attention forward");
}

void attention_merge(Tensor& o, Tensor& lse, const Tensor& o_part, const Tensor& lse_part) {
  require(o.contiguous() && o_part.contiguous() && o.shape() == o_part.shape(),
          "attention merge: {} and {}", to_string(o.shape()), to_string(o_part.shape()));
  check(attention_merge(o.data<float>(), lse.data<float>(), o_part.data<float>(),
                        lse_part.data<float>(), o.size(0), static_cast<int>(o.size(1)),
                        static_cast<int>(o.size(2)), stream()),
        "attention merge");
}

void attention_delta(const Tensor& o, const Tensor& d_o, Tensor& delta) {
  check(attention_delta(d_o.data<bf16>(), rows_of(d_o, "d_o"), o.raw(), rows_of(o, "o"),
                        o.dtype() == DType::f32, delta.data<float>(), o.size(0),
                        static_cast<int>(o.size(1)), static_cast<int>(o.size(2)), stream()),
        "attention delta");
}

void attention_backward(const AttentionWork& work, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const Tensor& lse, const Tensor& delta,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv,
                        const AttentionAdds& adds) {
  check_shapes(work, q, k, v);
  if (q.numel() == 0 || k.numel() == 0) {
    if (!adds.dq) dq.zero();
    if (!adds.dkv) dk.zero(), dv.zero();
    return;
  }
  AttentionBackwardArgs args;
  args.q = q.data<bf16>(), args.k = k.data<bf16>(), args.v = v.data<bf16>(),
  args.dout = d_o.data<bf16>();
  args.q_stride = rows_of(q, "q"), args.k_stride = rows_of(k, "k"), args.v_stride = rows_of(v, "v"),
  args.dout_stride = rows_of(d_o, "d_o");
  args.q_heads = static_cast<int>(q.size(1)), args.kv_heads = static_cast<int>(k.size(1)),
  args.head_dim = static_cast<int>(q.size(2));
  args.scale = static_cast<float>(scale);
  args.lse = lse.data<float>();
  args.delta = delta.data<float>();
  args.dq = dq.data<float>(), args.dk = dk.data<float>(), args.dv = dv.data<float>();
  args.dq_stride = rows_of(dq, "dq"), args.dk_stride = rows_of(dk, "dk"),
  args.dv_stride = rows_of(dv, "dv");
  args.accumulate_dq = adds.dq;
  args.accumulate_dkv = adds.dkv;
  args.deterministic = g_deterministic;
  const PlacedIndex& placed = index_of(work, args.q_heads, args.kv_heads);
  args.index = &placed.index;
  args.routed = placed.routed.get();
  args.workspace_bytes = attention_backward_workspace(args);
  args.workspace = scratch(args.workspace_bytes);
  check(attention_backward(args, stream()), "attention backward");
}

}  // namespace ballast::cuda

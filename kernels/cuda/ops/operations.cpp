#include "kernels/cuda/ops/operations.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cuda/ops/gradient_out.hpp"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/tensor_pointers.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/ops/dropout.hpp"
#include "kernels/ops/stochastic_rounding.hpp"

namespace ballast::cuda {
namespace {

void require_dense(const Tensor& x, const char* what) {
  require(x.contiguous(), "CUDA {} needs a contiguous tensor, got shape {}", what,
          to_string(x.shape()));
}

/// Elements between rows of a matrix whose last dimension is dense.
std::int64_t row_stride(const Tensor& x) {
  require(x.rank() == 2 && x.strides()[1] == 1, "CUDA matrix with strided columns, shape {}",
          to_string(x.shape()));
  return x.strides()[0];
}

/// Elements between entries of dimension 0, each of which is dense: rows of a matrix, or of heads
/// narrowed out of [tokens, heads, D].
std::int64_t entry_stride(const Tensor& x) {
  std::int64_t dense = 1;
  for (int d = x.rank() - 1; d > 0; --d) {
    require(x.size(d) == 1 || x.strides()[d] == dense,
            "CUDA rows that are not dense, shape {}, strides {}", to_string(x.shape()),
            to_string(x.strides()));
    dense *= x.size(d);
  }
  return x.strides()[0];
}

bool is_float(const Tensor& x, const char* what) {
  require(x.dtype() == DType::f32 || x.dtype() == DType::bf16, "CUDA {} of {} rows", what,
          name(x.dtype()));
  return x.dtype() == DType::f32;
}

/// f of a pointer to the elements of fp32 or bf16.
template <class F>
auto with_elements(const Tensor& x, F&& f) {
  return x.dtype() == DType::bf16 ? f(bf16_of(x)) : f(float_of(x));
}

cudaError_t squares_of(const Tensor& x, double* partial, double* result) {
  return with_elements(x, [&](const auto* elements) {
    return sum_of_squares(elements, x.numel(), partial, result, stream());
  });
}

/// Runs a reduction and brings its result to the host.
template <class F>
double read_double(F&& reduce) {
  auto* partial = static_cast<double*>(scratch((sum_partial_doubles() + 1) * sizeof(double)));
  double* result = partial + sum_partial_doubles();
  check(reduce(partial, result), "reduction");
  double value = 0;
  device_of(Space::cuda).copy(&value, Space::host, result, Space::cuda, sizeof value);
  return value;
}

}  // namespace

void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& y,
                    const ProductOut& out) {
  gemm({.m = x.size(0),
        .n = w.size(0),
        .k = w.size(1),
        .tokens = GemmTokens::m,
        .a = bf16_of(x),
        .lda = row_stride(x),
        .b = bf16_of(w),
        .ldb = row_stride(w),
        .transpose_b = true,
        .c = bf16_of(y),
        .ldc = row_stride(y),
        .alpha = static_cast<float>(out.scale),
        .beta = out.accumulate ? 1.0f : 0.0f,
        .bias = bias.defined() ? bf16_of(bias) : nullptr});
}

void linear_input_gradient(const Tensor& dy, const Tensor& w, Tensor& dx, const ProductOut& out) {
  gemm({.m = dy.size(0),
        .n = w.size(1),
        .k = w.size(0),
        .tokens = GemmTokens::m,
        .a = bf16_of(dy),
        .lda = row_stride(dy),
        .b = bf16_of(w),
        .ldb = row_stride(w),
        .c = bf16_of(dx),
        .ldc = row_stride(dx),
        .alpha = static_cast<float>(out.scale),
        .beta = out.accumulate ? 1.0f : 0.0f});
}

void linear_weight_gradient(const Tensor& x, const Tensor& dy, const GradientTarget& target) {
  const Tensor& dw = target.tensor;
  gemm({.m = dw.size(0),
        .n = dw.size(1),
        .k = x.size(0),
        .tokens = GemmTokens::k,
        .a = bf16_of(dy),
        .lda = row_stride(dy),
        .transpose_a = true,
        .b = bf16_of(x),
        .ldb = row_stride(x),
        .c = dw.raw(),
        .ldc = row_stride(dw),
        .c_is_float = dw.dtype() == DType::f32,
        .beta = target.accumulate ? 1.0f : 0.0f});
}

void linear_bias_gradient(const Tensor& dy, const GradientTarget& db) {
  auto* partial =
      static_cast<float*>(scratch(bias_partial_floats(dy.size(0), dy.size(1)) * sizeof(float)));
  check(bias_gradient(bf16_of(dy), row_stride(dy), out_of(db), partial, dy.size(0), dy.size(1),
                      stream()),
        "bias gradient");
}

void rmsnorm_forward(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  require_dense(x, "rmsnorm");
  require_dense(y, "rmsnorm");
  check(rmsnorm_forward(bf16_of(x), nullptr, bf16_of(w), eps, nullptr, bf16_of(y), float_of(rstd),
                        x.size(0), static_cast<int>(x.size(1)), stream()),
        "rmsnorm");
}

void add_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& y, Tensor& rstd) {
  for (const Tensor* t :
       {&x, &branch, static_cast<const Tensor*>(&sum), static_cast<const Tensor*>(&y)})
    require_dense(*t, "rmsnorm");
  check(rmsnorm_forward(bf16_of(x), bf16_of(branch), bf16_of(w), eps, bf16_of(sum), bf16_of(y),
                        float_of(rstd), x.size(0), static_cast<int>(x.size(1)), stream()),
        "rmsnorm with residual");
}

void rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w, Tensor& y) {
  require_dense(x, "rmsnorm");
  require_dense(y, "rmsnorm");
  check(rmsnorm_recompute(bf16_of(x), float_of(rstd), bf16_of(w), bf16_of(y), x.size(0),
                          static_cast<int>(x.size(1)), stream()),
        "rmsnorm");
}

void rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool accumulate, Tensor& dx, const GradientTarget& dw) {
  for (const Tensor* t : {&dy, &x, static_cast<const Tensor*>(&dx)})
    require_dense(*t, "rmsnorm gradient");
  const int width = static_cast<int>(x.size(1));
  auto* partial = dw.defined()
                      ? static_cast<float*>(scratch(rmsnorm_partial_floats(width) * sizeof(float)))
                      : nullptr;
  check(rmsnorm_backward(bf16_of(x), bf16_of(w), float_of(rstd), bf16_of(dy), accumulate,
                         bf16_of(dx), out_of(dw), partial, x.size(0), width, stream()),
        "rmsnorm gradient");
}

void rope_table(const Tensor& positions, const RopeFrequencies& frequencies, Tensor& cos,
                Tensor& sin) {
  const auto half = static_cast<std::int64_t>(frequencies.frequency.size());
  auto* frequency = static_cast<double*>(scratch(half * sizeof(double)));
  device_of(Space::cuda)
      .copy(frequency, Space::cuda, frequencies.frequency.data(), Space::host,
            half * sizeof(double));
  check(rope_table(positions.data<std::int32_t>(), frequency, frequencies.amplitude, float_of(cos),
                   float_of(sin), positions.size(0), static_cast<int>(half), stream()),
        "rope table");
}

void rope_apply(Tensor& x, std::int64_t turned, const Tensor& bias, const Tensor& cos,
                const Tensor& sin) {
  require(x.rank() == 3 && x.strides()[2] == 1 && x.strides()[1] == x.size(2),
          "CUDA rope needs dense heads, got shape {}", to_string(x.shape()));
  check(rope_apply(bf16_of(x), x.strides()[0], bias.defined() ? bf16_of(bias) : nullptr,
                   float_of(cos), float_of(sin), x.size(0), static_cast<int>(x.size(1)),
                   static_cast<int>(turned), static_cast<int>(x.size(2)), stream()),
        "rope");
}

void rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                   const Tensor& sin, Tensor& d_qkv) {
  for (const Tensor* t : {&dq, &dk, &dv}) require_dense(*t, "rope gradient");
  check(rope_backward(float_of(dq), float_of(dk), float_of(dv), float_of(cos), float_of(sin),
                      bf16_of(d_qkv), row_stride(d_qkv), dq.size(0), static_cast<int>(dq.size(1)),
                      static_cast<int>(dk.size(1)), static_cast<int>(dq.size(2)), stream()),
        "rope gradient");
}

void qk_norm_rope(const Tensor& x, std::int64_t query_heads, const QkNormWeights& w,
                  const Tensor& cos, const Tensor& sin, Tensor& y) {
  require_dense(y, "QK-norm");
  check(qk_norm_rope(bf16_of(x), entry_stride(x), bf16_of(w.q), bf16_of(w.k), w.eps, float_of(cos),
                     float_of(sin), bf16_of(y), y.size(0), static_cast<int>(query_heads),
                     static_cast<int>(y.size(1) - query_heads), static_cast<int>(y.size(2)),
                     stream()),
        "QK-norm");
}

void qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                           const QkNormWeights& w, const Tensor& cos, const Tensor& sin,
                           Tensor& d_qkv, const GradientTarget& d_w_q,
                           const GradientTarget& d_w_k) {
  for (const Tensor* t : {&dq, &dk, &dv}) require_dense(*t, "QK-norm gradient");
  require(d_w_q.defined() == d_w_k.defined(), "QK-norm: one weight is frozen, the other is not");
  const int dim = static_cast<int>(dq.size(2));
  const bool weights = d_w_q.defined();
  const QkNormBackward arguments{
      .dq = float_of(dq),
      .dk = float_of(dk),
      .dv = float_of(dv),
      .x = bf16_of(x),
      .stride = entry_stride(x),
      .w_q = bf16_of(w.q),
      .w_k = bf16_of(w.k),
      .eps = w.eps,
      .cos = float_of(cos),
      .sin = float_of(sin),
      .d_qkv = bf16_of(d_qkv),
      .d_stride = row_stride(d_qkv),
      .d_w_q = out_of(d_w_q),
      .d_w_k = out_of(d_w_k),
      .partial = weights ? static_cast<float*>(scratch(qk_norm_partial_floats(dim) * sizeof(float)))
                         : nullptr,
      .tokens = dq.size(0),
      .q_heads = static_cast<int>(dq.size(1)),
      .kv_heads = static_cast<int>(dk.size(1)),
      .head_dim = dim};
  check(qk_norm_rope_backward(arguments, stream()), "QK-norm gradient");
}

void swiglu_forward(const Tensor& gate_up, Tensor& y) {
  require_dense(gate_up, "swiglu");
  require_dense(y, "swiglu");
  check(swiglu_forward(bf16_of(gate_up), bf16_of(y), y.size(0), y.size(1), stream()), "swiglu");
}

void swiglu_backward(const Tensor& gate_up, const Tensor& dy, Tensor& d_gate_up, const Tensor& y) {
  for (const Tensor* t : {&gate_up, &dy, static_cast<const Tensor*>(&d_gate_up), &y})
    if (t->defined()) require_dense(*t, "swiglu gradient");
  check(swiglu_backward(bf16_of(gate_up), bf16_of(dy), bf16_of(d_gate_up),
                        y.defined() ? bf16_of(y) : nullptr, dy.size(0), dy.size(1), stream()),
        "swiglu gradient");
}

void embedding_forward(const Tensor& tokens, const Tensor& w, Tensor& y) {
  require_dense(y, "embedding");
  check(embedding_forward(tokens.data<std::int32_t>(), bf16_of(w), bf16_of(y), tokens.size(0),
                          w.size(1), stream()),
        "embedding");
}

void embedding_weight_gradient(const Tensor& tokens, const Tensor& dy, Tensor& dw) {
  require_dense(dy, "embedding gradient");
  const std::size_t bytes = embedding_workspace(tokens.size(0));
  check(embedding_backward(tokens.data<std::int32_t>(), bf16_of(dy), out_of({dw}), tokens.size(0),
                           dw.size(1), scratch(bytes), bytes, stream()),
        "embedding gradient");
}

void cross_entropy_forward(const Tensor& logits, const Tensor& targets, Tensor& token_loss,
                           Tensor& lse) {
  require_dense(logits, "cross-entropy");
  check(cross_entropy_forward(bf16_of(logits), targets.data<std::int32_t>(), float_of(token_loss),
                              float_of(lse), logits.size(0), logits.size(1), stream()),
        "cross-entropy");
}

void cross_entropy_correct(const Tensor& logits, const Tensor& targets, Tensor& correct) {
  require_dense(logits, "cross-entropy");
  check(
      cross_entropy_correct(bf16_of(logits), targets.data<std::int32_t>(),
                            correct.data<std::uint8_t>(), logits.size(0), logits.size(1), stream()),
      "correct predictions");
}

void cross_entropy_with_gradient(const Tensor& targets, double scale, const Tensor& weights,
                                 Tensor& logits, Tensor& token_loss, Tensor& lse) {
  require_dense(logits, "cross-entropy gradient");
  check(cross_entropy_with_gradient(bf16_of(logits), targets.data<std::int32_t>(),
                                    float_of(token_loss), float_of(lse), static_cast<float>(scale),
                                    weights.defined() ? float_of(weights) : nullptr, logits.size(0),
                                    logits.size(1), stream()),
        "cross-entropy gradient");
}

double sum_losses(const Tensor& token_loss) {
  require_dense(token_loss, "sum of losses");
  return read_double([&](double* partial, double* result) {
    return sum(float_of(token_loss), token_loss.numel(), partial, result, stream());
  });
}

void dropout(const Tensor& x, const Tensor& keys, std::uint64_t stream_id, double rate,
             double scale, Tensor& y, bool accumulate) {
  check(dropout(bf16_of(x), row_stride(x), keys.data<std::int64_t>(), stream_id,
                dropout_threshold(rate), static_cast<float>(scale), bf16_of(y), row_stride(y),
                accumulate, x.size(0), x.size(1), stream()),
        "dropout");
}

void fill_normal(Tensor& out, double std, std::uint64_t seed, std::uint64_t stream_id) {
  check(fill_normal(bf16_of(out), out.numel(), std, seed, stream_id, stream()), "normal values");
}

void add(const Tensor& a, const Tensor& b, Tensor& out) {
  const bool a_float = is_float(a, "sum"), b_float = is_float(b, "sum"),
             out_float = is_float(out, "sum");
  if (a.numel() == 0) return;
  const bool dense = a.contiguous() && b.contiguous() && out.contiguous();
  const std::int64_t rows = dense ? 1 : a.size(0), width = a.numel() / rows;
  const auto stride = [&](const Tensor& t) { return dense ? width : entry_stride(t); };
  check(add_rows(a.raw(), a_float, stride(a), b.raw(), b_float, stride(b), out.raw(), out_float,
                 stride(out), rows, width, stream()),
        "add");
}

void copy_rows(const Tensor& from, Tensor& to) {
  if (from.numel() == 0) return;
  const bool dense = from.contiguous() && to.contiguous();
  const std::int64_t rows = dense ? 1 : from.size(0), width = from.numel() / rows;
  check(
      convert_rows(from.raw(), is_float(from, "copy"), dense ? width : entry_stride(from), to.raw(),
                   is_float(to, "copy"), dense ? width : entry_stride(to), rows, width, stream()),
      "copy of rows");
}

void adamw_step(AdamWState& state, const Tensor& gradient, double gradient_scale,
                double learning_rate, std::int64_t step, const AdamWOptions& options,
                Tensor& values, Queue queue) {
  const auto at = [step](double beta) { return 1 - std::pow(beta, static_cast<double>(step)); };
  const AdamWFactors factors{.scale = static_cast<float>(gradient_scale),
                             .beta1 = static_cast<float>(options.beta1),
                             .beta2 = static_cast<float>(options.beta2),
                             .rest1 = static_cast<float>(1 - options.beta1),
                             .rest2 = static_cast<float>(1 - options.beta2),
                             .step_size = static_cast<float>(learning_rate / at(options.beta1)),
                             .correction = static_cast<float>(1 / std::sqrt(at(options.beta2))),
                             .eps = static_cast<float>(options.eps),
                             .shrink = static_cast<float>(learning_rate * options.weight_decay),
                             .first = state.first,
                             .key = rounding_key(step)};
  with_elements(gradient, [&](const auto* g) {
    with_elements(state.moment1, [&]<class Moment>(Moment* moment1) {
      auto* moment2 = static_cast<Moment*>(state.moment2.raw());
      check(adamw_step(float_of(state.master), moment1, moment2, state.decay.data<std::int64_t>(),
                       static_cast<int>(state.decay.numel()), g, bf16_of(values), gradient.numel(),
                       factors, stream(queue), queue == Queue::update),
            "adamw");
    });
  });
}

void muon_momentum(Tensor& moment, Tensor& gradient, double gradient_scale,
                   const MuonOptions& options) {
  const auto mu = static_cast<float>(options.momentum);
  check(muon_momentum(float_of(moment), float_of(gradient), moment.numel(),
                      static_cast<float>(gradient_scale), mu, options.nesterov ? 1.0f : 0.0f,
                      options.nesterov ? mu : 1.0f, stream()),
        "muon momentum");
}

void orthogonalise(Tensor& matrix, int steps, Workspace& workspace) {
  const std::int64_t m = matrix.size(0), n = matrix.size(1), s = std::min(m, n);
  const bool wide = m <= n;  // A = X X^T from the left, else X^T X from the right
  Tensor x = workspace.take("muon matrix", {m, n}, DType::bf16),
         next = workspace.take("muon next", {m, n}, DType::bf16),
         gram = workspace.take("muon gram", {s, s}, DType::bf16),
         polynomial = workspace.take("muon polynomial", {s, s}, DType::bf16);
  auto* partial = static_cast<double*>(scratch((sum_partial_doubles() + 1) * sizeof(double)));
  double* squares = partial + sum_partial_doubles();
  check(sum_of_squares(float_of(matrix), m * n, partial, squares, stream()), "norm of a matrix");
  check(normalise(float_of(matrix), squares, kMuonNormEps, bf16_of(x), m * n, stream()),
        "norm of a matrix");
  for (int step = 0; step < steps; ++step) {
    gemm({.m = s,
          .n = s,
          .k = wide ? n : m,
          .a = bf16_of(x),
          .lda = n,
          .transpose_a = !wide,
          .b = bf16_of(x),
          .ldb = n,
          .transpose_b = wide,
          .c = bf16_of(gram),
          .ldc = s});
    copy_rows(gram, polynomial);
    gemm({.m = s,
          .n = s,
          .k = s,
          .a = bf16_of(gram),
          .lda = s,
          .b = bf16_of(gram),
          .ldb = s,
          .c = bf16_of(polynomial),
          .ldc = s,
          .alpha = static_cast<float>(kMuonC),
          .beta = static_cast<float>(kMuonB)});
    copy_rows(x, next);
    gemm({.m = m,
          .n = n,
          .k = s,
          .a = wide ? bf16_of(polynomial) : bf16_of(x),
          .lda = wide ? s : n,
          .b = wide ? bf16_of(x) : bf16_of(polynomial),
          .ldb = wide ? n : s,
          .c = bf16_of(next),
          .ldc = n,
          .beta = static_cast<float>(kMuonA)});
    std::swap(x, next);
  }
  copy_rows(x, matrix);
}

void muon_update(Tensor& master, const Tensor& direction, double step_size, double shrink,
                 Tensor& values) {
  check(muon_update(float_of(master), float_of(direction), bf16_of(values), values.numel(),
                    static_cast<float>(step_size), static_cast<float>(shrink), stream()),
        "muon update");
}

double sum_of_squares(const Tensor& x) {
  require_dense(x, "sum of squares");
  return read_double(
      [&](double* partial, double* result) { return squares_of(x, partial, result); });
}

std::vector<double> sums_of_squares(const std::vector<Tensor>& list) {
  auto* partial =
      static_cast<double*>(scratch((sum_partial_doubles() + list.size()) * sizeof(double)));
  double* results = partial + sum_partial_doubles();
  for (std::size_t i = 0; i < list.size(); ++i) {
    require_dense(list[i], "sum of squares");
    check(squares_of(list[i], partial, results + i), "reduction");
  }
  std::vector<double> sums(list.size());
  device_of(Space::cuda)
      .copy(sums.data(), Space::host, results, Space::cuda, sums.size() * sizeof(double));
  return sums;
}

}  // namespace ballast::cuda

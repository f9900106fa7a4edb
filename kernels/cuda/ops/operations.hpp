// CUDA twins of the operations in kernels/*.hpp, with the same names, arguments and meaning;
// reached through BALLAST_ON_CUDA.  Values are bf16, statistics fp32, parameter gradients fp32 or
// bf16.  Each checks its arguments and enqueues on the compute stream.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "kernels/ops/adamw.hpp"
#include "kernels/ops/gradient_target.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/muon.hpp"
#include "kernels/ops/qk_norm.hpp"
#include "kernels/ops/rope.hpp"

namespace ballast {
struct AttentionAdds;
struct Fp8SwigluGradient;
struct Fp8Tokens;
struct Fp8Weight;
class Workspace;
struct AttentionAxes;
struct KeyAxis;
struct SlashSetup;
class SlashScores;
class BlockScores;
class RecallScores;
}  // namespace ballast

namespace ballast::cuda {

void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& y,
                    const ProductOut& out);
void linear_input_gradient(const Tensor& dy, const Tensor& w, Tensor& dx, const ProductOut& out);
void linear_weight_gradient(const Tensor& x, const Tensor& dy, const GradientTarget& dw);
void linear_bias_gradient(const Tensor& dy, const GradientTarget& db);

void fp8_round_weight(const Tensor& weight, Fp8Weight& rounded);
void fp8_round(const Tensor& x, Fp8Tokens& rounded);
void fp8_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& rstd, Fp8Tokens& rounded);
void fp8_rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w,
                           Fp8Tokens& rounded);
void fp8_swiglu_forward(const Tensor& gate_up, Fp8Tokens& rounded);
void fp8_swiglu_backward(const Tensor& gate_up, const Tensor& dy, Fp8SwigluGradient& rounded);
void fp8_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                       const Tensor& sin, const GradientTarget& d_bias, Fp8Tokens& rounded);
void fp8_linear_forward(const Fp8Tokens& x, const Fp8Weight& w, const Tensor& bias, Tensor& y,
                        Workspace& workspace);
void fp8_linear_input_gradient(const Fp8Tokens& dy, const Fp8Weight& w, Tensor& dx,
                               Workspace& workspace);
void fp8_linear_weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy, const GradientTarget& dw);

void rmsnorm_forward(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd);
void add_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& y, Tensor& rstd);
void rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w, Tensor& y);
void rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool accumulate, Tensor& dx, const GradientTarget& dw);

void rope_table(const Tensor& positions, const RopeFrequencies& frequencies, Tensor& cos,
                Tensor& sin);
void rope_apply(Tensor& x, std::int64_t turned, const Tensor& bias, const Tensor& cos,
                const Tensor& sin);
void rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                   const Tensor& sin, Tensor& d_qkv);

void qk_norm_rope(const Tensor& x, std::int64_t query_heads, const QkNormWeights& w,
                  const Tensor& cos, const Tensor& sin, Tensor& y);
void qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                           const QkNormWeights& w, const Tensor& cos, const Tensor& sin,
                           Tensor& d_qkv, const GradientTarget& d_w_q, const GradientTarget& d_w_k);

void swiglu_forward(const Tensor& gate_up, Tensor& y);
void swiglu_backward(const Tensor& gate_up, const Tensor& dy, Tensor& d_gate_up, const Tensor& y);

void embedding_forward(const Tensor& tokens, const Tensor& w, Tensor& y);
void embedding_weight_gradient(const Tensor& tokens, const Tensor& dy, Tensor& dw);

void cross_entropy_forward(const Tensor& logits, const Tensor& targets, Tensor& token_loss,
                           Tensor& lse);
void cross_entropy_correct(const Tensor& logits, const Tensor& targets, Tensor& correct);
void cross_entropy_with_gradient(const Tensor& targets, double scale, const Tensor& weights,
                                 Tensor& logits, Tensor& token_loss, Tensor& lse);
double sum_losses(const Tensor& token_loss);

void dropout(const Tensor& x, const Tensor& keys, std::uint64_t stream, double rate, double scale,
             Tensor& y, bool accumulate);
void fill_normal(Tensor& out, double std, std::uint64_t seed, std::uint64_t stream);
void add(const Tensor& a, const Tensor& b, Tensor& out);
void copy_rows(const Tensor& from, Tensor& to);

/// Scores of sparse patterns (kernels/attention/slash_scores.hpp, block_scores.hpp).
std::unique_ptr<SlashScores> slash_scores(const SlashSetup& setup);
std::unique_ptr<BlockScores> block_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                          std::int64_t block_tokens);

/// Recall (kernels/attention/recall_scores.hpp).
std::unique_ptr<RecallScores> recall_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                            const AxisRanges& rows);

/// Uploads a host pattern and prepares it for calls with these numbers of heads, and of this head
/// dim where they are dense and deterministic.
AttentionWork place_pattern(const AttentionPattern& pattern, const Tensor& q, const Tensor& k);
AttentionWork place_pattern(const AttentionPattern& pattern, int q_heads, int kv_heads,
                            int head_dim = 128);
void attention_forward(const AttentionWork& work, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, Tensor& o, Tensor& lse);
void attention_merge(Tensor& o, Tensor& lse, const Tensor& o_part, const Tensor& lse_part);
void attention_delta(const Tensor& o, const Tensor& d_o, Tensor& delta);
void attention_backward(const AttentionWork& work, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const Tensor& lse, const Tensor& delta,
                        const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv,
                        const AttentionAdds& adds);
/// Bit-identical backward from run to run (run.deterministic): slower, see
/// kernels/cuda/attention/attention.hpp.
void set_deterministic(bool on);
bool deterministic();

void adamw_step(AdamWState& state, const Tensor& gradient, double gradient_scale,
                double learning_rate, std::int64_t step, const AdamWOptions& options,
                Tensor& values, Queue queue);
double sum_of_squares(const Tensor& x);
std::vector<double> sums_of_squares(const std::vector<Tensor>& list);

void muon_momentum(Tensor& moment, Tensor& gradient, double gradient_scale,
                   const MuonOptions& options);
void orthogonalise(Tensor& matrix, int steps, Workspace& workspace);
void muon_update(Tensor& master, const Tensor& direction, double step_size, double shrink,
                 Tensor& values);

}  // namespace ballast::cuda

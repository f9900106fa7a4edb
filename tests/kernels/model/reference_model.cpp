#include "tests/kernels/model/reference_model.hpp"

#include <cmath>
#include <numbers>

namespace ballast::reference {
namespace {

using Values = std::vector<double>;

// y[t][o] = sum_i x[t][i] w[o][i] + b[o]
Values product(const Values& x, std::int64_t in, const Values& w, const Values& b = {}) {
  const auto n = static_cast<std::size_t>(in), out = w.size() / n, rows = x.size() / n;
  Values y(rows * out);
  for (std::size_t t = 0; t < rows; ++t)
    for (std::size_t o = 0; o < out; ++o) {
      double sum = b.empty() ? 0 : b[o];
      for (std::size_t i = 0; i < n; ++i) sum += x[t * n + i] * w[o * n + i];
      y[t * out + o] = sum;
    }
  return y;
}

Values normed(const Values& x, const Values& w, double eps) {
  Values y(x.size());
  const std::size_t n = w.size();
  for (std::size_t t = 0; t < x.size() / n; ++t) {
    double squares = 0;
    for (std::size_t i = 0; i < n; ++i) squares += x[t * n + i] * x[t * n + i];
    for (std::size_t i = 0; i < n; ++i)
      y[t * n + i] = x[t * n + i] / std::sqrt(squares / static_cast<double>(n) + eps) * w[i];
  }
  return y;
}

void rotate(Values& x, const ModelShape& s, std::int64_t heads,
            const std::vector<std::int32_t>& position) {
  const std::int64_t half = s.head_dim / 2;
  for (std::size_t t = 0; t < position.size(); ++t)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = position[t] * rope_frequency(s, i), m = rope_amplitude(s);
        double& a = x[static_cast<std::size_t>(
            (static_cast<std::int64_t>(t) * heads + h) * s.head_dim + i)];
        double& b = x[static_cast<std::size_t>(
            (static_cast<std::int64_t>(t) * heads + h) * s.head_dim + half + i)];
        const double kept = a;
        a = m * (kept * std::cos(angle) - b * std::sin(angle));
        b = m * (b * std::cos(angle) + kept * std::sin(angle));
      }
}

Values attention(const Values& q, const Values& k, const Values& v, const ModelShape& s,
                 const Tokens& tokens) {
  const std::int64_t n = static_cast<std::int64_t>(tokens.token.size()), d = s.head_dim,
                     group = s.query_heads / s.kv_heads;
  Values o(q.size(), 0.0);
  for (std::int64_t h = 0; h < s.query_heads; ++h)
    for (std::int64_t i = 0; i < n; ++i) {
      const double* query = &q[static_cast<std::size_t>((i * s.query_heads + h) * d)];
      Values weight(static_cast<std::size_t>(n), 0.0);
      double total = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        if (tokens.segment[static_cast<std::size_t>(i)] !=
            tokens.segment[static_cast<std::size_t>(j)])
          continue;
        const double* key = &k[static_cast<std::size_t>((j * s.kv_heads + h / group) * d)];
        double score = 0;
        for (std::int64_t c = 0; c < d; ++c) score += query[c] * key[c];
        total += weight[static_cast<std::size_t>(j)] =
            std::exp(score / std::sqrt(static_cast<double>(d)));
      }
      for (std::int64_t j = 0; j <= i; ++j)
        for (std::int64_t c = 0; c < d; ++c)
          o[static_cast<std::size_t>((i * s.query_heads + h) * d + c)] +=
              weight[static_cast<std::size_t>(j)] / total *
              v[static_cast<std::size_t>((j * s.kv_heads + h / group) * d + c)];
    }
  return o;
}

void add_to(Values& x, const Values& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace

double rope_amplitude(const ModelShape& s) {
  return s.yarn_factor > 1 ? 1.0 + 0.1 * std::log(s.yarn_factor) : 1.0;
}

double rope_frequency(const ModelShape& s, std::int64_t pair) {
  const double pi2 = 2 * std::numbers::pi,
               plain = 1.0 / std::pow(s.rope_theta, 2.0 * static_cast<double>(pair) /
                                                        static_cast<double>(s.head_dim));
  const double context = static_cast<double>(s.original_context);
  if (s.yarn_factor > 1) {
    // The pair whose frequency makes r turns within the original context: context / (theta^(2 i /
    // D) 2 pi) = r.
    const auto pair_of_turns = [&](double r) {
      return std::log(context / (r * pi2)) / std::log(s.rope_theta) *
             static_cast<double>(s.head_dim) / 2;
    };
    double low = std::floor(pair_of_turns(32)), high = std::ceil(pair_of_turns(1));
    if (low < 0) low = 0;
    if (high > static_cast<double>(s.head_dim - 1)) high = static_cast<double>(s.head_dim - 1);
    if (low == high) high += 0.001;
    double ramp = (static_cast<double>(pair) - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return plain / s.yarn_factor * ramp + plain * (1 - ramp);
  }
  if (s.llama3_factor > 1) {
    const double wavelength = pi2 / plain;
    if (wavelength < context / s.llama3_high) return plain;
    if (wavelength > context / s.llama3_low) return plain / s.llama3_factor;
    const double smooth = (context / wavelength - s.llama3_low) / (s.llama3_high - s.llama3_low);
    return (1 - smooth) * plain / s.llama3_factor + smooth * plain;
  }
  return plain;
}

std::vector<double> token_losses(const ModelShape& s, const Lookup& parameter,
                                 const Tokens& tokens) {
  const auto hidden = static_cast<std::size_t>(s.hidden);
  const Values embedding = parameter("model.embed_tokens.weight");
  Values x(tokens.token.size() * hidden);
  for (std::size_t t = 0; t < tokens.token.size(); ++t)
    for (std::size_t i = 0; i < hidden; ++i)
      x[t * hidden + i] = embedding[static_cast<std::size_t>(tokens.token[t]) * hidden + i];
  for (std::int64_t l = 0; l < s.layers; ++l) {
    const std::string prefix = "model.layers." + std::to_string(l) + ".";
    const auto get = [&](const char* name) { return parameter(prefix + name); };
    const auto bias = [&](const char* name) { return s.qkv_bias ? get(name) : Values(); };
    const Values n1 = normed(x, get("input_layernorm.weight"), s.rms_eps);
    Values q = product(n1, s.hidden, get("self_attn.q_proj.weight"), bias("self_attn.q_proj.bias"));
    Values k = product(n1, s.hidden, get("self_attn.k_proj.weight"), bias("self_attn.k_proj.bias"));
    const Values v =
        product(n1, s.hidden, get("self_attn.v_proj.weight"), bias("self_attn.v_proj.bias"));
    if (s.qk_norm) {  // heads are rows of their own
      q = normed(q, get("self_attn.q_norm.weight"), s.rms_eps);
      k = normed(k, get("self_attn.k_norm.weight"), s.rms_eps);
    }
    rotate(q, s, s.query_heads, tokens.position);
    rotate(k, s, s.kv_heads, tokens.position);
    add_to(x, product(attention(q, k, v, s, tokens), s.query_heads * s.head_dim,
                      get("self_attn.o_proj.weight")));
    const Values n2 = normed(x, get("post_attention_layernorm.weight"), s.rms_eps);
    Values gate = product(n2, s.hidden, get("mlp.gate_proj.weight"));
    const Values up = product(n2, s.hidden, get("mlp.up_proj.weight"));
    for (std::size_t i = 0; i < gate.size(); ++i)
      gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    add_to(x, product(gate, s.intermediate, get("mlp.down_proj.weight")));
  }
  const Values last = normed(x, parameter("model.norm.weight"), s.rms_eps);
  const Values logits =
      product(last, s.hidden, s.tied_embedding ? embedding : parameter("lm_head.weight"));
  Values losses(tokens.token.size(), 0.0);
  const auto vocabulary = static_cast<std::size_t>(s.vocabulary);
  for (std::size_t t = 0; t < losses.size(); ++t) {
    if (tokens.target[t] < 0) continue;
    double sum = 0;
    for (std::size_t c = 0; c < vocabulary; ++c) sum += std::exp(logits[t * vocabulary + c]);
    losses[t] = std::log(sum) - logits[t * vocabulary + static_cast<std::size_t>(tokens.target[t])];
  }
  return losses;
}

bool NaiveAttention::visible(std::int64_t query, std::int64_t key) const {
  const auto i = static_cast<std::size_t>(query), j = static_cast<std::size_t>(key);
  return segment_[i] == segment_[j] && position_[j] <= position_[i];
}

namespace {
template <class T>
T& at(const Tensor& t, std::int64_t token, std::int64_t head, std::int64_t c) {
  return t.data<T>()[token * t.strides()[0] + head * t.strides()[1] + c];
}
}  // namespace

void NaiveAttention::forward(const AttentionInputs& in, Tensor& o, Tensor& lse) {
  ++forwards;
  const std::int64_t n = in.q.size(0), heads = in.q.size(1), d = in.q.size(2),
                     group = heads / in.k.size(1);
  dispatch_float(in.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < n; ++i) {
        Values weight(static_cast<std::size_t>(n), 0.0);
        double total = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          if (!visible(i, j)) continue;
          double score = 0;
          for (std::int64_t c = 0; c < d; ++c)
            score += double(at<T>(in.q, i, h, c)) * double(at<T>(in.k, j, h / group, c));
          total += weight[static_cast<std::size_t>(j)] = std::exp(score * in.scale);
        }
        lse.data<T>()[h * n + i] = static_cast<T>(std::log(total));
        for (std::int64_t c = 0; c < d; ++c) {
          double sum = 0;
          for (std::int64_t j = 0; j < n; ++j)
            sum += weight[static_cast<std::size_t>(j)] * double(at<T>(in.v, j, h / group, c));
          at<T>(o, i, h, c) = static_cast<T>(total > 0 ? sum / total : 0.0);
        }
      }
  });
}

void NaiveAttention::backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse,
                              const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) {
  const std::int64_t n = in.q.size(0), heads = in.q.size(1), d = in.q.size(2),
                     group = heads / in.k.size(1);
  dispatch_float(in.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    Values q_sum(static_cast<std::size_t>(dq.numel())), k_sum(static_cast<std::size_t>(dk.numel())),
        v_sum(static_cast<std::size_t>(dv.numel()));
    const auto place = [&](std::int64_t token, std::int64_t head, std::int64_t count,
                           std::int64_t c) {
      return static_cast<std::size_t>((token * count + head) * d + c);
    };
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < n; ++i) {
        double delta = 0;
        for (std::int64_t c = 0; c < d; ++c)
          delta += double(at<T>(o, i, h, c)) * double(at<T>(d_o, i, h, c));
        for (std::int64_t j = 0; j < n; ++j) {
          if (!visible(i, j)) continue;
          double score = 0, d_weight = 0;
          for (std::int64_t c = 0; c < d; ++c) {
            score += double(at<T>(in.q, i, h, c)) * double(at<T>(in.k, j, h / group, c));
            d_weight += double(at<T>(d_o, i, h, c)) * double(at<T>(in.v, j, h / group, c));
          }
          const double weight = std::exp(score * in.scale - double(lse.data<T>()[h * n + i])),
                       d_score = weight * (d_weight - delta) * in.scale;
          for (std::int64_t c = 0; c < d; ++c) {
            q_sum[place(i, h, heads, c)] += d_score * double(at<T>(in.k, j, h / group, c));
            k_sum[place(j, h / group, heads / group, c)] += d_score * double(at<T>(in.q, i, h, c));
            v_sum[place(j, h / group, heads / group, c)] += weight * double(at<T>(d_o, i, h, c));
          }
        }
      }
    const auto write = [](const Values& sums, Tensor& t) {
      for (std::size_t i = 0; i < sums.size(); ++i) t.data<T>()[i] = static_cast<T>(sums[i]);
    };
    write(q_sum, dq);
    write(k_sum, dk);
    write(v_sum, dv);
  });
}

}  // namespace ballast::reference

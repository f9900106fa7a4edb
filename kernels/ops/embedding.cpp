#include "kernels/ops/embedding.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/gradient_elements.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace host {
namespace {

void check_tokens(const Vector<const std::int32_t>& tokens, std::int64_t vocabulary) {
  for (std::size_t i = 0; i < tokens.extent(0); ++i)
    require(tokens(i) >= 0 && tokens(i) < vocabulary,
            "embedding: token {} at local index {} lies outside the vocabulary of {}; use the "
            "model's tokenizer",
            tokens(i), i, vocabulary);
}

template <class T>
void forward(const Tensor& tokens_, const Tensor& w_, Tensor& y_) {
  const auto tokens = vector<const std::int32_t>(tokens_);
  const auto w = matrix<const T>(w_);
  const auto y = matrix<T>(y_);
  check_tokens(tokens, w.rows());
  parallel_for("embedding", y.rows(), [=](std::int64_t i) {
    std::copy_n(w.row(tokens(static_cast<std::size_t>(i))), y.columns(), y.row(i));
  });
}

template <class T>
void weight_gradient(const Tensor& tokens_, const Tensor& dy_, const Tensor& dw_) {
  const auto tokens = vector<const std::int32_t>(tokens_);
  const auto dy = matrix<const T>(dy_);
  const GradientElements<T> dw({dw_, true});
  check_tokens(tokens, dw_.size(0));
  // Rows of one id together, in token order: each id's sum is computed once, by one thread.
  std::vector<std::int64_t> order(tokens.extent(0));
  std::iota(order.begin(), order.end(), 0);
  const auto id = [&](std::int64_t i) { return tokens(static_cast<std::size_t>(i)); };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return id(a) < id(b); });
  std::vector<std::size_t> first;  // start of each id's group in `order`
  for (std::size_t i = 0; i < order.size(); ++i)
    if (i == 0 || id(order[i]) != id(order[i - 1])) first.push_back(i);
  first.push_back(order.size());
  const std::int64_t *sorted = order.data(), columns = dy.columns();
  const std::size_t* group = first.data();
  parallel_for("embedding weight gradient", static_cast<std::int64_t>(first.size()) - 1,
               [=](std::int64_t g) {
                 constexpr std::int64_t width = 64;
                 const std::int64_t row_of_id =
                     tokens(static_cast<std::size_t>(sorted[group[g]])) * columns;
                 for (std::int64_t begin = 0; begin < columns; begin += width) {
                   const std::int64_t n = std::min(width, columns - begin);
                   double sum[width] = {};
                   for (std::size_t k = group[g]; k < group[g + 1]; ++k) {
                     const T* row = dy.row(sorted[k]) + begin;
                     for (std::int64_t j = 0; j < n; ++j) sum[j] += static_cast<double>(row[j]);
                   }
                   for (std::int64_t j = 0; j < n; ++j)
                     dw.put(row_of_id + begin + j, static_cast<T>(sum[j]));
                 }
               });
}

}  // namespace
}  // namespace host

namespace {
void check(const char* what, const Tensor& tokens, const Tensor& w, const Tensor& y) {
  require(tokens.rank() == 1 && w.rank() == 2 && y.rank() == 2 && y.size(0) == tokens.size(0) &&
              y.size(1) == w.size(1),
          "{}: tokens {}, weight {} and output {} do not fit", what, to_string(tokens.shape()),
          to_string(w.shape()), to_string(y.shape()));
}
}  // namespace

void embedding_forward(const Tensor& tokens, const Tensor& w, Tensor& y) {
  check("embedding_forward", tokens, w, y);
  BALLAST_ON_CUDA(w, embedding_forward(tokens, w, y));
  dispatch_float(w.dtype(), [&](auto t) { host::forward<decltype(t)>(tokens, w, y); });
}

void embedding_weight_gradient(const Tensor& tokens, const Tensor& dy,
                               const GradientTarget& target) {
  if (!target.defined()) return;
  Tensor dw = target.tensor;
  check("embedding_weight_gradient", tokens, dw, dy);
  if (!target.accumulate) dw.zero();
  BALLAST_ON_CUDA(dy, embedding_weight_gradient(tokens, dy, dw));
  dispatch_float(dy.dtype(), [&](auto t) { host::weight_gradient<decltype(t)>(tokens, dy, dw); });
}

}  // namespace ballast

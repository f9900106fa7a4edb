#include "kernels/ops/dropout.hpp"

#include <algorithm>

#include "core/base/random.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {

void dropout(const Tensor& x_, const Tensor& keys_, std::uint64_t stream, double rate, double scale,
             Tensor& y_, bool accumulate) {
  require(x_.rank() == 2 && x_.shape() == y_.shape() &&
              (rate == 0 || (keys_.defined() && keys_.numel() == x_.size(0))),
          "dropout: input {}, output {} and token keys {} do not fit", to_string(x_.shape()),
          to_string(y_.shape()), to_string(keys_.shape()));
  require(rate >= 0 && rate < 1, "dropout: the rate {} lies outside [0, 1)", rate);
  BALLAST_ON_CUDA(x_, dropout(x_, keys_, stream, rate, scale, y_, accumulate));
  dispatch_float(x_.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto x = host::matrix<const T>(x_);
    const auto y = host::matrix<T>(y_);
    const std::int64_t* keys = rate > 0 ? host::vector<const std::int64_t>(keys_).data() : nullptr;
    const std::uint32_t threshold = dropout_threshold(rate);
    const auto factor = static_cast<T>(scale);
    host::parallel_for("dropout", x.rows(), [=](std::int64_t row) {
      const T* from = x.row(row);
      T* to = y.row(row);
      const std::int64_t n = x.columns();
      const auto put = [=](std::int64_t c, T value) { to[c] = accumulate ? to[c] + value : value; };
      if (!keys) {
        for (std::int64_t c = 0; c < n; ++c) put(c, factor * from[c]);
        return;
      }
      for (std::int64_t c = 0; c < n; c += 4) {
        const auto words = philox(stream, static_cast<std::uint64_t>(keys[row]),
                                  static_cast<std::uint64_t>(c / 4));
        for (std::int64_t w = 0; w < std::min<std::int64_t>(4, n - c); ++w)
          put(c + w, words[static_cast<std::size_t>(w)] >= threshold ? factor * from[c + w] : T(0));
      }
    });
  });
}

}  // namespace ballast

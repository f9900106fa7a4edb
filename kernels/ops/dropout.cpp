#include "kernels/ops/dropout.hpp"

#include <algorithm>

#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {

void dropout(const Tensor& x_, const Tensor& keys_, std::uint64_t stream, double rate, double scale,
             Tensor& y_, bool accumulate) {
  require(
      x_.rank() == 2 && x_.shape() == y_.shape() && keys_.defined() && keys_.numel() == x_.size(0),
      "dropout: input {}, output {} and token keys {} do not fit", to_string(x_.shape()),
      to_string(y_.shape()), to_string(keys_.shape()));
  require(rate > 0 && rate < 1, "dropout: the rate {} lies outside (0, 1)", rate);
  BALLAST_ON_CUDA(x_, dropout(x_, keys_, stream, rate, scale, y_, accumulate));
  dispatch_float(x_.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto x = host::matrix<const T>(x_);
    const auto y = host::matrix<T>(y_);
    const std::int64_t* keys = host::vector<const std::int64_t>(keys_).data();
    const std::uint32_t threshold = dropout_threshold(rate);
    const auto factor = static_cast<T>(scale);
    host::parallel_for("dropout", x.rows(), [=](std::int64_t row) {
      const T* from = x.row(row);
      T* to = y.row(row);
      for (std::int64_t c = 0; c < x.columns(); c += kDropoutColumns) {
        const auto drawn = philox(stream, static_cast<std::uint64_t>(keys[row]),
                                  static_cast<std::uint64_t>(c / kDropoutColumns));
        const auto columns = std::min<std::int64_t>(kDropoutColumns, x.columns() - c);
        for (int i = 0; i < columns; ++i) {
          const T value = dropout_stays(drawn, i, threshold) ? factor * from[c + i] : T(0);
          to[c + i] = accumulate ? to[c + i] + value : value;
        }
      }
    });
  });
}

}  // namespace ballast

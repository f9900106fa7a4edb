#include "kernels/ops/random_fill.hpp"

#include <algorithm>
#include <thread>

#include "core/base/random.hpp"
#include "core/base/threads.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace {

/// Calls range(begin, end) for parts of [0, n): billions of normal values take minutes on one core,
/// and the distribution's Kokkos has no threads.
template <class F>
void in_parts(std::int64_t n, const F& range) {
  constexpr std::int64_t kWorthAThread = 1 << 20;
  const std::int64_t workers = std::clamp<std::int64_t>(
      n / kWorthAThread, 1, std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, 16));
  in_threads(static_cast<std::size_t>(workers), [&](std::size_t part) {
    const auto w = static_cast<std::int64_t>(part);
    range(n * w / workers, n * (w + 1) / workers);
  });
}

}  // namespace

void fill_normal(Tensor& out, double std, std::uint64_t seed, std::uint64_t stream) {
  require(out.contiguous(), "fill_normal: a tensor of shape {} is not contiguous",
          to_string(out.shape()));
  BALLAST_ON_CUDA(out, fill_normal(out, std, seed, stream));
  dispatch_float(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* values = out.data<T>();
    in_parts(out.numel(), [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        values[i] =
            static_cast<T>(std * random_normal(seed, stream, static_cast<std::uint64_t>(i)));
    });
  });
}

}  // namespace ballast

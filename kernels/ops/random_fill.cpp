#include "kernels/ops/random_fill.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "core/base/random.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/host_view.hpp"

namespace ballast {
namespace {

/// Calls range(begin, end) for parts of [0, n): billions of normal values take minutes on one core,
/// and the distribution's Kokkos has no threads.
template <class F>
void in_threads(std::int64_t n, const F& range) {
  constexpr std::int64_t kWorthAThread = 1 << 20;
  const std::int64_t workers = std::clamp<std::int64_t>(
      n / kWorthAThread, 1, std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, 16));
  std::vector<std::thread> threads;
  for (std::int64_t w = 1; w < workers; ++w)
    threads.emplace_back(range, n * w / workers, n * (w + 1) / workers);
  range(0, n / workers);
  for (auto& thread : threads) thread.join();
}

}  // namespace

void fill_normal(Tensor& out, double std, std::uint64_t seed, std::uint64_t stream) {
  require(out.contiguous(), "fill_normal: a tensor of shape {} is not contiguous",
          to_string(out.shape()));
  BALLAST_ON_CUDA(out, fill_normal(out, std, seed, stream));
  dispatch_float(out.dtype(), [&](auto t) {
    using T = decltype(t);
    T* values = out.data<T>();
    in_threads(out.numel(), [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        values[i] =
            static_cast<T>(std * random_normal(seed, stream, static_cast<std::uint64_t>(i)));
    });
  });
}

}  // namespace ballast

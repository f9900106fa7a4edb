// The CUDA device: copies, and waits of the host that can be watched and ended.
#include <unistd.h>

#include <vector>

#include "core/observe/events.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

using CudaWaits = CudaTest;

TEST_F(CudaWaits, AWatchSeesALongWaitAndMayEndIt) {
  const std::size_t bytes = std::size_t{1} << 30;
  Tensor a = Tensor::zeros({static_cast<std::int64_t>(bytes)}, DType::u8, *gpu),
         b = Tensor::zeros({static_cast<std::int64_t>(bytes)}, DType::u8, *gpu);
  gpu->synchronize();
  const auto busy = [&] {  // some 100 ms of copies
    for (int i = 0; i < 200; ++i) b.copy_from(a);
  };
  double waited = 0;
  cuda::set_wait_watch([&](double seconds) { waited = seconds; });
  busy();
  gpu->synchronize();
  EXPECT_GT(waited, 0.005);
  cuda::set_wait_watch([](double seconds) {
    if (seconds > 0.005) fail("waited {:.3f} s", seconds);
  });
  busy();
  EXPECT_THROW(gpu->synchronize(), Error);
  cuda::set_wait_watch(nullptr);
  gpu->synchronize();
  EXPECT_EQ(cudaGetLastError(),
            cudaSuccess);  // "not ready" left nothing behind for the next launch
}

TEST_F(CudaWaits, TheClockFollowsTheHostsWhileItsOriginMoves) {
  const auto clock = cuda::device_clock();
  const auto host_s = [] { return host_clock().seconds(host_clock().mark()); };
  const auto now = [&] { return clock->seconds(clock->mark()); };
  double last = now();
  const double start = host_s();
  std::vector<std::int64_t> marks;
  while (host_s() - start < 5) {  // two origins further
    const double before = host_s(), device_s = now(), after = host_s();
    ASSERT_GE(device_s, last - 2e-6);
    ASSERT_GT(device_s, before - 2e-3);
    ASSERT_LT(device_s, after + 2e-3);
    last = device_s;
    if (marks.size() < 10) marks.push_back(clock->mark());
    usleep(1000);
  }
  for (std::size_t i = 1; i < marks.size(); ++i)
    EXPECT_GE(clock->seconds(marks[i]), clock->seconds(marks[i - 1]));
  EXPECT_LT(clock->seconds(marks.back()),
            start + 1);  // marks older than the origin keep their time
}

TEST_F(CudaWaits, HostDataAreTakenWhileTheGpuIsBusy) {
  const std::int64_t bytes = std::int64_t{1} << 30;
  Tensor a = Tensor::zeros({bytes}, DType::u8, *gpu), b = Tensor::zeros({bytes}, DType::u8, *gpu);
  const Tensor x = random({1 << 20});
  Tensor staged = Tensor::empty({1 << 20}, DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    staged.data<float>()[i] = static_cast<float>(x.data<double>()[i]);
  const auto host_s = [] { return host_clock().seconds(host_clock().mark()); };
  staged.to(*gpu);  // page-locked memory is there from now on
  gpu->synchronize();
  for (int i = 0; i < 400; ++i) b.copy_from(a);  // some 200 ms
  const double begin = host_s();
  const Tensor sent = staged.to(*gpu);
  const double taken_s = host_s() - begin;
  for (std::int64_t i = 0; i < x.numel(); ++i)
    staged.data<float>()[i] = 0;  // the source may change at once
  gpu->synchronize();
  EXPECT_LT(taken_s, 0.5 * (host_s() - begin));
  EXPECT_EQ(error(sent, x), 0);
}

TEST_F(CudaWaits, CopiesComeBack) {
  for (const std::int64_t n : {1, 1000, 10000001}) {
    const Tensor x = random({n});
    EXPECT_EQ(error(to_gpu(x, DType::bf16), x), 0);
  }
}

}  // namespace
}  // namespace ballast::test

// Copies to and from pinned host memory beside computation: their order, that they overlap, and
// chunks put away against chunks on the device.
#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/ops/elementwise.hpp"
#include "parallel/comm/host_copy.hpp"
#include "parallel/context/ring_attention.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

class CudaQueues : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    static cuda::PinnedHost pinned;
    if (gpu) set_pinned_device(&pinned);
  }
  void TearDown() override { set_pinned_device(nullptr); }
};

TEST_F(CudaQueues, BigWindowsComeWhileOthersAreComputedAndLeave) {
  constexpr int kWindows = 12;
  constexpr std::int64_t kElements = std::int64_t{16} << 20;  // 64 MiB
  constexpr int kSums = 80;  // longer than a copy there and one back
  const auto clock = cuda::device_clock();
  Recorder recorder(*clock);
  std::vector<Tensor> there, back;
  for (int w = 0; w < kWindows; ++w) {
    there.push_back(Tensor::empty({kElements}, DType::f32, pinned_device()));
    back.push_back(Tensor::zeros({kElements}, DType::f32, pinned_device()));
    for (std::int64_t i = 0; i < kElements; i += 4096)
      std::fill_n(there[w].data<float>() + i, 4096, static_cast<float>(rng() % 1000));
  }
  Tensor one = Tensor::empty({kElements}, DType::f32);
  std::fill_n(one.data<float>(), kElements, 1.0f);
  one = one.to(*gpu);
  Tensor window[2] = {Tensor::zeros({kElements}, DType::f32, *gpu),
                      Tensor::zeros({kElements}, DType::f32, *gpu)};
  Fence come[2], gone[2];
  const auto fetch = [&](int w) {
    gpu->wait(gone[w % 2], Queue::to_device);
    come[w % 2] = copy_beside(*gpu, Queue::to_device, {{window[w % 2], there[w]}}, &recorder);
  };
  fetch(0);
  for (int w = 0; w < kWindows; ++w) {
    if (w + 1 < kWindows) fetch(w + 1);
    wait_for_copy(*gpu, come[w % 2], &recorder);
    {
      Scope compute(&recorder, EventKind::attention_forward);
      for (int i = 0; i < kSums; ++i) add(window[w % 2], one, window[w % 2]);
    }
    gone[w % 2] = copy_beside(*gpu, Queue::to_host, {{back[w], window[w % 2]}}, &recorder);
  }
  gpu->synchronize();
  for (int w = 0; w < kWindows; ++w)
    for (std::int64_t i = 0; i < kElements; i += 1021)
      ASSERT_EQ(back[w].data<float>()[i], there[w].data<float>()[i] + kSums)
          << "window " << w << ", element " << i << ", seed " << seed;
  std::vector<Event> compute, fetches, offloads;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events)
      if (e.kind != EventKind::copy_wait)
        (e.kind == EventKind::fetch     ? fetches
         : e.kind == EventKind::offload ? offloads
                                        : compute)
            .push_back(e);
  });
  ASSERT_EQ(fetches.size(), static_cast<std::size_t>(kWindows));
  ASSERT_EQ(offloads.size(), static_cast<std::size_t>(kWindows));
  int beside = 0;
  double copied_s = 0, computed_s = 0;
  for (int w = 0; w < kWindows; ++w) {
    EXPECT_EQ(fetches[w].bytes, kElements * 4);
    EXPECT_GE(compute[w].begin_s, fetches[w].end_s - 2e-6) << w;
    EXPECT_GE(offloads[w].begin_s, compute[w].end_s - 2e-6) << w;
    if (w >= 2) {
      EXPECT_GE(fetches[w].begin_s, compute[w - 2].end_s - 2e-6) << w;
    }
    if (w >= 1) beside += fetches[w].begin_s < compute[w - 1].end_s;
    copied_s += fetches[w].end_s - fetches[w].begin_s + offloads[w].end_s - offloads[w].begin_s;
    computed_s += compute[w].end_s - compute[w].begin_s;
  }
  const double all_s = offloads.back().end_s - fetches.front().begin_s;
  std::printf("# %d windows of 64 MiB: computation %.1f ms, copies %.1f ms, together %.1f ms\n",
              kWindows, computed_s * 1e3, copied_s * 1e3, all_s * 1e3);
  EXPECT_GE(beside, kWindows / 2);  // not all_s: other processes on the GPU stretch it
}

TEST_F(CudaQueues, OldFencesStandForLaterOnes) {
  constexpr int kCopies = 2500;
  Tensor host = Tensor::zeros({kCopies}, DType::i32, pinned_device());
  const Tensor numbers = [&] {
    std::vector<std::int32_t> list(kCopies);
    for (int i = 0; i < kCopies; ++i) list[i] = i + 1;
    return integers(list).to(*gpu);
  }();
  std::vector<Fence> fences;
  for (int i = 0; i < kCopies; ++i)
    fences.push_back(copy_beside(*gpu, Queue::to_host,
                                 {{host.rows(i, i + 1), numbers.rows(i, i + 1)}}, nullptr));
  for (const int i : {0, 1000, kCopies - 1}) {
    gpu->wait(fences[i]);
    EXPECT_EQ(host.data<std::int32_t>()[i], i + 1);
  }
  gpu->wait(fences[3], Queue::to_device);
  gpu->wait(fences[kCopies - 1], Queue::compute);
  gpu->wait(Fence());
  EXPECT_THROW(gpu->wait(Fence{Queue::to_host, 1 << 20}), Error);
  gpu->synchronize();
}

TEST_F(CudaQueues, ChunksPutAwayEqualChunksOnTheDevice) {
  constexpr std::int64_t kChunk = 512, kChunks = 7, kHeads = 4, kKvHeads = 2, kDim = 128;
  const RingGroup ring{Communicator(), plan_ring(0, 1, 1)};
  std::vector<KvStore::ShardKeys> chunks;
  for (std::int64_t c = 0; c < kChunks; ++c) {
    const std::int64_t begin = c * kChunk, end = std::min(begin + kChunk, kChunks * kChunk - 100);
    const AxisRanges tokens{{0, begin, end - begin}};
    chunks.push_back({tokens});
  }
  std::vector<Tensor> q, k, v, d_o;
  for (const auto& chunk : chunks) {
    const auto n = token_count(chunk[0]);
    q.push_back(to_gpu(random({n, kHeads, kDim}), DType::bf16));
    k.push_back(to_gpu(random({n, kKvHeads, kDim}), DType::bf16));
    v.push_back(to_gpu(random({n, kKvHeads, kDim}), DType::bf16));
    d_o.push_back(to_gpu(random({n, kHeads, kDim}), DType::bf16));
  }
  const auto run = [&](const KvPlace& place) {
    std::vector<Tensor> results;
    const auto store = std::make_shared<KvStore>(chunks, 0, 1, place);
    std::vector<Tensor> o, lse;
    const auto inputs = [&](int layer, std::int64_t c) {
      return AttentionInputs{layer, q[c], k[c], v[c], 1 / std::sqrt(static_cast<double>(kDim))};
    };
    const auto attention = [&](std::int64_t c) {
      const StoredChunk stored{store, static_cast<int>(c)};
      return RingAttention(ring,
                           std::make_unique<DenseSource>(store->axes(static_cast<int>(c)), nullptr),
                           nullptr, stored);
    };
    for (std::int64_t c = 0; c < kChunks; ++c)
      for (const int layer : {0, 1}) {
        o.push_back(unwritten(q[c].shape(), DType::bf16));
        lse.push_back(unwritten({kHeads, q[c].size(0)}, DType::f32));
        attention(c).forward(inputs(layer, c), o.back(), lse.back());
      }
    for (std::int64_t c = kChunks; c-- > 0;)
      for (const int layer : {1, 0}) {
        const std::size_t at = static_cast<std::size_t>(2 * c + layer);
        Tensor dq = unwritten(q[c].shape(), DType::bf16), dk = unwritten(k[c].shape(), DType::bf16),
               dv = unwritten(k[c].shape(), DType::bf16);
        attention(c).backward(inputs(layer, c), o[at], lse[at], d_o[c], dq, dk, dv);
        for (const Tensor& t : {o[at], dq, dk, dv}) results.push_back(to_host(t));
      }
    return results;
  };
  KvPlace resident, away;
  away.offload = true;
  away.window_tokens = 2 * kChunk;
  const std::vector<Tensor> expected = run(resident);
  for (int repeat = 0; repeat < 3; ++repeat) {  // with buffers of the run before
    const std::vector<Tensor> found = run(away);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_CLOSE(found[i], expected[i], kBf16);
  }
}

}  // namespace
}  // namespace ballast::test

// What NCCL transfers cost matrix products that run beside them, and what the products cost the
// transfers: all-gathers of bf16 and reduce-scatters of fp32, of a layer of an 8B model, with fewer
// blocks (CTAs) for NCCL, in symmetric windows, and by copy engines (NCCL 2.28's CTA policies). One
// process drives all GPUs that it sees.
//
//   nvcc -std=c++20 -O2 -arch=sm_90a tests/reference/peer_transfers.cu -lnccl -lcublas
//   NCCL_NVLS_ENABLE=0 ./a.out [GPUS]
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

#define CHECK(call)                                                            \
  do {                                                                         \
    if (const int code = static_cast<int>(call); code != 0) {                  \
      std::printf("%s, line %d: %s is %d\n", __FILE__, __LINE__, #call, code); \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

constexpr std::size_t kGathered = 436ull << 20, kReduced = 872ull << 20;  // bytes
constexpr int kM = 8192, kN = 14336, kK = 4096;                           // a product
constexpr int kProducts = 100, kGathers = 40, kReductions = 20, kRepeats = 4;

struct Gpu {
  cudaStream_t compute, wire;
  cublasHandle_t blas;
  __nv_bfloat16 *a, *b, *c;
  char *values, *gradients;                // plain memory
  char *shared_values, *shared_gradients;  // NCCL's, for windows
  cudaEvent_t products[2], transfers[2];   // begin, end
};
std::vector<Gpu> g_gpus;
double g_alone_ms = 0;  // the products without transfers

__global__ void fill(__nv_bfloat16* p, std::size_t n, unsigned seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < n;
       i += step) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    p[i] = __float2bfloat16(((x & 0xffff) / 65536.f - 0.5f) * 0.1f);
  }
}

int count() { return static_cast<int>(g_gpus.size()); }

void synchronize() {
  for (int d = 0; d < count(); ++d) {
    CHECK(cudaSetDevice(d));
    CHECK(cudaDeviceSynchronize());
  }
}

void product(int d) {
  const Gpu& g = g_gpus[d];
  const float one = 1, zero = 0;
  CHECK(cudaSetDevice(d));
  CHECK(cublasGemmEx(g.blas, CUBLAS_OP_T, CUBLAS_OP_N, kN, kM, kK, &one, g.a, CUDA_R_16BF, kK, g.b,
                     CUDA_R_16BF, kK, &zero, g.c, CUDA_R_16BF, kN, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT_TENSOR_OP));
}

struct Transfers {
  std::vector<ncclComm_t> comms;
  bool gather = true, windows = false;
  int number() const { return gather ? kGathers : kReductions; }
  double bytes() const {
    return static_cast<double>(gather ? kGathered : kReduced) * (count() - 1) / count();
  }
  void start() const {
    CHECK(ncclGroupStart());
    for (int d = 0; d < count(); ++d) {
      const Gpu& g = g_gpus[d];
      if (gather) {
        char* to = windows ? g.shared_values : g.values;
        const std::size_t part = kGathered / count();
        CHECK(ncclAllGather(to + d * part, to, part / 2, ncclBfloat16, comms[d], g.wire));
      } else {
        char* from = windows ? g.shared_gradients : g.gradients;
        const std::size_t part = kReduced / count();
        CHECK(ncclReduceScatter(from, from + d * part, part / 4, ncclFloat, ncclSum, comms[d],
                                g.wire));
      }
    }
    CHECK(ncclGroupEnd());
  }
};

void mark(int which) {
  for (int d = 0; d < count(); ++d) {
    CHECK(cudaSetDevice(d));
    CHECK(cudaEventRecord(g_gpus[d].transfers[which], g_gpus[d].wire));
    CHECK(cudaEventRecord(g_gpus[d].products[which], g_gpus[d].compute));
  }
}

float slowest(cudaEvent_t (Gpu::*events)[2]) {
  float most = 0;
  for (int d = 0; d < count(); ++d) {
    float ms = 0;
    CHECK(cudaSetDevice(d));
    CHECK(cudaEventElapsedTime(&ms, (g_gpus[d].*events)[0], (g_gpus[d].*events)[1]));
    most = std::max(most, ms);
  }
  return most;
}

/// Medians of three of four rounds; null: no transfers.
void time_case(const std::string& name, const Transfers* transfers, int products) {
  std::vector<float> compute, wire;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    synchronize();
    mark(0);
    const int moved = transfers != nullptr ? transfers->number() : 0;
    for (int i = 0; i < std::max(products, moved); ++i) {
      if (i < moved) transfers->start();
      for (int d = 0; i < products && d < count(); ++d) product(d);
    }
    mark(1);
    synchronize();
    if (repeat == 0) continue;
    compute.push_back(slowest(&Gpu::products));
    wire.push_back(slowest(&Gpu::transfers));
  }
  std::sort(compute.begin(), compute.end());
  std::sort(wire.begin(), wire.end());
  if (transfers == nullptr) g_alone_ms = compute[1];
  std::printf("%-34s", name.c_str());
  if (products > 0)
    std::printf(" products %7.2f ms %4.0f TFLOP/s %+6.2f ms", compute[1],
                2.0 * kM * kN * kK * products / compute[1] / 1e9, compute[1] - g_alone_ms);
  if (transfers != nullptr)
    std::printf(" transfers %7.2f ms %6.1f GB/s", wire[1],
                transfers->number() * transfers->bytes() / wire[1] / 1e6);
  std::printf("\n");
  std::fflush(stdout);
}

void prepare(int d) {
  CHECK(cudaSetDevice(d));
  Gpu& g = g_gpus[d];
  int least = 0, greatest = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(cudaStreamCreateWithFlags(&g.compute, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithPriority(&g.wire, cudaStreamNonBlocking, greatest));
  CHECK(cublasCreate(&g.blas));
  CHECK(cublasSetStream(g.blas, g.compute));
  CHECK(cudaMalloc(&g.a, 2ull * kN * kK));
  CHECK(cudaMalloc(&g.b, 2ull * kM * kK));
  CHECK(cudaMalloc(&g.c, 2ull * kM * kN));
  fill<<<1024, 256>>>(g.a, static_cast<std::size_t>(kN) * kK, 1);
  fill<<<1024, 256>>>(g.b, static_cast<std::size_t>(kM) * kK, 2);
  CHECK(cudaMalloc(&g.values, kGathered));
  CHECK(cudaMalloc(&g.gradients, kReduced));
  CHECK(ncclMemAlloc(reinterpret_cast<void**>(&g.shared_values), kGathered));
  CHECK(ncclMemAlloc(reinterpret_cast<void**>(&g.shared_gradients), kReduced));
  for (char* p : {g.values, g.shared_values}) CHECK(cudaMemset(p, 0, kGathered));
  for (char* p : {g.gradients, g.shared_gradients}) CHECK(cudaMemset(p, 0, kReduced));
  for (auto* events : {g.products, g.transfers})
    for (int i = 0; i < 2; ++i) CHECK(cudaEventCreate(&events[i]));
}

/// ctas: at most so many, 0: NCCL's choice; policy: NCCL_CTA_POLICY_..., -1: NCCL's choice.
std::vector<ncclComm_t> communicators(int ctas, int policy) {
  std::vector<ncclComm_t> comms(g_gpus.size());
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id));
  CHECK(ncclGroupStart());
  for (int d = 0; d < count(); ++d) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (ctas > 0) config.maxCTAs = ctas;
    if (policy >= 0) config.CTAPolicy = policy;
    CHECK(cudaSetDevice(d));
    CHECK(ncclCommInitRankConfig(&comms[d], count(), id, d, &config));
  }
  CHECK(ncclGroupEnd());
  return comms;
}

void time_both(const std::string& name, const std::vector<ncclComm_t>& comms, bool windows) {
  for (const bool gather : {true, false}) {
    const Transfers transfers{comms, gather, windows};
    const std::string whole = (gather ? "gather, " : "reduction, ") + name;
    time_case(whole + ", alone", &transfers, 0);
    time_case(whole, &transfers, kProducts);
  }
}

void open_windows(const std::vector<ncclComm_t>& comms) {
  std::vector<ncclWindow_t> windows(2 * comms.size());
  for (const bool values : {true, false}) {
    CHECK(ncclGroupStart());
    for (int d = 0; d < count(); ++d) {
      CHECK(cudaSetDevice(d));
      CHECK(ncclCommWindowRegister(
          comms[d], values ? g_gpus[d].shared_values : g_gpus[d].shared_gradients,
          values ? kGathered : kReduced, &windows[2 * d + values], NCCL_WIN_COLL_SYMMETRIC));
    }
    CHECK(ncclGroupEnd());
  }
}

}  // namespace

int main(int argc, char** argv) {
  int gpus = 0, version = 0;
  CHECK(cudaGetDeviceCount(&gpus));
  g_gpus.resize(argc > 1 ? std::min(gpus, std::atoi(argv[1])) : gpus);
  CHECK(ncclGetVersion(&version));
  std::printf("NCCL %d, %d GPUs\n", version, count());
  for (int d = 0; d < count(); ++d) prepare(d);
  for (int i = 0; i < 20 * count(); ++i) product(i % count());
  synchronize();
  time_case("products alone", nullptr, kProducts);
  for (const int ctas : {0, 2, 4, 8, 16})
    time_both(ctas > 0 ? "at most " + std::to_string(ctas) + " CTAs" : "default",
              communicators(ctas, -1), false);
  time_case("products alone", nullptr, kProducts);
  for (const auto& [policy, name] : {std::pair{NCCL_CTA_POLICY_DEFAULT, "window"},
                                     {NCCL_CTA_POLICY_EFFICIENCY, "window, efficiency"},
                                     {NCCL_CTA_POLICY_ZERO, "window, zero CTAs"}}) {
    const auto comms = communicators(0, policy);
    open_windows(comms);
    time_both(name, comms, true);
  }
  time_case("products alone", nullptr, kProducts);
  return 0;
}

// The base of MFU.  Data-sheet rates for GPUs; on the host, what OpenBLAS reaches on one core with
// every rank at work.
#include "app/observe/peak_rate.hpp"

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels/ops/blas.hpp"

namespace ballast {
namespace {

double product_rate(DType type) {
  constexpr int n = 384;
  const std::vector<float> a(n * n, 0.5f), b(n * n, 0.25f);
  const std::vector<double> ad(n * n, 0.5), bd(n * n, 0.25);
  std::vector<float> c(n * n);
  std::vector<double> cd(n * n);
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    if (type == DType::f64)
      blas::gemm(CblasNoTrans, CblasNoTrans, n, n, n, 1, ad.data(), n, bd.data(), n, 0, cd.data(),
                 n);
    else
      blas::gemm(CblasNoTrans, CblasNoTrans, n, n, n, 1, a.data(), n, b.data(), n, 0, c.data(), n);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, 2.0 * n * n * n / seconds);
  }
  return best;
}

}  // namespace

double dense_peak_flops(const Device& device, DType type) {
  if (device.space() == Space::host) return product_rate(type);
  // Dense bf16 rates by NVIDIA's data sheets, of SXM parts where the name says no other.
  const std::string name = device.description();
  const std::pair<const char*, double> rates[] = {
      {"H200 NVL", 835e12}, {"H200", 989e12},  {"H100 NVL", 835e12}, {"H100 PCIe", 756e12},
      {"H100", 989e12},     {"H20", 148e12},   {"GH200", 989e12},    {"A100", 312e12},
      {"GB200", 2500e12},   {"B200", 2250e12}, {"L40S", 362e12}};
  for (const auto& [model, rate] : rates)
    if (name.find(std::string("NVIDIA ") + model) != std::string::npos) return rate;
  return 312e12;
}

}  // namespace ballast

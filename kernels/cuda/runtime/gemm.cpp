// cuBLASLt matrix products.  Row-major C = op(A) op(B) is column-major C^T = op(B)^T op(A)^T, so A
// and B swap places.
#include <cublasLt.h>

#include <map>
#include <tuple>

#include "core/base/error.hpp"
#include "kernels/cuda/runtime/device.hpp"

namespace ballast::cuda {
namespace {

void check_lt(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: {} failed: {}", what,
          cublasGetStatusString(status));
}

constexpr std::size_t kWorkspace = std::size_t{64}
                                   << 20;  // what Hopper's split-K algorithms may want

using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                       std::int64_t, bool, bool, bool, bool, bool>;

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

using Fp8Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, bool>;

struct Library {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  std::map<Key, Plan> plans;
  std::map<Fp8Key, Plan> fp8_plans;
};

Library& library() {
  static Library lib;
  if (!lib.handle) {
    check_lt(cublasLtCreate(&lib.handle), "cublasLtCreate");
    check(cudaMalloc(&lib.workspace, kWorkspace), "cudaMalloc of the matrix product workspace");
  }
  return lib;
}

template <class T>
void set(const Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const char* what) {
  check_lt(cublasLtMatmulDescSetAttribute(plan.operation, attribute, &value, sizeof value), what);
}

/// The algorithm that cuBLASLt's heuristic puts first.
void choose_algorithm(Plan& plan, std::int64_t m, std::int64_t n, std::int64_t k) {
  cublasLtMatmulPreference_t preference;
  check_lt(cublasLtMatmulPreferenceCreate(&preference), "preference");
  check_lt(
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &kWorkspace, sizeof kWorkspace),
      "preference");
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  cublasLtMatmulAlgoGetHeuristic(library().handle, plan.operation, plan.a, plan.b, plan.c, plan.c,
                                 preference, 1, &result, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  require(found > 0, "cuBLASLt: no algorithm for a product of {} x {} x {}", m, n, k);
  plan.algorithm = result.algo;
}

Plan make_plan(const Gemm& g) {
  Plan plan;
  check_lt(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "cublasLtMatmulDescCreate");
  set(plan, CUBLASLT_MATMUL_DESC_TRANSA, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, "transpose");
  set(plan, CUBLASLT_MATMUL_DESC_TRANSB, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, "transpose");
  if (g.bias) {
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, "epilogue");
    set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF, "bias type");
    set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias, "bias pointer");
  }
  const cudaDataType_t c_type = g.c_is_float ? CUDA_R_32F : CUDA_R_16BF;
  // Column-major shapes as stored: B is [n, k] (or [k, n] when transposed), A is [k, m] (or [m,
  // k]).
  check_lt(cublasLtMatrixLayoutCreate(&plan.a, CUDA_R_16BF, g.transpose_b ? g.k : g.n,
                                      g.transpose_b ? g.n : g.k, g.ldb),
           "layout");
  check_lt(cublasLtMatrixLayoutCreate(&plan.b, CUDA_R_16BF, g.transpose_a ? g.m : g.k,
                                      g.transpose_a ? g.k : g.m, g.lda),
           "layout");
  check_lt(cublasLtMatrixLayoutCreate(&plan.c, c_type, g.n, g.m, g.ldc), "layout");
  choose_algorithm(plan, g.m, g.n, g.k);
  return plan;
}

// Blocks of scales came with CUDA 12.9.
#if CUBLAS_VERSION >= 120900
Plan make_plan(const Fp8Gemm& g) {
  Plan plan;
  check_lt(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "cublasLtMatmulDescCreate");
  set(plan, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T, "transpose");
  set(plan, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N, "transpose");
  set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
      g.b_blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                 : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
      "scales");
  set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, "scales");
  set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.b_scales, "scales");
  set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.a_scales, "scales");
  check_lt(cublasLtMatrixLayoutCreate(&plan.a, CUDA_R_8F_E4M3, g.k, g.n, g.k), "layout");
  check_lt(cublasLtMatrixLayoutCreate(&plan.b, CUDA_R_8F_E4M3, g.k, g.m, g.k), "layout");
  check_lt(
      cublasLtMatrixLayoutCreate(&plan.c, g.c_is_float ? CUDA_R_32F : CUDA_R_16BF, g.n, g.m, g.n),
      "layout");
  choose_algorithm(plan, g.m, g.n, g.k);
  return plan;
}
#endif

}  // namespace

bool has_fp8() {
#if CUBLAS_VERSION >= 120900
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "compute capability");
  return major == 9 && cublasLtGetVersion() >= 120900;
#else
  return false;
#endif
}

void gemm([[maybe_unused]] const Fp8Gemm& g) {
#if CUBLAS_VERSION >= 120900
  if (g.m == 0 || g.n == 0) return;
  Library& lib = library();
  const Fp8Key key{g.m, g.n, g.k, g.b_blocks, g.c_is_float, g.beta != 0};
  auto found = lib.fp8_plans.find(key);
  if (found == lib.fp8_plans.end()) found = lib.fp8_plans.emplace(key, make_plan(g)).first;
  Plan& plan = found->second;
  set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g.b_scales, "scales");
  set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g.a_scales, "scales");
  const float alpha = 1;
  check_lt(
      cublasLtMatmul(lib.handle, plan.operation, &alpha, g.b, plan.a, g.a, plan.b, &g.beta, g.c,
                     plan.c, g.c, plan.c, &plan.algorithm, lib.workspace, kWorkspace, stream()),
      "cublasLtMatmul of FP8");
#else
  fail("FP8 products need cuBLASLt of CUDA 12.9 or newer");
#endif
}

void gemm(const Gemm& g) {
  if (g.m == 0 || g.n == 0) return;
  require(g.k > 0, "matrix product with an empty inner dimension");
  Library& lib = library();
  const Key key{g.m,        g.n,           g.k,           g.lda,        g.ldb,
                g.ldc,      g.transpose_a, g.transpose_b, g.c_is_float, g.bias != nullptr,
                g.beta != 0};
  auto found = lib.plans.find(key);
  if (found == lib.plans.end()) found = lib.plans.emplace(key, make_plan(g)).first;
  Plan& plan = found->second;
  if (g.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias, "bias pointer");
  check_lt(
      cublasLtMatmul(lib.handle, plan.operation, &g.alpha, g.b, plan.a, g.a, plan.b, &g.beta, g.c,
                     plan.c, g.c, plan.c, &plan.algorithm, lib.workspace, kWorkspace, stream()),
      "cublasLtMatmul");
}

}  // namespace ballast::cuda

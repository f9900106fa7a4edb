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

struct Library {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  std::map<Key, Plan> plans;
};

Library& library() {
  static Library lib;
  if (!lib.handle) {
    check_lt(cublasLtCreate(&lib.handle), "cublasLtCreate");
    check(cudaMalloc(&lib.workspace, kWorkspace), "cudaMalloc of the matrix product workspace");
  }
  return lib;
}

Plan make_plan(const Gemm& g) {
  Plan plan;
  check_lt(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
           "cublasLtMatmulDescCreate");
  const cublasOperation_t first = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                          second = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                          sizeof first),
           "transpose");
  check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                          sizeof second),
           "transpose");
  if (g.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = CUDA_R_16BF;
    check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                            &epilogue, sizeof epilogue),
             "epilogue");
    check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                            &type, sizeof type),
             "bias type");
    check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                            &g.bias, sizeof g.bias),
             "bias pointer");
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
  cublasLtMatmulPreference_t preference;
  check_lt(cublasLtMatmulPreferenceCreate(&preference), "preference");
  check_lt(
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                           &kWorkspace, sizeof kWorkspace),
      "preference");
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  check_lt(cublasLtMatmulAlgoGetHeuristic(library().handle, plan.operation, plan.a, plan.b, plan.c,
                                          plan.c, preference, 1, &result, &found),
           "heuristic");
  cublasLtMatmulPreferenceDestroy(preference);
  require(found > 0, "cuBLASLt: no algorithm for a product of {} x {} x {}", g.m, g.n, g.k);
  plan.algorithm = result.algo;
  return plan;
}

}  // namespace

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
  if (g.bias)
    check_lt(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                            &g.bias, sizeof g.bias),
             "bias pointer");
  check_lt(
      cublasLtMatmul(lib.handle, plan.operation, &g.alpha, g.b, plan.a, g.a, plan.b, &g.beta, g.c,
                     plan.c, g.c, plan.c, &plan.algorithm, lib.workspace, kWorkspace, stream()),
      "cublasLtMatmul");
}

}  // namespace ballast::cuda

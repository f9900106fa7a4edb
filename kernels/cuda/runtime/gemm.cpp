// cuBLASLt matrix products.  Row-major C = op(A) op(B) is column-major C^T = op(B)^T op(A)^T, so A
// and B swap places.  A shape that stays (trial_rule.hpp) gets the fastest of the algorithms that
// give the bits of the heuristic's first, so that results do not depend on what was measured.
#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "kernels/cuda/runtime/bits.hpp"
#include "kernels/cuda/runtime/cublaslt.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/cuda/runtime/trial_rule.hpp"

namespace ballast::cuda {
namespace {

void check_lt(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: {} failed: {}", what,
          cublaslt().status_string(status));
}

constexpr std::size_t kWorkspace = std::size_t{64}
                                   << 20;  // what Hopper's split-K algorithms may want

constexpr int kRivals = 7;             // algorithms beside the first
constexpr double kTrialFlops = 1e10;   // of a product for which it may pay
constexpr std::size_t kTrialPart = 8;  // of the free memory that its result may take once more
constexpr float kTrialGain = 1.01f;    // less is noise
constexpr float kNear = 1.08f;         // of the shortest time: what is tried for longer
constexpr float kSustained_ms = 100;   // for how long, in each round
constexpr int kSustainedRounds = 2;
constexpr std::int64_t kLengthStep = 20;  // of lengths whose kernels are loaded: one in so many

using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                       std::int64_t, bool, bool, bool, bool, bool>;

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool large = false;                        ///< a product for which a trial may pay
  std::vector<cublasLtMatmulAlgo_t> rivals;  ///< not tried yet; only of large ones
  TrialRule rule;
  /// Gradients in bf16: a product cut along k sums its parts in fp32, not in the result's type.
  bool sums_full = false;
};
/// The operands of a call, in cuBLASLt's order, and the bytes of its result, which lies at c.
struct Operands {
  const void *a, *b;
  void* c;
  float alpha, beta;
  std::size_t bytes;
};

using Fp8Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, bool>;

struct Library {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  std::map<Key, Plan> plans;
  std::map<Fp8Key, Plan> fp8_plans;
  std::int64_t large_calls = 0;
  double trial_work = TrialRule::kWork;
  std::int64_t most_tokens = 0;  ///< expect_lengths()
  std::set<Key> loaded;          ///< keys without tokens whose lengths have been loaded
};

bool trials_held = false;
std::int64_t waiting_trials = 0;

Library& library() {
  static Library lib;
  if (!lib.handle) {
    check_lt(cublaslt().create(&lib.handle), "cublasLtCreate");
    check(cudaMalloc(&lib.workspace, kWorkspace), "cudaMalloc of the matrix product workspace");
  }
  return lib;
}

template <class T>
void set(const Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const char* what) {
  check_lt(cublaslt().set_operation(plan.operation, attribute, &value, sizeof value), what);
}

/// Up to `most` algorithms in the order of cuBLASLt's heuristic.
std::vector<cublasLtMatmulAlgo_t> algorithms(const Plan& plan, int most) {
  cublasLtMatmulPreference_t preference;
  check_lt(cublaslt().create_preference(&preference), "preference");
  check_lt(cublaslt().set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                     &kWorkspace, sizeof kWorkspace),
           "preference");
  if (plan.sums_full) {
    const std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    check_lt(cublaslt().set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                       &schemes, sizeof schemes),
             "preference");
  }
  std::array<cublasLtMatmulHeuristicResult_t, 1 + kRivals> results;
  int found = 0;
  cublaslt().heuristic(library().handle, plan.operation, plan.a, plan.b, plan.c, plan.c, preference,
                       most, results.data(), &found);
  cublaslt().destroy_preference(preference);
  std::vector<cublasLtMatmulAlgo_t> in_order;
  for (int i = 0; i < found; ++i) in_order.push_back(results[static_cast<std::size_t>(i)].algo);
  return in_order;
}

void choose_algorithm(Plan& plan, std::int64_t m, std::int64_t n, std::int64_t k) {
  const auto in_order = algorithms(plan, 1 + kRivals);
  require(!in_order.empty(), "cuBLASLt: no algorithm for a product of {} x {} x {}", m, n, k);
  plan.algorithm = in_order.front();
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  plan.large = flops >= kTrialFlops;
  if (!plan.large) return;
  plan.rivals.assign(in_order.begin() + 1, in_order.end());
  plan.rule = TrialRule(flops, library().trial_work);
}

cublasStatus_t multiply(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& of,
                        void* result) {
  Library& lib = library();
  return cublaslt().matmul(lib.handle, plan.operation, &of.alpha, of.a, plan.a, of.b, plan.b,
                           &of.beta, of.c, plan.c, result, plan.c, &algorithm, lib.workspace,
                           kWorkspace, stream());
}

/// Of one algorithm: a sum over the bits of its result, its shortest time, and the time of a
/// product among many of its own, summed over the rounds.
struct Trial {
  cublasLtMatmulAlgo_t algorithm{};
  std::uint64_t bits = 0;
  float ms = 0, sustained_ms = 0;
};
constexpr std::size_t kSumBytes = 256;  // ahead of a tried result lies the sum over its bits

std::uint64_t bits_of(std::byte* result, const Operands& of) {
  auto* sum = reinterpret_cast<unsigned long long*>(result - kSumBytes);
  check(cudaMemsetAsync(sum, 0, sizeof *sum, stream()), "cudaMemsetAsync");
  check(sum_of_bits(result, of.bytes, sum, stream()), "sum of bits");
  std::uint64_t bits = 0;
  device_of(Space::cuda).copy(&bits, Space::host, sum, Space::cuda, sizeof bits);
  return bits;
}
bool try_algorithm(const Plan& plan, const Operands& of, std::byte* result, Trial& trial) {
  const cublasLtMatmulAlgo_t& algorithm = trial.algorithm;
  check(cudaMemsetAsync(result, 0, of.bytes, stream()), "cudaMemsetAsync");
  if (multiply(plan, algorithm, of, result) != CUBLAS_STATUS_SUCCESS) return false;
  trial.bits = bits_of(result, of);
  std::array<cudaEvent_t, 4> events;
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "cudaEventCreate");
  for (std::size_t i = 0; i < events.size(); ++i) {
    check(cudaEventRecord(events[i], stream()), "cudaEventRecord");
    if (i + 1 < events.size()) multiply(plan, algorithm, of, result);
  }
  wait_for(events.back(), "matrix products");
  trial.ms = std::numeric_limits<float>::infinity();
  for (std::size_t i = 1; i < events.size(); ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, events[i - 1], events[i]), "cudaEventElapsedTime");
    trial.ms = std::min(trial.ms, ms);
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  return true;
}

/// Memory for a result once more, which goes back to the driver when it is given back; null where
/// there is little left.
void* trial_memory(std::size_t bytes) {
  static cudaMemPool_t pool = nullptr;
  if (pool == nullptr) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    check(cudaGetDevice(&properties.location.id), "cudaGetDevice");
    check(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
  }
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  void* memory = nullptr;
  if (bytes > free / kTrialPart ||
      cudaMallocFromPoolAsync(&memory, bytes, pool, stream()) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return memory;
}

/// The milliseconds of one of many products in a row, once they have run for half of
/// `kSustained_ms`.
float sustained(const Plan& plan, const Trial& trial, const Operands& of, std::byte* result) {
  const int products = std::max(2, static_cast<int>(kSustained_ms / trial.ms));
  std::array<cudaEvent_t, 2> events;
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "cudaEventCreate");
  for (int i = 0; i < products; ++i) {
    if (i == products / 2) check(cudaEventRecord(events[0], stream()), "cudaEventRecord");
    multiply(plan, trial.algorithm, of, result);
  }
  check(cudaEventRecord(events[1], stream()), "cudaEventRecord");
  wait_for(events[1], "matrix products");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, events[0], events[1]), "cudaEventElapsedTime");
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  return ms / static_cast<float>(products - products / 2);
}

/// The plan's own algorithm, and those rivals that give its bits in about the shortest time.  A
/// result of zeros does not tell algorithms apart: then there are none.
std::vector<Trial> near_fastest(const Plan& plan, const std::vector<cublasLtMatmulAlgo_t>& rivals,
                                const Operands& of, std::byte* result) {
  check(cudaMemsetAsync(result, 0, of.bytes, stream()), "cudaMemsetAsync");
  const std::uint64_t zeros = bits_of(result, of);
  std::vector<Trial> trials(1);
  trials[0].algorithm = plan.algorithm;
  require(try_algorithm(plan, of, result, trials[0]), "cuBLASLt: a product failed");
  if (trials[0].bits == zeros) return trials;
  float least = trials[0].ms;
  for (const cublasLtMatmulAlgo_t& rival : rivals) {
    Trial trial{.algorithm = rival};
    if (!try_algorithm(plan, of, result, trial) || trial.bits != trials[0].bits) continue;
    least = std::min(least, trial.ms);
    trials.push_back(trial);
  }
  trials.erase(std::remove_if(trials.begin() + 1, trials.end(),
                              [&](const Trial& trial) { return trial.ms > kNear * least; }),
               trials.end());
  return trials;
}

/// Gives the plan the fastest algorithm of the bits that its own makes.  Training holds a GPU at
/// its power limit, where the algorithm that needs the least energy is the fastest: one that is
/// ahead in three products may be the slower one in a hundred.
void try_rivals(Plan& plan, const Operands& of) {
  const auto rivals = std::exchange(plan.rivals, {});
  auto* memory = static_cast<std::byte*>(trial_memory(kSumBytes + of.bytes));
  if (memory == nullptr) return;
  std::byte* result = memory + kSumBytes;
  std::vector<Trial> trials = near_fastest(plan, rivals, of, result);
  for (int round = 0; trials.size() > 1 && round < kSustainedRounds; ++round) {
    for (Trial& trial : trials) trial.sustained_ms += sustained(plan, trial, of, result);
    std::reverse(trials.begin() + 1, trials.end());
  }
  trials[0].sustained_ms /= kTrialGain;
  plan.algorithm =
      std::min_element(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) {
        return a.sustained_ms < b.sustained_ms;
      })->algorithm;
  check(cudaFreeAsync(memory, stream()), "cudaFreeAsync");
}

void multiply(Plan& plan, const Operands& of, const char* what) {
  if (plan.large && plan.rule.due(++library().large_calls) && !plan.rivals.empty()) {
    if (trials_held)
      ++waiting_trials;
    else
      try_rivals(plan, of);
  }
  check_lt(multiply(plan, plan.algorithm, of, of.c), what);
}

/// A product's operation and layouts, without an algorithm.
Plan lay_out(const Gemm& g) {
  Plan plan;
  check_lt(cublaslt().create_operation(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
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
  check_lt(cublaslt().create_layout(&plan.a, CUDA_R_16BF, g.transpose_b ? g.k : g.n,
                                    g.transpose_b ? g.n : g.k, g.ldb),
           "layout");
  check_lt(cublaslt().create_layout(&plan.b, CUDA_R_16BF, g.transpose_a ? g.m : g.k,
                                    g.transpose_a ? g.k : g.m, g.lda),
           "layout");
  check_lt(cublaslt().create_layout(&plan.c, c_type, g.n, g.m, g.ldc), "layout");
  plan.sums_full = g.tokens == GemmTokens::k && !g.c_is_float;
  return plan;
}
Plan make_plan(const Gemm& g) {
  Plan plan = lay_out(g);
  choose_algorithm(plan, g.m, g.n, g.k);
  return plan;
}
void destroy(const Plan& plan) {
  cublaslt().destroy_operation(plan.operation);
  for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c}) cublaslt().destroy_layout(layout);
}

Key key_of(const Gemm& g) {
  return {g.m,        g.n,           g.k,           g.lda,        g.ldb,
          g.ldc,      g.transpose_a, g.transpose_b, g.c_is_float, g.bias != nullptr,
          g.beta != 0};
}

/// Loads the kernels of a product for all lengths up to Library::most_tokens, by running each once
/// on a small product of zeros.  Neighbouring lengths mostly share a kernel, multiples of eight
/// apart from others, so lengths of either kind are asked for, `kLengthStep` apart.
void load_lengths(Gemm g) {
  constexpr std::int64_t kSmall = 256, kFirst = 64;
  constexpr std::size_t kOperand = kSmall * kSmall * sizeof(float);
  auto* memory = static_cast<std::byte*>(trial_memory(3 * kOperand));
  if (memory == nullptr) return;
  check(cudaMemsetAsync(memory, 0, 3 * kOperand, stream()), "cudaMemsetAsync");
  const Operands of{memory, memory + kOperand, memory + 2 * kOperand, 1.0f, g.beta, kOperand};
  Gemm small = g;
  small.m = small.n = small.k = small.lda = small.ldb = small.ldc = kSmall;
  if (g.bias != nullptr) small.bias = memory;
  const Plan on = lay_out(small);
  std::set<std::array<std::uint64_t, 8>> seen;
  const auto load = [&](std::int64_t tokens) {
    (g.tokens == GemmTokens::m ? g.m : g.k) = tokens;
    const Plan plan = lay_out(g);
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms(plan, 1)) {
      std::array<std::uint64_t, 8> words;
      std::copy(std::begin(algorithm.data), std::end(algorithm.data), words.begin());
      if (seen.insert(words).second) multiply(on, algorithm, of, of.c);
    }
    destroy(plan);
  };
  for (std::int64_t tokens = kFirst; tokens <= library().most_tokens;
       tokens += std::max<std::int64_t>(8, tokens / kLengthStep / 8 * 8)) {
    load(tokens);
    load((tokens + tokens / kLengthStep / 2) | 1);
  }
  destroy(on);
  check(cudaFreeAsync(memory, stream()), "cudaFreeAsync");
}
/// A key without its tokens.
Key kind_of(Gemm g) {
  (g.tokens == GemmTokens::m ? g.m : g.k) = 0;
  return key_of(g);
}

// Blocks of scales came with CUDA 12.9.
#if CUBLAS_VERSION >= 120900
Plan make_plan(const Fp8Gemm& g) {
  Plan plan;
  check_lt(cublaslt().create_operation(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
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
  check_lt(cublaslt().create_layout(&plan.a, CUDA_R_8F_E4M3, g.k, g.n, g.k), "layout");
  check_lt(cublaslt().create_layout(&plan.b, CUDA_R_8F_E4M3, g.k, g.m, g.k), "layout");
  check_lt(
      cublaslt().create_layout(&plan.c, g.c_is_float ? CUDA_R_32F : CUDA_R_16BF, g.n, g.m, g.n),
      "layout");
  plan.sums_full = !g.b_blocks && !g.c_is_float;
  choose_algorithm(plan, g.m, g.n, g.k);
  return plan;
}
#endif

std::size_t result_bytes(std::int64_t rows, std::int64_t stride, bool is_float) {
  return static_cast<std::size_t>(rows * stride) * (is_float ? 4 : 2);
}

}  // namespace

bool has_fp8() {
#if CUBLAS_VERSION >= 120900
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "compute capability");
  return major == 9 && cublaslt().version() >= 120900;
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
  multiply(plan, {g.b, g.a, g.c, 1.0f, g.beta, result_bytes(g.m, g.n, g.c_is_float)},
           "cublasLtMatmul of FP8");
#else
  fail("FP8 products need cuBLASLt of CUDA 12.9 or newer");
#endif
}

void expect_lengths(std::int64_t most) { library().most_tokens = most; }

void try_products_after(double flops) { library().trial_work = flops; }

void hold_trials(bool held) { trials_held = held; }

std::int64_t trials_put_off() { return waiting_trials; }

void gemm(const Gemm& g) {
  if (g.m == 0 || g.n == 0) return;
  require(g.k > 0, "matrix product with an empty inner dimension");
  Library& lib = library();
  if (lib.most_tokens > 0 && g.tokens != GemmTokens::none && lib.loaded.insert(kind_of(g)).second)
    load_lengths(g);
  const Key key = key_of(g);
  auto found = lib.plans.find(key);
  if (found == lib.plans.end()) found = lib.plans.emplace(key, make_plan(g)).first;
  Plan& plan = found->second;
  if (g.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias, "bias pointer");
  multiply(plan, {g.b, g.a, g.c, g.alpha, g.beta, result_bytes(g.m, g.ldc, g.c_is_float)},
           "cublasLtMatmul");
}

}  // namespace ballast::cuda

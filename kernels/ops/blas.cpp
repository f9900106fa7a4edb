#include "kernels/ops/blas.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>

// Of OpenBLAS; a BLAS without them is used as it is.
extern "C" {
__attribute__((weak)) void openblas_set_num_threads(int threads);
__attribute__((weak)) char* openblas_get_corename();
__attribute__((weak)) void gotoblas_dynamic_init();
__attribute__((weak)) void gotoblas_dynamic_quit();
}

namespace ballast::blas {
namespace {

std::string running_core() {
  const char* name = openblas_get_corename ? openblas_get_corename() : nullptr;
  return name == nullptr ? "" : name;
}

/// OpenBLAS chooses its kernels by the processor's model number when it is loaded, and takes a
/// model that is newer than itself for a Prescott of 2004: Debian 12's 0.3.21 reaches a fifth of a
/// recent Xeon's speed then.  So the choice is made again by what the processor can do.
/// OPENBLAS_CORETYPE, where it is set, stays the user's word.
void choose_kernels() {
#if defined(__x86_64__)
  if (!gotoblas_dynamic_init || !gotoblas_dynamic_quit ||
      std::getenv("OPENBLAS_CORETYPE") != nullptr || !before_avx2(running_core()))
    return;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  setenv("OPENBLAS_CORETYPE", wide ? "SkylakeX" : "Haswell", 0);
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();
  unsetenv("OPENBLAS_CORETYPE");
#endif
}

/// Before the first product.  Ranks share the machine's cores, so BLAS must not start threads of
/// its own.
void prepare() {
  static const bool once = [] {
    if (openblas_set_num_threads) openblas_set_num_threads(1);
    choose_kernels();
    return true;
  }();
  (void)once;
}

}  // namespace

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::int64_t m, std::int64_t n, std::int64_t k,
          float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
          float beta, float* c, std::int64_t ldc) {
  prepare();
  cblas_sgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
              alpha, a, static_cast<int>(lda), b, static_cast<int>(ldb), beta, c,
              static_cast<int>(ldc));
}

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::int64_t m, std::int64_t n, std::int64_t k,
          double alpha, const double* a, std::int64_t lda, const double* b, std::int64_t ldb,
          double beta, double* c, std::int64_t ldc) {
  prepare();
  cblas_dgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
              alpha, a, static_cast<int>(lda), b, static_cast<int>(ldb), beta, c,
              static_cast<int>(ldc));
}

std::string core_name() {
  prepare();
  return running_core();
}

bool before_avx2(const std::string& core) {
  static const char* const old[] = {
      "prescott",  "unknown",    "generic",      "katmai",    "coppermine",  "northwood",
      "banias",    "core2",      "atom",         "penryn",    "dunnington",  "nehalem",
      "athlon",    "opteron",    "opteron_sse3", "barcelona", "sandybridge", "bobcat",
      "bulldozer", "piledriver", "steamroller"};
  std::string name = core;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return std::find(std::begin(old), std::end(old), name) != std::end(old);
}

}  // namespace ballast::blas

// Matrix products of the host: BLAS, one thread a rank, with kernels that suit the processor.
#pragma once
#include <cblas.h>

#include <cstdint>
#include <string>

namespace ballast::blas {

/// Row-major C [m, n] = alpha op(A) op(B) + beta C; lda, ldb, ldc: elements from row to row as
/// stored.
void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::int64_t m, std::int64_t n, std::int64_t k,
          float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
          float beta, float* c, std::int64_t ldc);
void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, std::int64_t m, std::int64_t n, std::int64_t k,
          double alpha, const double* a, std::int64_t lda, const double* b, std::int64_t ldb,
          double beta, double* c, std::int64_t ldc);

/// The processor whose kernels OpenBLAS runs, such as "SkylakeX"; "" for another BLAS.
std::string core_name();
/// Whether OpenBLAS's kernels of that name are older than AVX2.
bool before_avx2(const std::string& core);

}  // namespace ballast::blas

#include "kernels/cuda/runtime/cublaslt.hpp"

#include <string>

#include "kernels/cuda/runtime/shared_library.hpp"

namespace ballast::cuda {
namespace {

CublasLt open_cublaslt() {
  const SharedLibrary library(
      {"libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), BALLAST_CUBLASLT});
  CublasLt lt;
  library.load(lt.version, "cublasLtGetVersion");
  library.load(lt.status_string, "cublasLtGetStatusString");
  library.load(lt.create, "cublasLtCreate");
  library.load(lt.matmul, "cublasLtMatmul");
  library.load(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  library.load(lt.create_operation, "cublasLtMatmulDescCreate");
  library.load(lt.destroy_operation, "cublasLtMatmulDescDestroy");
  library.load(lt.set_operation, "cublasLtMatmulDescSetAttribute");
  library.load(lt.create_layout, "cublasLtMatrixLayoutCreate");
  library.load(lt.destroy_layout, "cublasLtMatrixLayoutDestroy");
  library.load(lt.create_preference, "cublasLtMatmulPreferenceCreate");
  library.load(lt.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  library.load(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  return lt;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt opened = open_cublaslt();
  return opened;
}

}  // namespace ballast::cuda

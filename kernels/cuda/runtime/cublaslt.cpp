#include "kernels/cuda/runtime/cublaslt.hpp"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "core/base/error.hpp"

namespace ballast::cuda {
namespace {

CublasLt open_cublaslt() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = dlopen(name.c_str(), RTLD_NOW);
  if (library == nullptr) library = dlopen(BALLAST_CUBLASLT, RTLD_NOW);  // as it was built with
  require(library != nullptr,
          "{} was not found; it comes with the CUDA Toolkit, put its folder on LD_LIBRARY_PATH",
          name);
  const auto load = [&](auto& function, const char* symbol) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    require(function != nullptr, "{} has no {}", name, symbol);
  };
  CublasLt lt;
  load(lt.version, "cublasLtGetVersion");
  load(lt.status_string, "cublasLtGetStatusString");
  load(lt.create, "cublasLtCreate");
  load(lt.matmul, "cublasLtMatmul");
  load(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(lt.create_operation, "cublasLtMatmulDescCreate");
  load(lt.destroy_operation, "cublasLtMatmulDescDestroy");
  load(lt.set_operation, "cublasLtMatmulDescSetAttribute");
  load(lt.create_layout, "cublasLtMatrixLayoutCreate");
  load(lt.destroy_layout, "cublasLtMatrixLayoutDestroy");
  load(lt.create_preference, "cublasLtMatmulPreferenceCreate");
  load(lt.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  load(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  return lt;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt opened = open_cublaslt();
  return opened;
}

}  // namespace ballast::cuda

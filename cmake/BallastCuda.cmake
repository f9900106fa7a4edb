# CUDA backend, never required: library ballast_cuda of all *.cu and *.cpp below kernels/cuda,
# linked into ballast_kernels, and NCCL for ballast_parallel.  BALLAST_HAVE_CUDA=1 and
# BALLAST_HAVE_NCCL=1 tell the code.  kernels/cuda/standalone is for nvcc alone.
set(BALLAST_CUDA_ARCHITECTURES 80 90 CACHE STRING
    "Architectures of the plain kernels; *_sm90.cu are always built for sm_90a")
set(ballast_cuda_reason "switched off")
set(BALLAST_HAVE_CUDA FALSE)
set(BALLAST_HAVE_NCCL FALSE)

if(NOT BALLAST_CUDA STREQUAL "OFF")
  # Architectures are chosen per source below, so CMake must not add its own.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES OFF)
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    find_program(BALLAST_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH
                 PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(BALLAST_NVCC)
    if(BALLAST_NVCC)
      set(CMAKE_CUDA_COMPILER ${BALLAST_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND OR NOT TARGET CUDA::cublasLt)
      set(ballast_cuda_reason "nvcc was found, but not cuBLASLt")
    elseif(CUDAToolkit_VERSION VERSION_LESS 12.8)
      set(ballast_cuda_reason "CUDA ${CUDAToolkit_VERSION} was found, not 12.8 or newer")
    else()
      set(BALLAST_HAVE_CUDA TRUE)
    endif()
  elseif(BALLAST_NVCC)
    string(CONCAT ballast_cuda_reason "${BALLAST_NVCC} does not compile with "
           "${CMAKE_CXX_COMPILER}; see CMakeFiles/CMakeError.log")
  else()
    set(ballast_cuda_reason "no nvcc on PATH, under CUDA_HOME or in /usr/local/cuda")
  endif()
  if(BALLAST_CUDA STREQUAL "ON" AND NOT BALLAST_HAVE_CUDA)
    message(FATAL_ERROR "BALLAST_CUDA=ON, but: ${ballast_cuda_reason}")
  endif()
endif()

file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS kernels/cuda/*.cu kernels/cuda/*.cpp)
list(FILTER cuda_sources EXCLUDE REGEX "/standalone/")
if(BALLAST_HAVE_CUDA AND cuda_sources)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(ballast_cuda_version ${CUDAToolkit_VERSION})

  foreach(architecture ${BALLAST_CUDA_ARCHITECTURES})
    set(code "[sm_${architecture},compute_${architecture}]")
    list(APPEND plain_flags "-gencode=arch=compute_${architecture},code=${code}")
  endforeach()
  foreach(source ${cuda_sources})
    if(source MATCHES "_sm90\\.cu$")
      # wgmma, TMA and setmaxnreg exist only under the architecture-specific name.
      set_property(SOURCE ${source} PROPERTY COMPILE_OPTIONS -gencode=arch=compute_90a,code=sm_90a)
    elseif(source MATCHES "\\.cu$")
      set_property(SOURCE ${source} PROPERTY COMPILE_OPTIONS ${plain_flags})
    endif()
  endforeach()
  add_library(ballast_cuda STATIC ${cuda_sources})
  ballast_unity_groups(ballast_cuda)
  add_library(ballast::cuda ALIAS ballast_cuda)
  set_target_properties(ballast_cuda PROPERTIES EXPORT_NAME cuda
                        CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY Shared)
  target_compile_definitions(ballast_cuda PUBLIC BALLAST_HAVE_CUDA=1)
  foreach(option --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall)
    target_compile_options(ballast_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${option}>)
  endforeach()
  target_compile_options(ballast_cuda PRIVATE ${ballast_warnings})
  target_link_libraries(ballast_cuda PUBLIC ballast_core CUDA::cudart
                        PRIVATE ${CMAKE_DL_LIBS})
  # Opened by name, or where it lies now.
  target_compile_definitions(ballast_cuda PRIVATE
                             BALLAST_CUBLASLT="$<TARGET_FILE:CUDA::cublasLt>")
  # Each calls the other: dispatch by device, and the host's part of a pattern's choice.
  target_link_libraries(ballast_kernels PUBLIC ballast_cuda)
  target_link_libraries(ballast_cuda INTERFACE ballast_kernels)

  find_package(NCCL QUIET)
  if(NCCL_FOUND)
    set(BALLAST_HAVE_NCCL TRUE)
    set(ballast_nccl_version ${NCCL_VERSION})
    target_compile_definitions(ballast_parallel PUBLIC BALLAST_HAVE_NCCL=1)
    target_link_libraries(ballast_parallel PUBLIC NCCL::nccl)
  endif()
endif()
ballast_write_version_header()

# Third-party libraries.  Everything comes from find_package; jobs/setup.sh names the Debian
# packages.
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(BallastKokkos REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ZLIB REQUIRED)

if(CMAKE_BINARY_DIR MATCHES " ")
  message(FATAL_ERROR "The path of the build folder '${CMAKE_BINARY_DIR}' has a space, which "
          "HDF5's compiler wrapper does not bear; build elsewhere: cmake -B /path/without/space")
endif()
set(HDF5_PREFER_PARALLEL ON)
find_package(HDF5 REQUIRED COMPONENTS C)
if(NOT HDF5_IS_PARALLEL)
  message(FATAL_ERROR "The HDF5 found (${HDF5_C_LIBRARIES}) is serial; Ballast writes one "
          "checkpoint file from all ranks. Install libhdf5-mpich-dev, or name a parallel one: "
          "-DHDF5_C_COMPILER_EXECUTABLE=/path/to/h5pcc")
endif()

# Any BLAS with the C interface computes right; OpenBLAS is the one that is measured and whose
# threads Ballast sets.
if(NOT BLA_VENDOR)
  set(BLA_VENDOR OpenBLAS)
  find_package(BLAS QUIET)
  unset(BLA_VENDOR)
endif()
if(NOT BLAS_FOUND)
  find_package(BLAS REQUIRED)
endif()
find_path(BALLAST_CBLAS_INCLUDE_DIR NAMES cblas-openblas.h cblas.h
          PATH_SUFFIXES openblas openblas-pthread cblas)
if(NOT BALLAST_CBLAS_INCLUDE_DIR)
  message(FATAL_ERROR "cblas.h was not found. Install libopenblas-pthread-dev, or set "
          "-DBALLAST_CBLAS_INCLUDE_DIR=/folder/of/cblas.h")
endif()
# The path itself may be a system directory that the compiler searches already; naming it again is
# harmless.
set_property(TARGET BLAS::BLAS APPEND PROPERTY INTERFACE_INCLUDE_DIRECTORIES
             ${BALLAST_CBLAS_INCLUDE_DIR})

find_package(PkgConfig REQUIRED)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)

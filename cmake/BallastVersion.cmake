# Library ballast_version: what `ballast --version` and every output file say about this build.  The
# header is written at configure time and changes only with the tools; the git hash lives in one
# source that is rewritten when HEAD moves.
set(number "_VERSION +([0-9]+).*")
foreach(directory ${MPI_CXX_INCLUDE_DIRS})
  if(EXISTS ${directory}/mpi.h AND NOT ballast_mpi_version)
    file(STRINGS ${directory}/mpi.h lines
         REGEX "define +(MPICH_VERSION|OMPI_(MAJOR|MINOR|RELEASE)_VERSION) ")
    if(lines MATCHES "MPICH_VERSION +\"([^\"]+)\"")
      set(ballast_mpi_version "MPICH ${CMAKE_MATCH_1}")
    elseif(lines MATCHES "OMPI_MAJOR${number}OMPI_MINOR${number}OMPI_RELEASE${number}")
      set(ballast_mpi_version "Open MPI ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
    endif()
  endif()
endforeach()
if(NOT ballast_mpi_version)
  set(ballast_mpi_version "MPI standard ${MPI_CXX_VERSION}")
endif()
set(ballast_compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
set(ballast_cuda_version "none")
set(ballast_nccl_version "none")

# Called by BallastCuda once the CUDA versions are known.
function(ballast_write_version_header)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/ballast_version.hpp.in
                 ${PROJECT_BINARY_DIR}/generated/ballast_version.hpp @ONLY)
endfunction()

set(hash_source ${PROJECT_BINARY_DIR}/generated/ballast_version.cpp)
add_custom_target(ballast_git_hash
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DOUTPUT=${hash_source}
          -P ${PROJECT_SOURCE_DIR}/cmake/write_git_hash.cmake
  BYPRODUCTS ${hash_source} COMMENT "" VERBATIM)
add_library(ballast_version STATIC ${hash_source})
add_dependencies(ballast_version ballast_git_hash)
set_target_properties(ballast_version PROPERTIES EXPORT_NAME version)
target_include_directories(ballast_version
                           PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated>)

# Kokkos::kokkos and BallastKokkos_VERSION from a real Kokkos (3.7 or later) if one is found, else
# from the distribution's Trilinos package, whose own KokkosConfig.cmake names a missing include
# directory.
if(TARGET Kokkos::kokkos)
  set(BallastKokkos_FOUND TRUE)
  return()
endif()
find_package(Kokkos 3.7 QUIET CONFIG)
if(Kokkos_FOUND AND TARGET Kokkos::kokkos)
  set(BallastKokkos_FOUND TRUE)
  set(BallastKokkos_VERSION ${Kokkos_VERSION})
  return()
endif()
find_path(BallastKokkos_INCLUDE_DIR Kokkos_Core.hpp PATH_SUFFIXES trilinos kokkos)
find_library(BallastKokkos_LIBRARY NAMES kokkoscore trilinos_kokkoscore)
if(EXISTS ${BallastKokkos_INCLUDE_DIR}/KokkosCore_config.h)
  file(STRINGS ${BallastKokkos_INCLUDE_DIR}/KokkosCore_config.h version_line
       REGEX "define +KOKKOS_VERSION +[0-9]+")
  if(version_line MATCHES "([0-9]+)([0-9][0-9])([0-9][0-9])$")  # 30401 is 3.4.1
    math(EXPR minor "1${CMAKE_MATCH_2} - 100")
    math(EXPR patch "1${CMAKE_MATCH_3} - 100")
    set(BallastKokkos_VERSION ${CMAKE_MATCH_1}.${minor}.${patch})
  endif()
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(BallastKokkos
                                  REQUIRED_VARS BallastKokkos_LIBRARY BallastKokkos_INCLUDE_DIR
                                  VERSION_VAR BallastKokkos_VERSION)
if(BallastKokkos_FOUND)
  find_package(Threads REQUIRED)
  add_library(Kokkos::kokkos UNKNOWN IMPORTED)
  set_target_properties(Kokkos::kokkos PROPERTIES IMPORTED_LOCATION ${BallastKokkos_LIBRARY})
  target_include_directories(Kokkos::kokkos SYSTEM INTERFACE ${BallastKokkos_INCLUDE_DIR})
  target_link_libraries(Kokkos::kokkos INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
endif()
mark_as_advanced(BallastKokkos_INCLUDE_DIR BallastKokkos_LIBRARY)

# Installation: programs, pages and licence (share/doc/ballast), headers
# (include/ballast/FOLDER/*.hpp, included as "FOLDER/name.hpp"), libraries and the CMake package
# `ballast` with targets ballast::core, ::kernels, ::parallel and ::io.  The Python tools are
# wrapped so that they find their interpreter.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(report_folder ${PROJECT_SOURCE_DIR}/app/report)
set(executable OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
    WORLD_READ WORLD_EXECUTE)
configure_file(cmake/ballast-report.in ${PROJECT_BINARY_DIR}/bin/ballast-report @ONLY
               FILE_PERMISSIONS ${executable})
set(data_tool ${PROJECT_SOURCE_DIR}/app/data)
set(data_environment ${PROJECT_BINARY_DIR}/python)
configure_file(cmake/ballast-data.in ${PROJECT_BINARY_DIR}/bin/ballast-data @ONLY
               FILE_PERMISSIONS ${executable})
set(data_folder ${CMAKE_INSTALL_DATADIR}/ballast)
set(generated ${PROJECT_BINARY_DIR}/generated)
set(report_folder "$(dirname -- \"$(readlink -f -- \"$0\")\")/../${data_folder}/report")
configure_file(cmake/ballast-report.in ${generated}/ballast-report @ONLY)
set(installed_data "$BALLAST_DATA_FOLDER/../${data_folder}")
set(data_tool "${installed_data}/data")
set(data_environment "${installed_data}/python")
configure_file(cmake/ballast-data.in ${generated}/ballast-data @ONLY)
install(PROGRAMS ${generated}/ballast-report ${generated}/ballast-data
        DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY app/report app/data DESTINATION ${data_folder} PATTERN __pycache__ EXCLUDE)
install(DIRECTORY inputs jobs DESTINATION ${data_folder} USE_SOURCE_PERMISSIONS
        PATTERN setup.sh EXCLUDE PATTERN quickstart.sh EXCLUDE
        PATTERN packages EXCLUDE)

install(FILES LICENSE README.md CITATION.cff DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(exported_targets ballast_version ballast_core ballast_kernels ballast_parallel ballast_io)
if(TARGET ballast_cuda)
  list(APPEND exported_targets ballast_cuda)
endif()
install(TARGETS ballast ${exported_targets} EXPORT ballastTargets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast)
install(DIRECTORY core kernels parallel io DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast
        FILES_MATCHING PATTERN "*.hpp" PATTERN standalone EXCLUDE)
install(FILES ${generated}/ballast_version.hpp
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)
install(EXPORT ballastTargets NAMESPACE ballast:: DESTINATION ${package_folder})
configure_package_config_file(cmake/ballastConfig.cmake.in ${generated}/ballastConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${generated}/ballastConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${generated}/ballastConfig.cmake ${generated}/ballastConfigVersion.cmake
              cmake/BallastDependencies.cmake cmake/FindBallastKokkos.cmake cmake/FindNCCL.cmake
        DESTINATION ${package_folder})

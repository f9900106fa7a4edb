# Installation: programs, headers (include/ballast/FOLDER/*.hpp, included as "FOLDER/name.hpp"),
# libraries and the CMake package `ballast` with targets ballast::core, ::kernels, ::parallel and
# ::io.  The report tool is wrapped so that it finds its interpreter.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(report_folder ${PROJECT_SOURCE_DIR}/app/report)
configure_file(cmake/ballast-report.in ${PROJECT_BINARY_DIR}/bin/ballast-report @ONLY FILE_PERMISSIONS
               OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(report_folder "$(dirname -- \"$(readlink -f -- \"$0\")\")/../${CMAKE_INSTALL_DATADIR}/ballast/report")
configure_file(cmake/ballast-report.in ${PROJECT_BINARY_DIR}/generated/ballast-report @ONLY)
install(PROGRAMS ${PROJECT_BINARY_DIR}/generated/ballast-report DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY app/report/ DESTINATION ${CMAKE_INSTALL_DATADIR}/ballast/report PATTERN __pycache__ EXCLUDE)
install(DIRECTORY inputs jobs DESTINATION ${CMAKE_INSTALL_DATADIR}/ballast USE_SOURCE_PERMISSIONS
        PATTERN setup.sh EXCLUDE PATTERN quickstart.sh EXCLUDE)

set(exported_targets ballast_version ballast_core ballast_kernels ballast_parallel ballast_io)
if(TARGET ballast_cuda)
  list(APPEND exported_targets ballast_cuda)
endif()
install(TARGETS ballast ${exported_targets} EXPORT ballastTargets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast)
install(DIRECTORY core kernels parallel io DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast
        FILES_MATCHING PATTERN "*.hpp" PATTERN standalone EXCLUDE)
install(FILES ${PROJECT_BINARY_DIR}/generated/ballast_version.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)
install(EXPORT ballastTargets NAMESPACE ballast:: DESTINATION ${package_folder})
configure_package_config_file(cmake/ballastConfig.cmake.in ${PROJECT_BINARY_DIR}/generated/ballastConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/generated/ballastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/generated/ballastConfig.cmake ${PROJECT_BINARY_DIR}/generated/ballastConfigVersion.cmake
              cmake/BallastDependencies.cmake cmake/FindBallastKokkos.cmake cmake/FindNCCL.cmake DESTINATION ${package_folder})

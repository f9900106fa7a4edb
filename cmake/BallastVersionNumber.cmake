# BALLAST_VERSION: the newest tag vX.Y.Z that HEAD descends from; without git or such a tag, this.
set(BALLAST_VERSION 0.1.0)
find_program(BALLAST_GIT git)
mark_as_advanced(BALLAST_GIT)
get_filename_component(ballast_root ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
if(BALLAST_GIT AND EXISTS ${ballast_root}/.git)
  execute_process(COMMAND ${BALLAST_GIT} -c safe.directory=* -C ${ballast_root} describe --tags
                          --abbrev=0 --match v[0-9]*
                  OUTPUT_VARIABLE ballast_tag ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(ballast_tag MATCHES "^v([0-9]+\\.[0-9]+\\.[0-9]+)$")
    set(BALLAST_VERSION ${CMAKE_MATCH_1})
  endif()
endif()

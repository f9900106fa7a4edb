# cmake -DSOURCE_DIR=... -DOUTPUT=... -P write_git_hash.cmake: writes OUTPUT, the hashes of the
# tree, only when its content changes.
set(hash "unknown")
find_program(git git)
if(git AND EXISTS ${SOURCE_DIR}/.git)
  # A container's root may build a clone that another user owns.
  set(command ${git} -c safe.directory=* -C ${SOURCE_DIR})
  execute_process(COMMAND ${command} rev-parse --short=12 HEAD OUTPUT_VARIABLE head
                  RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed)
    set(hash ${head})
    execute_process(COMMAND ${command} --no-optional-locks diff-index --quiet HEAD --
                    RESULT_VARIABLE differs ERROR_QUIET)
    if(differs)
      string(APPEND hash "-dirty")
    endif()
  endif()
endif()
# Hash of what the kernels do: profile tables hold for it.
foreach(ending hpp cpp cu cuh)
  list(APPEND patterns ${SOURCE_DIR}/kernels/*.${ending})
endforeach()
file(GLOB_RECURSE kernels ${patterns})
list(SORT kernels)
set(sums "")
foreach(source ${kernels})
  file(SHA256 ${source} sum)
  string(APPEND sums ${sum})
endforeach()
string(SHA256 kernel_hash "${sums}")
string(SUBSTRING ${kernel_hash} 0 12 kernel_hash)
string(CONCAT content "#include \"ballast_version.hpp\"\n\nnamespace ballast {\n"
       "const char* git_hash() { return \"${hash}\"; }\n"
       "const char* kernel_hash() { return \"${kernel_hash}\"; }\n"
       "}  // namespace ballast\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL content)
  file(WRITE ${OUTPUT} "${content}")
endif()

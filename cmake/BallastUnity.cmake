# Most of a compilation reads headers and instantiates their templates, so that up to ten files of
# a folder are one compilation and standard headers come precompiled.  A compiler cache saves more,
# and its builds show which file misses an include.  -DCMAKE_UNITY_BUILD=OFF recompiles less after
# an edit.
if(CCACHE_PROGRAM)
  set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
else()
  set(CMAKE_UNITY_BUILD ON CACHE BOOL "Compile several files of a folder at once")
endif()
if(CMAKE_UNITY_BUILD)  # joined files are headers to the compiler
  list(APPEND ballast_warnings $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

# ballast_unity_groups(TARGET): files of one folder, up to ten together; anonymous names must differ
# among them.
function(ballast_unity_groups target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source ${sources})
    get_filename_component(folder ${source} DIRECTORY)
    string(MAKE_C_IDENTIFIER "${folder}" folder)
    list(APPEND folders ${folder})
    list(APPEND of_${folder} ${source})
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder ${folders})
    list(LENGTH of_${folder} files)
    math(EXPR groups "(${files} + 9) / 10")
    set(number 0)
    foreach(source ${of_${folder}})
      math(EXPR group "${number} * ${groups} / ${files}")
      set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${folder}_${group})
      math(EXPR number "${number} + 1")
    endforeach()
  endforeach()
endfunction()

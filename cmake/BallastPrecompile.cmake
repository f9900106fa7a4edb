# Headers of the standard library and of packages that most sources read, compiled once a target:
# half of a source's compile time.  Off with ccache, which keeps no object of a source that has
# them.  Sources include what they use: BALLAST_PRECOMPILE=OFF compiles them alone.
set(ballast_precompile_default ON)
if(CCACHE_PROGRAM)
  set(ballast_precompile_default OFF)
endif()
option(BALLAST_PRECOMPILE "Precompile headers that most sources read" ${ballast_precompile_default})

# ballast_precompile(TARGET HEADER...): those of every target, and HEADER... of this one.
function(ballast_precompile target)
  if(NOT BALLAST_PRECOMPILE)
    return()
  endif()
  target_precompile_headers(
    ${target} PRIVATE <algorithm> <array> <cmath> <cstdint> <cstring> <filesystem> <functional>
    <limits> <map> <memory> <numeric> <optional> <set> <span> <string> <string_view> <tuple>
    <utility> <vector> <fmt/format.h> ${ARGN})
endfunction()

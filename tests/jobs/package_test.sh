#!/usr/bin/env bash
# package_test.sh BUILD_FOLDER: installs the build into a temporary prefix and builds a program
# against find_package(ballast).
set -euo pipefail
build=${1:?}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cmake --install "$build" --prefix "$folder/prefix" >"$folder/install.log" ||
  { tail "$folder/install.log"; exit 1; }
for file in README.md LICENSE CITATION.cff docs/README.md docs/operate.md docs/overview.svg; do
  test -s "$folder/prefix/share/doc/ballast/$file" || { echo "$file was not installed"; exit 1; }
done
mkdir "$folder/user"
cat >"$folder/user/CMakeLists.txt" <<'FILE'
cmake_minimum_required(VERSION 3.22)
project(user LANGUAGES CXX)
find_package(ballast 0.1 REQUIRED)
add_executable(user user.cpp)
target_link_libraries(user PRIVATE ballast::core ballast::kernels ballast::parallel ballast::io)
FILE
cat >"$folder/user/user.cpp" <<'FILE'
#include <cstdio>

#include "ballast_version.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "io/data/dataset.hpp"
#include "kernels/attention/attention.hpp"
#include "parallel/comm/comm.hpp"

int main() {
  const ballast::RingPlan plan = ballast::plan_ring(1, 2, 2);
  std::printf("ballast %s (%s), %zu ring steps\n", ballast::version(), ballast::git_hash(),
              plan.forward.size());
  return plan.forward.size() == 4 ? 0 : 1;
}
FILE
cmake -G Ninja -S "$folder/user" -B "$folder/user/build" -DCMAKE_PREFIX_PATH="$folder/prefix" \
  -DCMAKE_BUILD_TYPE=Release >"$folder/configure.log" 2>&1 ||
  { tail -n 30 "$folder/configure.log"; exit 1; }
cmake --build "$folder/user/build" 2>&1
"$folder/user/build/user"
"$folder/prefix/bin/ballast" --version

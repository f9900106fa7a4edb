#!/usr/bin/env bash
# The test command: sets up, builds and runs the `default` tests; `tests/run.sh full` runs all.
#
#   tests/run.sh [full] [ctest arguments...]      e.g. tests/run.sh -R parallel
#
# The CUDA backend is compiled where nvcc is found; GPU tests run only where a device answers.
# BALLAST_PRESET names another preset.  The last lines are ctest's summary.
set -euo pipefail
exec </dev/null
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
selection=(-L '^default$') packages=--tests
if [ "${1:-}" = full ]; then
  selection=() packages=--all-tests
  shift
fi
preset=${BALLAST_PRESET:-default}
defines=(--define BALLAST_TESTS=ON)
# A build that jobs/quickstart.sh made without CUDA gets it now, where nvcc is found.
[ "$preset" != default ] || defines+=(--define BALLAST_CUDA=AUTO)
build=$("$root/jobs/setup.sh" "$packages" --preset "$preset" "${defines[@]}")
jobs=$(nproc)  # asked before OMP_NUM_THREADS is set, which it would answer
# Tests run many ranks on few cores: one thread each.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$build"
exec ctest --output-on-failure --no-tests=error --parallel "$jobs" "${selection[@]}" "$@"

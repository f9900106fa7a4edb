#!/usr/bin/env bash
# From a bare clone to a trained model and its report: sets up, builds, trains
# inputs/quickstart.toml on 4 ranks, writes the report.
#
#   jobs/quickstart.sh [ballast train arguments...]
#   jobs/quickstart.sh run.steps=50 mesh.dp=4 mesh.cp_inner=1
#
# BALLAST_RANKS (4) ranks; BALLAST_RUN is the run folder, from where you are (the tree's
# runs/quickstart, or the next free runs/quickstart-N).
set -euo pipefail
exec </dev/null
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
started=$SECONDS

# The CUDA backend costs minutes of compilation, so a new build has it only where a device answers.
cuda=(--define BALLAST_CUDA=OFF)
if [ -e "$root/build/CMakeCache.txt" ] ||
  { command -v nvidia-smi >/dev/null && timeout 60 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
then
  cuda=()
fi
build=$("$root/jobs/setup.sh" "${cuda[@]}" ballast)
built=$SECONDS

# Before the cd below: a relative BALLAST_RUN is the caller's.
run=$(realpath -ms -- "${BALLAST_RUN:-$root/runs/quickstart}")
if [ -z "${BALLAST_RUN:-}" ]; then
  for ((n = 2; ; ++n)); do
    [ -e "$run" ] || break
    run=$root/runs/quickstart-$n
  done
fi
mpiexec=$(sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' "$build/CMakeCache.txt")
# Ranks share the cores: one thread each unless the caller knows better.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"
"$mpiexec" -n "${BALLAST_RANKS:-4}" "$build/bin/ballast" train inputs/quickstart.toml -d "$run" "$@"
trained=$SECONDS
"$build/bin/ballast-report" "$run"
report=$(find "$run" -name report.html | head -n 1)
if [ -z "$report" ]; then
  echo "quickstart: ballast-report wrote no report.html under $run" >&2
  exit 1
fi
echo "quickstart: set-up and build $((built - started)) s, training $((trained - built)) s," \
  "report $((SECONDS - trained)) s"
echo "quickstart: report: $report"

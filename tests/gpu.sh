#!/usr/bin/env bash
# GPU tests on a machine with NVIDIA GPUs: operations against their host twins, whole training runs
# against the host backend, then against Hugging Face Transformers where python3 has it, and the
# attention kernels under compute-sanitizer where it and nvcc are there.
#
#   tests/gpu.sh [FOLDER [PATTERN]]   FOLDER holds ballast, test_cuda and test_parallel (default:
#                                     the build tree's); PATTERN (of grep -E) picks parts by
#                                     name, such as 'chunks|pipelines'; BALLAST_GPU_PART_S:
#                                     seconds that a part may take (300)
#
# A part that fails or hangs does not keep the others from running; last comes a table of all
# parts, after the ends of those that failed.  Without a GPU it says why it skips and leaves
# with 77.
set -u
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "skipped: no GPU answers here (nvidia-smi lists none)"
  exit 77
fi
programs=$(cd -- "${1:-$root/build/bin}" && pwd) || exit 1
pattern=${2:-.}
limit=${BALLAST_GPU_PART_S:-300}
tests=$programs
[ -x "$tests/test_cuda" ] || tests=$root/build/tests
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export BALLAST_PROGRAM=$programs/ballast PYTHONDONTWRITEBYTECODE=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
table=() failed=() status=0

# part NAME COMMAND...: runs it, keeps its output's end for the summary when it fails.
part() {
  local name=$1 begin=$SECONDS code result
  shift
  grep -qE -- "$pattern" <<<"$name" || return 0
  echo "== $name"
  timeout -k 10 "$limit" "$@" 2>&1 | tee "$folder/log"
  code=${PIPESTATUS[0]}
  case $code in
    0) result=passed ;;
    77) result=skipped ;;
    124 | 137) result="stopped after $limit s" ;;
    *) result="failed ($code)" ;;
  esac
  if [ "$code" != 0 ] && [ "$code" != 77 ]; then
    status=1
    failed+=("== $name: $result
$(grep -E 'FAILED|Error|error:|ballast:|CUDA:' "$folder/log" | head -n 8)
$(tail -n 8 "$folder/log")")
  fi
  table+=("$(printf '%-66s %-20s %4d s' "$name" "$result" $((SECONDS - begin)))")
}
skip() {
  grep -qE -- "$pattern" <<<"$1" || return 0
  echo "skipped: $1 ($2)"
  table+=("$(printf '%-66s %s' "$1" "skipped: $2")")
}

# The sanitizers' programs are built beside the first parts.
sanitizers="nvcc or compute-sanitizer is not here"
build=$root/kernels/cuda/standalone/build.sh
if command -v nvcc >/dev/null && command -v compute-sanitizer >/dev/null &&
  grep -qE -- "$pattern" <<<"sanitizer memcheck racecheck"; then
  sanitizers=
  (sh "$build" "$folder/plain" >"$folder/plain.log" 2>&1) &
  (FLAGS=-DBALLAST_EVERY_LANE_ARRIVES sh "$build" "$folder/arrivals" \
    >"$folder/arrivals.log" 2>&1) &
fi

# lists WHAT NAMES: a list that came out empty is a failure, not a pass.
lists() {
  [ -n "$2" ] && return
  status=1
  table+=("$(printf '%-66s %s' "$1" "failed: lists no tests")")
}
suites=$("$tests/test_cuda" --gtest_list_tests | grep -E '^[A-Za-z0-9_]+\.' | cut -d. -f1)
lists test_cuda "$suites"
for suite in $suites; do
  part "test_cuda $suite" "$tests/test_cuda" --gtest_filter="$suite.*"
done
# These need a build with NCCL, which other tests have not.
sharing="test_parallel NcclGroupRanks"
if [ ! -x "$tests/test_parallel" ]; then
  skip "$sharing" "no test_parallel beside test_cuda"
elif [[ $("$tests/test_parallel" --gtest_list_tests) != *NcclGroupRanks.* ]]; then
  skip "$sharing" "built without NCCL"
else
  part "$sharing" "${BALLAST_MPIEXEC:-mpiexec}" -n 3 "$tests/test_parallel" \
    --gtest_filter='NcclGroupRanks.*'
fi
cd "$root/tests/app" || exit 1
names=$(python3 -c '
import unittest
from test_cuda import Cuda
from test_cuda_bench import CudaBench
from test_cuda_decks import CudaDecks
from test_cuda_optimizer import CudaOptimizer
for case in (Cuda, CudaOptimizer, CudaDecks, CudaBench):
    for name in unittest.TestLoader().getTestCaseNames(case):
        print(f"{case.__module__}.{case.__name__}.{name}")')
lists test_cuda.py "$names"
for name in $names; do
  part "${name#*.}" python3 -u -m unittest "$name"
done
if python3 -c 'import torch, transformers, safetensors' 2>/dev/null; then
  part "compare_gpu (Transformers)" \
    python3 "$root/tests/reference/compare_gpu.py" "$programs/ballast"
else
  skip "compare_gpu (Transformers)" "no torch and transformers here"
fi
if [ -z "$sanitizers" ]; then
  wait
  cat "$folder/plain.log" "$folder/arrivals.log"
  part "attention check" "$folder/plain" check
  part "sanitizer memcheck" \
    compute-sanitizer --tool memcheck --error-exitcode 1 "$folder/plain" check smoke
  part "sanitizer racecheck" \
    compute-sanitizer --tool racecheck --error-exitcode 1 "$folder/arrivals" check smoke
else
  skip "sanitizer memcheck, racecheck" "$sanitizers"
fi

echo
[ ${#failed[@]} -eq 0 ] || printf '%s\n' "${failed[@]}"
printf '%s\n' "${table[@]}"
printf 'all: %d s\n' "$SECONDS"
exit $status

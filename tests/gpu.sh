#!/usr/bin/env bash
# GPU tests on a machine with NVIDIA GPUs: operations against their host twins, whole training runs against the host
# backend, then against Hugging Face Transformers where python3 has it, and the attention kernels under compute-sanitizer
# where it and nvcc are there.
#
#   tests/gpu.sh [FOLDER]      FOLDER holds ballast and test_cuda (default: the build tree's)
#
# Elsewhere it says why it skips and leaves with 77.
set -u
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "skipped: no GPU answers here (nvidia-smi lists none)"
  exit 77
fi
programs=${1:-$root/build/bin}
tests=$programs
[ -x "$tests/test_cuda" ] || tests=$root/build/tests
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
status=0
"$tests/test_cuda" || status=1
cd "$root/tests/app" && BALLAST_PROGRAM=$programs/ballast python3 -m unittest -v test_cuda || status=1
if python3 -c 'import torch, transformers, safetensors' 2>/dev/null; then
  python3 "$root/tests/reference/compare_gpu.py" "$programs/ballast" || status=1
else
  echo "skipped: comparison with Transformers (no torch and transformers here)"
fi
if command -v nvcc >/dev/null && command -v compute-sanitizer >/dev/null; then
  bench=$(mktemp -d)
  sh "$root/kernels/cuda/standalone/build.sh" "$bench/plain" && FLAGS=-DBALLAST_EVERY_LANE_ARRIVES sh "$root/kernels/cuda/standalone/build.sh" "$bench/arrivals" || status=1
  "$bench/plain" check || status=1
  compute-sanitizer --tool memcheck --error-exitcode 1 "$bench/plain" check smoke || status=1
  compute-sanitizer --tool racecheck --error-exitcode 1 "$bench/arrivals" check smoke || status=1
  rm -rf "$bench"
else
  echo "skipped: compute-sanitizer (no nvcc or no compute-sanitizer here)"
fi
exit $status

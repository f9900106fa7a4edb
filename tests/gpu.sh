#!/usr/bin/env bash
# GPU tests on a machine with NVIDIA GPUs: operations against their host twins, whole training runs against the host
# backend, then against Hugging Face Transformers where python3 has it.
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
exit $status

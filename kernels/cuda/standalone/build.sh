#!/bin/sh
# Builds attention_bench with nvcc alone (CUDA 12.8 or newer).  Usage: [FLAGS=...] build.sh [OUTPUT]
# FLAGS=-DBALLAST_EVERY_LANE_ARRIVES makes the hand-overs visible to compute-sanitizer's racecheck
# (hopper.cuh).
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${1:-$root/build/attention_bench}
mkdir -p "$(dirname "$out")"
exec ${NVCC:-nvcc} -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr \
  -gencode arch=compute_90a,code=sm_90a -I"$root" ${FLAGS:-} -o "$out" \
  "$here/attention_bench.cu" "$root"/kernels/cuda/attention/*.cu "$root"/kernels/cuda/index/*.cu

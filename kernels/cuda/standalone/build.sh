#!/bin/sh
# Builds a program of this folder with nvcc alone (CUDA 12.8 or newer).
# Usage: [FLAGS=...] build.sh [OUTPUT]
# OUTPUT's name begins with the program's: attention_bench (the default), ops_bench or index_check.
# FLAGS=-DBALLAST_EVERY_LANE_ARRIVES makes the hand-overs visible to compute-sanitizer's racecheck
# (hopper.cuh).
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${1:-$root/build/attention_bench}
mkdir -p "$(dirname "$out")"
cuda=$root/kernels/cuda
case $(basename "$out") in
  ops_bench*) set -- "$here/ops_bench.cu" "$cuda"/ops/*.cu ;;
  index_check*) set -- "$here/index_check.cu" "$cuda"/index/*.cu \
    "$root/core/plan/attention/device_index.cpp" ;;
  *) set -- "$here/attention_bench.cu" "$cuda"/attention/*.cu "$cuda"/index/*.cu \
    "$root/core/plan/attention/device_index.cpp" "$root/core/plan/attention/routed_lists.cpp" ;;
esac
exec ${NVCC:-nvcc} -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr \
  -gencode arch=compute_90a,code=sm_90a -I"$root" ${FLAGS:-} -o "$out" "$@"

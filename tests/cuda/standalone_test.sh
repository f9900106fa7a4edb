#!/usr/bin/env bash
# The programs for nvcc alone (kernels/cuda/standalone) still fit the launchers: each passes
# the compiler's front end.  Skips where there is no nvcc.
set -u
root=${BALLAST_ROOT:?}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "skipped: no nvcc on this machine"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
status=0 programs=0
for program in "$root"/kernels/cuda/standalone/*.cu; do
  programs=$((programs + 1))
  "$nvcc" -std=c++20 --expt-relaxed-constexpr -arch=compute_90a --ptx -Xcicc -O0 -I"$root" \
    -o "$folder/out.ptx" "$program" || { echo "$program does not compile"; status=1; }
done
[ "$programs" -ge 3 ] || { echo "$programs programs in place of three"; exit 1; }
exit $status

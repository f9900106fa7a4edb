#!/usr/bin/env bash
# Whole-program tests (tests/app/test_*.py) under the first python that has h5py, that of
# ballast-data's environment if there is one; BALLAST_PROGRAM names the program.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(dirname "$(dirname "${BALLAST_PROGRAM:-/usr/bin/ballast}")")
for python in ${BALLAST_PYTHON:+"$BALLAST_PYTHON"} "$build/python/bin/python" python3 \
  /usr/bin/python3; do
  if "$python" -c 'import h5py' 2>/dev/null; then
    cd "$here" && exec "$python" -m unittest -v "${1:-test_train}"
  fi
done
echo "skipped: no python3 with h5py; install python3-h5py"
exit 77

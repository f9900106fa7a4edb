#!/bin/bash
# Runs the report's tests with the first interpreter that has its packages; exits 77 (skipped)
# where none has.
here=$(cd "$(dirname "$0")" && pwd)
for python in ${BALLAST_PYTHON:-} python3 /usr/bin/python3; do
  if "$python" -c 'import h5py, matplotlib, numpy' >/dev/null 2>&1; then
    exec "$python" -B -W error::RuntimeWarning -m unittest discover -s "$here" -p 'test_*.py' "$@"
  fi
done
echo "no Python interpreter with h5py, numpy and matplotlib:" \
  "install python3-h5py python3-numpy python3-matplotlib" >&2
exit 77

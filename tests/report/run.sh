#!/bin/bash
# Runs the report's tests with the first interpreter that has its packages; exits 77 (skipped)
# where none has.  `run.sh thousand` tests the report of 1,024 simulated ranks in their place.
here=$(cd "$(dirname "$0")" && pwd)
for python in ${BALLAST_PYTHON:+"$BALLAST_PYTHON"} python3 /usr/bin/python3; do
  if "$python" -c 'import h5py, numpy, plotly' >/dev/null 2>&1; then
    cd "$here" || exit 1
    if [ "${1:-}" = thousand ]; then exec "$python" -B -m unittest -v thousand; fi
    exec "$python" -B -W error::RuntimeWarning -m unittest discover -p 'test_*.py' "$@"
  fi
done
echo "no Python interpreter with h5py, numpy and plotly:" \
  "install python3-h5py python3-numpy python3-plotly" >&2
exit 77

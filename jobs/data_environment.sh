#!/usr/bin/env bash
# Makes the Python environment of ballast-data: the distribution's h5py and numpy, and beside them
# the pinned packages of app/data/requirements.txt.  Needs the network once.
#
#   jobs/data_environment.sh FOLDER      FOLDER: BUILD/python, or PREFIX/share/ballast/python
#
# Nothing is done where FOLDER is up to date.
set -euo pipefail
folder=${1:?a folder is needed; see the first lines of this file}
here=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
list=$here/app/data/requirements.txt
[ -f "$list" ] || list=$here/data/requirements.txt  # installed

stop() {
  echo "data_environment: $*" >&2
  exit 1
}

if cmp -s "$list" "$folder/requirements.txt"; then exit 0; fi
for python in ${BALLAST_PYTHON:+"$BALLAST_PYTHON"} python3 /usr/bin/python3; do
  if "$python" -c 'import h5py, numpy' 2>/dev/null; then break; fi
  python=
done
[ -n "$python" ] || stop "no python3 with h5py and numpy; install python3-h5py and python3-numpy"
"$python" -m venv --clear --system-site-packages "$folder" >&2 ||
  stop "$python makes no virtual environments; install python3-venv"
"$folder/bin/python" -m pip install -q --no-deps --only-binary :all: --retries 1 --timeout 20 \
  --disable-pip-version-check -r "$list" >&2 ||
  stop "pip could not install $(grep -v '^#' "$list" | tr '\n' ' ')(is the network off?)"
"$folder/bin/python" -c 'import h5py, jinja2, tokenizers' >&2 || stop "$folder does not work"
cp "$list" "$folder/requirements.txt"

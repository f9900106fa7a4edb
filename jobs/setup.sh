#!/usr/bin/env bash
# Set-up shared by jobs/quickstart.sh and tests/run.sh: installs what is missing, checks MPI,
# configures by preset and builds.
#
#   jobs/setup.sh [--tests|--all-tests] [--preset NAME] [--define NAME=VALUE]... [TARGET...]
#                                                            (no TARGET: everything)
#   jobs/setup.sh [--tests] --packages       installs packages and stops
#
# --tests adds the packages that only tests need, --all-tests also those of tests/run.sh full;
# jobs/packages/packages.txt lists them all.
# Packages are installed on Debian and its family, as root or through sudo; apt-get is not called
# when nothing is missing.  BALLAST_SKIP_INSTALL=1
# leaves packages alone (libraries from modules), BALLAST_BUILD_JOBS bounds the compiler
# processes.  The last line of standard output is the build folder.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
exec 3>&1 1>&2  # everything but the last line goes to standard error

# Packages of group $1 of the list, one line.
listed_packages() {
  awk -v group="$1" '!/^#/ && $3 == group {printf "%s ", $1}' "$root/jobs/packages/packages.txt"
}
packages=$(listed_packages build)
test_packages=$(listed_packages test)
full_packages=$(listed_packages full)

stop() {
  echo "setup: $*"
  exit 1
}
say() { echo "setup: $*"; }

as_root() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif sudo -n true 2>/dev/null || [ -t 2 ]; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    return 1
  fi
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# Prints the entries of "$@" of which no alternative is installed.
missing_packages() {
  local entry alternative found
  for entry in "$@"; do
    found=
    for alternative in ${entry//|/ }; do
      if installed "$alternative"; then found=1; fi
    done
    [ -n "$found" ] || echo "$entry"
  done
}

# Prints the first alternative of $1 that the package lists offer.
offered() {
  local alternative
  for alternative in ${1//|/ }; do
    if apt-cache show --no-all-versions "$alternative" >/dev/null 2>&1; then
      echo "$alternative"
      return
    fi
  done
  echo "${1%%|*}"
}

install_packages() {
  local missing entry names=()
  if [ "${BALLAST_SKIP_INSTALL:-0}" = 1 ] || ! command -v dpkg-query >/dev/null ||
    ! command -v apt-get >/dev/null; then
    say "packages are left alone; needed (Debian names): $packages"
    return
  fi
  # shellcheck disable=SC2086
  mapfile -t missing < <(missing_packages $packages ${with_tests:+$test_packages} \
    ${with_all:+$full_packages})
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  as_root apt-get -q update </dev/null ||
    say "apt-get update failed; trying with the package lists that are here"
  for entry in "${missing[@]}"; do names+=("$(offered "$entry")"); done
  # --no-install-recommends: Plotly and Slurm recommend desktop and mail packages.
  as_root apt-get -q install -y --no-install-recommends -o DPkg::Lock::Timeout=300 \
    "${names[@]}" </dev/null ||
    stop "could not install: ${names[*]}. Run as root or with sudo:" \
      "apt-get update && apt-get install -y --no-install-recommends ${names[*]};" \
      "or set BALLAST_SKIP_INSTALL=1 if these come from elsewhere"
}

# MPI compiler or launcher $1: MPICH's own name where the system's default may be another MPI; a
# module's or user's choice is respected.
mpi_tool() {
  local tool
  tool=$(command -v "$1" || true)
  case $tool in
    "" | /usr/bin/* | /bin/*) command -v "$1.mpich" || echo "$tool" ;;
    *) echo "$tool" ;;
  esac
}

# Python packages of ballast-data, which need the network once; nothing else needs them.
data_environment() {
  "$root/jobs/data_environment.sh" "$1" </dev/null ||
    say "ballast-data will not run until jobs/data_environment.sh $1 succeeds; all else does"
}

# Two processes must be two ranks of one job, with messages between them.
check_mpi() {
  local folder ranks
  mpicc=$(mpi_tool mpicc)
  mpicxx=$(mpi_tool mpicxx)
  mpiexec=$(mpi_tool mpiexec)
  h5pcc=$(mpi_tool h5pcc)
  if [ -z "$mpicc" ] || [ -z "$mpicxx" ] || [ -z "$mpiexec" ]; then
    stop "mpicc, mpicxx and mpiexec are not all on PATH; install mpich and libmpich-dev"
  fi
  folder=$(mktemp -d)
  cat >"$folder/ranks.c" <<'PROGRAM'
#include <mpi.h>
#include <stdio.h>
int main(int argc, char** argv) {
  int rank = 0, size = 0, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) printf("size %d sum %d\n", size, sum);
  MPI_Finalize();
  return 0;
}
PROGRAM
  ranks=$({
    "$mpicc" -o "$folder/ranks" "$folder/ranks.c" &&
      timeout 120 "$mpiexec" -n 2 "$folder/ranks" </dev/null
  } 2>&1 || true)
  rm -rf "$folder"
  case $ranks in
    *"size 2 sum 1"*) ;;
    *"size 1"*)
      stop "'$mpiexec -n 2' starts two jobs of one rank, not one job of two." \
        "Ubuntu 24.04's MPICH 4.2.0-5build3 does this (its bug 2072338). Remedy: install that" \
        "release's later packages of mpich and libmpich12 (4.2.0-5.1 or newer), use Debian 12, or" \
        "put the mpicxx and mpiexec of a working MPICH, with an HDF5 built on it, first on PATH."
      ;;
    *) stop "'$mpiexec -n 2' did not run a two-rank program. It said: $ranks" ;;
  esac
}

# Compiler processes: one a core, and no more than memory allows at 2 GiB each.
build_jobs() {
  local jobs available limit used free
  jobs=$(nproc)
  available=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo)
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  used=$(cat /sys/fs/cgroup/memory.current 2>/dev/null || echo 0)
  if [ "$limit" != max ]; then
    free=$(((limit - used) / 1048576))
    if [ "$free" -lt "$available" ]; then available=$free; fi
  fi
  if [ $((available / 2048)) -lt "$jobs" ]; then jobs=$((available / 2048)); fi
  if [ "$jobs" -lt 1 ]; then jobs=1; fi
  echo "${BALLAST_BUILD_JOBS:-$jobs}"
}

with_tests='' with_all='' packages_alone='' preset=default definitions=() targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --tests) with_tests=1 ;;
    --all-tests) with_tests=1 with_all=1 ;;
    --packages) packages_alone=1 ;;
    --preset | --define)
      [ $# -ge 2 ] || stop "$1 needs a value"
      if [ "$1" = --preset ]; then preset=$2; else definitions+=("-D$2"); fi
      shift
      ;;
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&3
      exit 0
      ;;
    -*) stop "unknown option $1; see --help" ;;
    *) targets+=(--target "$1") ;;
  esac
  shift
done

started=$SECONDS
install_packages
if [ -n "$packages_alone" ]; then exit 0; fi
check_mpi
cd "$root"
jobs=$(build_jobs)
say "configuring preset $preset"
cmake --preset "$preset" -DMPI_CXX_COMPILER="$mpicxx" -DMPIEXEC_EXECUTABLE="$mpiexec" \
  ${h5pcc:+-DHDF5_C_COMPILER_EXECUTABLE="$h5pcc"} "${definitions[@]}" </dev/null
say "building with $jobs compiler processes"
cmake --build --preset "$preset" --parallel "$jobs" "${targets[@]}" </dev/null
build=$root/build
[ "$preset" = default ] || build=$root/build-$preset
data_environment "$build/python"
say "ready in $((SECONDS - started)) s"
echo "$build" >&3

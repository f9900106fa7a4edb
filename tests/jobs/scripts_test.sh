#!/usr/bin/env bash
# Checks the shell scripts without building or installing anything: syntax, usage, set-up's
# decisions (stand-ins for apt-get, dpkg-query and mpiexec come first on PATH), the elements of a
# sweep, and that the build knows its version.
set -euo pipefail
root=${BALLAST_ROOT:?}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0
# check NAME STATUS PATTERN COMMAND...: the status (`fail`: any but 0), and a line of the output
# that matches.
check() {
  local name=$1 expected=$2 pattern=$3 output status=0
  shift 3
  output=$("$@" 2>&1 </dev/null) || status=$?
  if [ "$expected" = fail ] && [ "$status" != 0 ]; then status=fail; fi
  if [ "$status" != "$expected" ] || ! grep -Eq -- "$pattern" <<<"$output"; then
    echo "FAILED: $name: status $status (expected $expected), no line matches '$pattern' in:"
    echo "$output"
    failures=$((failures + 1))
  else
    echo "ok: $name"
  fi
}

cd "$root"  # where shellcheck resolves the sourced file
mapfile -t scripts < <(find "$root/jobs" "$root/tests" "$root/.ci" -type f \
  \( -name '*.sh' -o -name '*.sbatch' -o -name run \) | sort)
for script in "${scripts[@]}"; do check "syntax of ${script#"$root"/}" 0 '' bash -n "$script"; done
if command -v shellcheck >/dev/null; then
  check "shellcheck" 0 '' shellcheck --severity=warning "${scripts[@]}"
fi
for script in tests/run.sh .ci/run jobs/{setup,quickstart}.sh jobs/{train,sweep,report}.sbatch; do
  check "$script is executable" 0 '' test -x "$root/$script"
done

check "set-up help" 0 'BALLAST_SKIP_INSTALL' "$root/jobs/setup.sh" --help
check "set-up refuses an unknown option" 1 'unknown option --tset' "$root/jobs/setup.sh" --tset
check "set-up refuses an option without its value" 1 'needs a value' "$root/jobs/setup.sh" --preset

# Set-up with stand-ins: dpkg-query says what is installed, apt-get and cmake write down how they
# were called.
mkdir "$folder/bin"
cat >"$folder/bin/dpkg-query" <<'STAND_IN'
#!/bin/sh
for last; do :; done
[ "$last" = "$MISSING_PACKAGE" ] && exit 1
printf installed
STAND_IN
cat >"$folder/bin/apt-get" <<'STAND_IN'
#!/bin/sh
echo "apt-get $*" >>"$CALLS"
STAND_IN
cat >"$folder/bin/cmake" <<'STAND_IN'
#!/bin/sh
echo "cmake $*" >>"$CALLS"
STAND_IN
for tool in apt-cache sudo python3; do printf '#!/bin/sh\nexit 0\n' >"$folder/bin/$tool"; done
chmod +x "$folder"/bin/*
setup_with() {
  env PATH="$folder/bin:$PATH" CALLS="$folder/calls" "$@" \
    "$root/jobs/setup.sh" --preset host some_target
}
installs_as_root() { [ "$(id -u)" = 0 ]; }

check "set-up with everything there" 0 '/build-host$' setup_with MISSING_PACKAGE=
check "  calls apt-get not at all" 1 '' grep -q apt-get "$folder/calls"
check "  configures the preset" 0 'cmake --preset host ' grep -e --preset "$folder/calls"
check "  builds the target" 0 '--target some_target' grep -e --build "$folder/calls"
if installs_as_root; then
  rm "$folder/calls"
  check "set-up with one package missing" 0 'installing libfmt-dev$' \
    setup_with MISSING_PACKAGE=libfmt-dev
  check "  updates the lists once" 0 '^1$' grep -c 'update' "$folder/calls"
  check "  installs that package alone" 0 ' libfmt-dev$' grep 'apt-get .*install' "$folder/calls"
  rm "$folder/calls"
  check "set-up for tests installs the formatters" 0 'installing black$' \
    env PATH="$folder/bin:$PATH" CALLS="$folder/calls" MISSING_PACKAGE=black \
    "$root/jobs/setup.sh" --tests --preset host
  check "  from the distribution" 0 ' black$' grep 'apt-get .*install' "$folder/calls"
fi
rm "$folder/calls"
check "set-up told to leave packages alone" 0 'left alone' \
  setup_with MISSING_PACKAGE=libfmt-dev BALLAST_SKIP_INSTALL=1
check "  calls apt-get not at all" 1 '' grep -q apt-get "$folder/calls"
check "  configures and builds all the same" 0 '^2$' grep -c -e --preset "$folder/calls"
rm "$folder/calls"
check "set-up asked for packages alone" 0 '' env PATH="$folder/bin:$PATH" \
  CALLS="$folder/calls" MISSING_PACKAGE= "$root/jobs/setup.sh" --packages
check "  configures nothing" 0 '' test ! -e "$folder/calls"

# An mpiexec that starts every process as rank 0 of 1.
cat >"$folder/bin/mpiexec" <<'STAND_IN'
#!/bin/sh
"$3"; "$3"
STAND_IN
chmod +x "$folder/bin/mpiexec"
check "set-up refuses an mpiexec that starts single ranks" 1 'Remedy: ' setup_with MISSING_PACKAGE=
printf '#!/bin/sh\nexit 7\n' >"$folder/bin/mpiexec"
check "set-up refuses an mpiexec that fails" 1 'did not run a two-rank program' \
  setup_with MISSING_PACKAGE=

cd "$folder"
printf '[run]\nsteps = 1\n' >plain.toml
cat >cases.toml <<'DECK'
[run]
name = "not a case"
[[case]]
name = "ring"
[[case]]
  name = "two words"  # text
DECK
sweep=$root/jobs/sweep.sbatch
check "sweep lists decks and cases" 0 '^2.cases.toml.two words$' \
  "$sweep" plain.toml cases.toml run.steps=3
check "sweep prints the command" 0 '^sbatch --array=0-2 .* plain.toml cases.toml run.steps=3$' \
  "$sweep" plain.toml cases.toml run.steps=3
check "sweep refuses a deck that is not there" 1 'no deck other.toml' "$sweep" other.toml
for script in train sweep report; do
  check "$script.sbatch outside Slurm prints its usage" 2 "sbatch .*jobs/$script.sbatch" \
    "$root/jobs/$script.sbatch"
done

# The version is that of the newest tag, else a stated one.
mkdir -p "$folder/tagged/cmake"
cp "$root/cmake/BallastVersionNumber.cmake" "$folder/tagged/cmake"
cat >"$folder/tagged/version.cmake" <<'FILE'
include(${CMAKE_CURRENT_LIST_DIR}/cmake/BallastVersionNumber.cmake)
message("version ${BALLAST_VERSION}")
FILE
check "version without a repository" 0 '^version 0\.' cmake -P "$folder/tagged/version.cmake"
git_in() {
  git -C "$folder/tagged" -c user.name=test -c user.email=test -c init.defaultBranch=main \
    -c commit.gpgsign=false -c tag.gpgsign=false "$@"
}
{ git_in init && git_in add . && git_in commit -m one && git_in tag v9.8.7 &&
  git_in tag not-v1.2.3 && git_in commit --allow-empty -m two; } >/dev/null 2>&1
check "version from the newest tag" 0 '^version 9\.8\.7$' cmake -P "$folder/tagged/version.cmake"

if [ -n "${BALLAST_PROGRAM:-}" ]; then
  check "ballast --version names its commit" 0 '[0-9a-f]{12}|unknown' "$BALLAST_PROGRAM" --version
  check "ballast refuses an unknown subcommand" fail '.' "$BALLAST_PROGRAM" no-such-command
  check "ballast-report finds an interpreter" 0 '.' \
    "$(dirname -- "$BALLAST_PROGRAM")/ballast-report" --help
fi
[ "$failures" = 0 ] || { echo "$failures checks failed"; exit 1; }

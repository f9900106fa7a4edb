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

# The batch scripts with stand-ins for Slurm: srun writes down how it was called and leaves with
# SRUN_STATUS; scontrol knows of one running job, started as SLURM_COMMAND.
mkdir "$folder/slurm" "$folder/area"
cat >"$folder/slurm/srun" <<'STAND_IN'
#!/bin/sh
trap '' USR1
printf ' %s' srun "$@" >>"$CALLS"
echo >>"$CALLS"
echo "cpus of a task: ${SRUN_CPUS_PER_TASK:-}" >>"$CALLS"
[ -z "$SRUN_WARNS" ] || kill -USR1 "$PPID"
if [ -n "$SRUN_STATE" ]; then
  mkdir -p runs/a-7
  printf '{"state": "%s", "step": %s}\n' "$SRUN_STATE" "$$" >runs/a-7/status.json
fi
exit "${SRUN_STATUS:-0}"
STAND_IN
cat >"$folder/slurm/scontrol" <<'STAND_IN'
#!/bin/sh
echo "scontrol $*" >>"$CALLS"
[ -z "$SCONTROL_FAILS" ] || exit 1
array=${SLURM_ARRAY_JOB_ID:+ ArrayJobId=$SLURM_ARRAY_JOB_ID ArrayTaskId=$SLURM_ARRAY_TASK_ID}
case $1 in
  show) printf '   Command=%s\n' "$SLURM_COMMAND" ;;
  -o) printf 'JobId=%s%s JobName=x Restarts=%s JobState=%s\n' "$SLURM_JOB_ID" \
    "${RECORD_ARRAY-$array}" "${RECORD_RESTARTS:-$SLURM_RESTART_COUNT}" \
    "${RECORD_STATE:-RUNNING}"
    [ -z "$SCONTROL_MORE" ] || seq -f 'JobId=1%.0f Restarts=0' 200000 ;;
esac
STAND_IN
printf '#!/bin/sh\necho "ballast-report $*"\n' >"$folder/slurm/ballast-report"
printf '#!/bin/sh\n' >"$folder/slurm/ballast"
chmod +x "$folder"/slurm/*
# batch [NAME=VALUE...] SCRIPT ARGUMENT...: SCRIPT as Slurm would start it, in a folder of its own.
batch() {
  (
    rm -f "$folder/calls"
    cd "$folder/area"
    env PATH="$folder/slurm:$PATH" CALLS="$folder/calls" BALLAST_ROOT="$root" \
      BALLAST_PROGRAM="$folder/slurm/ballast" SLURM_JOB_ID=7 SLURM_SUBMIT_DIR="$folder/area" \
      BALLAST_PROFILE= SLURM_RESTART_COUNT=0 "$@"
  )
}
called() { cat "$folder/calls"; }
train=$root/jobs/train.sbatch

check "train.sbatch starts the ranks" 0 '' batch "$train" a.toml run.steps=3
check "  with the deck and a run folder" 0 \
  "ballast train a.toml run.steps=3 -d $folder/area/runs/a-7\$" called
for options in "--case A" --case=A "-t 1:00 --case A" "--force-model run.steps=3 -r x.h5"; do
  # shellcheck disable=SC2086
  check "train.sbatch with $options before the deck" 0 '' batch "$train" $options b.toml
  check "  names the run folder by the deck" 0 " -d $folder/area/runs/b-7( |\$)" called
done
check "train.sbatch without a deck says so" 1 'which deck' batch "$train" --case A
# The signal ends the script's wait, and srun leaves before the script looks again.
printf 'kill() { builtin kill "$@" && sleep 0.3; }\n' >"$folder/late.sh"
check "train.sbatch has srun's status where a signal comes as it leaves" 75 'requeued' \
  batch BALLAST_PROFILE="$folder/late.sh" SRUN_WARNS=1 SRUN_STATUS=75 "$train" a.toml
check "  and requeues the job" 0 '^scontrol requeue 7$' called
check "train.sbatch goes by the run's word where Slurm killed a rank that left late" 75 requeued \
  batch SRUN_STATE=stopped SRUN_STATUS=137 "$train" a.toml
check "  or another failed in MPI's end" 75 requeued \
  batch SRUN_STATE=stopped SRUN_STATUS=1 "$train" a.toml
check "  but not by that of an earlier start" 137 '' batch SRUN_STATUS=137 "$train" a.toml
check "  nor where the run failed" 137 '' batch SRUN_STATE=failed SRUN_STATUS=137 "$train" a.toml
rm -r "$folder/area/runs"
echo 'sleep() { echo "slept $1"; }' >"$folder/quick.sh"
check "train.sbatch has srun's status where Slurm does not answer" 75 'is unknown: not requeued' \
  batch BALLAST_PROFILE="$folder/quick.sh" SCONTROL_FAILS=1 SRUN_STATUS=75 "$train" a.toml
check "  after some tries" 75 '^slept 5$' \
  batch BALLAST_PROFILE="$folder/quick.sh" SCONTROL_FAILS=1 SRUN_STATUS=75 "$train" a.toml
requeued_after() {
  batch BALLAST_PROFILE="$folder/quick.sh" SCONTROL_MORE=1 SRUN_STATUS=75 "$train" a.toml |
    grep -cE '^slept|checkpoint: requeued$'
}
check "train.sbatch takes the record of an scontrol that says more at once" 75 '^1$' requeued_after
check "train.sbatch says how a job goes on that it does not requeue" 75 \
  "is COMPLETING: .*: BALLAST_RESUME=1 BALLAST_RUN=.*a-7 sbatch $train a.toml run.name=.\"a\\\\ b" \
  batch RECORD_STATE=COMPLETING SRUN_STATUS=75 "$train" a.toml 'run.name="a b"'
check "  nor where that was done too often" 75 \
  '# job 7 was restarted 50 times .*: BALLAST_RESUME=1 BALLAST_RUN=.*a-7 sbatch .* a.toml$' \
  batch RECORD_RESTARTS=50 SRUN_STATUS=75 "$train" a.toml
check "a job that an array's element submitted stops early" 75 '# job 7 stopped early' \
  batch SLURM_ARRAY_JOB_ID=79 SLURM_ARRAY_TASK_ID=0 RECORD_ARRAY= SRUN_STATUS=75 "$train" a.toml
check "  and requeues itself" 0 '^scontrol requeue 7$' called
check "  an element requeues itself alone" 75 '# job 79_4 stopped early' \
  batch SLURM_ARRAY_JOB_ID=79 SLURM_ARRAY_TASK_ID=4 SRUN_STATUS=75 "$train" a.toml
check "  by its name" 0 '^scontrol requeue 79_4$' called
check "a job that a restarted one submitted begins anew" 0 '# job 7 start 1 ' \
  batch SLURM_RESTART_COUNT=2 RECORD_RESTARTS=0 "$train" a.toml
check "  without a checkpoint" 0 '/runs/a-7$' called
check "ranks have what the script and the profile export" 0 '' batch "$train" a.toml
check "  whatever sbatch was told" 0 '^ srun --export=ALL ' called
check "tasks of several CPUs keep them" 0 '' batch SLURM_CPUS_PER_TASK=3 \
  "$train" a.toml
check "  under srun" 0 '^cpus of a task: 3$' called
printf 'false\n[ -n "$NO_SUCH_NAME" ]\n' >"$folder/site.sh"
check "a profile's commands may fail" 0 'site.sh ended with status 1$' \
  batch BALLAST_PROFILE="$folder/site.sh" "$train" a.toml
check "  and the ranks start" 0 'train a.toml' called
for script in train sweep report; do
  check "$script.sbatch refuses a BALLAST_ROOT that is no tree" 1 'BALLAST_ROOT=/none has no' \
    batch BALLAST_ROOT=/none SLURM_ARRAY_TASK_ID=0 SLURM_ARRAY_JOB_ID=7 \
    "$root/jobs/$script.sbatch" "$folder/plain.toml"
done
printf 'kill -USR1 $$\n' >"$folder/slow.sh"
check "train.sbatch takes a warning while the profile is loaded" 75 'before its start: requeued' \
  batch BALLAST_PROFILE="$folder/slow.sh" "$train" a.toml
check "  starts no ranks" 1 '' grep -q srun "$folder/calls"
check "  requeues the job" 0 '^scontrol requeue 7$' called
check "train.sbatch finds BALLAST_PROGRAM on PATH" 0 '' \
  batch BALLAST_PROGRAM=ballast "$train" a.toml
check "  and starts that" 0 "$folder/slurm/ballast train a.toml" called
check "report.sbatch finds BALLAST_PROGRAM on PATH" 0 '^ballast-report runs/a$' \
  batch BALLAST_PROGRAM=ballast "$root/jobs/report.sbatch" runs/a
check "train.sbatch names a program that is nowhere" 1 "no program 'no-such-ballast'" \
  batch BALLAST_PROGRAM=no-such-ballast "$train" a.toml

# A run that began from the user's own checkpoint goes on from the run folder's newest.
run=$folder/area/run
for given in "-r old.h5" -rold.h5 "--restart old.h5" --restart=old.h5; do
  # shellcheck disable=SC2086
  started() { batch BALLAST_RUN="$run" "$@" "$train" a.toml $given run.steps=3; }
  rm -rf "$run"
  check "train.sbatch with $given" 0 '' started
  check "  passes it on" 0 "train a.toml run.steps=3 -d $run $given\$" called
  check "  restarted before its first checkpoint" 0 '' started SLURM_RESTART_COUNT=1
  check "  begins from it again" 0 "train a.toml run.steps=3 -d $run $given\$" called
  mkdir -p "$run/checkpoints" && touch "$run/checkpoints/step_00000002.h5"
  check "  restarted after it" 0 '' started SLURM_RESTART_COUNT=1
  check "  continues the run's own" 0 "train a.toml run.steps=3 -d $run -r latest\$" called
done
for given in "-d x" -dx "--output x" --output=x; do
  # shellcheck disable=SC2086
  check "train.sbatch refuses $given" 1 'name the run folder in BALLAST_RUN' \
    batch "$train" a.toml $given
done

# A sweep: decks of one name in several folders, paths with spaces and '=', all spellings of a case.
sweep_of() { batch SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID="$1" "$sweep" "${@:2}"; }
mkdir -p "$folder"/area/{one,two,lr=0.1,"a b"}
for deck in one/x two/x lr=0.1/y "a b/z"; do cp plain.toml "area/$deck.toml"; done
cp cases.toml area/lr=0.1
check "sweep of decks of one name" 0 '' sweep_of 0 one/x.toml two/x.toml
check "  has a run folder for the first" 0 'one/x.toml -d .*/runs/x-7_0$' called
check "sweep of decks of one name" 0 '' sweep_of 1 one/x.toml two/x.toml
check "  has another for the second" 0 'two/x.toml -d .*/runs/x-7_1$' called
check "sweep with a deck of its own name beside them" 0 '' \
  sweep_of 2 one/x.toml two/x.toml lr=0.1/y.toml
check "  names it as ever" 0 'train lr=0.1/y.toml -d .*/runs/y-7$' called
list() { (cd "$folder/area" && "$sweep" "$@"); }
check "sweep lists a deck with '=' in its path" 0 '^0.lr=0.1/y.toml$' list lr=0.1/y.toml run.steps=3
check "  and its cases" 0 '^0.lr=0.1/cases.toml.ring$' list lr=0.1/cases.toml
# The command printed is one that a shell takes as it was meant.
echo 'printf "<%s>" "$@"' >"$folder/slurm/sbatch"
printed() { (cd "$folder/area" && eval "bash $folder/slurm/$(list "$@" | tail -n 1)"); }
check "sweep prints a command that can be pasted" 0 '<a b/z.toml><run.name="a b">$' \
  printed "a b/z.toml" 'run.name="a b"'
cat >"$folder/area/spelled.toml" <<'DECK'
[[ case ]]  # text
"name" = "one"
[[case]]
'name' = 'two'
[["case"]]
name="three"
[other]
name = "not a case"
DECK
for name in 0.spelled.toml.one 1.spelled.toml.two 2.spelled.toml.three 'sbatch --array=0-2 .*'; do
  check "sweep finds the case $name" 0 "^$name\$" list spelled.toml
done
cat >"$folder/area/inline.toml" <<'DECK'
case = [{ name = "x", "run.steps" = 2 }, { "run.steps" = 3, name = "a\"\u0062" }]
DECK
for name in 0.inline.toml.x '1.inline.toml.a"b' 'sbatch --array=0-1 .*'; do
  check "sweep finds the case $name" 0 "^$name\$" list inline.toml
done
check "sweep starts a case with a quote in its name" 0 '' sweep_of 1 inline.toml run.steps=3
check "  as it is written" 0 \
  'train inline.toml --case a"b run.steps=3 -d .*/runs/inline-a"b-7$' called
printf '[[case]]\nname = "../up/x"\n' >"$folder/area/slashed.toml"
check "sweep starts a case with slashes in its name" 0 '' sweep_of 0 slashed.toml
check "  in a folder beside the others" 0 '/area/runs/slashed-.._up_x-7$' called
check "a sweep without --array prints a line that can be used" 1 \
  '^sbatch --array=0-0 jobs/sweep.sbatch one/x.toml$' batch "$sweep" one/x.toml
printf '[[case]]\nx = "name"\n' >"$folder/area/nameless.toml"
printf '[[case]\nname = "x"\n' >"$folder/area/broken.toml"
for deck in nameless broken; do
  check "sweep refuses a $deck deck" 1 "^sweep: $deck.toml: no sound deck .*ballast check" \
    list one/x.toml "$deck.toml"
done
mkdir "$folder/old-python"
echo 'raise ImportError' >"$folder/old-python/tomllib.py"
old_python() { env PYTHONPATH="$folder/old-python" "$sweep" "$@"; }
check "sweep names what reads cases" 1 'cases.toml: .* Python 3.11 .*BALLAST_PYTHON' \
  old_python plain.toml cases.toml
check "  also where there is none" 1 'cases.toml: no Python .*BALLAST_PYTHON' \
  env BALLAST_PYTHON=no-such-python "$sweep" cases.toml
check "  and needs it for no other deck" 0 '^0.plain.toml$' old_python plain.toml

# Without BALLAST_ROOT each script finds its tree by what Slurm knows of the job: the script's path
# and the arguments, joined by spaces.
mkdir "$folder/a tree"
cp -r "$root/jobs" "$folder/a tree/jobs"
cp "$folder/plain.toml" "$folder/area/a.toml"
for script in train sweep report; do
  check "$script.sbatch without a tree names the remedy" 1 'set BALLAST_ROOT' \
    batch BALLAST_ROOT= SLURM_ARRAY_TASK_ID=0 SLURM_COMMAND= "$root/jobs/$script.sbatch" a.toml
  ln -s "$folder/a tree/jobs/$script.sbatch" "$folder/area/$script-link"
  for command in "$folder/a tree/jobs/$script.sbatch" "$folder/area/$script-link"; do
    check "${command##*/} finds its tree" 0 '' batch BALLAST_ROOT= SLURM_ARRAY_TASK_ID=0 \
      SLURM_ARRAY_JOB_ID=7 SLURM_COMMAND="$command a.toml x=1 two words" \
      "$root/jobs/$script.sbatch" a.toml x=1 "two words"
    check "  without arguments" fail 'which|element 0 of 0' batch BALLAST_ROOT= \
      SLURM_ARRAY_TASK_ID=0 SLURM_ARRAY_JOB_ID=7 SLURM_COMMAND="$command" \
      "$root/jobs/$script.sbatch"
  done
done

# An interpreter whose path has a space is one path.
mkdir -p "$folder/p q" "$folder/wrapped"
cat >"$folder/p q/python" <<'STAND_IN'
#!/bin/sh
# As much of an interpreter as its scripts need: -c and -m do nothing, but for a folder of venv's.
[ "$1" != -c ] || exit 0
echo "interpreter with a space: $*"
case "$*" in *venv*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;; esac
STAND_IN
chmod +x "$folder/p q/python"
for tool in report data; do
  sed -e 's/@[a-z_]*@/somewhere/' "$root/cmake/ballast-$tool.in" >"$folder/wrapped/ballast-$tool"
  check "ballast-$tool takes BALLAST_PYTHON with a space in it" 0 '^interpreter with a space' \
    env BALLAST_PYTHON="$folder/p q/python" sh "$folder/wrapped/ballast-$tool" x
done
check "the environment of ballast-data does as well" 0 '^interpreter with a space: -m venv ' \
  env BALLAST_PYTHON="$folder/p q/python" "$root/jobs/data_environment.sh" "$folder/environment"

# quickstart.sh trains in its tree; a run folder is named from where the caller stands.
mkdir -p "$folder"/quick/{jobs,build/bin} "$folder/caller"
cp "$root/jobs/quickstart.sh" "$folder/quick/jobs"
printf '#!/bin/sh\necho "%s"\n' "$folder/quick/build" >"$folder/quick/jobs/setup.sh"
echo "MPIEXEC_EXECUTABLE:FILEPATH=$folder/quick/mpiexec" >"$folder/quick/build/CMakeCache.txt"
printf '#!/bin/sh\necho "mpiexec $*"\n' >"$folder/quick/mpiexec"
report=$folder/quick/build/bin/ballast-report
printf '#!/bin/sh\nmkdir -p "$1" && touch "$1/report.html"\n' >"$report"
chmod +x "$folder"/quick/jobs/*.sh "$folder/quick/mpiexec" "$report"
quickstart() { (cd "$folder/caller" && env "$@" "$folder/quick/jobs/quickstart.sh"); }
check "quickstart takes a run folder of the caller's" 0 "-d $folder/caller/my/run\$" \
  quickstart BALLAST_RUN=my/run
check "  by a whole path too" 0 "-d $folder/elsewhere\$" quickstart BALLAST_RUN="$folder/elsewhere"
check "  and has one of its own otherwise" 0 "-d $folder/quick/runs/quickstart\$" \
  quickstart BALLAST_RUN=

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

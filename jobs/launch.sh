# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034  # ballast_root comes from the batch script, which uses $report
# Sourced by the batch scripts: finds the program, loads the machine's profile, starts the ranks,
# passes on Slurm's warning signal and puts the job back into the queue when Ballast stopped early
# with a checkpoint (exit code 75).

ballast_stop() {
  echo "$(basename -- "$0"): $*" >&2
  exit 1
}

# The warning reaches this shell (--signal=B:); every rank must see it, since they agree on the step
# at which to stop.  Called before the profile is loaded, which may take long: without a trap the
# signal would end the script.
ballast_listen() {
  warned='' srun_pid=''
  trap 'warned=1; [ -z "$srun_pid" ] || kill -USR1 "$srun_pid" 2>/dev/null || true' USR1 TERM
}

# Sets `program` and `report` (unless BALLAST_PROGRAM names another build) and sources
# BALLAST_PROFILE.
ballast_setup() {
  local profile build
  if [ -n "${BALLAST_PROFILE:-}" ]; then
    profile=$BALLAST_PROFILE
    [ -f "$profile" ] || profile=$ballast_root/jobs/profiles/$BALLAST_PROFILE.sh
    [ -f "$profile" ] || ballast_stop "profile '$BALLAST_PROFILE' is neither a file nor one of: $(
      ls "$ballast_root/jobs/profiles")"
    # What a site's modules and environments source need not bear this script's -e and -u.
    set +u
    # shellcheck source=/dev/null
    . "$profile" || echo "# profile $profile ended with status $?"
    set -u
  fi
  program=
  if [ -n "${BALLAST_PROGRAM:-}" ]; then
    program=$(type -P "$BALLAST_PROGRAM") || ballast_stop "no program '$BALLAST_PROGRAM'" \
      "(BALLAST_PROGRAM); name an executable by its path, or one on PATH"
  fi
  for build in build build-host build-cuda ../..; do  # the last: of an installation
    if [ -z "$program" ] && [ -x "$ballast_root/$build/bin/ballast" ]; then
      program=$ballast_root/$build/bin/ballast
    fi
  done
  [ -n "$program" ] || program=$(type -P ballast) ||
    ballast_stop "no program 'ballast'; build one (jobs/setup.sh, or cmake --preset cuda) or set" \
      "BALLAST_PROGRAM"
  report=$(dirname -- "$program")/ballast-report
  local cpus=${SLURM_CPUS_PER_TASK:-1}
  export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$cpus}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}
  # Since Slurm 22.05 srun does not take the CPUs of a task from the job.
  [ "$cpus" = 1 ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$cpus}
}

# ballast_record [TRIES]: sets `job`, as scontrol names this job, `restarts` and `state` by Slurm's
# record, which is asked so often, 5 s apart; without an answer by the environment, with the state
# `unknown`.  A job that an element of an array submits has that element's variables.
ballast_record() {
  local tries=${1:-1} record=''
  # grep reads to the end (no -m): an scontrol whose pipe closes early would count as no answer.
  until record=$(scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null |
    grep "^JobId=$SLURM_JOB_ID "); do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || break
    sleep 5
  done
  field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<" $record"; }
  # One element of an array has the array's own number as its SLURM_JOB_ID, and scontrol takes that
  # number for all elements; ARRAY_ELEMENT means one.
  local array element
  array=$(field ArrayJobId) element=$(field ArrayTaskId)
  restarts=$(field Restarts) state=$(field JobState)
  if [ -z "$record" ]; then
    array=${SLURM_ARRAY_JOB_ID:-} element=${SLURM_ARRAY_TASK_ID:-}
  fi
  job=${array:+${array}_$element}
  job=${job:-$SLURM_JOB_ID}
  restarts=${restarts:-${SLURM_RESTART_COUNT:-0}} state=${state:-unknown}
}

# ballast_requeue WHY: puts the job back into the queue.  Where it is being cancelled or was there
# too often, or Slurm does not take it, prints `again`, the command that continues its run.
ballast_requeue() {
  local why=$1 job restarts state
  ballast_record 7  # a controller that fails over is away for some time
  # A job that is being cancelled must stay cancelled; one that Slurm ends to start it again later
  # is in the queue by now.
  if [ "$state" != RUNNING ]; then
    echo "# job $job is $state: not requeued; unless squeue shows it again, continue with: $again"
  elif [ "$restarts" -ge "${BALLAST_MAX_RESTARTS:-50}" ]; then
    echo "# job $job was restarted $restarts times (BALLAST_MAX_RESTARTS): not requeued;" \
      "continue with: $again"
  else
    echo "# job $job $why: requeued"
    scontrol requeue "$job" ||
      echo "# job $job was not requeued: continue with: $again"
  fi
}

# ballast_arguments ARGUMENT...: sets `resume` to the -r or --restart among the arguments and
# `arguments` to the others.
ballast_arguments() {
  resume=() arguments=()
  while [ $# -gt 0 ]; do
    case $1 in
      -d* | --output | --output=*)
        ballast_stop "'$1': name the run folder in BALLAST_RUN" \
          "(of a sweep: the folder of the run folders in BALLAST_RUNS)" ;;
      -r | --restart)
        resume+=("${@:1:2}")
        if [ $# -gt 1 ]; then shift; fi ;;
      -r* | --restart=*) resume+=("$1") ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
}

# ballast_train RUN_FOLDER ARGUMENT...: `ballast train ARGUMENT... -d RUN_FOLDER` on the job's
# ranks; a restarted job continues from its newest checkpoint, else as it began.  Ends the script
# with the run's status.
ballast_train() {
  local run=$1 status=0 resume arguments job restarts state again before after
  shift
  ballast_arguments "$@"
  ballast_record
  printf -v again ' %q' "BALLAST_RUN=$run" sbatch "$ballast_root/jobs/train.sbatch" \
    "${arguments[@]}"
  again=BALLAST_RESUME=1$again
  # A run that began from another checkpoint has none of its own until it writes one.
  if { [ "$restarts" -gt 0 ] || [ "${BALLAST_RESUME:-0}" = 1 ]; } &&
    { [ ${#resume[@]} -eq 0 ] || ls "$run"/checkpoints/step_*.h5 >/dev/null 2>&1; }; then
    resume=(-r latest)
  fi
  if [ -n "$warned" ]; then
    ballast_requeue "was warned before its start"
    exit 75
  fi
  echo "# job $job start $((restarts + 1)) on ${SLURM_JOB_NODELIST:-?}:" \
    "ballast train ${arguments[*]} -d $run ${resume[*]}"
  before=$(cat "$run/status.json" 2>/dev/null) || true
  # --wait ends a rank that stands still after MPI's end, which no other rank sees; after a status
  # of 75 --kill-on-bad-exit does.
  # Of what this script and the profile export a job of `sbatch --export` would pass on nothing.
  # shellcheck disable=SC2086
  srun --export=ALL --mpi="${BALLAST_MPI_TYPE:-pmi2}" --kill-on-bad-exit=1 --wait=120 \
    ${BALLAST_SRUN_FLAGS:-} \
    "$program" train "${arguments[@]}" -d "$run" "${resume[@]}" &
  srun_pid=$!
  # A warning since the look above found no srun to pass itself on to.
  if [ -n "$warned" ]; then kill -USR1 "$srun_pid" 2>/dev/null || true; fi
  # A signal ends a wait early, with the signal's status; the wait after srun's end has srun's.
  while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid" || true; done
  wait "$srun_pid" || status=$?
  trap '' USR1 TERM  # a second warning must not end the script before the job is back in the queue
  # A rank that leaves later than Slurm's KillWait after the first 75 is killed, and others may fail
  # in MPI's end for want of it: srun has their status.  The run has stopped as a whole all the
  # same; a rank that fails before leaves the word `failed`.
  after=$(cat "$run/status.json" 2>/dev/null) || true
  if [ "$status" != 0 ] && [ "$after" != "$before" ] &&
    grep -q '"state": *"stopped"' <<<"$after"; then
    status=75
  fi
  if [ "$status" = 75 ]; then
    ballast_requeue "stopped early with a checkpoint"
  elif [ -n "$warned" ] && [ "$status" = $((128 + $(kill -l USR1))) ]; then
    ballast_requeue "was warned before its ranks listened"
    status=75
  fi
  exit "$status"
}

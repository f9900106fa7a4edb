# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034  # ballast_root comes from the batch script, which uses $report
# Sourced by the batch scripts: finds the program, loads the machine's profile, starts the ranks,
# passes on Slurm's warning signal and puts the job back into the queue when Ballast stopped early
# with a checkpoint (exit code 75).

ballast_stop() {
  echo "$(basename -- "$0"): $*" >&2
  exit 1
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
    # shellcheck source=/dev/null
    . "$profile"
  fi
  program=${BALLAST_PROGRAM:-}
  for build in build build-host build-cuda; do
    if [ -z "$program" ] && [ -x "$ballast_root/$build/bin/ballast" ]; then
      program=$ballast_root/$build/bin/ballast
    fi
  done
  if [ -z "$program" ]; then program=$(command -v ballast || true); fi
  [ -x "$program" ] || ballast_stop "no program '${program:-ballast}'; build one (jobs/setup.sh," \
    "or cmake --preset cuda) or set BALLAST_PROGRAM"
  report=$(dirname -- "$program")/ballast-report
  local cpus=${SLURM_CPUS_PER_TASK:-1}
  export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$cpus}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}
}

# ballast_train RUN_FOLDER ARGUMENT...: `ballast train ARGUMENT... -d RUN_FOLDER` on the job's
# ranks; a restarted job continues from its newest checkpoint.  Ends the script with the run's
# status.
ballast_train() {
  local run=$1 restarts=${SLURM_RESTART_COUNT:-0} resume=() srun_pid status=0 state
  # One element of an array has the array's own number as its SLURM_JOB_ID, and scontrol takes that
  # number for all elements; ARRAY_ELEMENT means one.
  local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-$SLURM_JOB_ID}
  shift
  if [ "$restarts" -gt 0 ] || [ "${BALLAST_RESUME:-0}" = 1 ]; then resume=(-r latest); fi
  echo "# job $job start $((restarts + 1)) on ${SLURM_JOB_NODELIST:-?}:" \
    "ballast train $* -d $run ${resume[*]}"
  # Ranks leave together; --wait ends one that stands still after MPI's end, which no rank sees.
  # shellcheck disable=SC2086
  srun --mpi="${BALLAST_MPI_TYPE:-pmi2}" --kill-on-bad-exit=1 --wait=120 \
    ${BALLAST_SRUN_FLAGS:-} \
    "$program" train "$@" -d "$run" "${resume[@]}" &
  srun_pid=$!
  # The warning reaches this shell (--signal=B:); every rank must see it, since they agree on the
  # step at which to stop.
  trap 'kill -USR1 "$srun_pid" 2>/dev/null' USR1 TERM
  while true; do
    status=0
    wait "$srun_pid" || status=$?
    kill -0 "$srun_pid" 2>/dev/null || break  # otherwise a signal interrupted the wait
  done
  trap - USR1 TERM
  if [ "$status" = 75 ]; then
    # A job that is being cancelled must stay cancelled.
    state=$(scontrol show job "$job" 2>/dev/null |
      sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1)
    if [ "$state" != RUNNING ]; then
      echo "# job $job is $state: not requeued;" \
        "continue with BALLAST_RESUME=1 BALLAST_RUN=$run"
    elif [ "$restarts" -ge "${BALLAST_MAX_RESTARTS:-50}" ]; then
      echo "# job $job was restarted $restarts times (BALLAST_MAX_RESTARTS): not requeued"
    else
      echo "# job $job stopped early with a checkpoint: requeued"
      scontrol requeue "$job"
    fi
  fi
  exit "$status"
}

#!/usr/bin/env bash
# Starts a real Slurm on loopback in a temporary folder and checks jobs/train.sbatch: the warning
# signal stops the run with a checkpoint, the job is requeued, the restart finishes it and the log
# continues, also where the job began with -r FILE or was warned before its start; a cancelled job
# stays cancelled; a rank that stands still after MPI's end is ended (with BALLAST_FAULTS, the
# library of tests/campaign); jobs/sweep.sbatch runs its elements, and requeues one of them alone;
# the scripts find their tree from a link and a path with a space.
# Exits 77 (skipped) with one line where Slurm cannot start: it needs root, munged, slurmctld and
# slurmd.
set -euo pipefail
root=${BALLAST_ROOT:?}
program=${BALLAST_PROGRAM:?}
folder=$(mktemp -d /tmp/ballast-slurm.XXXXXX)
daemons=()

cleanup() {
  local status=$? pid
  trap - EXIT
  set +e
  if [ ${#daemons[@]} -gt 1 ]; then
    scancel --quiet --user="$(id -un)" >/dev/null 2>&1
    for _ in $(seq 50); do
      [ -n "$(squeue --noheader 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null; done
  for pid in "${daemons[@]}"; do
    for _ in $(seq 50); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null
  done
  if [ "$status" != 0 ] && [ "$status" != 77 ]; then
    for file in "$folder"/munged.log "$folder"/slurm*d.log "$folder"/area/*.out; do
      echo "--- $file"
      tail -n 20 "$file"
    done 2>/dev/null
  fi
  rm -rf "$folder"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 143' TERM INT

skip() {
  echo "SKIPPED: $*"
  exit 77
}
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
# wait_for SECONDS COMMAND...: until COMMAND succeeds; 1 when it never does.
wait_for() {
  local until=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 0.2
  done
}

[ "$(id -u)" = 0 ] || skip "a Slurm of its own needs root"
for tool in munged slurmctld slurmd sbatch srun setpriv; do
  command -v "$tool" >/dev/null || PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null ||
    skip "no $tool (Debian packages slurm-wlm and munge)"
done
PATH=$PATH:/usr/sbin

host=$(hostname -s)
free_port() {
  /usr/bin/python3 -c '
import socket
s = socket.socket()
s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])'
}
mkdir -p "$folder"/{munge,state,spool,area}
chmod 755 "$folder" "$folder/munge"
head -c 1024 /dev/urandom >"$folder/munge/key"
chmod 400 "$folder/munge/key"
chown -R munge: "$folder/munge"
setpriv --reuid=munge --regid=munge --clear-groups munged --foreground \
  --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munge/pid" \
  --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
  >"$folder/munged.log" 2>&1 </dev/null &
daemons+=($!)
wait_for 20 test -S "$folder/munge/socket" ||
  skip "munged does not start: $(tail -n 1 "$folder/munged.log")"

cat >"$folder/slurm.conf" <<CONF
ClusterName=ballasttest
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=pmi2
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld -D >"$folder/slurmctld.out.log" 2>&1 </dev/null &
daemons+=($!)
slurmd -D >"$folder/slurmd.out.log" 2>&1 </dev/null &
daemons+=($!)
node_idle() { sinfo --noheader --format=%T | grep -qx idle; }
last_lines() { tail -q -n 1 "$folder"/{slurmctld,slurmd}.log 2>/dev/null | tr '\n' ' '; }
wait_for 40 node_idle || skip "Slurm does not start here: $(last_lines)"

cd "$folder/area"
export BALLAST_ROOT=$root BALLAST_PROGRAM=$program
state() { scontrol show job "$1" | sed -n 's/^ *JobState=\([A-Z]*\).*/\1/p'; }
field() { scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -n 1; }
is() { [ "$(state "$1")" = "$2" ]; }
requeued() { [ "$(field "$1" Restarts)" -ge 1 ] && is "$1" PENDING; }
resumed() { is "$1" RUNNING || is "$1" COMPLETED; }
reached() { [ "$(grep -c '^step=[0-9]* loss=' "$1")" -ge "$2" ]; }

# The quickstart deck, made small; long enough that the signal finds it at work.
small=(model.layers=1 model.hidden=32 model.intermediate=64 model.query_heads=2 model.kv_heads=1
  model.head_dim=16 batching.micro_batch_tokens=256 batching.global_tokens=1024 data.max_tokens=256
  checkpoint.every_steps=1000000)
steps=${BALLAST_SLURM_STEPS:-400}
submit() { sbatch --parsable --ntasks-per-node=4 --output=job-%j.out "$@" "${small[@]}"; }
train=("$root/jobs/train.sbatch" "$root/inputs/quickstart.toml")

job=$(BALLAST_RUN=$folder/area/run submit "${train[@]}" run.steps="$steps")
log=$folder/area/run/log.txt
wait_for 60 reached "$log" 5 || fail "job $job took no step in 60 s; state $(state "$job")"
scancel --batch --signal=USR1 "$job"  # what --signal=B:USR1@120 sends
wait_for 60 requeued "$job" ||
  fail "job $job was not requeued; state $(state "$job"), restarts $(field "$job" Restarts)"
first=$(grep -c '^step=[0-9]* loss=' "$log")
[ "$first" -lt "$steps" ] || fail "the run finished before the signal; raise BALLAST_SLURM_STEPS"
# A requeued job waits two minutes, so that nodes can forget its first start.  This one need not
# wait so long.
sleep 4
scontrol update jobid="$job" starttime=now
wait_for 60 resumed "$job" || fail "job $job did not start again; state $(state "$job")"
wait_for 120 is "$job" COMPLETED ||
  fail "job $job did not finish; state $(state "$job"), exit $(field "$job" ExitCode)"
[ "$(field "$job" ExitCode)" = 0:0 ] || fail "job $job ended with $(field "$job" ExitCode)"
grep -q 'stopped early with a checkpoint: requeued' "job-$job.out" ||
  fail "the first start did not stop for the signal"
mapfile -t numbers < <(sed -n 's/^step=\([0-9]*\) loss=.*/\1/p' "$log")
[ "${numbers[*]}" = "$(seq -s ' ' 1 "$steps")" ] ||
  fail "the log's steps are not 1 to $steps once each: ${numbers[*]}"
echo "requeue: job $job wrote $first of $steps steps, was requeued and wrote the rest"

# start_again JOB: a requeued job's next start, now.
start_again() {
  wait_for 60 requeued "$1" || fail "job $1 was not requeued; state $(state "$1")"
  sleep 4
  scontrol update jobid="$1" starttime=now
}
# A job that begins from another run's checkpoint is warned while its modules load, then at work.
old=$(ls "$folder"/area/run/checkpoints/step_*.h5 | tail -n 1)
echo '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || { touch loading; sleep 5; }' >slow.sh
job=$(BALLAST_RUN=$folder/area/begun BALLAST_PROFILE=$folder/area/slow.sh submit "${train[@]}" \
  run.steps=1000000 -r "$old")
wait_for 60 test -e loading || fail "job $job loads no profile"
scancel --batch --signal=USR1 "$job"
start_again "$job"
grep -q 'was warned before its start: requeued' "job-$job.out" || fail "$(cat "job-$job.out")"
log=$folder/area/begun/log.txt
wait_for 60 reached "$log" 3 || fail "job $job did not start again: $(cat "job-$job.out")"
grep -q "^step=$((steps + 1)) " "$log" || fail "job $job did not begin from $old: $(cat "$log")"
scancel --batch --signal=USR1 "$job"
start_again "$job"
continued() { grep -q "^# continues $folder/area/begun/checkpoints/" "job-$job.out"; }
wait_for 60 continued || fail "job $job did not continue its own run: $(cat "job-$job.out")"
scancel "$job"
wait_for 60 is "$job" CANCELLED || fail "cancelled job $job is $(state "$job")"
echo "restart: job $job, warned before its start and begun with -r FILE, continued its own run"

job=$(BALLAST_RUN=$folder/area/cancelled submit "${train[@]}" run.steps=1000000)
wait_for 60 reached "$folder/area/cancelled/log.txt" 3 || fail "job $job took no step in 60 s"
scancel "$job"
wait_for 60 is "$job" CANCELLED || fail "cancelled job $job is $(state "$job")"
sleep 1
is "$job" CANCELLED || fail "cancelled job $job came back as $(state "$job")"
echo "cancel: job $job stayed cancelled"

# A rank that stops after MPI's end is seen by srun alone, whose --wait ends it.
ended() { is "$1" COMPLETED || is "$1" FAILED; }
if [ -n "${BALLAST_FAULTS:-}" ]; then
  flags="--wait=2 --export=ALL,LD_PRELOAD=$BALLAST_FAULTS"
  job=$(BALLAST_RUN=$folder/area/left BALLAST_FAULT="2 exit - 0 stop 0" \
    BALLAST_SRUN_FLAGS=$flags submit "${train[@]}" run.steps=3)
  wait_for 60 ended "$job" || fail "job $job waits for a rank that stopped; it is $(state "$job")"
  grep -q '"state": "finished"' "$folder/area/left/status.json" ||
    fail "job $job: $(cat "$folder/area/left/status.json")"
  grep -q "Terminating StepId" "job-$job.out" || fail "srun ended no rank: $(cat "job-$job.out")"
  echo "wait: srun ended the rank of job $job that stood still after MPI's end"
fi

cp "$root/inputs/quickstart.toml" one.toml
cp "$root/inputs/quickstart.toml" two.toml
job=$(submit --array=0-1 "$root/jobs/sweep.sbatch" one.toml two.toml run.steps=3)
element_done() { reached "$folder/area/runs/$1-$job/log.txt" 3; }
wait_for 90 element_done one || fail "element 0 of sweep $job did not run"
wait_for 90 element_done two || fail "element 1 of sweep $job did not run"
echo "sweep: both elements of job $job ran"

# The element that starts last bears the number of the array itself; stopping it leaves the other
# at work.
job=$(submit --array=0-1 "$root/jobs/sweep.sbatch" one.toml two.toml run.steps=1000000)
for deck in one two; do
  wait_for 60 reached "$folder/area/runs/$deck-$job/log.txt" 3 || fail "$deck of sweep $job waits"
done
last=$(scontrol --oneliner show job "$job" |
  sed -n "s/^JobId=$job .*ArrayTaskId=\([0-9]*\) .*/\1/p") other=0
[ -n "$last" ] || fail "no element of sweep $job has its number"
[ "$last" != 0 ] || other=1
scancel --batch --signal=USR1 "${job}_$last"
element_requeued() { requeued "${job}_$last"; }
wait_for 60 element_requeued || fail "element $last of $job is $(state "${job}_$last")"
sleep 1
is "${job}_$other" RUNNING || fail "element $other of $job is $(state "${job}_$other")"
[ "$(field "${job}_$other" Restarts)" = 0 ] || fail "element $other of $job was restarted as well"
scancel "$job"
echo "sweep: element $last of job $job was requeued, element $other went on"

# Without BALLAST_ROOT the scripts find their tree, which a link and a path with a space lead to.
mkdir "a tree"
cp -r "$root/jobs" "a tree"
ln -s "a tree/jobs/train.sbatch" linked.sbatch
unset BALLAST_ROOT
for script in "a tree/jobs/train.sbatch" linked.sbatch; do
  job=$(submit "$script" one.toml run.steps=3 run.output="two words")
  wait_for 90 ended "$job" || fail "job $job of $script is $(state "$job")"
  is "$job" COMPLETED || fail "job $job of $script: $(cat "job-$job.out")"
done
echo "root: found from a link and a path with a space"

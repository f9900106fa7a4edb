"""What happens to processes: kills, stalls, signals, an MPI that does not start or end."""
import json
import os
import shutil
import signal
import threading
import time

from common import FAULTS, STEPS, finish, judge, undisturbed
from rig import HANG_S, is_stopped, signal_ranks

RANKS = 4
MESHES = ("dp = 2\ncp_inner = 2", "dp = 4", "dp = 2\npp = 2", "cp_inner = 2\npp = 2")


def kill(rig, number):
    """Ranks are killed at a random moment, twice, with a checkpoint at every step."""
    mesh = MESHES[number % len(MESHES)]
    undisturbed(mesh, RANKS)
    for restart in range(2):
        more = ("-r", "latest") if restart else ()
        process = rig.start(RANKS, "train", rig.deck(mesh), "-d", rig.run, *more)
        time.sleep(rig.random.uniform(0.2, 1.6))
        pids = rig.ranks()
        had = rig.checkpoints()
        signal_ranks(rig.random.choice((pids[:1], pids[-1:], pids[:2], pids)), signal.SIGKILL)
        status, text = rig.end(process)
        if status is None:
            return "hang", text[-600:]
        if had and (not rig.checkpoints() or rig.checkpoints()[-1] < had[-1]):
            return "lost", f"{had[-1]} was there before the kill"
        if not os.path.exists(os.path.join(rig.run, "log.txt")):
            shutil.rmtree(rig.run, ignore_errors=True)  # killed before the run began
    return finish(rig, mesh, RANKS)


def stall(rig, number):
    """One rank is stopped at a random moment, from the start of the processes on: the others end
    in time and say what they waited for, and the next run continues."""
    mesh = MESHES[number % len(MESHES)]
    undisturbed(mesh, RANKS)
    limit = f"run.hang_timeout_s={HANG_S}"  # MPI starts before the deck is read
    steps = rig.random.choice((STEPS, 100000))
    deck = rig.deck(mesh, steps=steps)
    process = rig.start(
        RANKS, "train", deck, "-d", rig.run, limit, "optimizer.decay_steps=100"
    )  # fmt: skip
    while process.poll() is None and len(rig.ranks()) < RANKS:
        time.sleep(0.01)
    time.sleep(rig.random.uniform(0, 1.5))
    pids = rig.ranks()
    stopped = [rig.random.choice(pids)] if pids else []
    signal_ranks(stopped, signal.SIGSTOP)
    _release_launcher(rig, process)
    status, text = rig.end(process, deadline=6 * HANG_S + 20)
    signal_ranks(stopped, signal.SIGKILL)
    if status is None:
        return "hang", text[-600:]
    complete = steps == STEPS and max(rig.losses(), default=0) == STEPS
    if not complete and (status == 0 or "run.hang_timeout_s" not in text):
        return "wrong", f"status {status}: {text[-600:]}"
    if not rig.checkpoints():
        shutil.rmtree(rig.run, ignore_errors=True)
        return "ok", ""
    if steps == STEPS:
        return finish(rig, mesh, RANKS)
    last = int(rig.checkpoints()[-1][5:13])
    status, text = rig.call(
        RANKS, "train", rig.deck(mesh, steps=last + 1), "-d", rig.run, "-r", "latest"
    )
    return judge(status, text) or (("ok", "") if status == 0 else ("lost", text[-600:]))


def start_end(rig, number):
    """A rank stops before MPI has started, or MPI_Finalize never returns on it, or it stops after
    MPI's end: the others end, with everything written that was to be written."""
    mesh, rank = MESHES[number % len(MESHES)], rig.random.randrange(RANKS)
    call = ("MPI_Init", "MPI_Finalize", "exit")[number % 3]
    expected = undisturbed(mesh, RANKS)
    process = rig.start(
        RANKS, "train", rig.deck(mesh), "-d", rig.run, f"run.hang_timeout_s={HANG_S}",
        LD_PRELOAD=FAULTS, BALLAST_FAULT=f"{rank} {call} - 0 stop 0",
    )  # fmt: skip
    pids = []
    while process.poll() is None and len(pids) < RANKS:
        pids = rig.ranks()
        time.sleep(0.01)
    if call == "exit":
        _release_launcher(rig, process)
    status, text = rig.end(process, deadline=6 * HANG_S + 20)
    signal_ranks([pid for pid in pids if pid in rig.ranks()], signal.SIGKILL)
    if status is None:
        return "hang", text[-600:]
    if call == "MPI_Init":
        if status == 0 or text.count("MPI has not started") != 1:
            return "wrong", f"status {status}: {text[-600:]}"
        return finish(rig, mesh, RANKS) if rig.checkpoints() else ("ok", "")
    if (rig.losses(), rig.sums(f"step_{STEPS:08}.h5")) != expected:
        return "wrong", "the run wrote other numbers"
    if _state(rig).get("state") != "finished":
        return "wrong", f"status.json: {_state(rig)}"
    # The launcher kills whoever is left when the first rank goes without MPI's end, so that its
    # status is a matter of microseconds; status.json is not.
    return ("ok" if status == 0 else "ok, launcher's status"), f"status {status}"


def _release_launcher(rig, process):
    """Kills a stopped rank, beside the caller, once it is the last one of a finished run.  A rank
    that stops after MPI's end is seen by its launcher alone: mpiexec waits for it for ever."""

    def last():
        left = rig.ranks()
        finished = _state(rig).get("state") == "finished"
        return left if len(left) == 1 and finished and is_stopped(left[0]) else []

    def watch():
        while process.poll() is None:
            if last():
                time.sleep(1)  # whoever else ends this job has done so by then
                signal_ranks(last(), signal.SIGKILL)
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()


def _state(rig):
    try:
        with open(os.path.join(rig.run, "status.json")) as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        return {"problem": str(error)}


def catches(pid, number):
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def stop(rig, number):
    """SIGTERM, SIGUSR1 or SIGINT at a random moment: a checkpoint of the last step, status 75."""
    mesh = MESHES[number % len(MESHES)]
    wanted = rig.random.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    process = rig.start(
        RANKS, "train", rig.deck(mesh, steps=100000), "-d", rig.run, "optimizer.decay_steps=100"
    )
    if number % 4:
        rig.wait_for_step(process, 1 + number % 3)
    else:
        # As early as there are handlers: before MPI has started.
        while process.poll() is None and not (
            len(rig.ranks()) == RANKS and all(catches(pid, wanted) for pid in rig.ranks())
        ):
            time.sleep(0.002)
    pids = rig.ranks()
    signal_ranks(pids[: rig.random.randint(1, max(1, len(pids)))], wanted)
    status, text = rig.end(process)
    bad = judge(status, text)
    if bad:
        return bad
    state = _state(rig)
    # Hydra's mpiexec may lose status 75; status.json does not.
    if state.get("state") != "stopped" or status not in (0, 75):
        return "wrong", f"status {status}, {state}: {text[-400:]}"
    last = max(rig.losses())
    if rig.checkpoints()[-1] != f"step_{last:08}.h5":
        return "lost", f"step {last} was the last one, {rig.checkpoints()} are there"
    return "ok", ""

"""What storage does: calls that fail, writes that are lost or altered, a full disk, files that were
damaged later."""
import errno
import os
import shutil

from common import FAULTS, STEPS, compare, finish, judge, once, undisturbed
from rig import DEADLINE_S, Rig

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
CALLS = ("pwrite", "fsync", "pread", "ftruncate", "fallocate", "rename", "open")
RANKS, MESH = 2, "dp = 2"
EVERY = 2  # steps from one checkpoint to the next: the first one's calls are those that are spoilt
SWEEP_STEPS = 4
# A run of the faults that pass has a checkpoint for each of SIDE_BY_SIDE faults, and steps between
# for the next attempt.
SIDE_BY_SIDE, APART = 12, 4


def injected(faults):
    """BALLAST_FAULT of (call, rank, number of the call, kind, error, where)."""
    return ";".join(
        f"{rank} {call} {where} {nth} {kind} {error}"
        for call, rank, nth, kind, error, where in faults
    )


@once
def calls_of(call, rank):
    """How often a rank makes a call for one checkpoint of an undisturbed run, older ones' removal
    included."""
    rig = Rig(0)
    log = os.path.join(rig.folder, "faults")
    last = 5 * EVERY  # the rig keeps three
    counted = [(call, rank, 0, "fail", errno.EIO, f"checkpoints@{last}")]
    rig.call(
        RANKS, "train", rig.deck(MESH, steps=last, every=EVERY), "-d", rig.run, LD_PRELOAD=FAULTS,
        BALLAST_FAULT_LOG=log, BALLAST_FAULT=injected(counted),
    )  # fmt: skip
    with open(log) as file:
        seen = int(file.read().rsplit("seen=", 1)[1])
    rig.close()
    return seen


def calls():
    return [(call, rank) for rank in range(RANKS) for call in CALLS if calls_of(call, rank) > 0]


@once
def fault_plan():
    """Trials: each kind of call broken from its first on, alone; then every call of one checkpoint
    on either rank failing once with each error, SIDE_BY_SIDE of them in one run, each at another
    checkpoint.  Lists of (call, rank, number of the call, how, error)."""
    once_each = [
        (call, rank, nth, "fail", ERRORS[(nth + turn) % len(ERRORS)])
        for turn in range(len(ERRORS))
        for call, rank in calls()
        for nth in range(1, calls_of(call, rank) + 1)
    ]
    return [[(call, rank, 1, "broken", errno.EIO)] for call, rank in calls()] + [
        once_each[i : i + SIDE_BY_SIDE] for i in range(0, len(once_each), SIDE_BY_SIDE)
    ]


@once
def spoil_plan():
    """Every write of one checkpoint on either rank, lost or with one bit altered."""
    return [
        ("pwrite", rank, nth, kind, errno.EIO)
        for rank in range(RANKS)
        for nth in range(1, calls_of("pwrite", rank) + 1)
        for kind in ("lost", "flip")
    ]


def struck(rig, faults, steps, every):
    """Trains under faults: (status, output, which of them struck)."""
    log = os.path.join(rig.folder, "faults")
    deck = rig.deck(MESH, steps=steps, every=every, failures=len(faults) + 3)
    status, text = rig.call(
        RANKS, "train", deck, "-d", rig.run, LD_PRELOAD=FAULTS, BALLAST_FAULT_LOG=log,
        BALLAST_FAULT=injected(faults),
    )  # fmt: skip
    with open(log) as file:
        lines = {line.rsplit(" ", 1)[0] for line in file if line.startswith("struck")}
    return status, text, [
        fault for fault in faults
        if "struck {0} {5}".format(*fault) in lines
    ]  # fmt: skip


def fault(rig, number):
    """I/O calls of a checkpoint fail: that checkpoint is tried again after the next step and the
    run ends well; where a call always fails it ends with a message.  It never hangs, crashes or
    loses an older file."""
    plan = fault_plan()[number % len(fault_plan())]
    alone = len(plan) == 1
    every = EVERY if alone else APART
    steps = SWEEP_STEPS if alone else APART * (len(plan) + 1)
    faults = [
        (*one, f"checkpoints@{0 if alone else APART * (i + 1)}") for i, one in enumerate(plan)
    ]
    status, text, reached = struck(rig, faults, steps, every)
    note = "; ".join(
        f"{call} #{nth} of rank {rank}, {kind} {errno.errorcode[error]}"
        for call, rank, nth, kind, error in plan
    )
    if len(reached) < len(faults):
        return "not reached", f"{note}: {text[-600:]}"
    bad = judge(status, text)
    if bad:
        return bad[0], f"{note}: {bad[1]}"
    broken = plan[0][3] == "broken"
    if status not in (0, 1) or (status == 1 and not broken):
        return "wrong", f"{note}: status {status}: {text[-600:]}"
    if status == 1 and "/checkpoints" not in text:
        return "wrong", f"{note}: {text[-600:]}"
    if not rig.checkpoints():
        shutil.rmtree(rig.run)
        return ("ok", "") if broken else ("lost", f"{note}: {text[-600:]}")
    outcome, more = finish(rig, MESH, RANKS, steps, every)
    return outcome, f"{note}: {more}" if outcome != "ok" else ""


def step_of(name):
    """Of a checkpoint's file."""
    return int(name[len("step_") : -len(".h5")])


def spoil(rig, number):
    """A write is lost or a bit flips on the way to the disk: the file never becomes a checkpoint
    that loads as if nothing had happened, and HDF5 is never handed what would bring it down."""
    plan = spoil_plan()[number % len(spoil_plan())]
    status, text, reached = struck(rig, [(*plan, "checkpoints@0")], SWEEP_STEPS, EVERY)
    note = "{0} #{2} of rank {1}, {3}: ".format(*plan)
    if not reached:
        return "not reached", note
    bad = judge(status, text)
    if bad:
        return bad[0], note + bad[1]
    if status != 0:
        return "wrong", note + f"status {status}: {text[-600:]}"
    last = SWEEP_STEPS + 2  # after the last checkpoint one step by its weights, one by its moments
    losses = undisturbed(MESH, RANKS, last, EVERY)[0]
    for name in rig.checkpoints():  # every file that stayed continues to the undisturbed numbers
        expected = {step: losses[step] for step in range(step_of(name) + 1, last + 1)}
        twin = Rig(1)
        deck = twin.deck(MESH, steps=last, every=EVERY)
        status, text = twin.call(RANKS, "train", deck, "-d", twin.run, "-r", rig.path(name))
        found = twin.losses()
        twin.close()
        if status != 0:
            return "lost", note + f"{name} does not load: {text[-400:]}"
        if found != expected:
            return "silent", note + f"{name}: {found} where {expected} were expected"
    return "ok", ""


def damage(rig, number):
    """A checkpoint is cut, extended, or altered in bits and pages: the one before it is used."""
    status, text = rig.call(2, "train", rig.deck(steps=3), "-d", rig.run)
    if status != 0:
        return "wrong", text[-400:]
    newest = rig.path(rig.checkpoints()[-1])
    size = os.path.getsize(newest)
    kind = number % 4
    with open(newest, "r+b") as file:
        place = rig.random.randrange(size)
        if kind == 0:
            file.truncate(place)
        elif kind == 1:
            file.seek(0, 2)
            file.write(b"\0")
        else:
            count = 1 if kind == 2 else min(4096, size - place)
            file.seek(place)
            old = file.read(count)
            new = bytes([old[0] ^ (1 << rig.random.randrange(8))]) + old[1:]
            if kind == 3:
                new = bytes(b ^ 255 for b in old)
            file.seek(place)
            file.write(new)
    status, text = rig.call(2, "train", rig.deck(steps=STEPS), "-d", rig.run, "-r", "latest")
    bad = judge(status, text)
    if bad:
        return bad
    if status != 0:
        return "lost", text[-400:]
    if not os.path.exists(newest + ".damaged") or "continues" not in text:
        return "silent", f"damage {kind} at {place} of {size}: {text[-400:]}"
    return compare(rig, "dp = 2", 2)


def full_disk(rig, number):
    """A limit on file sizes stands for a full disk, under checkpoints, trace and log alike."""
    status, text = rig.call(2, "train", rig.deck(steps=3), "-d", rig.run)
    if status != 0:
        return "wrong", text[-400:]
    limit = rig.random.choice((40, 100, 200, 400))  # KiB; below, MPI itself does not start
    deck = rig.deck(steps=STEPS, trace="true")
    status, text = rig.alone(
        "bash", "-c", f"trap '' XFSZ; ulimit -f {limit}; UCX_TLS=tcp,self exec \"$@\"", "limit",
        *rig.start_words(2, "train", deck, "-d", rig.run, "-r", "latest"),
        deadline=2 * DEADLINE_S,
    )  # fmt: skip
    bad = judge(status, text)
    if bad:
        return bad
    if status not in (0, 1):
        return "wrong", f"status {status}: {text[-600:]}"
    return finish(rig, "dp = 2", 2)

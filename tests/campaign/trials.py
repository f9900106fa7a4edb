"""The trials.  Each takes a Rig and the trial's number and returns (outcome, note); outcome is ok,
hang, crash, lost, wrong or silent."""
import errno
import json
import os
import shutil
import signal
import subprocess
import time

from rig import HANG_S, Rig, crashed, signal_ranks

STEPS = 8
FAULTS = os.environ.get("BALLAST_FAULTS", "")  # faults.c, built
PARSERS = os.environ.get("BALLAST_PARSERS", "")  # parsers.cpp, built
_undisturbed = {}


def undisturbed(mesh, ranks, steps=STEPS):
    """Losses and checkpoint sums of a run that nothing happens to."""
    key = (mesh, ranks, steps)
    if key not in _undisturbed:
        rig = Rig(0)
        try:
            status, text = rig.call(ranks, "train", rig.deck(mesh, steps=steps), "-d", rig.run)
            if status != 0:
                raise RuntimeError(f"the undisturbed run ended with {status}:\n{text[-2000:]}")
            _undisturbed[key] = (rig.losses(), rig.sums(f"step_{steps:08}.h5"))
        finally:
            rig.close()
    return _undisturbed[key]


def compare(rig, mesh, ranks, steps=STEPS):
    losses, sums = undisturbed(mesh, ranks, steps)
    if rig.losses() != losses:
        return "wrong", f"losses {rig.losses()} where {losses} were expected"
    if rig.sums(f"step_{steps:08}.h5") != sums:
        return "wrong", "the last checkpoint's sums differ"
    return "ok", ""


def judge(status, text):
    """Outcome of an end that must be an orderly one, or None."""
    if status is None:
        return "hang", text[-600:]
    if crashed(status, text):
        return "crash", text[-600:]
    return None


def finish(rig, mesh, ranks):
    """Continues to the end and compares with the undisturbed run."""
    status, text = rig.call(
        ranks, "train", rig.deck(mesh, steps=STEPS), "-d", rig.run, "-r", "latest"
    )
    bad = judge(status, text)
    if bad:
        return bad
    if status != 0:
        return "lost", text[-600:]
    return compare(rig, mesh, ranks)


MESHES = (("dp = 2\ncp_inner = 2", 4), ("dp = 2", 2), ("cp_inner = 2", 2), ("pp = 2", 2))


def kill(rig, number):
    """Ranks are killed at a random moment, twice, with a checkpoint at every step."""
    mesh, ranks = MESHES[number % len(MESHES)]
    undisturbed(mesh, ranks)
    for restart in range(2):
        more = ("-r", "latest") if restart else ()
        process = rig.start(ranks, "train", rig.deck(mesh), "-d", rig.run, *more)
        time.sleep(rig.random.uniform(0.2, 1.6))
        pids = rig.ranks()
        had = rig.checkpoints()
        victims = rig.random.choice((pids[:1], pids[-1:], pids[:2], pids))
        signal_ranks(victims, signal.SIGKILL)
        status, text = rig.end(process)
        if status is None:
            return "hang", text[-600:]
        if had and rig.checkpoints() and rig.checkpoints()[-1] < had[-1]:
            return "lost", f"{had[-1]} was there before the kill"
        if not os.path.exists(os.path.join(rig.run, "log.txt")):
            shutil.rmtree(rig.run, ignore_errors=True)  # killed before the run began
    return finish(rig, mesh, ranks)


def stall(rig, number):
    """One rank is stopped at a random moment: the others end with one message, in time."""
    mesh, ranks = MESHES[number % len(MESHES)]
    undisturbed(mesh, ranks)
    process = rig.start(
        ranks,
        "train",
        rig.deck(mesh, steps=100000, keep=3),
        "-d",
        rig.run,
        "optimizer.decay_steps=100",
    )
    rig.wait_for_step(process, 1)
    time.sleep(rig.random.uniform(0, 0.3))
    pids = rig.ranks()
    stopped = rig.random.choice(pids)
    signal_ranks([stopped], signal.SIGSTOP)
    status, text = rig.end(process, deadline=6 * HANG_S + 10)
    signal_ranks([stopped], signal.SIGKILL)
    if status is None:
        return "hang", text[-600:]
    if status == 0 or "run.hang_timeout_s" not in text:
        return "wrong", f"status {status}: {text[-600:]}"
    last = int(rig.checkpoints()[-1][5:13]) if rig.checkpoints() else 0
    status, text = rig.call(
        ranks, "train", rig.deck(mesh, steps=last + 1), "-d", rig.run, "-r", "latest"
    )
    bad = judge(status, text)
    return bad if bad else (("ok", "") if status == 0 else ("lost", text[-600:]))


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
    mesh, ranks = MESHES[number % len(MESHES)]
    undisturbed(mesh, ranks)
    wanted = rig.random.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    process = rig.start(
        ranks, "train", rig.deck(mesh, steps=100000), "-d", rig.run, "optimizer.decay_steps=100"
    )
    if number % 4:
        rig.wait_for_step(process, 1 + number % 3)
    else:
        # As early as there are handlers: before MPI has started.
        while process.poll() is None and not (
            len(rig.ranks()) == ranks and all(catches(pid, wanted) for pid in rig.ranks())
        ):
            time.sleep(0.002)
    pids = rig.ranks()
    signal_ranks(pids[: rig.random.randint(1, len(pids))], wanted)
    status, text = rig.end(process)
    bad = judge(status, text)
    if bad:
        return bad
    try:
        with open(os.path.join(rig.run, "status.json")) as file:
            state = json.load(file)
    except (OSError, ValueError) as error:
        return "lost", f"status {status}, no status.json ({error}): {text[-400:]}"
    # Hydra's mpiexec may lose status 75; status.json does not.
    if state["state"] != "stopped" or status not in (0, 75):
        return "wrong", f"status {status}, {state}: {text[-400:]}"
    last = max(rig.losses())
    if rig.checkpoints()[-1] != f"step_{last:08}.h5":
        return "lost", f"step {last} was the last one, {rig.checkpoints()} are there"
    return "ok", ""


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
CALLS = ("pwrite", "fsync", "pread", "ftruncate", "fallocate", "rename", "open")
_seen = {}


def calls_of(call, rank):
    """How often a rank makes a call on the checkpoints of an undisturbed run."""
    if (call, rank) not in _seen:
        rig = Rig(0)
        log = os.path.join(rig.folder, "faults")
        rig.call(
            2, "train", rig.deck(steps=3), "-d", rig.run, LD_PRELOAD=FAULTS, BALLAST_FAULT_LOG=log,
            BALLAST_FAULT=f"{rank} {call} /checkpoints/ 0 fail 5",
        )  # fmt: skip
        with open(log) as file:
            _seen[call, rank] = int(file.read().rsplit("seen=", 1)[1])
        rig.close()
    return _seen[call, rank]


def fault(rig, number):
    """One I/O call of a checkpoint fails: that checkpoint is tried again, or the run ends with a
    message; it never hangs, crashes or loses an older file.  The trials go through all calls."""
    plan = [(c, r) for r in (0, 1) for c in CALLS if calls_of(c, r) > 0]
    call, rank = plan[number % len(plan)]
    nth = 1 + (number // len(plan) * 7) % calls_of(call, rank)
    error = ERRORS[number % len(ERRORS)]
    kind = rig.random.choice(("fail", "fail", "broken"))
    log = os.path.join(rig.folder, "faults")
    status, text = rig.call(
        2, "train", rig.deck(steps=STEPS), "-d", rig.run, LD_PRELOAD=FAULTS, BALLAST_FAULT_LOG=log,
        BALLAST_FAULT=f"{rank} {call} /checkpoints/ {nth} {kind} {error}",
    )  # fmt: skip
    note = f"{call} #{nth} of rank {rank}, {kind} {errno.errorcode[error]}: "
    bad = judge(status, text)
    if bad:
        return bad[0], note + bad[1]
    if status not in (0, 1):
        return "wrong", note + f"status {status}: {text[-400:]}"
    with open(log) as file:
        if "struck" not in file.read():
            return "ok", note + "the call was not reached"
    if kind == "fail" and status != 0 and "/checkpoints/" not in text:
        return "wrong", note + text[-400:]
    if not rig.checkpoints():
        shutil.rmtree(rig.run)
    outcome, more = finish(rig, "dp = 2", 2) if os.path.isdir(rig.run) else ("ok", "")
    return outcome, note + more if outcome != "ok" else ""


def spoil(rig, number):
    """A write is lost or a bit flips on the way to the disk: the file never becomes a checkpoint
    that loads as if nothing had happened."""
    rank = number % 2
    nth = 1 + (number // 2 * 5) % calls_of("pwrite", rank)
    kind = ("lost", "flip")[number // 2 % 2]
    status, text = rig.call(
        2, "train", rig.deck(steps=STEPS), "-d", rig.run, LD_PRELOAD=FAULTS,
        BALLAST_FAULT_LOG=os.path.join(rig.folder, "faults"),
        BALLAST_FAULT=f"{rank} pwrite /checkpoints/ {nth} {kind} 5",
    )  # fmt: skip
    note = f"pwrite #{nth} of rank {rank}, {kind}: "
    bad = judge(status, text)
    if bad:
        return bad[0], note + bad[1]
    for name in rig.checkpoints():  # every file that stayed continues to the undisturbed numbers
        twin = os.path.join(rig.folder, "twin-" + name)
        status, text = rig.call(2, "train", rig.deck(steps=STEPS), "-d", twin, "-r", rig.path(name))
        if status != 0:
            return "lost", note + f"{name} does not load: {text[-400:]}"
        other = Rig(1)
        shutil.rmtree(other.folder)
        other.run = twin
        expected = undisturbed("dp = 2", 2)[0]
        found = other.losses()
        if any(expected[s] != found[s] for s in found):
            return "silent", note + f"{name}: {found}"
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
    process = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f {limit}; UCX_TLS=tcp,self exec \"$@\"", "limit"]
        + rig.start_words(2, "train", deck, "-d", rig.run, "-r", "latest"),
        capture_output=True, text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    bad = judge(process.returncode, process.stdout + process.stderr)
    if bad:
        return bad
    if process.returncode not in (0, 1):
        return "wrong", f"status {process.returncode}"
    return finish(rig, "dp = 2", 2)


def mesh_change(rig, number):
    """A run in fp64 continues on another mesh: every printed digit stays."""
    first, ranks = MESHES[number % len(MESHES)]
    second, others = MESHES[(number // len(MESHES) + 1 + number) % len(MESHES)]
    results = []
    for mesh, count, steps, more in (
        (first, ranks, STEPS, ()),
        (first, ranks, 3, ()),
        (second, others, STEPS, ("-r", "latest")),
    ):
        if more == () and results:
            shutil.rmtree(rig.run)
        status, text = rig.call(
            count, "train", rig.deck(mesh, steps=steps), "-d", rig.run, "run.precision=fp64", *more
        )
        if status != 0:
            return judge(status, text) or ("wrong", text[-600:])
        results.append(rig.losses())
    return ("ok", "") if results[0] == results[2] else ("wrong", f"{results[0]} {results[2]}")


def bad_input(rig, number):
    """Damaged decks, data, weights and checkpoints through the parsers, 40 files in one process."""
    kinds = _samples(rig)
    lines, names = [], []
    for i in range(40):
        kind, path, good = kinds[(number + i) % len(kinds)]
        bad = _mutate(rig.random, good)
        target = os.path.join(rig.folder, f"bad{i}")
        if kind in ("config", "megatron"):
            os.makedirs(target)
            for name in os.listdir(os.path.dirname(path)):
                shutil.copy(os.path.join(os.path.dirname(path), name), target)
            target_file = os.path.join(target, os.path.basename(path))
            argument = target if kind == "config" else os.path.join(target, "data")
        else:
            target_file = argument = target
        with open(target_file, "wb") as file:
            file.write(bad)
        lines.append(f"{kind} {argument}")
        names.append((kind, bad == good))
    try:
        done = subprocess.run(
            [PARSERS], input="\n".join(lines) + "\n", capture_output=True, text=True,
            errors="replace", timeout=120,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        return "hang", f"after {len((expired.stdout or b'').splitlines())} of {len(lines)} files"
    answers = done.stdout.splitlines()
    if done.returncode != 0 or len(answers) != len(lines):
        return (
            "crash",
            f"status {done.returncode} at {lines[min(len(answers), 39)]}: {done.stderr[-800:]}",
        )
    for (kind, same), answer in zip(names, answers):
        if kind == "checkpoint" and answer == "accepted" and not same:
            return "silent", "an altered checkpoint was accepted"
    return "ok", ""


def _mutate(rng, good):
    bad = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 8))):
        way = rng.randrange(5)
        place = rng.randrange(max(1, len(bad)))
        if way == 0 and bad:
            bad[place] ^= 1 << rng.randrange(8)
        elif way == 1:
            del bad[place:]
        elif way == 2:
            bad[place:place] = rng.choice(
                (b"\0" * 8, b"9" * 20, b"[", b'"', b"\xff" * 4, b"-1", b"nan")
            )
        elif way == 3 and bad:
            end = min(len(bad), place + rng.randrange(1, 64))
            bad[place:place] = bad[place:end]
        elif len(bad) > 8:
            other = rng.randrange(len(bad) - 8)
            bad[place : place + 8] = bad[other : other + 8]
    return bytes(bad)


def _samples(rig):
    """Sound inputs of every kind: (kind, path, bytes)."""
    global _sound
    if "_sound" not in globals():
        import h5py
        import numpy as np

        home = Rig(0)
        status, text = home.call(1, "train", home.deck("dp = 1", steps=1), "-d", home.run)
        if status != 0:
            raise RuntimeError(text[-2000:])
        checkpoint = home.path(home.checkpoints()[-1])
        model = os.path.join(home.folder, "model")
        home.call(1, "export", checkpoint, model)
        hdf5 = os.path.join(home.folder, "data.h5")
        with h5py.File(hdf5, "w") as file:
            file["tokens"] = np.arange(300, dtype="i4") % 100
            file["offsets"] = np.array([0, 100, 180, 300])
            file["loss_mask"] = np.ones(300, "u1")
        lengths = os.path.join(home.folder, "lengths.txt")
        with open(lengths, "w") as file:
            file.write("# lengths\n10\n20\n30\n")
        os.makedirs(os.path.join(home.folder, "mega"))
        _write_megatron(os.path.join(home.folder, "mega", "data"))
        _sound = []
        for kind, path in (
            ("deck", home.deck()),
            ("checkpoint", checkpoint),
            ("safetensors", os.path.join(model, "model.safetensors")),
            ("config", os.path.join(model, "config.json")),
            ("hdf5", hdf5),
            ("lengths", lengths),
            ("megatron", os.path.join(home.folder, "mega", "data.idx")),
        ):
            with open(path, "rb") as file:
                _sound.append((kind, path, file.read()))
    return _sound


def _write_megatron(prefix):
    import numpy as np

    lengths = np.array([50, 70, 30], "i4")
    with open(prefix + ".bin", "wb") as file:
        file.write((np.arange(150) % 100).astype("i4").tobytes())
    with open(prefix + ".idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(4).tobytes())
        file.write(np.uint64(3).tobytes() + np.uint64(4).tobytes() + lengths.tobytes())
        file.write(np.array([0, 200, 480], "i8").tobytes() + np.array([0, 1, 2, 3], "i8").tobytes())


# name -> (trial, count of a full pass, count of the short form)
TRIALS = {
    "kill": (kill, 150, 3),  # two kills each
    "stall": (stall, 150, 2),
    "stop": (stop, 60, 3),
    "fault": (fault, 400, 5),
    "spoil": (spoil, 100, 3),
    "damage": (damage, 100, 3),
    "full_disk": (full_disk, 20, 2),
    "mesh_change": (mesh_change, 24, 1),
    "bad_input": (bad_input, 125, 5),  # 40 files each
}

"""What trials share: undisturbed runs to compare with, and how an end is judged.  A trial takes a
Rig and its number and returns (outcome, note); outcome is ok, hang, crash, lost (a checkpoint that
should be there is not), wrong (other numbers than an undisturbed run, another message or status)
or silent (damage that nobody noticed)."""
import functools
import os
import threading

from rig import Rig, crashed

STEPS = 8
FAULTS = os.environ.get("BALLAST_FAULTS", "")  # faults.c, built
PARSERS = os.environ.get("BALLAST_PARSERS", "")  # parsers.cpp, built


def once(work):
    """Remembers results by arguments; trials beside that ask for the same one wait for it."""
    results, locks, guard = {}, {}, threading.Lock()

    @functools.wraps(work)
    def ask(*arguments):
        with guard:
            lock = locks.setdefault(arguments, threading.Lock())
        with lock:
            if arguments not in results:
                results[arguments] = work(*arguments)
            return results[arguments]

    return ask


@once
def undisturbed(mesh, ranks, steps=STEPS, every=1):
    """Losses and checkpoint sums of a run that nothing happens to."""
    rig = Rig(0)
    try:
        deck = rig.deck(mesh, steps=steps, every=every)
        status, text = rig.call(ranks, "train", deck, "-d", rig.run)
        if status != 0:
            raise RuntimeError(f"the undisturbed run ended with {status}:\n{text[-2000:]}")
        return rig.losses(), rig.sums(f"step_{steps:08}.h5")
    finally:
        rig.close()


def compare(rig, mesh, ranks, steps=STEPS, every=1):
    losses, sums = undisturbed(mesh, ranks, steps, every)
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


def finish(rig, mesh, ranks, steps=STEPS, every=1):
    """Continues to the end and compares with the undisturbed run."""
    deck = rig.deck(mesh, steps=steps, every=every)
    status, text = rig.call(ranks, "train", deck, "-d", rig.run, "-r", "latest")
    bad = judge(status, text)
    if bad:
        return bad
    if status != 0:
        return "lost", text[-600:]
    return compare(rig, mesh, ranks, steps, every)

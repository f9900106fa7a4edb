"""Damaged and hostile inputs: decks, data, weights, checkpoints and traces, through the program
and through the parsers in one process."""
import os
import shutil

import samples
from common import PARSERS, judge
from hostile import HOSTILE

FILES_THROUGH_THE_PROGRAM = 12
FILES_THROUGH_PARSERS = 40
PARSED = ("deck", "checkpoint", "safetensors", "config", "hdf5", "lengths", "megatron")
KINDS = (*PARSED, "trace")


def refused_well(status, text):
    """Outcome of a program that read a bad input, or None: it says what is wrong and leaves."""
    bad = judge(status, text)
    if bad:
        return bad
    if status not in (0, 1, 2):
        return "crash", f"status {status}: {text[-600:]}"
    if "bad_alloc" in text or "Traceback" in text or (status != 0 and not text.strip()):
        return "wrong", f"status {status}: {text[-600:]}"
    return None


def hostile(rig, number):
    """A file that was made to harm: it is refused with a message that names it."""
    name = sorted(HOSTILE)[number % len(HOSTILE)]
    kind, make = HOSTILE[name]
    path = samples.copy_of(rig, kind, "hostile")
    path = make(path) or path
    status, text = rig.alone(*samples.words(rig, kind, path))
    bad = refused_well(status, text)
    if bad:
        return bad[0], f"{name}: {bad[1]}"
    # One trace that cannot be read costs that trace; the report says so.
    if status == 0 and kind != "trace":
        return "silent", f"{name}: {text[-400:]}"
    hints = (os.path.basename(path), os.path.basename(os.path.dirname(path)))
    if not any(hint in text for hint in hints):
        return "wrong", f"{name}: no file is named: {text[-400:]}"
    return "ok", ""


def damaged_input(rig, number):
    """Inputs with flipped bits, cuts and insertions, through the program."""
    for i in range(FILES_THROUGH_THE_PROGRAM):
        kind = KINDS[(number * FILES_THROUGH_THE_PROGRAM + i) % len(KINDS)]
        good = samples.sound(kind)
        bad = mutate(rig.random, good)
        path = samples.copy_of(rig, kind, f"damaged{i}")
        with open(path, "wb") as file:
            file.write(bad)
        status, text = rig.alone(*samples.words(rig, kind, path))
        problem = refused_well(status, text)
        if problem is None and kind == "checkpoint" and status == 0 and bad != good:
            problem = "silent", "an altered checkpoint was accepted"
        if problem is not None:
            kept = f"{rig.folder}-{kind}"
            shutil.copytree(os.path.dirname(path), kept, dirs_exist_ok=True)
            return problem[0], f"{kind}, kept in {kept}: {problem[1]}"
    return "ok", ""


def bad_input(rig, number):
    """Damaged decks, data, weights and checkpoints through the parsers, many files in one
    process."""
    lines, names = [], []
    for i in range(FILES_THROUGH_PARSERS):
        kind = PARSED[(number + i) % len(PARSED)]
        good = samples.sound(kind)
        bad = mutate(rig.random, good)
        path = samples.copy_of(rig, kind, f"bad{i}")
        with open(path, "wb") as file:
            file.write(bad)
        lines.append(f"{kind} {samples.argument(kind, path)}")
        names.append((kind, bad == good))
    given = os.path.join(rig.folder, "given")
    with open(given, "w") as file:
        file.write("\n".join(lines) + "\n")
    status, text = rig.alone("sh", "-c", '"$0" < "$1"', PARSERS, given, deadline=120)
    answers = [line for line in text.splitlines() if line.startswith(("accepted", "refused"))]
    bad = judge(status, text)
    if bad or status != 0 or len(answers) != len(lines):
        at = lines[min(len(answers), len(lines) - 1)]
        return bad[0] if bad else "crash", f"status {status} at {at}: {text[-800:]}"
    for (kind, same), answer in zip(names, answers):
        if kind == "checkpoint" and answer == "accepted" and not same:
            return "silent", "an altered checkpoint was accepted"
    return "ok", ""


def mutate(rng, good):
    """Bytes with one to eight changes: a bit, a cut, something hostile, a part twice or moved."""
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

"""python3 tests/campaign [--short] [--only KIND,...] [--seed N] [--jobs N] [--minutes M]
[--state FILE]: see README.md."""
import argparse
import concurrent.futures
import json
import os
import platform
import random
import subprocess
import sys
import threading
import time

from rig import Rig
from trials import TRIALS

GOOD = ("ok", "ok, launcher's status", "not reached")


def commit():
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        ["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or os.environ.get("BALLAST_COMMIT", "unknown")


def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {"passes": []}


class Pass:
    """One pass through the trials: its counts in the state's file, which it replaces after each
    trial."""

    def __init__(self, path, form, seed, count):
        self.path, self.lock, self.failed = path, threading.Lock(), 0
        self.state = load(path)
        passes = self.state["passes"]
        self.now = passes[-1] if passes else None
        fresh = {"commit": commit(), "form": form, "machine": f"{os.cpu_count()} cores"}
        if (
            self.now is None
            or any(self.now.get(key) != value for key, value in fresh.items())
            or seed not in (None, self.now["seed"])
            or all(
                len(self.now["done"].get(kind, ())) >= wanted for kind, (_, wanted) in count.items()
            )
        ):
            if seed is None:
                seed = random.SystemRandom().randrange(1 << 31)
            fresh |= {"python": platform.python_version(), "seed": seed}
            self.now = {**fresh, "seconds": 0, "done": {}, "outcomes": {}, "bad": []}
            passes.append(self.now)

    def open_trials(self, count):
        """(kind, number) of what is not done yet, the kinds in turn, so that a pass that is cut
        short has some of each."""
        left = []
        for kind, (total, wanted) in count.items():
            numbers = range(total)
            if wanted < total:  # the short form draws its trials from all of them
                numbers = random.Random(f"{self.now['seed']} {kind}").sample(numbers, wanted)
            left += [
                ((place + 1) / wanted, kind, number)
                for place, number in enumerate(numbers)
                if number not in self.now["done"].get(kind, ())
            ]
        return [(kind, number) for _, kind, number in sorted(left)]

    def add(self, kind, number, outcome, note, seconds):
        with self.lock:
            counts = self.now["outcomes"].setdefault(kind, {})
            counts[outcome] = counts.get(outcome, 0) + 1
            self.now["done"].setdefault(kind, []).append(number)
            self.now["seconds"] = round(self.now["seconds"] + seconds, 1)
            if outcome not in GOOD:
                self.failed += 1
                self.now["bad"].append(
                    {"kind": kind, "number": number, "outcome": outcome, "note": note}
                )
                print(f"{kind} {number}: {outcome}: {note}", flush=True)
            with open(self.path + ".new", "w") as file:
                json.dump(self.state, file, indent=1)
            os.replace(self.path + ".new", self.path)


def run_trial(current, kind, number, end):
    if time.time() > end:
        return
    began = time.time()
    rig = Rig(f"{current.now['seed']} {kind} {number}")
    try:
        outcome, note = TRIALS[kind][0](rig, number)
    except Exception as error:  # of the campaign itself: that counts as no pass either
        outcome, note = "wrong", f"{type(error).__name__}: {error}"
    rig.close()
    current.add(kind, number, outcome, note, time.time() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form of the default tests")
    parser.add_argument("--only", default="", help="kinds: " + ", ".join(TRIALS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--state", default="campaign.json", help="counts of all passes")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else list(TRIALS)
    unknown = set(kinds) - set(TRIALS)
    if unknown or options.jobs < 1:
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}" if unknown else "--jobs < 1")
    count = {}  # kind: how many there are, how many are wanted
    for kind in kinds:
        _, full, short = TRIALS[kind]
        full = full() if callable(full) else full
        count[kind] = (full, min(short, full) if options.short else full)
    form = "short" if options.short else "full"
    current = Pass(options.state, form, options.seed, count)
    print(f"commit {current.now['commit']}, {form} form, seed {current.now['seed']}", flush=True)
    end = time.time() + 60 * options.minutes
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for kind, number in current.open_trials(count):
            pool.submit(run_trial, current, kind, number, end)
    for kind in kinds:
        print(f"{kind}: {current.now['outcomes'].get(kind, {})} of {count[kind][1]}")
    return 1 if current.failed else 0


if __name__ == "__main__":
    sys.exit(main())

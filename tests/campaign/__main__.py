"""python3 tests/campaign [--short] [--only KIND,...] [--seed N] [--minutes M] [--state FILE]:
see README.md."""
import argparse
import json
import os
import random
import subprocess
import sys
import time

from rig import Rig
from trials import TRIALS


def commit():
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run(
        ["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def load(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {"passes": []}


def save(path, state):
    with open(path + ".new", "w") as file:
        json.dump(state, file, indent=1)
    os.replace(path + ".new", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form of the default tests")
    parser.add_argument("--only", default="", help="kinds: " + ", ".join(TRIALS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--state", default="campaign.json", help="counts of all passes")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else list(TRIALS)
    state = load(options.state)
    now = commit()
    current = state["passes"][-1] if state["passes"] else None
    form = "short" if options.short else "full"
    if (
        current is None
        or current["commit"] != now
        or current["form"] != form
        or options.seed not in (None, current["seed"])
        or all(current["done"].get(k, 0) >= TRIALS[k][2 if options.short else 1] for k in kinds)
    ):
        seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
        current = {"commit": now, "form": form, "seed": seed, "done": {}, "outcomes": {}, "bad": []}
        state["passes"].append(current)
    print(f"commit {now}, {form} form, seed {current['seed']}")
    end, failed = time.time() + 60 * options.minutes, 0
    for kind in kinds:
        trial, full, short = TRIALS[kind]
        began = time.time()
        for number in range(current["done"].get(kind, 0), short if options.short else full):
            if time.time() > end:
                break
            rig = Rig(f"{current['seed']} {kind} {number}")
            try:
                outcome, note = trial(rig, number)
            except Exception as error:  # of the campaign itself: that counts as no pass either
                outcome, note = "wrong", f"{type(error).__name__}: {error}"
            rig.close()
            counts = current["outcomes"].setdefault(kind, {})
            counts[outcome] = counts.get(outcome, 0) + 1
            current["done"][kind] = number + 1
            if outcome != "ok":
                failed += 1
                current["bad"].append(
                    {"kind": kind, "number": number, "outcome": outcome, "note": note}
                )
                print(f"{kind} {number}: {outcome}: {note}", flush=True)
            save(options.state, state)
        print(
            f"{kind}: {current['outcomes'].get(kind, {})} in {time.time() - began:.0f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

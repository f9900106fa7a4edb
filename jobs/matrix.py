#!/usr/bin/env python3
"""Trains every case of a deck and evaluates each trained model under every case: a matrix of
training pattern by evaluation pattern, as one command.

    python3 jobs/matrix.py inputs/mtraining/ruler.toml --seeds 1 2 3 --jobs 2 --out runs/ruler
    python3 jobs/matrix.py DECK --ranks 4 run.backend=cuda run.precision=bf16

Cases whose names begin alike up to a colon ("values: dense", "values: moba") make one matrix; a
deck without colons makes one.  A cell is the held-out needle accuracy where the data asks
questions, else the held-out loss: the mean over seeds, and the spread (largest less smallest).
An evaluation whose figure is no number is a run that failed, and its cell says so.
What a folder already holds is not run again, and a training that was stopped continues from its
newest checkpoint, so a matrix that was stopped goes on; more seeds and cases may join it.
made_with.json of the folder has the deck and the overrides of its results; with others the folder
is refused.  Exit status 1 when a run failed; its log is named and its cells stay empty.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def built():
    """The program of this tree or installation, else the one on PATH."""
    for folder in ("build", "build-host", "build-cuda", "../.."):
        program = ROOT / folder / "bin/ballast"
        if program.exists():
            return str(program.resolve())
    return shutil.which("ballast") or str(ROOT / "build/bin/ballast")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("deck", type=pathlib.Path)
    parser.add_argument("overrides", nargs="*", help="block.key=value, for every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", help="groups or cases whose names hold this text")
    parser.add_argument("--ranks", type=int, default=1, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/matrix"))
    parser.add_argument("--program", default=built())
    parser.add_argument("--launcher", default=os.environ.get("BALLAST_MPIEXEC", "mpiexec"))
    args = parser.parse_intermixed_args()
    if args.ranks < 1 or args.jobs < 1:
        parser.error("--ranks and --jobs must be at least 1")
    if len(set(args.seeds)) < len(args.seeds):
        parser.error("--seeds names a seed twice: both runs would share a folder")
    for program in [args.program] + [args.launcher] * (args.ranks > 1):
        if shutil.which(program) is None:
            parser.error(f"no program '{program}'; build it (jobs/setup.sh) or name another")
    if any(o.startswith("run.seed=") for o in args.overrides):
        parser.error("run.seed among the overrides makes all seeds one run: give --seeds")
    return args


def plain(name):
    return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


def read_deck(path):
    """The deck and the names of its cases, no two of which share a folder."""
    try:
        deck = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        sys.exit(f"matrix.py: {path}: {error}")
    names = [case["name"] for case in deck.get("case", []) if "name" in case]
    if not names:
        sys.exit(f"matrix.py: {path} has no [[case]]; each pattern to compare is one")
    owners = {}
    for name in names:
        if plain(name) in owners:
            sys.exit(
                f"matrix.py: {path}: cases {owners[plain(name)]!r} and {name!r} would share the "
                f"folder {plain(name)}-SEED; rename one of them"
            )
        owners[plain(name)] = name
    return deck, names


def groups_of(args, names):
    """{group: [case]} in the order of the deck."""
    groups = {}
    for name in names:
        if args.only is None or args.only in name:
            groups.setdefault(name.split(":")[0] if ":" in name else "", []).append(name)
    if not groups:
        sys.exit(f"matrix.py: no case of {args.deck} holds {args.only!r}: {', '.join(names)}")
    return groups


def record(args, deck):
    """Refuses a folder whose runs were made with another deck or other overrides; writes down
    what those of this matrix are made with."""
    file = args.out / "made_with.json"
    made = {f"[{key}]": value for key, value in deck.items() if key != "case"}
    made |= {f"case {case['name']!r}": case for case in deck["case"] if "name" in case}
    made = json.loads(
        json.dumps(made | {"overrides": args.overrides, "ranks": args.ranks}, default=str)
    )
    remedy = f"choose another folder with --out, or delete {args.out}"
    old = {}
    if any(args.out.glob("*/log.txt")):  # otherwise no run began
        if not file.exists():
            sys.exit(f"matrix.py: {args.out} holds runs but no {file.name}; {remedy}")
        old = stored(file)
        if not isinstance(old, dict):
            sys.exit(f"matrix.py: {file} is empty or damaged; {remedy}")
    # Results of the other cases stand where a case is new, or gone.
    keys = [k for k in old | made if not k.startswith("case ") or (k in old and k in made)]
    other = [key for key in keys if old and old.get(key) != made.get(key)]
    if other:
        sys.exit(
            f"matrix.py: {args.out} holds runs that were made with other settings "
            f"({', '.join(other)}: see {file.name}); {remedy}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".part")
    with fresh.open("w") as out:
        out.write(json.dumps(old | made, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())  # else a loss of power leaves an empty file under the name
    fresh.replace(file)


def stored(path):
    """What a file of JSON holds; None where there is none, or one that is cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def finished(found):
    """Whether a result is that of a whole run: mpiexec may leave with 0 where a training was
    stopped."""
    return isinstance(found, dict) and found.get("finished", True)


class Runs:
    """Commands of one matrix, each skipped where its result is there."""

    def __init__(self, args):
        self.args = args
        self.failed = []

    def folder(self, case, seed):
        return self.args.out / f"{plain(case)}-{seed}"

    def run(self, command, case, seed, result, *options):
        if finished(found := stored(result)):
            return found
        program = [self.args.program, command, str(self.args.deck), "--case", case]
        if self.args.ranks > 1:
            program = [self.args.launcher, "-n", str(self.args.ranks)] + program
        fresh = result.with_suffix(".part")
        program += [*options, "--json", str(fresh), f"run.seed={seed}", *self.args.overrides]
        log = result.with_suffix(".log")
        fresh.unlink(missing_ok=True)  # an earlier start's says nothing of this one
        with log.open("w") as out:
            code = subprocess.run(program, stdout=out, stderr=subprocess.STDOUT).returncode
        found = stored(fresh)
        if code != 0 or not finished(found):
            stopped = isinstance(found, dict) and not finished(found)
            remedy = " (stopped early: the same command goes on with it)" * stopped
            self.failed.append(
                f"{command} --case {case!r}, seed {seed}: status {code}{remedy}, see {log}"
            )
            return None
        fresh.replace(result)
        return found

    def row(self, case, seed, cases):
        """One model: trained, then asked under every case; {case: figure}."""
        folder = self.folder(case, seed)
        folder.mkdir(parents=True, exist_ok=True)
        # latest is the beginning where there is no checkpoint yet.
        options = ["-d", str(folder), "-r", "latest"]
        if self.run("train", case, seed, folder / "train.json", *options) is None:
            return {}
        row = {}
        for asked in cases:
            result = folder / f"eval-{plain(asked)}.json"
            found = self.run("eval", asked, seed, result, *options)
            if found is not None:
                row[asked] = self.figure(found, result)
        return row

    def figure(self, found, result):
        """Of an evaluation; None where it is no number, which the twin states as null."""
        name = "needle_accuracy" if "needle_accuracy" in found else "validation_loss"
        if found[name] is None:
            self.failed.append(f"{result}: {name} is no number")
        return found[name]


def cell(values):
    """Mean and spread over seeds; of seeds of which one has no number there is neither."""
    if not values:
        return "-"
    if None in values:
        return "failed"
    text = f"{sum(values) / len(values):.4f}"
    return text + (f" ± {max(values) - min(values):.4f}" if len(values) > 1 else "")


def table(group, cases, rows):
    """Trained with (rows) by evaluated with (columns)."""
    short = [name.split(":", 1)[-1].strip() for name in cases]
    lines = [["trained \\ evaluated", *short]]
    for case, name in zip(cases, short):
        found = [rows.get((case, seed), {}) for seed in sorted({s for _, s in rows})]
        lines.append([name] + [cell([r[c] for r in found if c in r]) for c in cases])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [f"{group}" if group else "all cases"]
    text += ["  " + "  ".join(f"{t:<{w}}" for t, w in zip(line, widths)).rstrip() for line in lines]
    return "\n".join(text)


def main():
    args = arguments()
    deck, names = read_deck(args.deck)
    groups = groups_of(args, names)
    record(args, deck)
    runs = Runs(args)
    tasks = [(g, c, s) for g, cases in groups.items() for c in cases for s in args.seeds]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        found = dict(
            zip(tasks, pool.map(lambda task: runs.row(task[1], task[2], groups[task[0]]), tasks))
        )
    result = {
        "deck": str(args.deck),
        "overrides": args.overrides,
        "ranks": args.ranks,
        "cells": [
            {"group": g, "trained": c, "seed": s, "evaluated": row}
            for (g, c, s), row in found.items()
        ],
    }
    (args.out / "matrix.json").write_text(json.dumps(result, indent=1) + "\n")
    for group, cases in groups.items():
        rows = {(c, s): found[(group, c, s)] for c in cases for s in args.seeds}
        print(table(group, cases, rows), end="\n\n")
    for line in runs.failed:
        print(f"matrix.py: {line}", file=sys.stderr)
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of combinations, held against the program: a covering design, drawn by seed, trains
every pair of choices that the table does not refuse on a tiny model over 1 to 8 host ranks; every
pair that it refuses is refused by `check` and `train` with the table's words.  The report reads
what every row leaves."""
import concurrent.futures
import itertools
import json
import math
import os
import random
import subprocess
import unittest

from runs import BALLAST, REPORT, RunCase

SEED = int(os.environ.get("BALLAST_TEST_SEED", "14"))
WORKERS = 2
TRIALS = 4

# What the choices need beside them on a model of this size.
BASE = [
    "run.steps=2",
    "checkpoint.every_steps=0",
    "checkpoint.at_end=false",
    "trace.enabled=false",
    "batching.global_tokens=700",
    "data.max_tokens=256",
    "ring.stripe=128",
    "chunk.tokens=128",
    "chunk.window_tokens=128",
    "attention.moba_block=64",
    "attention.moba_top_k=2",
    "attention.generated_density=0.5",
    "attention.flex_share=0.5",
    "attention.flex_threshold=0.3",
    "costs.forward_token_s=1e-6",
    "costs.forward_pair_s=1e-9",
]
DEGREES = {"dp": {"2": 2}, "pp": {"2": 2}, "sp": {"2": 2}, "ring": {"flat": 2, "hierarchical": 4}}


def table():
    text = subprocess.run([BALLAST, "--help", "combinations.json"], capture_output=True, text=True)
    return json.loads(text.stdout)


def row_of(*names):
    """dimension -> choice."""
    return {name.partition(" ")[0]: name for name in names}


class Design:
    """Rows of one choice a dimension that together hold every allowed pair."""

    def __init__(self, combinations, rng, refused=("backend cuda", "index recorded")):
        """`refused`: single choices left out beside those of the table; no GPU answers in the
        default tests, no run has recorded indexes."""
        self.rng = rng
        self.refused = [set(row["choices"]) for row in combinations["refused"]]
        self.refused += [{name} for name in refused]
        self.settings, self.dimensions = {}, {}
        for dimension, values in combinations["dimensions"].items():
            for value in values:
                name = f"{dimension} {value['value']}"
                if {name} in self.refused:
                    continue
                self.settings[name] = value["settings"]
                self.dimensions.setdefault(dimension, []).append(name)

    def ranks(self, row):
        product = 1
        for dimension, degrees in DEGREES.items():
            product *= degrees.get(row.get(dimension, "").partition(" ")[2], 1)
        return product

    def fits(self, row, name):
        trial = {**row, **row_of(name)}
        if any(refusal <= set(trial.values()) for refusal in self.refused):
            return False
        if trial.get("method", "").endswith(" over ranks") and trial.get("dp") == "dp 1":
            return False  # a pack on two ranks needs two
        return self.ranks(trial) <= 8

    def fitting(self, row):
        """dimension -> the choices that fit, of the dimensions that the row leaves open."""
        return {
            dimension: [n for n in names if self.fits(row, n)]
            for dimension, names in self.dimensions.items()
            if dimension not in row
        }

    def pairs(self):
        """Pairs that run, with a choice of every other dimension beside them."""
        names = [n for values in self.dimensions.values() for n in values]
        rows = [row_of(a, b) for a, b in itertools.combinations(names, 2)]
        rows = [row for row in rows if len(row) == 2 and self.fits(row, next(iter(row.values())))]
        return {frozenset(row.values()) for row in rows if all(self.fitting(row).values())}

    def worth(self, row, dimension, name):
        """Pairs that a choice newly covers, less the ranks, two or more, that start for it."""
        gain = sum(frozenset((name, other)) in self.left for other in row.values())
        return gain - max(2, self.ranks({**row, dimension: name}))

    def complete(self, row):
        """Fills the open dimensions, narrow ones first, with what is worth most."""
        while len(row) < len(self.dimensions):
            fitting = self.fitting(row)
            narrow = [d for d, names in fitting.items() if len(names) < 2]
            dimension = self.rng.choice(sorted(narrow or fitting))
            if not fitting[dimension]:
                return None
            worth = {n: self.worth(row, dimension, n) for n in fitting[dimension]}
            best = [n for n in worth if worth[n] == max(worth.values())]
            row[dimension] = self.rng.choice(best)
        return row

    def drawn(self, row, ranks):
        """A row that has the choices of `row`, all others at random, on `ranks` ranks."""
        while True:
            trial = dict(row)
            while len(trial) < len(self.dimensions):
                fitting = self.fitting(trial)
                dimension = self.rng.choice(sorted(fitting))
                if not fitting[dimension]:
                    break
                trial[dimension] = self.rng.choice(fitting[dimension])
            if len(trial) == len(self.dimensions) and self.ranks(trial) == ranks:
                return trial

    def rows(self):
        self.left = self.pairs()
        rows = []
        while self.left:
            trials = []
            for _ in range(TRIALS):
                row = self.complete(row_of(*self.rng.choice(sorted(map(sorted, self.left)))))
                if row:
                    pairs = map(frozenset, itertools.combinations(row.values(), 2))
                    covered = self.left.intersection(pairs)
                    trials.append((len(covered) / (2 + self.ranks(row)), len(trials), row, covered))
            if not trials:
                raise AssertionError(f"no row holds one of {len(self.left)} pairs: {self.left}")
            _, _, row, covered = max(trials, key=lambda trial: trial[:2])
            self.left -= covered
            rows.append(row)
        return rows

    def overrides(self, row):
        # Both answers of a pair must fit the packing groups.
        beside = ["data.max_tokens=128"] if row.get("loss") == "loss dpo" else []
        return beside + [setting for name in row.values() for setting in self.settings[name]]


def same_loss(row):
    """Rows whose first loss is that of one rank with dense attention."""
    return (
        row["loss"] == "loss cross_entropy"
        and row["pattern"] == "pattern dense"
        and row["index"] == "index pattern"
        and row["normaliser"]
        in ("normaliser ave_token", "normaliser sequence_mean", "normaliser sum")
    )


class Combinations(RunCase):
    def heads(self):
        """A table of patterns by head for the tiny model: one of each."""
        path = self.out("heads.json")
        if not os.path.exists(path):
            row = [
                {"pattern": "a_shape", "sink": 64, "window": 64},
                {"pattern": "vertical_slash", "columns": 8, "slashes": 1},
                {"pattern": "block_sparse", "blocks": 1},
                {"pattern": "dense"},
            ]
            with open(path, "w") as file:
                json.dump({"layers": 2, "heads": 4, "rules": [row, row[::-1]]}, file)
        return [f"attention.heads={path}"]

    def train(self, deck, name, ranks, overrides):
        done = subprocess.run(
            self.command(
                ranks, "train", deck, *BASE, *self.heads(), *overrides, "-d", self.out(name)
            ),
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        return done

    def test_every_allowed_pair_trains(self):
        design = Design(table(), random.Random(SEED))
        rows = design.rows()
        deck = self.deck(dp=1)
        reference = {}
        for normaliser in ("ave_token", "sequence_mean", "sum"):
            name = f"reference-{normaliser}"
            done = self.train(deck, name, 1, [f"loss.normaliser={normaliser}"])
            self.assertEqual(done.returncode, 0, done.stderr[-2000:])
            reference[f"normaliser {normaliser}"] = float(self.losses(self.out(name))[1])

        def run(i):
            row = rows[i]
            overrides = [*design.overrides(row), "trace.enabled=true"]
            done = self.train(deck, f"row-{i}", design.ranks(row), overrides)
            if done.returncode != 0:
                return f"status {done.returncode}: {done.stderr[-600:]}"
            loss = float(self.losses(self.out(f"row-{i}"))[1])
            if not math.isfinite(loss):
                return f"loss {loss}"
            if same_loss(row):
                expected = reference[row["normaliser"]]
                if abs(loss / expected - 1) > 2e-5:
                    return f"first loss {loss}, {expected} on one rank"
            return ""

        def report(numbers):
            """What is wrong with the reports of runs, {number: text}: one page over all, or, where
            that fails, of each alone."""
            folders = [self.out(f"row-{i}") for i in numbers]
            page = ["--out", self.out(f"page-{numbers[0]}"), "--no-simulator"]
            done = subprocess.run([REPORT, *folders, *page], capture_output=True, text=True)
            if done.returncode == 0:
                return {}
            if len(numbers) == 1:
                return {numbers[0]: f"report, status {done.returncode}: {done.stderr[-600:]}"}
            return {i: text for n in numbers for i, text in report([n]).items()} or {
                numbers[0]: f"report of these {len(numbers)} together: {done.stderr[-600:]}"
            }

        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(run, range(len(rows))))
            trained = [i for i, text in enumerate(results) if not text]
            for wrong in pool.map(report, [trained[i : i + 8] for i in range(0, len(trained), 8)]):
                for i, text in wrong.items():
                    results[i] = text
        print(f"{len(rows)} rows cover {len(design.pairs())} pairs, seed {SEED}")
        wrong = [
            f"{' | '.join(sorted(rows[i].values()))}\n{text}"
            for i, text in enumerate(results)
            if text
        ]
        self.assertFalse(wrong, f"{len(wrong)} of {len(rows)} rows:\n" + "\n\n".join(wrong[:8]))

    def test_every_refused_pair_says_why(self):
        combinations = table()
        settings = {
            f"{dimension} {value['value']}": value["settings"]
            for dimension, values in combinations["dimensions"].items()
            for value in values
        }
        deck = self.deck(dp=2)
        self.assertGreater(len(combinations["refused"]), 5)

        def refused(row, command):
            """What is missing of the table's words and a failure."""
            overrides = [s for name in row["choices"] for s in settings[name]]
            folder = ["-d", self.out("refused")] if command == "train" else []
            done = subprocess.run(
                self.command(1, command, deck, *BASE, *overrides, *folder),
                capture_output=True,
                text=True,
                timeout=120,
                stdin=subprocess.DEVNULL,
            )
            words = f"{row['because']}; {row['remedy']}" if row["remedy"] else row["because"]
            return "" if done.returncode != 0 and words in done.stderr else done.stderr or "runs"

        runs = [(row, command) for row in combinations["refused"] for command in ("check", "train")]
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for (row, command), wrong in zip(runs, pool.map(lambda run: refused(*run), runs)):
                self.assertEqual(wrong, "", f"{command} of {row}")


if __name__ == "__main__":
    unittest.main()

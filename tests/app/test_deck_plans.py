"""Whole-program test of every deck and every batching method: the plans of twenty steps that
`check`, `pack` and `plan` print are those that eight host ranks execute.  Decks are made small
(shrunk_decks.py); BALLAST_TEST_FULL runs all of them, the default tests SOME."""
import glob
import json
import os
import subprocess
import tempfile
import time
import unittest

import shrunk_decks
from runs import BALLAST, RunCase
from shrunk_decks import RANKS, STEPS

ROOT = os.environ.get("BALLAST_ROOT", "")
FULL = bool(os.environ.get("BALLAST_TEST_FULL"))
INPUTS = os.path.join(ROOT, "inputs")

SOME = {  # deck: cases of the default tests
    "chunkflow/zero_bubble.toml": ["zero-bubble, K 2"],
    "hbp/balanced.toml": ["balanced-window-8"],
    "hbp/table5.toml": ["hbp"],
    "quickstart.toml": [""],
    "sparsebalance/figure9.toml": ["micro-batch 1"],
}
SOME_METHODS = "none random isf sab".split() + [  # of the default tests, beside those of test_plans
    "hbp, Algorithm 2",
    "LongAlign",
]
METHODS = {  # beside those of the table of combinations
    "hbp, Algorithm 2": [
        "batching.method=hbp",
        "batching.groups=[64,128,300]",
        "batching.group_ranks=[1,2,4]",
        "batching.packing=isf",
    ],
    "LongAlign": [
        "batching.method=packed",
        "batching.window=4",
        "batching.window_rule=sorted",
        "loss.normaliser=sequence_mean",
    ],
    "balanced, window": ["batching.method=balanced", "batching.window=4"],
}
BESIDE = {  # what a method needs, or what makes its plan worth comparing
    "hbp": ["data.max_tokens=256"],
    "hbp over ranks": ["data.max_tokens=256"],
    "chunkflow": ["chunk.tokens=64"],
}
TINY = [
    "model.layers=1",
    "model.hidden=16",
    "model.head_dim=4",
    "trace.recall_every=0",
    "checkpoint.at_end=false",
    "costs.forward_token_s=1e-6",
    "costs.forward_pair_s=1e-9",
]


def methods():
    """{name: settings} of every batching method that `ballast` lists."""
    done = subprocess.run(
        [BALLAST, "--help", "combinations.json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)["dimensions"]["method"]
    listed = {row["value"]: row["settings"] + BESIDE.get(row["value"], []) for row in rows}
    return listed | METHODS


class DeckPlans(RunCase):
    def shown(self, command, deck, *overrides):
        """Hashes of the steps that a command prints as those of `train`, all but where it says that
        later ones are simulated; None where `plan` has nothing to say on the deck."""
        twin = self.out("twin.json")
        done = self.run_ballast(
            1,
            command,
            deck,
            *overrides,
            "--plans",
            str(STEPS),
            "--json",
            twin,
            status=None,
            cwd=ROOT,
        )
        if command == "plan" and "nothing to plan" in done.stderr:
            return None
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr[-2000:]}")
        with open(twin) as file:
            found = json.load(file)
        self.assertIn("plans", found, f"{command}: {found.get('plans_refused')}")
        hashes = [plan["hash"] for plan in found["plans"]]
        self.assertEqual(len(hashes), STEPS)
        return hashes[: found.get("plans_simulated_from", STEPS + 1) - 1]

    def compare(self, deck, *overrides, known=STEPS):
        """Trains, and returns the number of commands that print what was executed in the first
        `known` steps."""
        begin = time.monotonic()
        run = self.out("run")
        self.run_ballast(RANKS, "train", deck, *overrides, "-d", run, timeout=300, cwd=ROOT)
        stored = self.stored(run)
        subprocess.run(["rm", "-rf", run], check=True)
        self.assertEqual(sorted(stored), list(range(1, STEPS + 1)))
        executed = [stored[step]["hash"] for step in sorted(stored)]
        self.assertEqual(len(set(executed)), STEPS)
        commands = 0
        for command in ("check", "pack", "plan"):
            shown = self.shown(command, deck, *overrides)
            if shown is not None:
                self.assertEqual(shown, executed[:known], command)
                commands += 1
        self.seconds = time.monotonic() - begin
        return commands

    def test_every_method(self):
        tiny = [f"mesh.dp={RANKS}", *TINY]
        found = methods()
        self.assertGreater(len(found), 15)
        for name in found if FULL else SOME_METHODS:
            with self.subTest(name):
                deck = self.deck(steps=STEPS, dp=1, every=0)
                self.assertGreaterEqual(self.compare(deck, *tiny, *found[name]), 2)
                print(f"# {name}: {self.seconds:.0f} s", flush=True)

    def profiled(self, deck):
        """The deck with a profile table measured here, and the groups that it selects."""
        folder = tempfile.mkdtemp(dir=self.folder)
        quick = {
            "profile.lengths": [64, 256, 512],
            "profile.budgets": [2, 8],
            "profile.target_s": 0.5,
            "profile.repeats": 3,
            "profile.held_out": 0,
            "profile.largest_message": 16384,
            "profile.repair_limit": 10.0,
            "profile.recompute": ["none", "full"],
        }
        kept = {
            key: value
            for key, value in deck.items()
            if not key.startswith(("mesh.", "batching.", "dst.", "profile."))
        }
        self.run_ballast(1, "profile", self.written({**kept, **quick}), "-d", folder)
        made = {**deck, **quick, "profile.table": os.path.join(folder, "profile.h5")}
        if made.get("batching.groups_from") == "profile":  # `plan` stores what it selects
            self.run_ballast(1, "plan", self.written(made))
        return made

    def written(self, deck):
        path = self.out("small.toml")
        with open(path, "w") as file:
            file.write(shrunk_decks.text_of(deck))
        return path

    def small(self, deck):
        made = shrunk_decks.Shrunk(deck).deck
        if made.get("loss.kind") == "dpo":  # pairs cannot be drawn
            made = {k: v for k, v in made.items() if not k.startswith("data.bin_")}
            made.update({"data.source": "files", "data.paths": [self.data]})
            made.update({"data.max_tokens": 256, "batching.micro_batch_tokens": 600})
        return self.profiled(made) if "profile.table" in deck else made

    def test_every_deck(self):
        paths = sorted(glob.glob(os.path.join(INPUTS, "**", "*.toml"), recursive=True))
        names = {os.path.relpath(path, INPUTS) for path in paths}
        self.assertLessEqual(set(SOME), names)
        compared = 0
        for name in sorted(names):
            cases = dict(shrunk_decks.deck_cases(os.path.join(INPUTS, name)))
            for case in cases if FULL else SOME.get(name, []):
                with self.subTest(deck=name, case=case):
                    deck = self.small(cases[case])
                    # Later steps are balanced by what earlier ones found.
                    found = deck.get("batching.method") == "sab" and deck.get("dst.enabled")
                    known = 1 if found else STEPS
                    self.assertGreaterEqual(self.compare(self.written(deck), known=known), 2)
                    print(f"# {name} {case}: {self.seconds:.0f} s", flush=True)
                    compared += 1
        self.assertGreaterEqual(compared, len(names if FULL else SOME))


if __name__ == "__main__":
    unittest.main()

"""Whole-program tests of placement by time: groups of different size side by side, windows of
steps."""
import json
import os
import unittest

from runs import RunCase

BALANCED = ["batching.method=balanced", "batching.global_tokens=2500"]


class Balanced(RunCase):
    def train(self, name, ranks, *overrides, **values):
        run = self.out(name)
        self.run_ballast(
            ranks,
            "train",
            self.deck(name + ".toml", **{"steps": 5, "every": 0, **values}),
            "-d",
            run,
            *overrides,
        )
        return run

    def curve(self, run):
        return [(float(r["loss"]), float(r["grad_norm"])) for r in self.steps(run) if "loss" in r]

    def assert_same(self, one, other, message):
        self.assertEqual(len(one), len(other), message)
        for (a, b), (c, d) in zip(one, other):
            self.assertAlmostEqual(a, c, delta=2e-6, msg=message)
            self.assertAlmostEqual(b, d, delta=2e-5, msg=message)


class Placement(Balanced):
    def test_losses_are_those_of_one_rank_on_every_mesh(self):
        one = self.curve(
            self.train("one", 1, "run.precision=fp64", "batching.global_tokens=2500", dp=1)
        )
        self.assertEqual(len(one), 5)
        runs = [
            (4, {"dp": 4}, ["batching.micro_batch_tokens=100", "optimizer.zero=2"]),
            (4, {"dp": 4}, ["batching.micro_batch_tokens=60", "optimizer.zero=1", "chunk.k=2"]),
            (
                4,
                {"dp": 2, "cp_inner": 2},
                ["batching.micro_batch_tokens=120", "ring.layout=document_zigzag"],
            ),
            (4, {"dp": 2}, ["mesh.pp=2", "batching.micro_batch_tokens=120"]),
            (
                4,
                {"dp": 4},
                ["batching.micro_batch_tokens=100", "recompute.mode=full", "optimizer.zero=0"],
            ),
        ]
        for i, (ranks, mesh, more) in enumerate(runs):
            run = self.train(f"placed{i}", ranks, "run.precision=fp64", *BALANCED, *more, **mesh)
            self.assert_same(one, self.curve(run), str(runs[i]))

    def test_groups_of_different_size_stand_in_one_step(self):
        import h5py

        run = self.train("mixed", 4, *BALANCED, "batching.micro_batch_tokens=100", dp=4)
        with h5py.File(os.path.join(run, "trace", "trace_00000.h5"), "r") as f:
            text = f["plan_text"][()].tobytes().decode(errors="replace")
        self.assertIn(" sp 2:", text)
        self.assertIn(" sp 4:", text)


class Window(Balanced):
    def test_a_run_that_stops_inside_a_window_goes_on_alike_on_another_mesh(self):
        window = ["batching.global_tokens=1500", "batching.window=4", "run.precision=fp64"]
        whole = self.curve(self.train("whole", 2, *window, dp=2, steps=7))
        parts = self.train("parts", 2, *window, "optimizer.decay_steps=7", dp=2, steps=3, every=3)
        again = self.deck("again.toml", dp=1, cp_inner=2, steps=7, every=3)
        other = self.run_ballast(
            2,
            "train",
            again,
            "-d",
            parts,
            "-r",
            "latest",
            *window[:1],
            "batching.window=3",
            window[2],
            status=None,
        )
        self.assertNotEqual(other.returncode, 0)
        self.assertIn("window of 4 steps", other.stdout + other.stderr)
        self.run_ballast(2, "train", again, "-d", parts, "-r", "latest", *window)
        self.assert_same(whole, self.curve(parts), "stopped after step 3 of 4")


class Deck(Balanced):
    DECK = os.path.join(os.environ.get("BALLAST_ROOT", ""), "inputs", "hbp", "balanced.toml")

    def test_balanced_is_faster_than_rounds_and_fixed_splits(self):
        out = self.out("pack.json")
        self.run_ballast(1, "pack", self.DECK, "data.samples=12000", "--json", out)
        with open(out) as f:
            cases = {c["name"]: c for c in json.load(f)["cases"]}
        balanced = cases["balanced"]["run_seconds"]
        self.assertGreater(cases["hbp"]["run_seconds"], 1.35 * balanced)
        for fixed in ("packed-sp8", "packed-sp32"):
            self.assertGreater(cases[fixed]["run_seconds"], balanced)
        self.assertEqual(cases["balanced"]["samples"], cases["hbp"]["samples"])

    def test_the_small_case_trains(self):
        self.run_ballast(4, "train", self.DECK, "--case", "small", "-d", self.out("small"))


if __name__ == "__main__":
    unittest.main()

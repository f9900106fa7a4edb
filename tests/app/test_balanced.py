"""Whole-program tests of placement by time: groups of different size side by side, windows of
steps."""
import json
import os
import unittest

import numpy as np

from runs import RunCase
from test_dpo import safetensors

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
        run = self.train("mixed", 4, *BALANCED, "batching.micro_batch_tokens=100", dp=4)
        degrees = [
            {m.get("ranks", 1) for m in plan["micro_batches"]} for plan in self.stored(run).values()
        ]
        self.assertIn({1, 2, 4}, degrees, degrees)

    def test_fewer_samples_than_ranks_and_equal_ones(self):
        equal = ["data.source=lengths", "data.lengths=[96,96,96,96,96,96,96,96]"]
        for name, more in (
            ("one", ["batching.global_samples=1"]),
            ("three", ["batching.global_samples=3"]),
            ("equal", [*equal, "batching.global_samples=8", "data.validation_share=0"]),
        ):
            placed = self.train(name, 4, "run.precision=fp64", *BALANCED, *more, dp=4)
            one = self.train(name + "1", 1, "run.precision=fp64", *more, dp=1)
            self.assert_same(self.curve(one), self.curve(placed), name)
            row = self.steps(placed)[0]
            self.assertGreaterEqual(float(row["load_balance"]), 0)
            self.assertLessEqual(float(row["load_balance"]), 1)
            busy = {
                rank
                for m in self.stored(placed)[1]["micro_batches"]
                for rank in range(m["first"], m["first"] + m.get("ranks", 1))
            }
            self.assertEqual(int(row["idle_ranks"]), 4 - len(busy))
            with open(os.path.join(placed, "log.txt")) as f:
                self.assertIn("balance of step 1, expected over all 4 ranks", f.read())

    def test_live_chunks_of_a_sample_that_no_group_holds_are_bounded(self):
        found = []
        for more in (
            ["chunk.k=8"],
            ["chunk.k=1"],
            ["chunk.k=1", "chunk.offload=host", "chunk.window_tokens=256"],
            ["chunk.k=1", "pipeline.schedule=1f1b"],
        ):
            keys = ["--case", "balanced", "batching.micro_batch_tokens=64", "run.steps=2", *more]
            keys += ["data.source=lengths", "data.lengths=[2048]", "batching.global_samples=1"]
            keys += ["data.bin_tokens=[]", "data.bin_share=[]", "data.max_tokens=2048"]
            run = self.out(f"chunks{len(found)}")
            deck = os.path.join(os.environ["BALLAST_ROOT"], "inputs/chunkflow/figure8.toml")
            self.run_ballast(4, "train", deck, *keys, "-d", run)
            rows = [r for r in self.steps(run) if "loss" in r]
            found.append((rows[-1]["loss"], float(rows[-1]["memory_mib"])))
            with open(os.path.join(run, "log.txt")) as log:
                noted = "chunk.k has no effect" in log.read()
            self.assertEqual(noted, "pipeline.schedule=1f1b" in more)
        self.assertEqual(len({loss for loss, _ in found}), 1, found)
        kept, one, offloaded, unbounded = (memory for _, memory in found)
        self.assertLess(one, 0.8 * kept, found)
        self.assertLess(offloaded, 0.95 * one, found)
        self.assertGreaterEqual(unbounded, 0.99 * kept, found)

    def test_idle_ranks_are_seen_before_and_while_a_deck_runs(self):
        few = ["batching.global_samples=2", "batching.method=none"]
        done = self.run_ballast(1, "check", self.deck("few.toml", dp=4), *few)
        self.assertRegex(
            done.stdout,
            r"over all 4 ranks: 2 idle, load balance 0\.\d+ .*; evener with batching.method = "
            r'"balanced", or ',
        )
        row = self.steps(self.train("few", 4, *few, dp=4))[0]
        self.assertEqual(int(row["idle_ranks"]), 2)
        self.assertLess(float(row["load_balance"]), 0.6)


class Papers(Balanced):
    def test_algorithm_2_as_printed_trains(self):
        one = self.curve(self.train("one", 1, "run.precision=fp64", dp=1))
        printed = [
            "batching.method=hbp",
            "batching.packing=isf",
            "batching.groups=[80,160,300]",
            "batching.group_ranks=[1,2,4]",
        ]
        self.assert_same(
            one, self.curve(self.train("isf", 4, "run.precision=fp64", *printed, dp=4)), "isf"
        )

    def test_sorted_windows_with_equal_weight_for_every_sample_train(self):
        longalign = [
            "run.precision=fp64",
            "batching.window=4",
            "batching.window_rule=sorted",
            "loss.normaliser=sequence_mean",
        ]
        one = self.curve(self.train("one", 1, *longalign, dp=1))
        runs = [
            (4, {"dp": 4}, ["batching.method=balanced", "batching.micro_batch_tokens=100"]),
            (2, {"dp": 2}, ["batching.method=chunkflow", "chunk.tokens=64"]),
            (2, {"dp": 1}, ["mesh.pp=2"]),
        ]
        for i, (ranks, mesh, more) in enumerate(runs):
            run = self.train(f"longalign{i}", ranks, *longalign, *more, **mesh)
            self.assert_same(one, self.curve(run), str(runs[i]))


class Chunks(Balanced):
    def test_chunks_of_a_sample_count_as_one_in_every_normaliser(self):
        long = ["run.precision=fp64", "data.min_tokens=65", "batching.global_tokens=1500"]
        for normaliser in ("token_mean", "sample_mean", "sequence_mean"):
            of = [*long, f"loss.normaliser={normaliser}"]
            whole = self.train(normaliser, 1, *of, "batching.method=none", dp=1)
            cut = self.train(
                normaliser + "cut", 2, *of, "batching.method=chunkflow", "chunk.tokens=64", dp=2
            )
            self.assert_same(self.curve(whole), self.curve(cut), normaliser)


class Gradients(Balanced):
    def test_zero_2_of_one_replica_dumps_gradients(self):
        dumps = []
        for zero in (0, 2):
            file = self.out(f"zero{zero}.safetensors")
            self.train(
                f"zero{zero}",
                1,
                "run.precision=fp64",
                f"optimizer.zero={zero}",
                f"run.dump_gradients={file}",
                dp=1,
                steps=1,
            )
            with open(file, "rb") as f:
                dumps.append(f.read())
        self.assertEqual(dumps[0], dumps[1])

    def test_an_embedding_that_two_stages_hold_is_dumped_once(self):
        dumps, sizes = [], []
        for name, ranks, keys in (("one", 1, []), ("stages", 2, ["mesh.pp=2"])):
            file = self.out(name + ".safetensors")
            keys += ["model.tied_embedding=true", "run.precision=fp64"]
            self.train(name, ranks, *keys, f"run.dump_gradients={file}", dp=1, steps=1)
            dumps.append(safetensors(file))
            sizes.append(os.path.getsize(file))
        self.assertEqual(*sizes)  # a name that comes twice is one in what was loaded
        # Embedding and last norm, and of each layer two norms, four projections and three of the
        # MLP.
        self.assertEqual(len(dumps[0]), 2 + 2 * 9)
        self.assertEqual(list(dumps[0]), list(dumps[1]))
        for name, gradient in dumps[0].items():
            apart = np.linalg.norm(dumps[1][name] - gradient)
            self.assertLess(apart, 1e-6 * np.linalg.norm(gradient), name)


class Window(Balanced):
    def test_a_run_that_stops_inside_a_window_goes_on_alike_on_another_mesh(self):
        window = ["batching.global_tokens=1500", "batching.window=4", "run.precision=fp64"]
        whole = self.curve(self.train("whole", 2, *window, dp=2, steps=7))
        parts = self.train("parts", 2, *window, "optimizer.decay_steps=7", dp=2, steps=3, every=3)
        again = self.deck("again.toml", dp=1, cp_inner=2, steps=7, every=3)
        goes_on = ["train", again, "-d", parts, "-r", "latest", *window]
        for other in ("batching.window=3", "batching.global_tokens=1600"):
            refused = self.run_ballast(2, *goes_on, other, status=None)
            self.assertNotEqual(refused.returncode, 0, other)
            self.assertIn("window of 4 steps", refused.stdout + refused.stderr)
            self.assertIn("batching.global_tokens = 1500", refused.stdout + refused.stderr)
        self.run_ballast(2, *goes_on)
        self.assert_same(whole, self.curve(parts), "stopped after step 3 of 4")


class Deck(Balanced):
    DECK = os.path.join(os.environ.get("BALLAST_ROOT", ""), "inputs", "hbp", "balanced.toml")

    PROLONG = os.environ.get(
        "BALLAST_LENGTHS",
        os.path.join(
            os.environ.get("BALLAST_ROOT", ""), "..", "shared", "data", "prolong_lengths.txt"
        ),
    )

    def packed(self, *overrides):
        """Cases of 32 ranks by name, as planned."""
        out = self.out("pack.json")
        done = self.run_ballast(1, "pack", self.DECK, *overrides, "--json", out, timeout=600)
        with open(out) as f:
            cases = {c["name"]: c for c in json.load(f)["cases"]}
        cases.pop("small")
        for name, case in cases.items():
            gain = case["step_seconds"] / cases["balanced"]["step_seconds"]
            print(
                f"{name:18} {case['step_seconds']:.4f} s a step, {case['step_over_bound']:.4f} x"
                f" bound, {gain:.3f} x balanced, {case['batches']} steps"
            )
            self.assertTrue(case["trains"], name)
            self.assertIn(name, done.stdout)
        return cases

    def assert_bars(self, cases, over_fixed):
        balanced = cases["balanced"]["step_seconds"]
        self.assertGreater(cases["hbp"]["step_seconds"], 1.35 * balanced)
        fixed = [c["step_seconds"] for name, c in cases.items() if name.startswith("packed-")]
        self.assertGreater(min(fixed), over_fixed * balanced)
        self.assertLess(cases["balanced"]["step_over_bound"], 1.05)
        self.assertLess(cases["balanced-window-8"]["step_over_bound"], 1.05)
        self.assertLess(cases["balanced"]["length_share"], cases["longalign"]["length_share"])

    def test_balanced_is_faster_than_rounds_and_fixed_splits(self):
        cases = self.packed("data.samples=12000")
        self.assert_bars(cases, 1.0)
        self.assertEqual(cases["balanced"]["samples"], cases["hbp"]["samples"])

    def test_real_lengths_where_they_are(self):
        if not os.path.exists(self.PROLONG):
            self.skipTest("no file of real lengths: BALLAST_LENGTHS names one")
        cases = self.packed(
            "data.source=lengths", f"data.lengths_file={self.PROLONG}", "data.max_tokens=131072"
        )
        self.assertGreaterEqual(cases["balanced"]["batches"], 100)
        self.assert_bars(cases, 1.10)

    def test_the_small_case_trains(self):
        self.run_ballast(4, "train", self.DECK, "--case", "small", "-d", self.out("small"))


if __name__ == "__main__":
    unittest.main()

"""Whole-program tests of the needle task: accuracy while training, from a checkpoint, on every
mesh, in log, JSON and trace."""
import glob
import json
import os
import unittest

from runs import RunCase
from test_generation import Numpy

DECK = """# Tiny needle run for the tests.
[run]
seed = 5
steps = {steps}
precision = "fp64"
[mesh]
dp = {dp}
cp_outer = {cp_outer}
cp_inner = {cp_inner}
[model]
layers = 1
hidden = 16
intermediate = 16
query_heads = 2
kv_heads = 1
head_dim = 8
vocabulary = 24
[data]
source = "needle"
samples = 200
needle_held_out = 30
needle_lengths = [64, 96]
needle_pairs = [4, 8]
needle_questions = [4, 7]
needle_keys = 8
needle_values = {values}
needle_value_tokens = 2
needle_closing = {closing}
[batching]
micro_batch_tokens = 200
global_tokens = 800
[optimizer]
learning_rate = 0.01
[eval]
every_steps = {every}
depths = 3
"""


class Needle(RunCase):
    def evaluate(self, deck, run, ranks, *more):
        twin = self.out("eval.json")
        self.run_ballast(ranks, "eval", deck, "-d", run, "-r", "latest", "--json", twin, *more)
        with open(twin) as f:
            return json.load(f)

    def test_accuracy_is_the_same_on_every_mesh_and_everywhere(self):
        import h5py

        run, twin = self.out("run"), self.out("train.json")
        self.run_ballast(
            2, "train", self.deck(text=DECK, values=2, closing="true"), "-d", run, "--json", twin
        )
        with open(twin) as f:
            trained = json.load(f)
        logged = [r["needle_accuracy"] for r in self.steps(run) if "needle_accuracy" in r]
        self.assertEqual(len(logged), 3)
        found = None
        for ranks, dp, outer, inner in [(1, 1, 1, 1), (2, 1, 1, 2), (4, 2, 1, 2), (4, 1, 2, 2)]:
            deck = self.deck(
                "mesh.toml",
                text=DECK,
                values=2,
                closing="true",
                dp=dp,
                cp_outer=outer,
                cp_inner=inner,
            )
            for more in ([], ["ring.layout=striped", "ring.stripe=1"])[: 2 if ranks == 2 else 1]:
                again = self.evaluate(deck, run, ranks, *more)
                found = found or again
                self.assertEqual(
                    again["needle"], found["needle"], f"mesh dp {dp} cp {outer} x {inner} {more}"
                )
        self.assertAlmostEqual(found["needle_accuracy"], float(logged[-1]), places=5)
        self.assertEqual(found["needle"], trained["needle"])
        needle = found["needle"]
        by_length = {row["length"]: row for row in needle["by_length"]}
        self.assertEqual(sorted(by_length), [64, 96])
        self.assertEqual(by_length[64]["questions"] % 4 + by_length[96]["questions"] % 7, 0)
        self.assertEqual(by_length[64]["questions"] // 4 + by_length[96]["questions"] // 7, 30)
        self.assertEqual(len(needle["by_depth"]), 3)
        for rows in ("by_length", "by_depth", "cells"):
            self.assertEqual(sum(r["questions"] for r in needle[rows]), needle["questions"])
            self.assertAlmostEqual(
                sum(r["questions"] * r["accuracy"] for r in needle[rows]),
                needle["questions"] * needle["accuracy"],
                places=9,
            )
        self.assertTrue(0 < needle["accuracy"] < 1)  # two values of two tokens: a quarter by chance
        with h5py.File(glob.glob(os.path.join(run, "trace", "trace_00000.h5"))[0], "r") as f:
            steps = f["steps"][()]
            last = steps[steps["step"] == 6][0]
            self.assertEqual(last["needle_accuracy"], needle["accuracy"])
            self.assertEqual(last["needle_accuracy.length.96"], by_length[96]["accuracy"])
            self.assertEqual(last["needle_accuracy.depth.2"], needle["by_depth"][2]["accuracy"])

    def test_an_answer_is_right_when_all_its_tokens_are(self):
        """By a model in numpy, given the answer's tokens before each one; by length and depth."""
        deck, run = self.deck(text=DECK, values=2, closing="true", dp=1, every=0), self.out("run")
        self.run_ballast(1, "train", deck, "-d", run)
        texts = ["eval.generate_samples=30", "eval.generate_prefix_tokens=96"]
        found = self.evaluate(deck, run, 1, *texts, "eval.generate_tokens=1")
        samples, folder = [text["prompt"] for text in found["generated"]], self.out("exported")
        self.assertEqual({len(sample) for sample in samples}, {64, 96})
        last = os.path.join(run, "checkpoints", self.checkpoints(run)[-1])
        self.run_ballast(1, "export", last, folder, "--dtype", "f32")
        model, questions, half, right = Numpy(folder), 0, 0, {64: 0, 96: 0}
        for tokens in samples:
            for place in range(len(tokens) - 3 * (4 if len(tokens) == 64 else 7), len(tokens), 3):
                key, *answer = tokens[place : place + 3]
                self.assertTrue(key < 8 and set(answer) <= {8, 9}, tokens)
                told = [int(model.logits(tokens[: place + i]).argmax()) for i in (1, 2)]
                questions += 1
                half += sum(a == b for a, b in zip(told, answer)) == 1
                right[len(tokens)] += told == answer
        self.assertGreater(half, 0)
        needle = found["needle"]
        self.assertEqual(needle["questions"], questions)
        self.assertAlmostEqual(needle["accuracy"], sum(right.values()) / questions, places=9)
        for row in needle["by_length"]:
            self.assertEqual(round(row["accuracy"] * row["questions"]), right[row["length"]])
        for row, part in zip(needle["by_depth"], range(3), strict=True):
            self.assertAlmostEqual(row["depth_begin"], part / 3, places=9)
            self.assertAlmostEqual(row["depth_end"], (part + 1) / 3, places=9)

    def test_what_can_only_be_right_is_right(self):
        # One value token: every answer is known after a few steps, wherever its tokens lie.
        run = self.out("run")
        self.run_ballast(
            1,
            "train",
            self.deck(text=DECK, values=1, closing="false", dp=1, every=0, steps=12),
            "-d",
            run,
        )
        found = self.evaluate(
            self.deck("two.toml", text=DECK, values=1, closing="false", dp=1, cp_inner=2),
            run,
            2,
            "ring.layout=striped",
            "ring.stripe=1",
        )
        self.assertEqual(found["needle_accuracy"], 1)
        fresh = self.out("fresh")
        self.run_ballast(
            1,
            "train",
            self.deck(text=DECK, values=1, closing="false", dp=1, every=0, steps=1),
            "-d",
            fresh,
            "optimizer.learning_rate=0",
        )
        self.assertLess(
            self.evaluate(
                self.deck("one.toml", text=DECK, values=1, closing="false", dp=1), fresh, 1
            )["needle_accuracy"],
            0.5,
        )

    def test_eval_samples_limits_the_questions(self):
        run = self.out("run")
        self.run_ballast(
            2, "train", self.deck(text=DECK, values=2, closing="true", every=0), "-d", run
        )
        found = self.evaluate(
            os.path.join(run, "deck.toml"), run, 2, "eval.samples=1"
        )  # the effective deck, which states every key
        self.assertIn(found["needle"]["questions"], (4, 7))

    def test_evaluation_does_not_ask_for_the_order_of_training(self):
        run = self.out("run")
        self.run_ballast(
            1,
            "train",
            self.deck(text=DECK, values=2, closing="true", dp=1, every=0, steps=2),
            "-d",
            run,
            "curriculum.steps=1",
            "curriculum.max_tokens=64",
        )
        deck = self.deck("other.toml", text=DECK, values=2, closing="true", dp=1)
        found = self.evaluate(deck, run, 1, "batching.global_tokens=400")
        other = self.evaluate(
            deck, run, 1, "run.seed=6"
        )  # questions from another stream: none was trained on under any seed
        self.assertNotEqual(found["validation_loss"], other["validation_loss"])
        self.assertIn(
            "another curriculum",
            self.run_ballast(1, "train", deck, "-d", run, "-r", "latest", status=1).stderr,
        )
        # Of files another seed would hold out samples that were trained on.
        files = self.out("files")
        self.run_ballast(1, "train", self.deck("files.toml", dp=1, steps=1), "-d", files)
        self.assertIn(
            "some of them trained on",
            self.run_ballast(
                1,
                "eval",
                self.deck("files.toml", dp=1),
                "-d",
                files,
                "-r",
                "latest",
                "run.seed=12",
                status=1,
            ).stderr,
        )

    def test_a_tuned_run_is_evaluated_at_its_base_budget(self):
        run, deck = self.out("run"), self.deck(
            text=DECK, values=2, closing="true", dp=1, every=0, steps=3
        )
        long = ["data.needle_lengths=[64,256]", "batching.micro_batch_tokens=256"]
        self.run_ballast(1, "train", deck, "-d", run, *long)
        moba = ["attention.pattern=moba", "attention.moba_block=64"]
        slashes = [
            "attention.pattern=vertical_slash",
            "attention.max_slashes=1",
            "attention.max_columns=1",
        ]
        tuned = ["dst.enabled=true", "costs.forward_token_s=1e-6", "costs.forward_pair_s=1e-8"]

        def loss(*more):
            return self.evaluate(deck, run, 1, *long, *more)["validation_loss"]

        dense, narrow = loss(), loss(*moba, "attention.moba_top_k=2")
        self.assertGreater(abs(dense - narrow), 1e-6)
        self.assertAlmostEqual(
            loss(*moba, "attention.moba_top_k=4", *tuned, "dst.base_budget=2"), narrow, places=12
        )
        self.assertGreater(abs(dense - loss(*slashes)), 1e-6)
        self.assertAlmostEqual(
            loss(
                *slashes[:1],
                "attention.max_slashes=1",
                "attention.max_columns=0",
                *tuned,
                "dst.base_budget=8",
            ),
            dense,
            places=12,
        )  # 4 slashes, 4 x 64 columns


if __name__ == "__main__":
    unittest.main()

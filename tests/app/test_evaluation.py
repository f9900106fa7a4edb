"""Losses of held-out samples against a model in numpy: over tokens that carry loss, and by their
position; and what goes on after an evaluation."""
import json
import os
import unittest

import h5py
import numpy as np

from runs import RunCase
from test_dpo import Policy

SAMPLES, LENGTH, PROMPT, HELD_OUT = 20, 40, 12, 8


class Evaluation(RunCase):
    """Samples whose first PROMPT tokens carry no loss, as the prompts of conversations do."""

    def masked(self):
        path, rng = self.out("tokens.h5"), np.random.default_rng(3)
        with h5py.File(path, "w") as file:
            file["tokens"] = rng.integers(0, 200, SAMPLES * LENGTH).astype("<i4")
            file["loss_mask"] = np.tile(np.arange(LENGTH) >= PROMPT, SAMPLES).astype("u1")
            file["offsets"] = np.arange(0, SAMPLES * LENGTH + 1, LENGTH).astype("<i8")
        share = HELD_OUT / SAMPLES
        return ["data.source=hdf5", f"data.path={path}", f"data.validation_share={share}"]

    def evaluated(self, run, *settings):
        twin = self.out("eval.json")
        deck = self.deck("eval.toml", dp=1)
        self.run_ballast(1, "eval", deck, "-d", run, "-r", "latest", "--json", twin, *settings)
        with open(twin) as file:
            return json.load(file)

    def exported(self, run):
        folder = self.out("exported")
        last = os.path.join(run, "checkpoints", self.checkpoints(run)[-1])
        self.run_ballast(1, "export", last, folder, "--dtype", "f32")
        return Policy(folder)

    def test_held_out_losses_are_those_of_numpy(self):
        run, data = self.out("run"), self.masked()
        trained = [self.deck(steps=2), "-d", run, *data, "eval.every_steps=2"]
        self.run_ballast(2, "train", *trained, "run.precision=fp64")
        texts = ["eval.generate_tokens=1", f"eval.generate_samples={HELD_OUT}"]
        texts += [f"eval.generate_prefix_tokens={LENGTH}", "run.precision=fp64"]
        found, model = self.evaluated(run, *data, *texts), self.exported(run)
        samples = [text["prompt"] for text in found["generated"]]
        self.assertEqual([len(s) for s in samples], [LENGTH] * HELD_OUT)

        def loss(first, last):
            """Mean over targets at places [first, last) of the samples."""
            mask = [first <= i < last for i in range(LENGTH)]
            terms = [model.log_probability(sample, mask) for sample in samples]
            return -sum(terms) / (HELD_OUT * (last - first))

        self.assertEqual(found["samples"], HELD_OUT)
        self.assertEqual(found["loss_tokens"], HELD_OUT * (LENGTH - PROMPT))
        self.assertAlmostEqual(found["validation_loss"], loss(PROMPT, LENGTH), delta=1e-5)
        # A target stands one place behind the token that predicts it, whose place counts here.
        places = [(8, 16, PROMPT, 17), (16, 32, 17, 33), (32, 64, 33, LENGTH)]
        rows = found["loss_by_position"]
        self.assertEqual([(r["begin"], r["end"]) for r in rows], [p[:2] for p in places])
        for row, (_, _, first, last) in zip(rows, places):
            self.assertEqual(row["tokens"], HELD_OUT * (last - first))
            self.assertAlmostEqual(row["loss"], loss(first, last), delta=1e-5)
        (line,) = [row for row in self.steps(run) if "validation_loss" in row]
        self.assertAlmostEqual(float(line["validation_loss"]), loss(PROMPT, LENGTH), delta=1e-5)
        self.assertEqual(int(line["validation_tokens"]), HELD_OUT * (LENGTH - PROMPT))

    def test_draws_do_not_follow_the_step(self):
        """Sampled rows of coverage buy the index: they are the same in every evaluation."""
        keys = ["attention.pattern=vertical_slash", "attention.last_q=16", "dst.enabled=true"]
        keys += ["dst.coverage_rows=sampled", "dst.base_budget=2", "dst.budgets=[2,3]"]
        keys += ["data.max_tokens=1200", "batching.micro_batch_tokens=2048"]
        keys += ["batching.global_tokens=2048", "costs.forward_pair_s=1e-6"]
        keys += ["data.validation_share=0.3", "optimizer.learning_rate=1e-12"]
        run = self.out("run")
        deck = self.deck(dp=1, steps=4, every=0)
        self.run_ballast(1, "train", deck, "-d", run, *keys, "eval.every_steps=2")
        with open(os.path.join(run, "steps.jsonl")) as file:
            rows = [json.loads(line) for line in file]
        losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
        self.assertEqual(len(losses), 2)
        self.assertAlmostEqual(losses[0], losses[1], delta=1e-6)
        self.assertAlmostEqual(self.evaluated(run, *keys)["validation_loss"], losses[1], delta=1e-6)


if __name__ == "__main__":
    unittest.main()

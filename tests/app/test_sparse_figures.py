"""Figures of sparse attention in step lines, against the rows that ranks store: recall and its
interval, what caps leave out, drift of indexes."""
import json
import math
import os
import unittest
import zlib

import h5py

from runs import RunCase

SETTINGS = [
    "attention.pattern=vertical_slash",
    "attention.vertical_share=0.5",
    "attention.slash_share=0.5",
    "attention.last_q=32",
    "attention.max_columns=80",
    "data.validation_share=0.5",
    "trace.recall_every=2",
    "trace.recall_drift=true",
    "optimizer.learning_rate=0.05",
]


class SparseFigures(RunCase):
    def train(self, name, ranks, steps, *settings, **mesh):
        run, deck = self.out(name), self.deck(name + ".toml", steps=steps, every=0, dp=1, **mesh)
        self.run_ballast(ranks, "train", deck, "-d", run, *SETTINGS, *settings)
        with open(os.path.join(run, "steps.jsonl")) as file:
            return run, {row["step"]: row for row in map(json.loads, file)}

    def rows(self, run, kind):
        """Of rank 0, by step."""
        found = {}
        with h5py.File(os.path.join(run, "trace", "trace_00000.h5"), "r") as file:
            text = file["plan_text"][()].tobytes()
            for plan in file["plans"][: int(file["rows"][()]["plans"])]:
                if plan["kind"].decode() == kind:
                    part = text[int(plan["begin"]) :][: int(plan["bytes"])]
                    for row in json.loads(zlib.decompress(part)):
                        found.setdefault(row[0], []).append(row)
        return found

    def expect_recall(self, run, lines):
        recall = self.rows(run, "recall")
        self.assertEqual(sorted(recall), [1, 3, 5])
        for step, rows in recall.items():
            queries = sum(row[6] for row in rows)
            mean = sum(row[6] * row[7] for row in rows) / queries
            heads = len({row[4] for row in rows})  # measured on the same queries
            error = math.sqrt(heads * sum((row[6] * row[8]) ** 2 for row in rows)) / queries
            self.assertAlmostEqual(lines[step]["recall"], mean, delta=2e-6)
            self.assertGreater(error, 1e-4)
            self.assertAlmostEqual(lines[step]["recall_interval"], 1.96 * error, delta=2e-6)

    def expect_caps(self, run, lines):
        with h5py.File(os.path.join(run, "trace", "trace_00000.h5"), "r") as file:
            budgets = file["budgets"][: int(file["rows"][()]["budgets"])]
        for step, line in lines.items():
            rows = budgets[budgets["step"] == step]
            cut = rows["overflow"] > 0
            self.assertTrue(0 < cut.mean() < 1, "some choices meet the cap, others do not")
            self.assertAlmostEqual(line["cap_share"], cut.mean(), delta=1e-6)
            mass = rows["overflow_mass"][cut].sum() / len(rows)
            self.assertAlmostEqual(line["cap_mass"], mass, delta=1e-6)

    def expect_drift(self, run, lines):
        """Whose rate is 0 from step 3 on: the index of step 5 is that of step 3, not of step 1."""
        drift = self.rows(run, "drift")
        self.assertEqual(sorted(drift), [3, 5])
        for step, rows in drift.items():
            change = sum(row[3] * (row[4] - row[5]) for row in rows) / sum(row[3] for row in rows)
            self.assertAlmostEqual(lines[step]["drift"], change, delta=2e-6)
        self.assertGreater(abs(lines[3]["drift"]), 1e-4)
        self.assertEqual(lines[5]["lr"], 0)
        self.assertEqual([row[4] for row in drift[5]], [row[5] for row in drift[5]])

    def test_figures_are_those_of_the_rows(self):
        run, lines = self.train("alone", 1, 5, "optimizer.decay_steps=3")
        self.expect_recall(run, lines)
        self.expect_caps(run, lines)
        self.expect_drift(run, lines)
        # Ranks of a ring share a choice: it counts once.
        _, ring = self.train("ring", 2, 1, cp_inner=2)
        for key in ("recall", "recall_interval", "cap_share", "cap_mass"):
            self.assertAlmostEqual(ring[1][key], lines[1][key], delta=2e-5, msg=key)

    def test_drift_is_measured_where_something_is_left_out(self):
        """The first block and the diagonal are always computed: 100 tokens are whole."""
        data = ["data.source=needle", "data.needle_lengths=[100,600]", "data.samples=40"]
        data += ["data.needle_held_out=4", "data.needle_held_out_share=[0.5,0.5]"]
        data += ["data.validation_share=0", "data.max_tokens=0", "model.vocabulary=512"]
        data += ["batching.micro_batch_tokens=700"]
        run, _ = self.train("drift", 1, 3, *data)
        for row in self.rows(run, "drift")[3]:
            self.assertGreater(row[3], 400)

    def test_stages_name_the_same_micro_batches(self):
        """A stage behind the first prepares micro-batches while it is at work on others."""
        keys = ["mesh.pp=2", "pipeline.schedule=1f1b", "attention.index=generated"]
        keys += ["trace.recall_every=0", "trace.recall_drift=false"]
        run, _ = self.train("stages", 2, 1, *keys)
        found = []
        for rank in range(2):
            with h5py.File(os.path.join(run, "trace", f"trace_{rank:05}.h5"), "r") as file:
                budgets = file["budgets"][: int(file["rows"][()]["budgets"])]
            found.append(sorted(budgets["micro_batch"].tolist()))
        self.assertGreater(len(set(found[0])), 2)
        self.assertEqual(*found)


if __name__ == "__main__":
    unittest.main()

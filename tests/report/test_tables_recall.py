"""Recall and coverage rows of a trace in the report: known numbers."""
import csv

import synthetic
from support import RunTest
from synthetic import Rank


class KnownRecall(RunTest):
    def test_recall_and_coverage(self):
        """Two ranks of other heads: weighted means, intervals, parts, curves."""
        ranks = [Rank(r, 2, {"sp": 2}, {"sp": r}) for r in range(2)]
        for r in ranks:
            r.event("step", 100.0, 101.0, step=0)
            r.event("step", 101.0, 102.0, step=1)
        # step, micro-batch, chunk, layer, head, rows, queries, mean, error, p10, parts
        ranks[0].plan(
            "recall", 1, 0, [[0, 0, -1, 0, 0, 8, 100, 0.9, 0.03, 0.5, 0.1, 0.2, 0.5, 0.1]]
        )
        ranks[1].plan(
            "recall", 2, 0, [[0, 0, -1, 0, 1, 8, 300, 0.5, 0.01, 0.2, 0.1, 0.1, 0.2, 0.1]]
        )
        ranks[0].plan("coverage", 3, 0, [[0, 0, -1, 0, 1, 0.4, 0], [0, 0, -1, 0, 4, 0.9, 1]])
        deck = synthetic.DECK + '\n[attention]\npattern = "vertical_slash"\n'
        run = synthetic.write(self.folder / "recall", ranks, deck=deck)
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["recall"], 0.6)
        self.assertAlmostEqual(m["recall_interval"], 1.96 * (2 * 18) ** 0.5 / 400)
        with open(run / "report" / "recall.csv", newline="") as f:
            (row,) = csv.DictReader(f)
        self.assertAlmostEqual(float(row["recall"]), 0.6)
        self.assertAlmostEqual(float(row["10th percentile"]), 0.2)
        self.assertAlmostEqual(float(row["own block"]), 0.125)
        with open(run / "report" / "recall_rows.csv", newline="") as f:
            self.assertEqual([float(r["head"]) for r in csv.DictReader(f)], [0, 1])
        with open(run / "report" / "coverage.csv", newline="") as f:
            self.assertEqual([float(r["coverage"]) for r in csv.DictReader(f)], [0.4, 0.9])
        self.assertEqual(len(self.figures(run / "report")["recall"]), 4)
        self.assertIn("0.900 of the observed", self.body(run / "report"))

    def test_coverage_is_weighted_by_queries(self):
        """Rank 1 of two tells C(k) of a long micro-batch, 0.7, which a dense segment of 100 queries
        raised to 0.76, and of a short one, 1; recall speaks of the 400 and 100 long queries."""
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        plan = synthetic.batch_plan((0, 1, [9]), (1, 1, [400, 100]), (1, 1, [100]), (1, 1, [50]))
        plan["lanes"] = [{"micro_batches": [0]}, {"micro_batches": [1, 2, 3]}]
        for r in ranks:
            r.event("step", 100.0, 101.0, step=0)
            r.plan("step", 1, 0, plan)
        parts = [0.5, 0.1, 0.1, 0.4, 0.1]
        rows = [[0, 0, -1, 0, 0, 8, 400, 0.65, 0, *parts], [0, 1, -1, 0, 0, 8, 100, 1, 0, *parts]]
        ranks[1].plan("recall", 2, 0, rows)
        told = [[0, 0, -1, 0, 4, 0.76, 1], [0, 1, -1, 0, 4, 1, 1], [0, 2, -1, 0, 4, 1, 1]]
        ranks[1].plan("coverage", 3, 0, told)
        deck = synthetic.DECK + '\n[attention]\npattern = "vertical_slash"\n'
        run = synthetic.write(self.folder / "weighted", ranks, deck=deck)
        self.report(run)
        (curve,) = self.figures(run / "report")["recall"][-1]["data"]
        self.assertAlmostEqual(curve["y"][0], (500 * 0.76 + 100 + 50) / 650, places=5)
        self.assertEqual(self.metrics(run / "report")["notes"], [])  # 0.76, and 0.72 held
        rows[0][7] = 0.6
        ranks[1].lines = [x for x in ranks[1].lines if "\trecall\t" not in x]
        ranks[1].plan("recall", 2, 0, rows)
        self.report(synthetic.write(self.folder / "far", ranks, deck=deck))
        (note,) = self.metrics(self.folder / "far" / "report")["notes"]
        self.assertIn("0.760 of the observed queries' attention, and 0.680 of all", note)

    def test_a_coverage_below_the_recall_is_noted_too(self):
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        parts = [0.5, 0.1, 0.1, 0.4, 0.1]
        r.plan("recall", 2, 0, [[0, 0, -1, 0, 0, 8, 400, 0.9, 0, *parts]])
        r.plan("coverage", 3, 0, [[0, 0, -1, 0, 4, 0.7, 1]])
        deck = synthetic.DECK + '\n[attention]\npattern = "vertical_slash"\n'
        run = synthetic.write(self.folder / "below", [r], deck=deck)
        self.report(run, draw=False)
        (note,) = self.metrics(run / "report")["notes"]
        self.assertIn("hold 0.700 of the observed queries' attention, and 0.900 of all", note)

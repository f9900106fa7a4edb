"""Values of the figures on attention: rings, recall, patterns of heads."""
import unittest

import synthetic
from support import RunTest
from synthetic import Rank


class Values(RunTest):
    def figures_of(self, ranks):
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run)
        return self.figures(run / "report")

    def test_ring_times_are_in_the_unit_of_their_scale(self):
        """2 ms of computation and 3 of waiting: colours reach to their sum."""
        ranks = [Rank(r, 2, {"cp_inner": 2}, {"cp_inner": r}) for r in range(2)]
        place = {"step": 0, "mb": 0, "layer": 0, "outer": 0, "inner": 0}
        for r in ranks:
            r.event("step", 0, 0.010, step=0)
            r.event("attention_forward", 0, 0.002, **place)
            r.event("ring_wait", 0.002, 0.005, **place)
        computation = self.figures_of(ranks)["ring"][0]["data"][0]
        self.assertEqual(computation["z"], [[2], [2]])
        self.assertAlmostEqual(computation["zmax"], 5)

    def test_recall_and_its_parts_are_weighted_by_queries(self):
        """100 queries with a recall of 0.9 and 300 with 0.5, of which their own block is 0.2 and
        0.1."""
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        rows = [
            [0, mb, -1, 0, 0, 8, queries, mean, 0.03, 0.5, 0.1, own, 0.5, 0.1]
            for mb, queries, mean, own in ((0, 100, 0.9, 0.2), (1, 300, 0.5, 0.1))
        ]
        r.plan("recall", 1, 0, rows)
        heat, _, parts = self.figures_of([r])["recall"]
        _, (cells, *_), *_ = heat["by_step"][0]
        self.assertAlmostEqual(cells["z"][0][0], (100 * 0.9 + 300 * 0.5) / 400)
        self.assertAlmostEqual(parts["data"][1]["y"][0], (100 * 0.2 + 300 * 0.1) / 400)

    def test_shares_of_patterns_are_of_each_head(self):
        """Head 0 chose one pattern three times of four, head 1 always."""
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        for kind in (1, 1, 1, 3):
            r.budget(0, 0, 0, 4, 10, 100, kind=kind)
        r.budget(0, 0, 1, 4, 10, 100, kind=1)
        panel = self.figures_of([r])["sparsity"][-1]
        _, (cells, *_), *_ = panel["by_step"][0]
        self.assertEqual(cells["z"], [[0.75, 1]])


if __name__ == "__main__":
    unittest.main()

"""Several runs side by side: whose steps, which units, which differences."""
import unittest

import synthetic
from support import RunTest
from synthetic import Rank


class SideBySide(RunTest):
    """Three runs of two ranks, of which rank 1 takes twice as long as rank 0 and ends after one of
    two steps.  Rank 0's steps take 10, 20 and 40 ms."""

    def setUp(self):
        super().setUp()
        runs = [self.run_of(name, s) for name, s in (("a", 0.01), ("b", 0.02), ("c", 0.04))]
        self.out = self.folder / "out"
        self.report(*runs, "--out", self.out)

    def run_of(self, name, seconds):
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            for step in range(2 - r.rank):
                r.event("step", step, step + seconds * (1 + r.rank), step=step)
                r.step(step, peak_bytes_total=2.0**21)
        return synthetic.write(self.folder / name, ranks)

    def test_memory_is_in_mebibytes(self):
        rows = {r["metric"]: r for r in self.table(self.out, "comparison.csv")}
        self.assertEqual(float(rows["peak memory (MiB)"]["a"]), 2)

    def test_a_step_takes_what_its_slowest_rank_takes(self):
        row = self.table(self.out, "comparison_steps.csv")[0]
        self.assertAlmostEqual(float(row["a (s)"]), 0.02)

    def test_differences_are_to_the_first_run(self):
        row = self.table(self.out, "comparison_steps.csv")[0]
        self.assertAlmostEqual(float(row["b - a (s)"]), 0.04 - 0.02)
        self.assertAlmostEqual(float(row["c - a (s)"]), 0.08 - 0.02)

    def test_curves_are_in_the_unit_of_their_axis(self):
        panel = self.figures(self.out, "")["steps"][0]
        self.assertAlmostEqual(panel["data"][0]["y"][0], 20)

    def test_the_mean_split_is_over_steps_that_a_rank_has(self):
        """10 and 10 ms of rank 0, 20 of rank 1."""
        panel = self.figures(self.out, "")["where"][0]
        shown = sum(t["y"][0] for t in panel["data"])
        self.assertAlmostEqual(shown, (10 + 10 + 20) / 3, places=3)


if __name__ == "__main__":
    unittest.main()

"""Several runs side by side: whose steps, which units, which differences."""
import unittest

import synthetic
from support import RunTest
import tables
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

    def test_every_number_of_metrics_json_is_compared(self):
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.event("forward", 0, 4, step=0, mb=0)
        r.predicted("forward", 0, 5, step=0, mb=0)
        r.budget(0, 0, 0, 8, 100, 400, 3)
        r.step(0, loss=3.0, tokens=9, mfu=0.5, peak_bytes_total=2.0**21, validation_loss=2.0)
        r.plan("recall", 1, 0, [[0, 0, -1, 0, 0, 8, 100, 0.9, 0.03, 0.5, 0.1, 0.2, 0.5, 0.1]])
        r.plan("step", 2, 0, synthetic.batch_plan((0, 1, [64])))
        run = synthetic.write(self.folder / "whole", [r])
        self.report(run, run, "--out", self.out, draw=False)
        case = self.metrics(self.out)["cases"][0]
        numbers = {k: v for k, v in case.items() if isinstance(v, (int, float))}
        self.assertLessEqual({"recall_interval", "schedule_s", "budget_overflow"}, set(numbers))
        compared = {key: label for key, label, _ in tables.COMPARED}
        self.assertEqual([key for key in numbers if key not in compared], [])
        rows = {r["metric"]: r["whole"] for r in self.table(self.out, "comparison.csv")}
        for key, value in numbers.items():
            factor = 2**-20 if key == "peak_bytes" else 1
            self.assertAlmostEqual(float(rows[compared[key]]), value * factor, msg=key)

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

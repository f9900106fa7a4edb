"""Values of a run's figures: their units and weights."""
import unittest

import synthetic
from support import RunTest
from synthetic import Rank


class Values(RunTest):
    def figures_of(self, run):
        self.report(run)
        return self.figures(run / "report")

    def test_memory_is_in_the_unit_of_its_axis(self):
        """Activations of 1 and 2 MiB."""
        figures = self.figures_of(synthetic.known_run(self.folder / "known"))
        (panel,) = figures["memory"]
        self.assertEqual(panel["data"][0]["y"], [1, 2])

    def test_lengths_are_weighted_by_their_tokens(self):
        """Two steps with a segment of 2048 and one of 1024 tokens."""
        figures = self.figures_of(synthetic.known_run(self.folder / "known"))
        self.assertEqual(sum(figures["lengths"][1]["data"][0]["y"]), 2 * (2048 + 1024))

    def test_step_times_are_in_the_unit_of_their_axis(self):
        """A step of 10 ms, of which 2 are spent in forward."""
        r = Rank(0, 1)
        r.event("step", 0, 0.010, step=0)
        r.event("forward", 0, 0.002, step=0, mb=0)
        figures = self.figures_of(synthetic.write(self.folder / "r", [r]))
        self.assertAlmostEqual(sum(t["y"][0] for t in figures["split"][1]["data"]), 10)


if __name__ == "__main__":
    unittest.main()

"""What the timeline shows where ranks are many and came and went."""
from support import RunTest
from test_starts import TWO, batch_plan, start


class ManyRanks(RunTest):
    def test_steps_of_fewer_ranks_are_drawn_too(self):
        """Two ranks, then forty, of which 0 and 1 are neither the slowest nor the fastest."""
        run, ranks = self.folder / "run", 40
        order = [*range(2, 11), 0, *range(11, 13), 1, *range(13, ranks)]
        busy = [1 + 0.05 * order.index(r) for r in range(ranks)]
        start(run, range(2), {"dp": 2}, [0.001, 0.001], 4, TWO, 50)
        many = batch_plan(*((d, 1, [1000]) for d in range(ranks)))
        start(run, range(2, 4), {"dp": ranks}, busy, 4, many, 9)
        self.report(run, draw=True)
        (timeline,) = self.figures(run / "report")["timeline"]
        labels = [label for label, _ in timeline["by_step"]]
        self.assertEqual(labels, ["step 1", "step 2", "step 3", "step 4"])
        for _, bars in timeline["by_step"]:
            self.assertTrue(bars)

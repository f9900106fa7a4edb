"""What all ranks of a ring have alike is told where its first one left no trace."""
import synthetic
from support import RunTest
from synthetic import Rank, batch_plan


class LostTraces(RunTest):
    def test_budgets_of_a_ring_are_those_of_a_rank_that_is_left(self):
        """A ring of two levels of two: two of the three that are left are its first at a level."""
        mesh = {"cp_outer": 2, "cp_inner": 2}
        ranks = [Rank(r, 4, mesh, {"cp_outer": r // 2, "cp_inner": r % 2}) for r in range(4)]
        for r in ranks:
            r.event("step", 0, 10, step=0)
            r.event("forward", 0, 4, step=0, mb=0)
            for head in range(2):
                r.budget(0, 0, head, 8, 100, 400, 3)
            r.plan("step", 5, 0, batch_plan((0, 1, [64, 64])))
        run = synthetic.write(self.folder / "run", ranks)
        for lost in (None, 0):
            if lost is not None:
                (run / "trace" / f"trace_{lost:05}.h5").unlink()
            self.report(run)
            found = self.metrics(run / "report")
            self.assertEqual(found["mean_budget"], 8)
            self.assertEqual(found["budget_overflow"], 2 * 3)

"""Scalars of steps: of which rank a value is, and what is told of losses that are no number."""
import json
import unittest

import synthetic
from support import RunTest
from synthetic import Rank


def start(run, steps, owners, losses=()):
    """Two replicas' steps of 10 s and 100 tokens, of which `owners` left a trace."""
    ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}, segment=steps[0]) for r in owners]
    for r in ranks:
        for n, step in enumerate(steps):
            t = 50 + 10 * n
            r.event("step", t, t + 10, step=step)
            r.event("forward", t, t + 4, step=step, mb=0)
            r.step(step, loss=10.0 - step, tokens=100, computation_s=1.0 + r.rank)
            if n < len(losses):
                r.step(step, validation_loss=losses[n], validation_tokens=7)
    return synthetic.write(run, ranks)


class LostSteps(RunTest):
    """Ten steps, of which rank 0 has the last two alone: its file was damaged, and begun anew."""

    def setUp(self):
        super().setUp()
        self.run_folder = self.folder / "run"
        start(self.run_folder, range(8), [1])
        start(self.run_folder, range(8, 10), [0, 1])
        self.report(self.run_folder, draw=False)
        self.found = self.metrics(self.run_folder / "report")

    def test_steps_that_a_rank_lacks_are_those_of_another(self):
        self.assertEqual((self.found["first_loss"], self.found["loss"]), (10, 1))
        self.assertAlmostEqual(self.found["tokens_per_s_per_rank"], 10 * 100 / (100 * 2))
        rows = self.table(self.run_folder / "report", "steps.csv")
        self.assertEqual([float(r["loss"]) for r in rows], [10.0 - s for s in range(10)])

    def test_what_a_rank_measures_of_itself_is_of_one_rank(self):
        rows = self.table(self.run_folder / "report", "steps.csv")
        self.assertEqual([float(r["computation_s"]) for r in rows], [2] * 10)
        self.assertIn("is rank 1's in steps.csv", " ".join(self.found["notes"]))


class LostLosses(RunTest):
    def numbers(self, losses):
        run = start(self.folder / "run", range(len(losses)), [0, 1], losses)
        self.report(run, draw=False)

        def refuse(constant):
            self.fail(f"{constant} is no JSON")

        text = (run / "report" / "metrics.json").read_text()
        return json.loads(text, parse_constant=refuse)

    def test_the_last_finite_one_stands_and_a_note_says_so(self):
        for lost in ("nan", "inf"):
            with self.subTest(lost):
                self.folder /= lost
                found = self.numbers([3.0, 2.0, float(lost)])
                self.assertEqual(found["validation_loss"], 2)
                notes = " ".join(found["notes"])
                self.assertIn("the held-out loss of step 3, the last one taken, is no", notes)
                self.assertIn("validation_loss is that of step 2", notes)
                self.assertNotIn("training loss", notes)

    def test_none_that_is_finite(self):
        found = self.numbers([float("nan")])
        self.assertNotIn("validation_loss", found)
        self.assertTrue(found["notes"][0].endswith("is no finite number"), found["notes"])

    def test_sound_losses_need_no_note(self):
        self.assertEqual(self.numbers([3.0, 2.0])["notes"], [])

    def test_steps_that_were_simulated_have_no_loss(self):
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.step(0, tokens=100)
        run = synthetic.write(self.folder / "run", [r])
        self.report(run, draw=False)
        self.assertEqual(self.metrics(run / "report")["notes"], [])


if __name__ == "__main__":
    unittest.main()

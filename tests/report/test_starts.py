"""Runs that were continued on another number of ranks or another mesh."""
import csv
import time
import unittest
from types import SimpleNamespace

import numpy as np
import synthetic
from support import RunTest
import starts
from synthetic import Rank, batch_plan

FOUR = batch_plan(*((d, 1, [1000]) for d in range(4)))
TWO = batch_plan((0, 1, [1000]), (1, 1, [2000]))


def start(run, steps, mesh, busy, length, plan, clock, kill=False):
    """Ranks that compute `busy` seconds in each step, which takes `length`; places go over dp, then
    cp."""
    cp, ranks = mesh.get("cp_inner", 1), []
    for r, seconds in enumerate(busy):
        at = {"dp": r // cp, "cp_inner": r % cp}
        rank = Rank(r, len(busy), mesh, at, segment=steps[0])
        for n, step in enumerate(steps):
            t = clock + length * n
            rank.event("step", t, t + length, step=step)
            rank.event("forward", t, t + seconds, step=step, mb=0)
            rank.predicted("forward", 0, seconds, step=step, mb=0)
            tokens = sum(s[2] for m in plan["micro_batches"] for s in m["segments"])
            rank.step(step, loss=1.0, tokens=tokens)
            rank.plan("step", tokens, step, plan)
        ranks.append(rank)
    return synthetic.write(run, ranks, kill=kill)


class Continued(RunTest):
    def numbers(self, run):
        self.report(run, draw=False)
        return self.metrics(run / "report")

    def test_on_fewer_ranks(self):
        """Three steps on four ranks and, after three that were given up, seven on two."""
        run = self.folder / "run"
        start(run, range(6), {"dp": 4}, [1, 2, 3, 4], 10, {**FOUR, "mesh": {"dp": 4}}, 50, True)
        start(run, range(3, 10), {"dp": 2}, [4, 6], 8, {**TWO, "mesh": {"dp": 2}}, 9)
        m = self.numbers(run)
        useful, most, whole = 3 * 10 + 7 * 10, 3 * 4 * 4 + 7 * 2 * 6, 3 * 4 * 10 + 7 * 2 * 8
        want = {
            "ranks": 2,
            "ranks_read": 4,
            "steps": 10,
            "runtime_s": 86,
            "step_time_s": 8.6,
            "load_balance": useful / most,
            "communication_efficiency": most / whole,
            "parallel_efficiency": useful / whole,
            "tokens_per_s_per_rank": (3 * 4000 + 7 * 3000) / whole,
            "ave_t": (3 * 1000 + 7 * 1500) / 10,
            "dbr": 0.7 * 0.25,
            "abr": 0.7 * 0.375,
            "schedule_s": (3 * 4 + 7 * 6) / 10,
            "prediction_error": 0,
        }
        for name, value in want.items():
            self.assertAlmostEqual(m[name], value, msg=name)
        notes = " ".join(m["notes"])
        self.assertIn("steps 1-3 on 4, 4-10 on 2 ranks", notes)
        self.assertNotIn("not recorded to the end", notes)
        told = " ".join(m["verdict"]["ranks"])
        # Of the mean of their steps: rank 0 31 s of 42.5, rank 1 48 of 42.5, 2 and 3 9 and 12 of
        # 7.5.
        self.assertIn("Ranks 1-3 computed more than 10 % above the mean, at most 60 %", told)
        self.assertNotIn("less than half", told)
        with open(run / "report" / "pop.csv", newline="") as file:
            rows = list(csv.DictReader(file))[:4]
        shares = [float(row["useful / runtime"]) for row in rows]
        for share, value in zip(shares, (31 / 86, 48 / 86, 9 / 30, 12 / 30)):
            self.assertAlmostEqual(share, value)
        # Of the slowest rank of both starts: 3 x 4 s, then 7 x 6 s.
        self.assertAlmostEqual(float(rows[0]["useful / max useful"]), 31 / (3 * 4 + 7 * 6))

    def test_on_more_ranks(self):
        """Ranks that joined later did as much as the others of their steps."""
        run = self.folder / "run"
        start(run, range(3), {"dp": 2}, [4, 4], 10, TWO, 50)
        start(run, range(3, 6), {"dp": 2, "cp_inner": 2}, [2] * 4, 10, TWO, 9)
        m = self.numbers(run)
        self.assertEqual((m["steps"], m["load_balance"]), (6, 1))
        self.assertAlmostEqual(m["parallel_efficiency"], (3 * 8 + 3 * 8) / (3 * 20 + 3 * 40))
        self.assertAlmostEqual(m["ave_t"], 1500)
        self.assertAlmostEqual(m["cr"], 0.5)  # a ring shares the tokens of the last three
        self.assertNotIn("not recorded to the end", " ".join(m["notes"]))
        self.assertEqual(len(m["verdict"]["ranks"]), 1, m["verdict"]["ranks"])
        self.assertIn("All ranks computed alike", m["verdict"]["ranks"][0])

    def test_heads_are_those_of_the_mesh_that_chose(self):
        """Two ranks that each hold one of two heads, then replicas that hold both."""
        run = self.folder / "run"
        for step, mesh, heads in ((0, "sp", 1), (1, "dp", 2)):
            ranks = [Rank(r, 2, {mesh: 2}, {mesh: r}, segment=step) for r in range(2)]
            for r in ranks:
                r.event("step", 10, 20, step=step)
                for head in range(heads):
                    r.budget(step, 0, head, 8, 10, 100, overflow=1)
            synthetic.write(run, ranks)
        self.numbers(run)
        with open(run / "report" / "budgets.csv", newline="") as file:
            rows = [(r["step"], r["head"], r["overflow"]) for r in csv.DictReader(file)]
        self.assertEqual(rows, [("1", "0", "1"), ("1", "1", "1"), ("2", "0", "2"), ("2", "1", "2")])

    def test_plans_that_were_given_up_do_not_count(self):
        """Four steps of 1000 tokens, of which the last two ran again with 2000."""
        run = self.folder / "run"
        start(run, range(4), {}, [1], 10, batch_plan((0, 1, [1000])), 50)
        start(run, range(2, 4), {}, [1], 10, batch_plan((0, 1, [2000])), 9)
        self.assertAlmostEqual(self.numbers(run)["ave_t"], (2 * 1000 + 2 * 2000) / 4)

    def test_tokens_a_second_are_over_ranks_without_a_trace_too(self):
        """3072 tokens a step of 10 s, by two ranks."""
        run = synthetic.known_run(self.folder / "known")
        (run / "trace" / "trace_00001.h5").unlink()
        self.assertAlmostEqual(self.numbers(run)["tokens_per_s_per_rank"], 3072 / 10 / 2)


class LongRuns(unittest.TestCase):
    def test_a_step_is_found_without_going_through_all(self):
        """Both ways to do it differ a hundredfold here."""
        count = 2_000_000
        session = SimpleNamespace(number=1)
        trace = SimpleNamespace(sessions=[SimpleNamespace(number=0), session], last=session)
        a = SimpleNamespace(ranks=[0], run=SimpleNamespace(traces={0: trace}, first_trace=trace))
        a.steps, a.session = 2 * np.arange(count), (np.arange(count) >= count // 2).astype(int)
        begin = time.process_time()
        for step in range(0, 2 * count, count // 100):
            number = int(step >= count)
            self.assertEqual(starts.session_of_step(a, step).number, number)
        self.assertLess(time.process_time() - begin, 0.5)
        found = starts.session_numbers(a, [0, 1, 2 * count - 2, 2 * count, -1])
        self.assertEqual(found.tolist(), [0, 1, 1, 1, 1])


class StepsWithoutPlans(RunTest):
    """A step counts where its ranks cannot have shared micro-batches."""

    def notes(self, dp, batching):
        deck = f"[mesh]\ndp = {dp}\n[batching]\n{batching}\n"
        ranks = [Rank(r, dp, {"dp": dp}, {"dp": r}, deck=deck) for r in range(dp)]
        for r in ranks:
            r.event("step", 0, 1, step=0)
            r.event("forward", 0, 1, step=0, mb=0)
        run = synthetic.write(self.folder / f"run{len(deck)}", ranks, deck=deck)
        self.report(run, draw=False)
        return " ".join(self.metrics(run / "report")["notes"])

    def test_one_replica_shares_with_no_other(self):
        self.assertEqual(self.notes(1, 'method = "balanced"'), "")

    def test_groups_of_one_rank_share_nothing(self):
        self.assertEqual(self.notes(2, 'method = "hbp"\ngroup_ranks = [1, 1]'), "")

    def test_balanced_replicas_may_have_shared(self):
        self.assertIn("1 of 1 steps hold no plan", self.notes(2, 'method = "balanced"'))


if __name__ == "__main__":
    unittest.main()

"""Rings that data-parallel ranks joined for a micro-batch: who is in one, and its balance, by
hand."""
import types
import unittest

import numpy as np

import support
import synthetic
from synthetic import Rank
import analysis
import load
import ring

KINDS = ["attention_forward", "attention_backward", "ring_wait"]
FIELDS = ("session", "begin_s", "end_s", *ring.FIELDS)


def events(rows):
    """Of (step, micro-batch, inner, begin, end): forward events of layer 0."""
    made = np.zeros(len(rows), [(f, "f8" if f.endswith("_s") else "i4") for f in FIELDS])
    for event, (step, micro_batch, inner, begin, end) in zip(made, rows):
        for field, value in (
            ("step", step), ("micro_batch", micro_batch), ("inner", inner), ("begin_s", begin),
            ("end_s", end), ("kind", load.code("attention_forward")),
        ):  # fmt: skip
            event[field] = value
    return made


def run(plan, rows_by_dp):
    """rank -> trace of dp ranks alone, the plan in the first."""
    return {
        dp: types.SimpleNamespace(
            executed_by_step=lambda kind, mine=[(1, plan)] if dp == 0 else []: mine,
            sessions=[types.SimpleNamespace(number=0, at={"dp": dp})],
            events=events(rows),
        )
        for dp, rows in enumerate(rows_by_dp)
    }


def plan_of(micro_batches, lanes, sp=1):
    return {
        "step": 1,
        "mesh": {"sp": sp},
        "micro_batches": micro_batches,
        "lanes": [{"micro_batches": ids} for ids in lanes],
    }


class JoinedRings(unittest.TestCase):
    def setUp(self):
        self.kept = list(load.KINDS)
        load.KINDS[:] = KINDS

    def tearDown(self):
        load.KINDS[:] = self.kept

    def test_ranks_that_share_a_micro_batch_are_one_ring(self):
        # Rank 0 has a micro-batch of its own first, so the shared one is its second.
        plan = plan_of(
            [{"first": 0, "ranks": 1, "split": [1, 1, 1]},
             {"first": 0, "ranks": 2, "split": [1, 1, 2]}],
            [[0, 1], [1]],
        )  # fmt: skip
        traces = run(
            plan,
            [[(1, 0, 0, 0, 9), (1, 1, 0, 10, 11), (1, 1, 1, 11, 12)],
             [(1, 0, 0, 10, 13), (1, 0, 1, 13, 14)]],
        )  # fmt: skip
        balance, times = ring.analyse(traces)
        workers, steps, compute, _ = times["forward"]
        self.assertEqual((workers, steps), ([0, 1], [(0, 0), (0, 1)]))
        np.testing.assert_array_equal(compute, [[1, 1], [3, 1]])
        # Mean over the ring steps of the largest over the mean: 3 / 2 and 1.
        self.assertAlmostEqual(balance["forward"]["worker_imbalance"], 1.25)

    def test_ranks_that_share_heads_are_in_different_rings(self):
        # Four ranks: heads over two adjacent ones, rings of ranks 0 and 2, 1 and 3.
        plan = plan_of([{"first": 0, "ranks": 4, "split": [2, 1, 2]}], [[0]] * 4)
        joined = ring._joined(run(plan, [[]] * 4))
        rings = [joined[1, dp, 0] for dp in range(4)]
        self.assertEqual([rings[0], rings[1]], [rings[2], rings[3]])
        self.assertNotEqual(rings[0], rings[1])
        # A plan states no split where all ranks of a group share heads.
        heads_alone = plan_of([{"first": 0, "ranks": 2}], [[0]] * 2)
        joined = ring._joined(run(heads_alone, [[]] * 2))
        self.assertNotEqual(joined[1, 0, 0], joined[1, 1, 0])
        # Where the mesh itself shares heads, its ranks are apart already.
        within = plan_of([{"first": 0, "ranks": 2, "split": [2, 1, 2]}], [[0]] * 2, sp=2)
        joined = ring._joined(run(within, [[]] * 2))
        self.assertEqual(joined[1, 0, 0], joined[1, 1, 0])


class Places(unittest.TestCase):
    def test_heads_and_rings_of_joined_ranks(self):
        """Six data-parallel ranks with two of the mesh's own for heads: ranks 0 and 1 share heads,
        2 and 3, 4 and 5 are further on their ring."""
        plan = {
            "mesh": {"sp": 2},
            "micro_batches": [
                {"first": 0, "ranks": 6, "split": [4, 1, 3]},
                {"first": 3, "ranks": 1, "split": [2, 1, 1]},
            ],
            "lanes": [{"micro_batches": [0, 1]} for _ in range(6)],
        }
        places = [
            analysis._place_in_group(plan, {"dp": dp, "sp": sp}, 0)[1:]
            for dp in range(6)
            for sp in range(2)
        ]
        want = [(2 * (dp % 2) + sp, (dp // 2, 0, 0)) for dp in range(6) for sp in range(2)]
        self.assertEqual(places, want)
        alone = analysis._place_in_group(plan, {"dp": 3, "sp": 1}, 1)
        self.assertEqual(alone, ((3, 1), 1, (0, 0, 0)))
        unplanned = analysis._place_in_group(None, {"sp": 1, "cp_inner": 2}, 0)
        self.assertEqual(unplanned, ((0, 0), 1, (0, 0, 2)))


class Measured(support.RunTest):
    """What the report says of a ring whose events are known."""

    def ranks(self, mesh="cp_inner"):
        ranks = [Rank(r, 2, {mesh: 2}, {mesh: r}) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 20, step=0)
        return ranks

    def attention(self, rank, begin, end, inner=0, kind="attention_forward"):
        rank.event(kind, begin, end, step=0, mb=0, layer=0, outer=0, inner=inner)

    def metrics_of(self, ranks):
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run, draw=False)
        return self.metrics(run / "report")

    def test_the_imbalance_is_of_both_directions(self):
        """Forward 1 and 1 s on rank 0, 2 and 4 s on rank 1; backward 2 s everywhere."""
        ranks = self.ranks()
        for r in ranks:
            for inner, seconds in enumerate(([1, 1], [2, 4])[r.rank]):
                self.attention(r, 5 * inner, 5 * inner + seconds, inner)
            for inner in range(2):
                begin = 10 + 5 * inner
                self.attention(r, begin, begin + 2, inner, "attention_backward")
        forward, backward = (2 / 1.5 + 4 / 2.5) / 2, 1
        m = self.metrics_of(ranks)
        self.assertAlmostEqual(m["worker_imbalance"], (forward + backward) / 2)

    def test_ranks_that_share_heads_are_no_ring(self):
        ranks = self.ranks("sp")
        for r in ranks:
            self.attention(r, 0, 1 + r.rank)
        self.assertEqual(self.metrics_of(ranks)["ring"], {})

    def test_the_time_between_computation_and_wait_belongs_to_the_ring_step(self):
        """Computation from 0 to 1 s, a wait from 3 to 4 s."""
        ranks = self.ranks()
        for r in ranks:
            self.attention(r, 0, 1)
            self.attention(r, 3, 4, kind="ring_wait")
        self.assertAlmostEqual(self.metrics_of(ranks)["computation_ratio"], 0.25)

    def test_the_table_holds_computation_and_wait_apart(self):
        """Ring steps of 2 and 4 s, of which rank 0 computes a second each and rank 1 all."""
        run = synthetic.known_run(self.folder / "known")
        self.report(run, draw=False)
        rows = self.table(run / "report", "ring_steps.csv")
        times = [(float(r["computation (s)"]), float(r["wait (s)"])) for r in rows]
        self.assertEqual(times, [(1, 1), (1, 3), (2, 0), (4, 0)])


if __name__ == "__main__":
    unittest.main()

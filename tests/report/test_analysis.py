"""Numbers of a run: known ones, and those of runs side by side."""
import csv
import json
import re
import unittest

import h5py
import numpy as np
import synthetic
from support import RunTest
from synthetic import Rank, known_run


class KnownNumbers(RunTest):
    def test_metrics(self):
        run = known_run(self.folder / "known")
        self.report(run, "--json", self.folder / "m.json", draw=False)
        m = self.metrics(run / "report")
        self.assertEqual(m, json.loads((self.folder / "m.json").read_text()))
        want = {
            "ranks": 2,
            "steps": 2,
            "runtime_s": 20,
            "step_time_s": 10,
            "load_balance": 0.75,
            "communication_efficiency": 0.8,
            "parallel_efficiency": 0.6,
            "worker_imbalance": (2 / 1.5 + 4 / 2.5) / 2,
            "step_imbalance": (1 + 4 / 3) / 2,
            "computation_ratio": (0.5 + 0.25 + 1 + 1) / 4,
            "imbalance": 1,
            "bubble_ratio": 1 - (4 + 8) / 16,
            "dbr": 0,
            "abr": 0,
            "pr": 0.25,
            "cr": 1,
            "ave_t": 3072,
            "loss": 2,
            "first_loss": 3,
            "peak_bytes": 2**21,
            "tokens_per_s_per_rank": 6144 / 20 / 2,
        }
        for name, value in want.items():
            self.assertAlmostEqual(m[name], value, places=9, msg=name)
        split = {
            "attention": 4,
            "indexing": 0.5,
            "rest of forward and backward": 1.5,
            "ring wait": 2,
            "gradient reduction": 1.5,
            "idle": 0.5,
        }
        self.assertEqual(set(m["step_split_s"]), set(split))
        for name, value in split.items():
            self.assertAlmostEqual(m["step_split_s"][name], value, msg=name)
        self.assertAlmostEqual(sum(m["step_split_s"].values()), 10)
        self.assertEqual([p["useful_s"] for p in m["per_rank"]], [8, 16])
        self.assertEqual(m["notes"], [])

    def test_files(self):
        run = known_run(self.folder / "known")
        self.report(run)
        report = run / "report"
        page = self.body(report)
        figures = self.figures(report)
        for name in ("loss", "split", "heatmap", "timeline", "ring", "memory", "lengths"):
            self.assertIn(name, figures)
            self.assertIn(f'id="run_{name}"', page)
        (cells,) = figures["heatmap"][0]["data"]
        self.assertEqual(cells["z"], [[4, 4], [8, 8]])
        self.assertEqual(cells["meta"], {"ranks": [0, 1], "fields": ["y", "z"]})
        self.assertNotRegex(page, r'(src|href)="(?!data:|#)')  # self-contained
        for formula in (
            "load balance = mean useful / max useful",
            "worker imbalance = max / mean",
            "dbr = sum",
            "imbalance = max T_i / mean T_i",
        ):
            self.assertEqual(page.count(formula), 1, formula)
        with open(report / "pop.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([float(r["useful (s)"]) for r in rows[:2]], [8, 16])
        with open(report / "steps.csv", newline="") as file:
            self.assertEqual([float(r["loss"]) for r in csv.DictReader(file)], [3, 2])

    def test_what_lies_between_steps_stands_apart(self):
        """A step of 10 s, then 1 s of validation and a checkpoint of 2 s with a gather in it."""
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.event("forward", 0, 7, step=0, mb=0)
        r.event("parameter_gather", 9, 10, step=0)
        r.event("validation", 10, 11, step=0)
        r.event("checkpoint", 11, 13, step=0)
        r.event("parameter_gather", 12, 12.5, step=0)
        run = synthetic.write(self.folder / "r", [r])
        self.report(run)
        m = self.metrics(run / "report")
        inside = {"rest of forward and backward": 7, "gradient reduction": 1, "idle": 2}
        self.assertEqual(m["step_split_s"], inside)
        between = {"gradient reduction": 0.5, "checkpoint": 1.5, "validation": 1}
        self.assertEqual(m["between_steps_s"], between)
        self.assertIn("wait for the slowest rank included 10 %", m["verdict"]["headline"])
        self.assertIn("checkpoints 15 %, validation 10 %", m["verdict"]["headline"])
        with open(run / "report" / "split.csv", newline="") as file:
            (row,) = csv.DictReader(file)
        self.assertEqual(float(row["sum (ms)"]), 10000)
        self.assertEqual(float(row["checkpoint, between steps (ms)"]), 1500)
        self.assertNotIn("checkpoint (ms)", row)

    def test_regions_that_rank_0_never_enters(self):
        run = known_run(self.folder / "known")
        self.report(run)
        with open(run / "report" / "regions.csv", newline="") as file:
            rows = {r["region"]: r for r in csv.DictReader(file)}
        self.assertEqual(rows["indexing"]["ranks"], "1")
        self.assertAlmostEqual(float(rows["indexing"]["imbalance"]), 2)
        self.assertIn('<td class="text">indexing</td>', self.body(run / "report"))

    def test_overheads_of_tuning_and_planning(self):
        deck = (
            synthetic.DECK.replace('method = "packed"', 'method = "sab"')
            + "[dst]\nenabled = true\n"
        )
        ranks = [synthetic.Rank(r, 2, {"dp": 2}, {"dp": r}, deck=deck) for r in range(2)]
        for step, (tuning, planning) in enumerate(
            [((9, 9), (9, 9)), ((0.1, 0.3), (0.02, 0.01)), ((0.5, 0.1), (0.04, 0.05))]
        ):
            for r in ranks:
                t0 = 100.0 + 10 * step
                r.event("step", t0, t0 + 10, step=step)
                r.event("planning", t0, t0 + planning[r.rank] / 2, step=step)
                r.event("planning", t0 + 9, t0 + 9 + planning[r.rank] / 2, step=step)
                r.event("tuning", t0 + 5, t0 + 5 + tuning[r.rank], step=step)
        run = synthetic.write(self.folder / "overheads", ranks, deck=deck)
        self.report(run, draw=False)
        found = self.metrics(run / "report")
        self.assertAlmostEqual(found["dst_overhead_share"], (0.3 + 0.5) / 20)
        self.assertAlmostEqual(found["sab_overhead_share"], (0.02 + 0.05) / 20)
        self.assertIn(
            "dst_overhead_share = time of budget tuning",
            self.body(run / "report"),
        )

    def test_copies_run_beside_the_others(self):
        r = Rank(0, 1)
        for kind, begin, end in (
            ("step", 0, 10),
            ("forward", 0, 10),
            ("fetch", 1, 7),
            ("copy_wait", 6, 7),
            ("offload", 8, 12),
        ):
            r.event(kind, begin, end, step=0, mb=0)
        run = synthetic.write(self.folder / "run", [r])
        self.report(run, "--perfetto", self.folder / "p.json")
        self.assertAlmostEqual(self.metrics(run / "report")["parallel_efficiency"], 0.9)
        events = json.loads((self.folder / "p.json").read_text())["traceEvents"]
        lanes = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
        self.assertEqual((lanes["forward"], lanes["copy_wait"]), (0, 0))
        self.assertEqual(len({lanes["forward"], lanes["fetch"], lanes["offload"]}), 3)

    def test_perfetto(self):
        run = known_run(self.folder / "known")
        self.report(run, "--perfetto", self.folder / "p.json", draw=False)
        events = json.loads((self.folder / "p.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        with h5py.File(run / "trace" / "trace_00000.h5") as a, h5py.File(
            run / "trace" / "trace_00001.h5"
        ) as b:
            self.assertEqual(len(spans), len(a["events"]) + len(b["events"]))
        waits = [
            e
            for e in spans
            if e["name"] == "ring_wait" and e["pid"] == 0 and e["args"]["step"] == 2
        ]
        self.assertEqual(
            [(e["ts"], e["dur"], e["args"]["inner"]) for e in waits],
            [(11e6, 1e6, 0), (13e6, 3e6, 1)],
        )
        self.assertEqual(waits[0]["args"]["bytes"], 64)
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.assertEqual(names, {0: "rank 0 (cp_inner 0)", 1: "rank 1 (cp_inner 1)"})

    def test_arrows_follow_the_hops_of_a_ring(self):
        """Two ranks, forward and backward of two layers; backward ends with a hop without
        attention.  The run began on one rank, whose ring has no hops."""

        def steps(rank, hops):
            other = 1 - rank
            return [
                {"outer": outer, "inner": inner, "shard": shard}
                | {
                    kind: {"to": other, "from": other, "send": 0, "recv": 0, "complete": complete}
                    for kind, complete in found.items()
                }
                for (outer, inner, shard), found in zip(
                    ((0, 0, rank), (0, 1, other), (1, 0, -1)), hops
                )
            ]

        alone, before = Rank(0, 1), 5.0  # seconds
        alone.event("step", 0, before, step=0)
        turn = {"outer": 0, "inner": 0, "shard": 0}
        alone.plan("ring", 5, 0, {"rank": 0, "forward": [turn], "backward": [turn]})
        ranks = [Rank(r, 2, {"cp_inner": 2}, {"cp_inner": r}, segment=1) for r in range(2)]
        hops = {
            "attention_forward": ({"kv_inner": 1}, {}),
            "attention_backward": ({"kv_inner": 0}, {}, {"dkv_inner": 2}),
        }
        expected, clock = set(), 0.0
        for r in ranks:
            plan = {"rank": r.rank, "outer": 1, "inner": 2}
            for kind, name in (
                ("attention_forward", "forward"),
                ("attention_backward", "backward"),
            ):
                plan[name] = steps(r.rank, hops[kind])
            r.plan("ring", 7, 1, plan)
        for layer, kind in [(l, k) for k in hops for l in range(2)]:
            for t, (outer, inner) in enumerate(((0, 0), (0, 1), (1, 0))[: len(hops[kind])]):
                for r in ranks:
                    ids = {"step": 1, "mb": 0, "layer": layer, "outer": outer, "inner": inner}
                    late = 0.1 * r.rank
                    if t < 2:
                        r.event(kind, clock + late, clock + 1 + late, **ids)
                    r.event("ring_wait", clock + 1 + late, clock + 2 + late, **ids)
                clock += 10
            first = clock - 10 * len(hops[kind])
            for t, found in enumerate(hops[kind]):
                for complete in found.values():
                    for a in range(2):
                        begin = before + first + 10 * t + (1 if t == 2 else 0) + 0.1 * a
                        end = before + first + 10 * complete + 2 + 0.1 * (1 - a)
                        expected.add((a, round(1e6 * begin, 3), 1 - a, round(1e6 * end, 3)))
        synthetic.write(self.folder / "r", [alone])
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run, "--perfetto", self.folder / "p.json", draw=False)
        events = json.loads((self.folder / "p.json").read_text())["traceEvents"]
        ends = {(e["id"], e["ph"]): (e["pid"], e["ts"]) for e in events if e["ph"] in "sf"}
        found = {ends[i, "s"] + ends[i, "f"] for i, phase in ends if phase == "s"}
        self.assertEqual(found, expected)
        self.assertEqual({e["name"] for e in events if e["ph"] in "sf"}, {"hop"})

    def test_preferences_are_drawn(self):
        r = Rank(0, 1)
        for step in range(3):
            r.event("step", 10 * step, 10 * step + 9, step=step)
            r.step(
                step, rewards_chosen=0.1 * step, rewards_rejected=-0.2 * step,
                rewards_margin=0.3 * step, rewards_accuracy=0.5 + 0.1 * step,
            )  # fmt: skip
        r.step(2, validation_rewards_margin=0.25, validation_rewards_accuracy=0.75)
        run = synthetic.write(self.folder / "r", [r])
        self.report(run)
        rewards, accuracy = self.figures(run / "report")["preferences"]
        names = [t["name"] for t in rewards["data"]]
        self.assertEqual(names, ["chosen", "rejected", "margin", "margin, held out"])
        self.assertEqual([t["name"] for t in accuracy["data"]], ["training", "held out"])

    def test_arrows_lead_from_sends_to_their_receives(self):
        """Three stages, one micro-batch in two chunks, on and back.  Of the second chunk the
        senders wait after the receivers have ended."""
        ranks = [Rank(r, 3, {"pp": 3}, {"pp": r}) for r in range(3)]
        expected = set()
        for chunk in range(2):
            for n, (a, b) in enumerate(((0, 1), (1, 2), (2, 1), (1, 0))):
                at = 10.0 * chunk + n
                wait = at + 0.625 * chunk
                ranks[a].event("send", wait, wait + 0.25, step=0, mb=0, chunk=chunk, stage=a)
                ranks[b].event("recv", at, at + 0.5, step=0, mb=0, chunk=chunk, stage=b)
                expected.add((a, 1e6 * min(wait, at + 0.5), b, 1e6 * (at + 0.5)))
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run, "--perfetto", self.folder / "p.json", draw=False)
        events = json.loads((self.folder / "p.json").read_text())["traceEvents"]
        ends = {(e["id"], e["ph"]): (e["pid"], e["ts"]) for e in events if e["ph"] in "sf"}
        found = {ends[i, "s"] + ends[i, "f"] for i, phase in ends if phase == "s"}
        self.assertEqual(found, expected)

    def test_recomputation_is_a_bubble_and_a_pass_of_its_own(self):
        ranks = [Rank(0, 1)]
        r = ranks[0]
        r.event("step", 0, 10, step=0)
        r.event("forward", 0, 2, step=0, mb=0)
        r.event("recompute", 2, 4, step=0, mb=0)
        r.event("layer_forward", 2.5, 4, step=0, mb=0, layer=0)
        r.event("backward", 4, 8, step=0, mb=0)
        r.event("recv", 5, 6, step=0, mb=0)
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["bubble_ratio"], 1 - 5 / 8)
        self.assertAlmostEqual(m["parallel_efficiency"], 0.7)

    def test_what_precedes_the_schedule_is_no_part_of_its_bubble_ratio(self):
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.event("indexing", 0, 2, step=0, mb=0)
        r.event("forward", 2, 5, step=0, mb=0)
        r.event("backward", 6, 8, step=0, mb=0)
        run = synthetic.write(self.folder / "r", [r])
        self.report(run)
        self.assertAlmostEqual(self.metrics(run / "report")["bubble_ratio"], 1 - 5 / 6)

    def test_a_joined_micro_batch_counts_once_in_the_imbalance(self):
        """Two ranks share the first micro-batch; each has one of its own beside it."""
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        plan = synthetic.batch_plan((0, 2, [60]), (0, 1, [10]), (1, 1, [20]))
        plan["lanes"] = [{"micro_batches": [1, 0]}, {"micro_batches": [0, 2]}]
        for r, times in zip(ranks, ([1.0, 5.0], [7.0, 3.0])):
            r.event("step", 0, 11, step=0)
            at = 0
            for place, seconds in enumerate(times):
                r.event("forward", at, at + seconds, step=0, mb=place)
                at += seconds
            r.plan("step", 1, 0, plan)
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run, draw=False)
        mean = ((5 + 7) / 2 + 1 + 3) / 3
        self.assertAlmostEqual(self.metrics(run / "report")["imbalance"], 6 / mean)

    def test_padding_of_chunks_is_against_their_length(self):
        """Chunks of 300 tokens, in packs of 4096 as the deck has them for other methods."""
        deck = synthetic.DECK.replace('"packed"', '"chunkflow"') + "[chunk]\ntokens = 300\n"
        r = Rank(0, 1, deck=deck)
        r.event("step", 0, 10, step=0)
        plan = synthetic.batch_plan((0, 1, [300]), (0, 1, [120]), (0, 1, [100, 80, 90]))
        r.plan("step", 1, 0, plan)
        run = synthetic.write(self.folder / "r", [r], deck=deck)
        self.report(run, draw=False)
        self.assertAlmostEqual(self.metrics(run / "report")["pr"], (0 + 0.6 + 0.1) / 3)

    def test_micro_batch_imbalance_over_data_parallel_ranks(self):
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r, times in zip(ranks, ([1.0, 3.0], [2.0, 2.0])):
            r.event("step", 0, 6, step=0)
            at = 0
            for mb, t in enumerate(times):
                r.event("forward", at, at + t, step=0, mb=mb)
                at += t
            rows = (0, 1, [10]), (0, 1, [30]), (1, 1, [20])
            r.plan("step", 1, 0, synthetic.batch_plan(*rows))
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["imbalance"], 1.5)
        self.assertAlmostEqual(m["dbr"], 20 / 80)
        self.assertAlmostEqual(m["abr"], 600 / 2000)
        self.assertAlmostEqual(m["cr"], 0)
        self.assertNotIn("worker_imbalance", m)


class SlowestRanks(RunTest):
    """What a step takes is what its slowest rank takes."""

    def metrics_of(self, ranks, **deck):
        run = synthetic.write(self.folder / "r", ranks, **deck)
        self.report(run, draw=False)
        return self.metrics(run / "report")

    def test_the_step_time_and_peak_are_those_of_the_largest_rank(self):
        """Steps of 4 and 8 s, peaks of 1 and 2 MiB."""
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 4 + 4 * r.rank, step=0)
            r.event("forward", 0, 2, step=0, mb=0)
            r.step(0, peak_bytes_total=2.0 ** (20 + r.rank))
        m = self.metrics_of(ranks)
        self.assertAlmostEqual(m["step_time_s"], 8)
        self.assertEqual(m["peak_bytes"], 2**21)

    def test_overheads_are_shares_of_the_slowest_ranks_step(self):
        """A second of tuning in steps of 10 and 6 s."""
        deck = synthetic.DECK + "[dst]\nenabled = true\n"
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}, deck=deck) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 10 - 4 * r.rank, step=0)
            r.event("tuning", 0, 1, step=0)
        self.assertAlmostEqual(self.metrics_of(ranks, deck=deck)["dst_overhead_share"], 0.1)

    def test_without_step_events_a_step_spans_all_its_events(self):
        """Seconds 0 to 2 and 4 to 8."""
        r = Rank(0, 1)
        r.event("forward", 0, 2, step=0, mb=0)
        r.event("backward", 4, 8, step=0, mb=0)
        self.assertAlmostEqual(self.metrics_of([r])["step_time_s"], 8)

    def test_what_lies_before_a_step_stands_apart_too(self):
        r = Rank(0, 1)
        r.event("validation", -1, 0, step=0)
        r.event("step", 0, 10, step=0)
        r.event("forward", 0, 10, step=0, mb=0)
        m = self.metrics_of([r])
        self.assertEqual(m["between_steps_s"], {"validation": 1})
        self.assertNotIn("validation", m["step_split_s"])

    def test_a_step_that_a_rank_lacks_is_in_no_figure(self):
        """Rank 1 ends behind the first of two steps of 10 s; the second computes 8 s, not 4."""
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            for step in range(2 - r.rank):
                at = 10 * step
                r.event("step", at, at + 10, step=step)
                r.event("forward", at, at + 4 + 4 * step, step=step, mb=0)
                r.step(step, tokens=100.0)
        m = self.metrics_of(ranks)
        self.assertEqual(m["steps"], 1)
        self.assertAlmostEqual(m["runtime_s"], 10)
        self.assertAlmostEqual(m["tokens_per_s_per_rank"], 100 / 10 / 2)
        self.assertEqual([p["useful_s"] for p in m["per_rank"]], [4, 4])
        self.assertAlmostEqual(m["step_split_s"]["rest of forward and backward"], 4)


class SeveralRuns(RunTest):
    def test_side_by_side(self):
        a, b = known_run(self.folder / "a"), synthetic.training_run(self.folder / "b", straggler=1)
        out = self.folder / "both"
        self.report(
            a,
            b,
            a,
            "--out",
            out,
            "--json",
            self.folder / "m.json",
            "--perfetto",
            self.folder / "p.json",
        )
        cases = self.metrics(out)["cases"]
        self.assertEqual([c["name"] for c in cases], ["a", "b", "a (2)"])
        self.assertAlmostEqual(cases[0]["load_balance"], 0.75)
        self.assertGreater(cases[1]["worker_imbalance"], 1.15)  # the straggler shows
        with open(out / "comparison.csv", newline="") as file:
            rows = {r["metric"]: r for r in csv.DictReader(file)}
        self.assertAlmostEqual(float(rows["load balance"]["a"]), 0.75)
        self.assertGreater(
            float(rows["tokens / s / rank"]["b"]), 0
        )  # numbers for programs, without separators
        page = self.body(out)
        for anchor in re.findall(r'href="#([^"]+)"', page):
            self.assertIn(f'id="{anchor}"', page)
        self.assertIn("heatmap", self.figures(out, "b_"))
        self.assertEqual(len(self.figures(out, "")["steps"]), 3)
        pids = {e["pid"] for e in json.loads((self.folder / "p.json").read_text())["traceEvents"]}
        self.assertEqual(pids, {0, 1, 100000, 100001, 100002, 100003, 200000, 200001})

    def test_a_balanced_twin_scores_better(self):
        slow, even = (
            synthetic.training_run(self.folder / n, straggler=s, seed=1)
            for n, s in (("slow", 1), ("even", None))
        )
        self.report(slow, even, "--out", self.folder / "out", draw=False)
        first, second = self.metrics(self.folder / "out")["cases"]
        self.assertGreater(first["worker_imbalance"], second["worker_imbalance"])
        self.assertLess(first["computation_ratio"], second["computation_ratio"])


class KnownBudgets(RunTest):
    def test_budgets(self):
        ranks = [Rank(r, 2, {"cp_inner": 2}, {"cp_inner": r}) for r in range(2)]
        for r in ranks:
            for step in range(2):
                r.event("step", 100.0 + step, 101.0 + step, step=step)
                for layer in range(2):
                    for head in range(3):
                        r.budget(
                            step,
                            layer,
                            head,
                            4 + head + step,
                            10 * (1 + head) * (1 + r.rank),
                            100,
                            overflow=layer,
                        )
        run = synthetic.write(self.folder / "budgets", ranks)
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["sparsity_ratio"], 1 - (10 + 20 + 30) * 3 / 600)
        self.assertAlmostEqual(m["mean_budget"], 5.5)
        self.assertEqual(
            m["budget_overflow"], 6
        )  # a ring's ranks cut off the same columns: counted once
        with open(run / "report" / "budgets.csv", newline="") as f:
            rows = list(csv.DictReader(f))
        self.assertEqual(len(rows), 12)
        self.assertEqual(
            [
                float(rows[5][k])
                for k in (
                    "step",
                    "layer",
                    "head",
                    "budget",
                    "computed pairs",
                    "visible pairs",
                    "overflow",
                )
            ],
            [1, 1, 2, 6, 90, 200, 1],
        )
        self.assertIn("sparsity", self.figures(run / "report"))
        self.assertIn("Sparse attention", self.body(run / "report"))
        self.assertFalse((run / "report" / "head_patterns.csv").exists(), "all heads are alike")

    def test_the_mean_budget_counts_rings_not_ranks(self):
        """A step of a ring of two ranks with a budget of 4, then one of a rank alone with 7."""
        run = self.folder / "rings"
        for step, (ranks, budget) in enumerate(((2, 4), (1, 7))):
            mesh = {"cp_inner": ranks}
            made = [Rank(r, ranks, mesh, {"cp_inner": r}, segment=step) for r in range(ranks)]
            for r in made:
                r.event("step", 10, 20, step=step)
                r.budget(step, 0, 0, budget, 10, 100)
            synthetic.write(run, made)
        self.report(run, draw=False)
        self.assertAlmostEqual(self.metrics(run / "report")["mean_budget"], 5.5)

    def test_the_mean_budget_is_of_all_micro_batches(self):
        """Budgets of 4 and 6 of one head."""
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        r.budget(0, 0, 0, 4, 10, 100)
        r.budget(0, 0, 0, 6, 10, 100)
        run = synthetic.write(self.folder / "mean", [r])
        self.report(run, draw=False)
        self.assertAlmostEqual(self.metrics(run / "report")["mean_budget"], 5)
        (row,) = self.table(run / "report", "budgets.csv")
        self.assertEqual(float(row["budget"]), 5)

    def test_patterns_by_head(self):
        ranks = [Rank(r, 2, {"sp": 2}, {"sp": r}) for r in range(2)]
        for r in ranks:
            for step in range(4):
                r.event("step", 100.0 + step, 101.0 + step, step=step)
                for head in range(2):
                    kind = 1 + 2 * r.rank if head == 0 else 2 + (step == 3)
                    r.budget(step, 0, head, 4, 10, 100, kind=kind)
        run = synthetic.write(self.folder / "heads", ranks)
        self.report(run)
        with open(run / "report" / "head_patterns.csv", newline="") as f:
            rows = [list(map(int, row)) for row in list(csv.reader(f))[1:]]
        self.assertEqual(
            rows,
            [[0, 0, 0, 4, 0, 0], [0, 1, 0, 0, 3, 1], [0, 2, 0, 0, 0, 4], [0, 3, 0, 0, 3, 1]],
        )
        self.assertEqual(len(self.figures(run / "report")["sparsity"]), 3)

    def test_generated_patterns_have_no_budget(self):
        r = Rank(0, 1)
        r.event("step", 100.0, 101.0, step=0)
        r.budget(0, -1, 0, "nan", 5, 20)
        run = synthetic.write(self.folder / "generated", [r])
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["sparsity_ratio"], 0.75)
        self.assertNotIn("mean_budget", m)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    unittest.main()

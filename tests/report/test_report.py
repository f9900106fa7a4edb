"""The report end to end: known numbers, and runs that were killed, restarted or lost ranks."""
import csv
import json
import random
import re
import shutil
import subprocess
import sys
import time
import unittest
import unittest.mock

import h5py
import numpy as np
import support
import synthetic
from support import RunTest
from synthetic import Rank


def known_run(folder):
    """Two context-parallel ranks, two steps of 10 s.  Rank 0 computes 4 s a step, rank 1 computes 8
    s."""
    mesh = {"cp_inner": 2}
    ranks = [Rank(r, 2, mesh, {"cp_inner": r}) for r in range(2)]
    ring = {0: [1.0, 1.0], 1: [2.0, 4.0]}  # computation of the two ring steps
    for step in range(2):
        for r in ranks:
            t0 = 100.0 + 10 * step
            r.event("step", t0, t0 + 10, step=step)
            r.event("forward", t0, t0 + 8, step=step, mb=0)
            at = t0
            for inner, compute in enumerate(ring[r.rank]):
                wall = [2.0, 4.0][inner]
                r.event(
                    "attention_forward",
                    at,
                    at + compute,
                    step=step,
                    mb=0,
                    layer=0,
                    outer=0,
                    inner=inner,
                )
                if compute < wall:
                    r.event(
                        "ring_wait",
                        at + compute,
                        at + wall,
                        step=step,
                        mb=0,
                        layer=0,
                        outer=0,
                        inner=inner,
                        nbytes=64,
                    )
                at += wall
            # 2 s of the forward op are left: useful on both ranks.
            if r.rank == 1:
                r.event("indexing", t0 + 7, t0 + 8, step=step, mb=0)
            r.event("gradient_reduce", t0 + 8, t0 + 9.5, step=step)
            r.plan("step", 5, step, synthetic.batch_plan((0, 1, [2048, 1024])))
            r.step(
                step,
                loss=3.0 - step,
                tokens=3072,
                peak_bytes_activations=2**20 * (1 + r.rank),
                peak_bytes_total=2**21,
            )
    return synthetic.write(folder, ranks)


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
        page = (report / "report.html").read_text()
        for name in ("loss", "split", "heatmap", "timeline", "ring", "memory", "lengths"):
            self.assertEqual((report / f"{name}.png").read_bytes()[:4], b"\x89PNG", name)
            self.assertIn(f'alt="{name}"', page)
        self.assertNotRegex(page, r'(src|href)="(?!data:|#)')  # self-contained
        self.assertNotIn("<script", page)
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

    def test_regions_that_rank_0_never_enters(self):
        run = known_run(self.folder / "known")
        self.report(run)
        with open(run / "report" / "regions.csv", newline="") as file:
            rows = {r["region"]: r for r in csv.DictReader(file)}
        self.assertEqual(rows["indexing"]["ranks"], "1")
        self.assertAlmostEqual(float(rows["indexing"]["imbalance"]), 2)
        self.assertIn(
            '<td class="text">indexing</td>', (run / "report" / "report.html").read_text()
        )

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
            (run / "report" / "report.html").read_text(),
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
            if e["name"] == "ring_wait" and e["pid"] == 0 and e["args"]["step"] == 1
        ]
        self.assertEqual(
            [(e["ts"], e["dur"], e["args"]["inner"]) for e in waits],
            [(11e6, 1e6, 0), (13e6, 3e6, 1)],
        )
        self.assertEqual(waits[0]["args"]["bytes"], 64)
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.assertEqual(names, {0: "rank 0 (cp_inner 0)", 1: "rank 1 (cp_inner 1)"})

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


class DamagedRuns(RunTest):
    def test_killed_run_reads_up_to_its_last_flush(self):
        run = synthetic.training_run(self.folder / "run", steps=4, kill=True)
        self.report(run)
        self.assertEqual(self.metrics(run / "report")["steps"], 4)

    def test_killed_at_random_moments(self):
        r = Rank(0, 1)
        for step in range(20000):
            r.event("step", step, step + 1, step=step)
            r.step(step, loss=1.0, **{f"column_{step // 500}": 2.0})
        commands = self.folder / "commands"
        commands.write_text("\n".join(r.lines) + "\n")
        for round_ in range(6):
            run = self.folder / f"run{round_}"
            with open(commands) as source:
                child = subprocess.Popen(
                    [synthetic.HELPER, "write", str(run / "trace")], stdin=source
                )
            while child.poll() is None and not (run / "trace" / "trace_00000.h5").exists():
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.2))
            child.kill()
            child.wait()
            with h5py.File(
                run / "trace" / "trace_00000.h5", "r"
            ) as file:  # opens with nothing special
                self.assertGreaterEqual(int(file["rows"][()]["events"]), 0)
            self.report(run, draw=round_ == 0)

    def test_missing_rank_is_noted(self):
        run = known_run(self.folder / "run")
        (run / "trace" / "trace_00001.h5").unlink()
        text = self.report(run)
        self.assertIn("rank 1 of 2 left no readable trace", text)
        m = self.metrics(run / "report")
        self.assertEqual((m["ranks"], m["ranks_read"]), (2, 1))
        self.assertAlmostEqual(m["communication_efficiency"], 0.4)
        self.assertIn("left no readable trace", (run / "report" / "report.html").read_text())

    def test_rank_0_missing(self):
        run = known_run(self.folder / "run")
        (run / "trace" / "trace_00000.h5").unlink()
        self.report(run)
        self.assertAlmostEqual(self.metrics(run / "report")["loss"], 2)

    def test_truncated_and_foreign_files_are_noted(self):
        for damage in ("truncate", "text", "empty", "other hdf5", "enum"):
            run = known_run(self.folder / damage)
            victim = run / "trace" / "trace_00001.h5"
            if damage == "truncate":
                victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
            elif damage == "other hdf5":
                victim.unlink()
                with h5py.File(victim, "w") as file:
                    file["x"] = 1
            elif damage == "enum":
                with h5py.File(victim, "r+") as file:
                    rows = file["events"][:]
                    rows["kind"] = 99
                    file["events"][...] = rows
            else:
                victim.write_text("" if damage == "empty" else "no HDF5")
            text = self.report(run, draw=False)
            self.assertIn("trace_00001.h5 cannot be read", text, damage)
            self.assertEqual(self.metrics(run / "report")["ranks_read"], 1)

    def test_last_step_known_to_one_rank_alone(self):
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            for step in range(3 - r.rank):
                r.event("step", step * 10, step * 10 + 10, step=step)
                r.event("forward", step * 10, step * 10 + 5, step=step, mb=0)
        run = synthetic.write(self.folder / "run", ranks)
        text = self.report(run)
        m = self.metrics(run / "report")
        self.assertEqual(m["steps"], 2)
        self.assertAlmostEqual(m["parallel_efficiency"], 0.5)
        self.assertIn("1 step (2)", text)

    def test_no_events_at_all(self):
        run = synthetic.write(self.folder / "run", [Rank(0, 1)])
        self.report(run)
        m = self.metrics(run / "report")
        self.assertEqual((m["steps"], m["parallel_efficiency"]), (0, 1))

    def test_empty_steps_and_scalars_alone(self):
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)  # nothing inside
        r.event("step", 2, 2, step=1)  # no length
        r.step(7, validation_loss=1.5)  # a row without events
        run = synthetic.write(self.folder / "run", [r])
        self.report(run)
        m = self.metrics(run / "report")
        self.assertEqual(m["steps"], 2)
        self.assertEqual(m["validation_loss"], 1.5)

    def test_needle_accuracy_is_shown(self):
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        r.event("step", 1, 2, step=1)
        for step, right in ((0, 0.25), (1, 0.75)):
            r.step(
                step,
                loss=1.0,
                **{
                    "needle_accuracy": right,
                    "needle_accuracy.length.64": right,
                    "needle_accuracy.length.512": right - 0.1,
                    "needle_accuracy.length.64.depth.0": right,
                    "needle_accuracy.length.512.depth.1": 0.5,
                },
            )
        run = synthetic.write(self.folder / "run", [r])
        self.report(run)
        self.assertEqual(self.metrics(run / "report")["needle_accuracy"], 0.75)
        self.assertTrue((run / "report" / "needle.png").exists())

    def test_events_with_impossible_times(self):
        r = Rank(0, 1)
        r.event("step", 0, 10, step=0)
        r.event("forward", 5, 4, step=0, mb=0)
        r.event("forward", float("nan"), 4, step=0, mb=0)
        r.event("forward", 1, 2, step=0, mb=0)
        run = synthetic.write(self.folder / "run", [r])
        text = self.report(run)
        self.assertIn("2 events without sound times", text)
        self.assertAlmostEqual(self.metrics(run / "report")["parallel_efficiency"], 0.1)

    def test_errors_name_the_folder(self):
        self.assertIn("no such run folder", self.report(self.folder / "nowhere", status=2))
        (self.folder / "empty").mkdir()
        self.assertIn("trace.enabled=true", self.report(self.folder / "empty", status=2))
        run = known_run(self.folder / "run")
        (self.folder / "file").write_text("")
        self.assertIn(
            "cannot write", self.report(run, "--out", self.folder / "file" / "below", status=1)
        )


class Restarts(RunTest):
    def part(self, first, last, rank, ranks, loss, clock):
        r = Rank(rank, ranks, {"dp": ranks}, {"dp": rank}, segment=first)
        for step in range(first, last):
            t = clock + 10 * step
            r.event("step", t, t + 10, step=step)
            r.event("forward", t, t + loss, step=step, mb=0)
            r.step(step, loss=loss)
        return r

    def test_steps_given_up_are_not_shown(self):
        run = self.folder / "run"
        # Killed in step 6; restarted from the checkpoint after step 3, with another clock, and once
        # more from after step 5.
        synthetic.write(run, [self.part(0, 6, r, 2, 1.0, 1000) for r in range(2)], kill=True)
        synthetic.write(run, [self.part(4, 6, r, 2, 2.0, 5) for r in range(2)])
        synthetic.write(run, [self.part(6, 8, r, 2, 3.0, 5) for r in range(2)])
        text = self.report(run, "--perfetto", self.folder / "p.json")
        m = self.metrics(run / "report")
        self.assertIn("2 steps from 4 to 5 ran before a restart", text)
        self.assertEqual(m["steps"], 8)
        self.assertAlmostEqual(m["runtime_s"], 80)
        self.assertAlmostEqual(m["parallel_efficiency"], (4 * 1 + 2 * 2 + 2 * 3) / 80)
        with open(run / "report" / "steps.csv", newline="") as file:
            self.assertEqual(
                [float(r["loss"]) for r in csv.DictReader(file)], [1, 1, 1, 1, 2, 2, 3, 3]
            )
        spans = [
            e
            for e in json.loads((self.folder / "p.json").read_text())["traceEvents"]
            if e["ph"] == "X" and e["name"] == "step" and e["pid"] == 1
        ]
        for before, after in zip(spans, spans[1:]):
            self.assertGreaterEqual(after["ts"], before["ts"] + before["dur"] - 1)

    def test_restart_on_fewer_ranks(self):
        run = self.folder / "run"
        synthetic.write(run, [self.part(0, 6, r, 3, 1.0, 1000) for r in range(3)], kill=True)
        synthetic.write(run, [self.part(4, 8, r, 2, 2.0, 5) for r in range(2)])
        text = self.report(run)
        self.assertIn("rank 2 belongs to an earlier start", text)
        self.assertNotIn("left no readable trace", text)
        self.assertEqual(self.metrics(run / "report")["ranks"], 2)


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
        page = (out / "report.html").read_text()
        for anchor in re.findall(r'href="#([^"]+)"', page):
            self.assertIn(f'id="{anchor}"', page)
        self.assertTrue((out / "b_heatmap.png").exists())
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
            [0, 1, 2, 6, 90, 200, 1],
        )
        self.assertTrue((run / "report" / "sparsity.png").exists())
        self.assertIn("Sparse attention", (run / "report" / "report.html").read_text())

    def test_generated_patterns_have_no_budget(self):
        r = Rank(0, 1)
        r.event("step", 100.0, 101.0, step=0)
        r.budget(0, -1, 0, "nan", 5, 20)
        run = synthetic.write(self.folder / "generated", [r])
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["sparsity_ratio"], 0.75)
        self.assertNotIn("mean_budget", m)


class Loading(RunTest):
    def test_every_field_arrives(self):
        import load

        r = Rank(3, 8, {"dp": 4, "cp_inner": 2}, {"dp": 1, "cp_inner": 1}, segment=5)
        r.event(
            "send",
            1.5,
            2.5,
            step=1,
            mb=2,
            chunk=3,
            layer=4,
            stage=5,
            outer=6,
            inner=7,
            flops=8,
            nbytes=9,
        )
        r.plan("step", 2**63 + 1, 1, {"micro_batches": [], "note": "\u00e4"})
        run = synthetic.write(self.folder / "run", [r])
        loaded = load.load_run(run)
        trace = loaded.traces[3]
        event = trace.events[0]
        self.assertEqual(
            [
                event[n].item()
                for n in (
                    "step",
                    "micro_batch",
                    "chunk",
                    "layer",
                    "stage",
                    "outer",
                    "inner",
                    "begin_s",
                    "end_s",
                    "flops",
                    "bytes",
                )
            ],
            [1, 2, 3, 4, 5, 6, 7, 1.5, 2.5, 8.0, 9],
        )
        self.assertEqual(load.KINDS[event["kind"]], "send")
        self.assertEqual(load.BESIDE, {"offload", "fetch"})
        self.assertEqual(load.USEFUL & {"layer_forward", "send"}, {"layer_forward"})
        self.assertEqual(
            (
                trace.last.ranks,
                trace.last.segment,
                trace.last.mesh["dp"],
                trace.last.at["cp_inner"],
            ),
            (8, 5, 4, 1),
        )
        self.assertEqual(
            trace.plans, [("step", 2**63 + 1, {"micro_batches": [], "note": "\u00e4"})]
        )
        self.assertEqual(loaded.deck["batching.micro_batch_tokens"], 4096)
        self.assertEqual(trace.last.deck, synthetic.DECK)

    def test_prose_of_older_formats(self):
        import analysis
        import old_plans

        text = (
            "dp 0 micro_batch 0: 12[0,345) 3[100,200)\ndp 1 micro_batch 0:\ndp 1 micro_batch 1 sp"
            " 4 recompute 2: 7[0,5)\n"
        )
        kind, number, plan = old_plans.read("batch", 8, text)
        self.assertEqual((kind, number), ("step", 8))
        self.assertEqual(analysis.micro_batches(plan), [(0, 1, [345, 100]), (1, 4, [5])])
        text = "micro_batch 0 layer 3 base 32 budget 20 coverage_loss 0.05\n"
        self.assertEqual(old_plans.read("budgets", 8, text)[2], [[0, 3, 32, 20, 0.05]])

    def test_deck_without_tomllib(self):
        import load

        with unittest.mock.patch.dict(sys.modules, {"tomllib": None}):
            deck = load.parse_deck(
                '[a]\nx = 3  # note\ny = "text # not a note"\n# z = 1\n[b]\nx = 2.5\n'
            )
        self.assertEqual(deck, {"a.x": 3, "a.y": "text # not a note", "b.x": "2.5"})

    def test_loss_falls_back_to_the_log(self):
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        run = synthetic.write(self.folder / "run", [r])
        (run / "log.txt").write_text(
            "# header\nstep=1 loss=5.5 lr=1e-3\nstep=2 loss=nonsense\nstep=2 loss=5.0\n"
        )
        self.report(run)
        self.assertEqual(self.metrics(run / "report")["loss"], 5.0)


class CommandLine(unittest.TestCase):
    def run_report(self, *arguments, **keywords):
        return subprocess.run(
            [sys.executable, str(support.REPORT), *arguments],
            capture_output=True,
            text=True,
            **keywords,
        )

    def test_help_and_bad_usage(self):
        self.assertEqual(self.run_report("--help").returncode, 0)
        self.assertNotEqual(self.run_report().returncode, 0)
        self.assertNotEqual(self.run_report("--nonsense", "x").returncode, 0)

    def test_missing_packages_are_named(self):
        done = (
            self.run_report("x", env={"PATH": ""})
            if shutil.which("true") is None
            else subprocess.run(
                [sys.executable, "-S", "-I", str(support.REPORT), "x"],
                capture_output=True,
                text=True,
            )
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("python3-h5py", done.stderr)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    unittest.main()

"""What is read from run folders: every field, and runs that were killed or lost ranks."""
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
import unittest
import unittest.mock

import h5py
import numpy as np
import synthetic
from support import REPORT, RunTest
from synthetic import Rank, known_run


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
            [2, 2, 3, 4, 5, 6, 7, 1.5, 2.5, 8.0, 9],
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
        import batches
        import old_plans

        text = (
            "dp 0 micro_batch 0: 12[0,345) 3[100,200)\ndp 1 micro_batch 0:\ndp 1 micro_batch 1 sp"
            " 4 recompute 2: 7[0,5)\n"
        )
        kind, number, plan = old_plans.read("batch", 8, text)
        self.assertEqual((kind, number), ("step", 8))
        self.assertEqual(
            batches.micro_batches(plan), [(0, 1, [(0, 345), (100, 200)]), (1, 4, [(0, 5)])]
        )
        text = "micro_batch 0 layer 3 base 32 budget 20 coverage_loss 0.05\n"
        self.assertEqual(old_plans.read("budgets", 8, text)[2], [[0, 3, 32, 20, 0.05]])

    def test_deck_without_tomllib(self):
        import load

        with unittest.mock.patch.dict(sys.modules, {"tomllib": None}):
            deck = load.parse_deck(
                '[a]\nx = 3  # note\ny = "text # not a note"\n# z = 1\n'
                '[b]\nx = 2.5\ny = [32, 128]  # lists\nz = ["q", "k"]\non = true\n'
            )
        expected = {"a.x": 3, "a.y": "text # not a note"}
        expected.update({"b.x": 2.5, "b.y": [32, 128], "b.z": ["q", "k"], "b.on": True})
        self.assertEqual(deck, expected)

    def test_loss_falls_back_to_the_log(self):
        r = Rank(0, 1)
        r.event("step", 0, 1, step=0)
        run = synthetic.write(self.folder / "run", [r])
        (run / "log.txt").write_text(
            "# header\nstep=1 loss=5.5 lr=1e-3\nstep=2 loss=nonsense\nstep=2 loss=5.0\n"
        )
        self.report(run)
        self.assertEqual(self.metrics(run / "report")["loss"], 5.0)


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
        self.assertIn("left no readable trace", self.body(run / "report"))

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

    def test_a_file_that_brings_hdf5_down_is_noted(self):
        import load

        run = known_run(self.folder / "run")
        read_rank = load.read_rank

        def read(path):  # what HDF5 does with some damaged files
            if path.name == "trace_00000.h5":
                os.kill(os.getpid(), signal.SIGKILL)
            return read_rank(path)

        with unittest.mock.patch("load.read_rank", read):
            text = self.report(run, draw=False)
        self.assertIn("trace_00000.h5 cannot be read and is left out: reading it brought", text)
        self.assertIn("(SIGKILL)", text)
        self.assertAlmostEqual(self.metrics(run / "report")["loss"], 2)

    def test_numbers_that_cannot_be_are_noted(self):
        """One number of rank 1's file, by table and column; of sessions by attribute."""
        made = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in made:
            r.event("step", 0, 1, step=0)
            r.event("forward", 0, 0.5, step=0, mb=0)
            r.predicted("forward", 0, 1, step=0, mb=0)
            r.budget(0, 0, 0, 4, 10, 20, kind=2)
            r.plan("step", 5, 0, synthetic.batch_plan((0, 1, [8])))
        sound = synthetic.write(self.folder / "sound", made)
        self.assertNotIn("cannot be read", self.report(sound, draw=False))
        for table, column, value, problem in (
            ("rows", "events", -1, "lacks rows of its events"),
            ("rows", "steps", 1 << 20, "lacks rows of its steps"),
            ("plan_steps", "plan", 64, "steps name plans"),
            ("plan_steps", "plan", -1, "steps name plans"),
            ("predicted", "end_s", np.nan, "ops without sound times"),
            ("budgets", "kind", 1 << 30, "budgets of unknown patterns"),
            ("sessions", "rank", 0, "mesh contradict"),
            ("sessions", "ranks", 3, "mesh contradict"),
            ("sessions", "mesh.dp", 1 << 50, "mesh contradict"),
            ("sessions", "at.dp", 2, "mesh contradict"),
            ("sessions", "first_events", 1, "rows of its events"),
            ("sessions", "started_unix_s", np.nan, "no time"),
        ):
            run = self.folder / f"{table}_{column}_{value}"
            shutil.copytree(sound / "trace", run / "trace")
            with h5py.File(run / "trace" / "trace_00001.h5", "r+") as file:
                if table == "sessions":
                    file["sessions/000"].attrs.modify(column, value)
                else:
                    rows = file[table][()]
                    rows[column] = value
                    file[table][...] = rows
            text = self.report(run, draw=False)
            self.assertRegex(text, f"trace_00001.h5 cannot be read and is left out: .*{problem}")
            self.assertEqual(self.metrics(run / "report")["ranks_read"], 1)

    def test_fifos_are_noted_and_not_waited_for(self):
        run = known_run(self.folder / "run")
        for name in ("trace/trace_00002.h5", "deck.toml", "log.txt"):
            (run / name).unlink(missing_ok=True)
            os.mkfifo(run / name)
        done = subprocess.run(
            [sys.executable, str(REPORT), str(run), "--no-simulator"],
            capture_output=True,
            text=True,
            timeout=60,  # without the repair it waits forever
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        said = "trace_00002.h5 cannot be read and is left out: no regular file"
        self.assertIn(said, done.stdout)
        for name in ("deck.toml", "log.txt"):
            self.assertIn(f"{name} is no regular file and is left out", done.stdout)
        self.assertEqual(self.metrics(run / "report")["ranks_read"], 2)

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
        self.assertIn("1 step (3)", text)

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
        self.assertIn("needle", self.figures(run / "report"))

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

    def test_steps_of_older_formats_count_from_1_too(self):
        import load

        rank = synthetic.Rank(0, 1)
        rank.event("step", 0, 1, step=4)
        rank.event("data", 1, 2)
        rank.predicted("forward", 0, 1, step=4, mb=0)
        rank.budget(4, 0, 0, 4, 10, 20)
        rank.step(4, loss=1.0)
        rank.plan("step", 1, 4, {"step": 5, "micro_batches": []})
        rank.plan("recall", 2, 4, [[5, 0, -1, 0, 0, 8, 100, 0.9, 0.03, 0.5, 0.1, 0.2, 0.5, 0.1]])
        run = synthetic.write(self.folder / "run", [rank])
        path = run / "trace" / "trace_00000.h5"

        def steps():
            trace, _ = load.read_rank(path)
            return (
                trace.events["step"].tolist(),
                trace.predicted["step"].tolist(),
                trace.budgets["step"].tolist(),
                trace.steps["step"].tolist(),
                trace.plan_steps["step"].tolist(),
                [v["step"] if k == "step" else v[0][0] for k, _, v in trace.plans],
            )

        self.assertEqual(steps(), ([5, -1], [5], [5], [5], [5, 5], [5, 5]))
        with h5py.File(path, "r+") as file:  # as if an older program had written these numbers
            file.attrs["format_version"] = 4
        self.assertEqual(steps(), ([6, -1], [6], [6], [6], [6, 6], [6, 6]))

    def test_steps_of_drift_count_from_1_too(self):
        import load

        rank = synthetic.Rank(0, 1)
        rank.event("step", 0, 1, step=4)
        rank.plan("drift", 3, 4, [[5, 0, 0, 8, 0.9, 0.8]])
        run = synthetic.write(self.folder / "run", [rank])
        path = run / "trace" / "trace_00000.h5"
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 4
        ((_, _, rows),) = load.read_rank(path)[0].plans
        self.assertEqual(rows[0][0], 6)

    def test_steps_given_up_are_not_shown(self):
        run = self.folder / "run"
        # Killed in step 7; restarted from the checkpoint after step 4, with another clock, and once
        # more from after step 6.
        synthetic.write(run, [self.part(0, 6, r, 2, 1.0, 1000) for r in range(2)], kill=True)
        synthetic.write(run, [self.part(4, 6, r, 2, 2.0, 5) for r in range(2)])
        synthetic.write(run, [self.part(6, 8, r, 2, 3.0, 5) for r in range(2)])
        text = self.report(run, "--perfetto", self.folder / "p.json")
        m = self.metrics(run / "report")
        self.assertIn("2 steps from 5 to 6 ran before a restart", text)
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

    def test_scalars_of_a_step_given_up_are_not_shown(self):
        """Held-out losses of a branch that the kept one did not measure again."""
        run = self.folder / "run"
        given_up = self.part(0, 3, 0, 1, 1.0, 5)
        for step in range(3):
            given_up.step(step, validation_loss=5.0 + step)
        synthetic.write(run, [given_up])
        synthetic.write(run, [self.part(2, 5, 0, 1, 2.0, 5)])
        self.report(run)
        with open(run / "report" / "steps.csv", newline="") as file:
            rows = [r["validation_loss"] for r in csv.DictReader(file)]
        self.assertEqual(rows, ["5.0", "6.0", "", "", ""])
        self.assertEqual(self.metrics(run / "report")["validation_loss"], 6)

    def test_steps_without_a_plan_hide_who_shared_a_micro_batch(self):
        """Two ranks share one; without the step's plan it would count twice, and its rows of heads
        for heads of two ranks."""
        deck = '[mesh]\ndp = 2\n[batching]\nmethod = "hbp"\ngroup_ranks = [1, 2]\n'
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}, deck=deck) for r in range(2)]
        plan = synthetic.batch_plan((0, 2, [64]), (0, 1, [9]))
        plan |= {"step": 1, "lanes": [{"micro_batches": [0, 1]}, {"micro_batches": [0]}]}
        for r, rank in enumerate(ranks):
            for step in range(2):
                rank.event("step", 10 * step, 10 * step + 9, step=step)
                rank.event("forward", 10 * step, 10 * step + 4, step=step, mb=0)
                rank.budget(step, 0, 0, 4, 10, 40)
                rank.step(step, imbalance=1.1 + step / 10)
            if r == 0:
                for step in range(2):
                    rank.event("forward", 10 * step + 4, 10 * step + 6, step=step, mb=1)
        ranks[0].plan("step", 1, 0, plan)
        run = synthetic.write(self.folder / "run", ranks, deck=deck)
        text = self.report(run)
        self.assertIn("1 of 2 steps hold no plan (trace.plans_every)", text)
        self.assertIn("1 of 2 steps hold a batch plan", text)
        m = self.metrics(run / "report")
        # The first step by its micro-batches, of 4 and 2 s; the second as recorded.
        self.assertAlmostEqual(m["imbalance"], (4 / 3 + 1.2) / 2)
        self.assertAlmostEqual(m["sparsity_ratio"], 0.75)  # of all steps
        with open(run / "report" / "budgets.csv", newline="") as file:
            self.assertEqual({r["step"] for r in csv.DictReader(file)}, {"1"})

    def test_restart_on_fewer_ranks(self):
        run = self.folder / "run"
        synthetic.write(run, [self.part(0, 6, r, 3, 1.0, 1000) for r in range(3)], kill=True)
        synthetic.write(run, [self.part(4, 8, r, 2, 2.0, 5) for r in range(2)])
        text = self.report(run)
        self.assertIn("rank 2 belongs to an earlier start", text)
        self.assertNotIn("left no readable trace", text)
        self.assertEqual(self.metrics(run / "report")["ranks"], 2)

    def test_what_was_predicted_or_budgeted_for_a_step_given_up_is_not_shown(self):
        """Six steps, of which the last two ran again."""
        import load

        run = self.folder / "run"
        for first, last, kill in ((0, 6, True), (4, 6, False)):
            ranks = [self.part(first, last, r, 2, 1.0, 1000) for r in range(2)]
            for r in ranks:
                for step in range(first, last):
                    r.budget(step, 0, 0, 4, 10, 100)
                    r.predicted("forward", 0, 1, step=step, mb=0)
            synthetic.write(run, ranks, kill=kill)
        for trace in load.load_run(run).traces.values():
            self.assertEqual(trace.budgets["step"].tolist(), [1, 2, 3, 4, 5, 6])
            self.assertEqual(trace.predicted["step"].tolist(), [1, 2, 3, 4, 5, 6])

    def test_facts_of_a_run_are_those_of_its_newest_start(self):
        """Rank 0's trace of the second start, on three ranks, is lost."""
        import load

        run = self.folder / "run"
        synthetic.write(run, [self.part(0, 2, r, 2, 1.0, 1000) for r in range(2)])
        kept = (run / "trace" / "trace_00000.h5").read_bytes()
        synthetic.write(run, [self.part(2, 4, r, 3, 1.0, 5) for r in range(3)])
        (run / "trace" / "trace_00000.h5").write_bytes(kept)
        loaded = load.load_run(run)
        self.assertEqual(loaded.ranks, 3)
        self.assertEqual(loaded.first_trace.rank, 1)
        self.assertEqual(loaded.first_trace.last.mesh["dp"], 3)
        self.assertIn("rank 0 of 3 left no readable trace", " ".join(loaded.notes))


class Starts(unittest.TestCase):
    """Which starts of a rank are those of the others."""

    def numbers(self, *ranks):
        """Of (first step, number of ranks, time) of the starts of every rank."""
        import load

        traces = {}
        for rank, starts in enumerate(ranks):
            sessions = [
                types.SimpleNamespace(segment=segment, ranks=count, started=started, number=-1)
                for segment, count, started in starts
            ]
            traces[rank] = types.SimpleNamespace(rank=rank, sessions=sessions)
        load._number_sessions(traces)
        return [[s.number for s in trace.sessions] for trace in traces.values()]

    def test_starts_at_one_step_on_other_ranks_are_apart(self):
        """Rank 1 lacks the first start, and its second began nearer to the first."""
        found = self.numbers([(0, 2, 100), (0, 3, 130)], [(0, 3, 110)])
        self.assertEqual(found, [[0, 1], [1]])

    def test_of_two_starts_from_one_checkpoint_the_nearest_in_time_is_meant(self):
        found = self.numbers([(0, 2, 100), (4, 2, 200), (4, 2, 300)], [(0, 2, 101), (4, 2, 301)])
        self.assertEqual(found, [[0, 1, 2], [0, 2]])

    def test_a_clock_that_is_ahead_does_not_matter(self):
        found = self.numbers([(4, 2, 100), (4, 2, 103)], [(4, 2, 140), (4, 2, 143)])
        self.assertEqual(found, [[0, 1], [0, 1]])
        found = self.numbers([(0, 2, 100), (4, 2, 200), (4, 2, 300)], [(0, 2, 40), (4, 2, 241)])
        self.assertEqual(found, [[0, 1, 2], [0, 2]])


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    unittest.main()

"""What a run says of its steps: lines that fit a terminal, JSON lines, TensorBoard event files;
sinks that fail; and the checkpoint of the lowest held-out loss."""
import glob
import json
import os
import struct
import subprocess
import unittest

import h5py
import numpy

from runs import BALLAST, RunCase

REPORT = os.path.join(os.path.dirname(BALLAST), "ballast-report")


def scalars(folder):
    """{tag: [(step, value)]} of the event files below `folder`, by a parser of our own."""

    def fields(data):
        at = 0

        def varint():
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    return value

        while at < len(data):
            key = varint()
            if key & 7 == 0:
                yield key >> 3, varint()
            else:
                size = {1: 8, 5: 4}.get(key & 7) or varint()
                yield key >> 3, data[at : at + size]
                at += size

    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "*tfevents*"))):
        with open(path, "rb") as file:
            data = file.read()
        at = 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = dict(fields(data[at + 12 : at + 12 + size]))
            at += size + 16
            for _, value in fields(event.get(5, b"")):
                parts = dict(fields(value))
                (number,) = struct.unpack("<f", parts[2])
                found.setdefault(parts[1].decode(), []).append((event[2], number))
    return found


class StepSinks(RunCase):
    def lines(self, run):
        with open(os.path.join(run, "steps.jsonl")) as file:
            return [json.loads(line) for line in file]

    def test_log_json_lines_and_tensorboard_say_the_same(self):
        deck, run = self.deck(steps=4), self.out("run")
        done = self.run_ballast(2, "train", deck, "-d", run, "eval.every_steps=2")
        shown = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        self.assertEqual(len(shown), 6)
        self.assertTrue(all(len(line) <= 100 for line in shown), shown)
        self.assertRegex(shown[0], r"^step 1/4  loss \S+  grad_norm .* left \d+:\d\d:\d\d$")
        self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=6")
        rows = [row for row in self.lines(run) if "loss" in row]
        self.assertEqual([row["step"] for row in rows], [1, 2, 3, 4, 5, 6])
        logged = [row for row in self.steps(run) if "loss" in row]
        charts = scalars(os.path.join(run, "tensorboard"))
        for key, chart in (("loss", "train/loss"), ("lr", "train/lr"), ("mfu", "speed/mfu")):
            self.assertEqual([step for step, _ in charts[chart]], [1, 2, 3, 4, 5, 6])
            for row, line, (_, value) in zip(rows, logged, charts[chart]):
                self.assertAlmostEqual(row[key], float(line[key]), delta=6e-5)
                self.assertAlmostEqual(row[key], value, delta=1e-6 * abs(row[key]))
        held_out = [row["validation_loss"] for row in self.lines(run) if "validation_loss" in row]
        self.assertEqual([step for step, _ in charts["eval/loss"]], [2, 4])
        for mine, (_, value) in zip(held_out, charts["eval/loss"]):
            self.assertAlmostEqual(mine, value, delta=1e-6 * mine)

    def test_a_step_without_loss_tells_none(self):
        """Of four samples one is masked whole: a loss of 0 would be a dip of every chart."""
        data, run = self.out("masked.h5"), self.out("run")
        with h5py.File(data, "w") as file:
            file["tokens"] = numpy.arange(400, dtype="i4") % 251
            file["offsets"] = numpy.arange(0, 401, 100)
            file["loss_mask"] = numpy.repeat(numpy.array([1, 1, 0, 1], "u1"), 100)
        options = ["data.source=hdf5", f"data.path={data}", "data.validation_share=0"]
        options += ["batching.global_samples=1"]
        deck = self.deck(steps=4, dp=1)
        done = self.run_ballast(1, "train", deck, "-d", run, *options)
        rows = self.lines(run)
        (masked,) = [row["step"] for row in rows if row["loss_tokens"] == 0]
        told = [step for step in (1, 2, 3, 4) if step != masked]
        self.assertEqual([row["step"] for row in rows if "loss" in row], told)
        self.assertEqual(sorted(self.losses(run)), told)
        charts = scalars(os.path.join(run, "tensorboard"))
        self.assertEqual([step for step, _ in charts["train/loss"]], told)
        self.assertIn(f"step {masked}/4  no token carries loss  grad_norm 0", done.stdout)
        subprocess.run([REPORT, run], check=True, capture_output=True, text=True)
        with open(os.path.join(run, "report", "metrics.json")) as file:
            self.assertNotIn("NaN", file.read())

    def test_what_no_event_told_is_left_out(self):
        """Balance and exposed seconds come from events; without them no figure is made up."""
        derived = {"imbalance", "load_balance", "exposed_reduction_s"}
        for enabled in ("true", "false"):
            run = self.out(f"traced-{enabled}")
            self.run_ballast(2, "train", self.deck(steps=2), "-d", run, f"trace.enabled={enabled}")
            for row in [*self.steps(run), *self.lines(run)]:
                if "loss" in row:
                    self.assertEqual(set(row) & derived, derived if enabled == "true" else set())

    def test_log_and_report_agree_on_imbalance(self):
        """Of micro-batches that stages, Ulysses ranks or joined data-parallel ranks share."""
        joined = ["batching.method=hbp", "batching.groups=[64,256,1024]"]
        joined += ["batching.group_ranks=[1,2,4]", "batching.global_tokens=3000"]
        for name, mesh, keys in (
            ("stages", {"dp": 1}, ["mesh.pp=2"]),
            ("sequence", {"dp": 1, "sp": 2}, []),
            ("joined", {"dp": 4}, joined),
        ):
            run = self.out(name)
            ranks = 4 if name == "joined" else 2
            self.run_ballast(
                ranks, "train", self.deck(name + ".toml", steps=3, **mesh), "-d", run, *keys
            )
            subprocess.run([REPORT, run], check=True, capture_output=True, text=True)
            with open(os.path.join(run, "report", "metrics.json")) as file:
                told = json.load(file)["imbalance"]
            logged = [row["imbalance"] for row in self.lines(run) if "loss" in row]
            self.assertAlmostEqual(told, sum(logged) / len(logged), delta=1e-3 * told, msg=name)

    def test_tensorboard_reads_the_event_files(self):
        try:
            from tensorboard.backend.event_processing import event_accumulator
        except ImportError:
            self.skipTest("tensorboard is not installed")
        run = self.out("run")
        self.run_ballast(1, "train", self.deck(steps=3, dp=1), "-d", run)
        read = event_accumulator.EventAccumulator(os.path.join(run, "tensorboard"))
        read.Reload()
        rows = self.lines(run)
        self.assertEqual([event.step for event in read.Scalars("train/loss")], [1, 2, 3])
        for event, row in zip(read.Scalars("train/loss"), rows):
            self.assertAlmostEqual(event.value, row["loss"], delta=1e-6 * row["loss"])

    def test_a_sink_that_fails_costs_a_warning(self):
        deck, run = self.deck(steps=3), self.out("run")
        os.makedirs(os.path.join(run, "steps.jsonl"))
        with open(os.path.join(run, "tensorboard"), "w"):
            pass
        done = self.run_ballast(2, "train", deck, "-d", run)
        self.assertEqual(done.stdout.count("the run goes on without JSON lines"), 1)
        self.assertEqual(done.stdout.count("the run goes on without TensorBoard's event file"), 1)
        self.assertEqual(len(self.steps(run)), 3)
        off = self.out("off")
        settings = ("run.json_lines=false", "run.tensorboard=false")
        self.run_ballast(2, "train", deck, "-d", off, *settings)
        self.assertFalse(os.path.exists(os.path.join(off, "steps.jsonl")))
        self.assertFalse(os.path.exists(os.path.join(off, "tensorboard")))


class BestCheckpoint(RunCase):
    def best(self, run):
        return os.path.basename(os.readlink(os.path.join(run, "checkpoints", "best.h5")))

    def held_out(self, run):
        return {
            int(row["step"]): float(row["validation_loss"])
            for row in self.steps(run)
            if "validation_loss" in row
        }

    def test_the_lowest_held_out_loss_stays(self):
        # A rate that becomes too high: the held-out loss goes up again.
        deck, run = self.deck(every=1), self.out("run")
        settings = (
            "eval.every_steps=1",
            "checkpoint.keep=2",
            "checkpoint.best=true",
            "optimizer.schedule=constant",
        )
        self.run_ballast(2, "train", deck, "-d", run, *settings, "run.steps=6")
        losses = self.held_out(run)
        first = min(losses, key=losses.get)
        self.assertEqual(self.best(run), f"step_{first:08}.h5")
        high = ("-r", "latest", "run.steps=12", "optimizer.learning_rate=1")
        self.run_ballast(2, "train", deck, "-d", run, *settings, *high)
        losses = self.held_out(run)
        best = min(losses, key=losses.get)
        self.assertLess(best, 10, "the best one must be older than those that keep would leave")
        self.assertEqual(self.best(run), f"step_{best:08}.h5")
        there = sorted(os.listdir(os.path.join(run, "checkpoints")))
        self.assertEqual(
            there, ["best.h5", f"step_{best:08}.h5", "step_00000011.h5", "step_00000012.h5"]
        )
        twin = self.out("eval.json")
        self.run_ballast(2, "eval", deck, "-d", run, "-r", "best", "--json", twin)
        with open(twin) as file:
            found = json.load(file)
        self.assertEqual(found["step"], best)
        self.assertAlmostEqual(found["validation_loss"], losses[best], delta=2e-5)

    def test_it_is_written_where_no_other_is_due(self):
        deck, run = self.deck(steps=2, every=0), self.out("run")
        keys = ("eval.every_steps=1", "checkpoint.best=true", "checkpoint.at_end=false")
        self.run_ballast(2, "train", deck, "-d", run, *keys)
        losses = self.held_out(run)
        self.assertEqual(sorted(losses), [1, 2])
        self.assertEqual(self.best(run), f"step_{min(losses, key=losses.get):08}.h5")
        self.assertTrue(os.path.isfile(os.path.join(run, "checkpoints", self.best(run))))

    def test_it_needs_an_evaluation(self):
        deck = self.deck()
        done = self.run_ballast(1, "check", deck, "checkpoint.best=true", status=1)
        self.assertIn("eval.every_steps", done.stdout + done.stderr)
        done = self.run_ballast(2, "eval", deck, "-d", self.out("none"), "-r", "best", status=1)
        self.assertIn("no best checkpoint", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()

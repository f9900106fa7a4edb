"""Whole-program tests of pipelines: losses, gradients, checkpoints, evaluation, diagnosis and trace
over mesh.pp stages."""
import glob
import json
import os
import shutil
import subprocess
import unittest

from runs import BALLAST, RunCase

SHAPE = ["model.layers=4", "model.tied_embedding=true", "run.precision=fp64"]


class Pipelines(RunCase):
    def test_losses_gradients_and_restarts_are_those_of_one_stage(self):
        reference = None
        gradients = {}
        for ranks, dp, pp, inner, schedule in [
            (1, 1, 1, 1, "1f1b"),
            (2, 1, 2, 1, "1f1b"),
            (4, 2, 2, 1, "gpipe"),
            (4, 1, 4, 1, "state_aware_1f1b"),
            (4, 1, 2, 2, "1f1b"),
            (4, 1, 4, 1, "zero_bubble"),
        ]:
            run, dump = self.out(f"p{dp}{pp}{inner}{schedule[0]}"), self.out(
                f"p{dp}{pp}{inner}{schedule[0]}.safetensors"
            )
            self.run_ballast(
                ranks,
                "train",
                self.deck(dp=dp, cp_inner=inner, steps=4),
                "-d",
                run,
                f"mesh.pp={pp}",
                f"pipeline.schedule={schedule}",
                f"run.dump_gradients={dump}",
                "eval.every_steps=4",
                *SHAPE,
            )
            rows = self.steps(run)
            values = (
                [float(r["loss"]) for r in rows if "loss" in r]
                + [float(r["grad_norm"]) for r in rows if "grad_norm" in r]
                + [float(r["validation_loss"]) for r in rows if "validation_loss" in r]
            )
            reference = reference or values
            self.assertEqual(len(values), len(reference))
            for a, b in zip(reference, values):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=f"dp {dp} pp {pp} cp {inner}")
            with open(dump, "rb") as f:
                gradients[run] = f.read()
        sizes = {len(g) for g in gradients.values()}
        self.assertEqual(len(sizes), 1)
        # A checkpoint of four stages goes on with one, and evaluates the same on two.
        four, one = self.out("p141z"), self.out("p1111")
        self.run_ballast(1, "train", self.deck(dp=1, steps=6), "-d", four, "-r", "latest", *SHAPE)
        self.run_ballast(
            2, "train", self.deck(dp=1, steps=6), "-d", one, "-r", "latest", "mesh.pp=2", *SHAPE
        )
        a, b = self.losses(four), self.losses(one)
        self.assertEqual(sorted(a), list(range(1, 7)))
        for step in a:
            self.assertAlmostEqual(float(a[step]), float(b[step]), delta=2e-6)
        losses = []
        for ranks, pp in [(1, 1), (2, 2)]:
            twin = self.out("eval.json")
            self.run_ballast(
                ranks,
                "eval",
                self.deck(dp=1, steps=6),
                "-r",
                sorted(glob.glob(os.path.join(one, "checkpoints", "*.h5")))[-1],
                f"mesh.pp={pp}",
                "--json",
                twin,
                *SHAPE,
            )
            with open(twin) as f:
                losses.append(json.load(f)["validation_loss"])
        self.assertAlmostEqual(*losses, delta=1e-9)

    def test_the_trace_holds_the_schedule_of_every_stage_op_by_op(self):
        import h5py

        for schedule in ("gpipe", "state_aware_1f1b", "zero_bubble"):
            run = self.out(schedule)
            self.run_ballast(
                4,
                "train",
                self.deck(dp=1, steps=2),
                "-d",
                run,
                "mesh.pp=4",
                "model.layers=4",
                f"pipeline.schedule={schedule}",
            )
            stages, plans = set(), self.stored(run)
            self.assertEqual(sorted(plans), [1, 2])
            for path in glob.glob(os.path.join(run, "trace", "trace_*.h5")):
                with h5py.File(path, "r") as f:
                    events = f["events"][: f["rows"][0]] if f["rows"].shape else f["events"][()]
                    kinds = {
                        value: name
                        for name, value in h5py.check_enum_dtype(events.dtype["kind"]).items()
                    }
                    for step, plan in plans.items():
                        rows = [
                            e
                            for e in events
                            if e["step"] == step
                            and kinds[e["kind"]]
                            in (
                                "forward",
                                "recompute",
                                "backward",
                                "backward_input",
                                "backward_weight",
                                "send",
                                "recv",
                            )
                            and e["layer"] < 0
                            and e["micro_batch"] >= 0
                        ]
                        rows.sort(key=lambda e: e["begin_s"])
                        stage = int(rows[0]["stage"])
                        stages.add(stage)
                        self.assertEqual(
                            [
                                (kinds[e["kind"]], int(e["micro_batch"]), int(e["chunk"]))
                                for e in rows
                            ],
                            self.ops(plan, 0, stage),
                        )
            self.assertEqual(stages, {0, 1, 2, 3})
            kinds = {kind for plan in plans.values() for kind, _, _ in self.ops(plan, 0, 1)}
            self.assertEqual("backward_weight" in kinds, schedule == "zero_bubble")

    def test_predicted_ops_stand_beside_the_executed_ones(self):
        import h5py

        profile, run, shape = (
            self.out("profile"),
            self.out("predicted"),
            ["model.layers=2", "model.vocabulary=4096"],
        )
        self.run_ballast(
            2,
            "profile",
            self.deck(dp=1, steps=2),
            "-d",
            profile,
            "mesh.pp=2",
            "profile.lengths=[8,64,128]",
            "profile.prefixes=[64]",
            "profile.repeats=3",
            "profile.held_out=0",
            "profile.repair_limit=100",
            "profile.largest_message=65536",
            *shape,
        )
        self.run_ballast(
            2,
            "train",
            self.deck(dp=1, steps=2),
            "-d",
            run,
            "mesh.pp=2",
            "batching.method=chunkflow",
            "chunk.tokens=64",
            "chunk.k=1",
            "pipeline.schedule=zero_bubble",
            f"profile.table={profile}/profile.h5",
            "profile.repair_limit=100",
            *shape,
        )
        for row in self.steps(run):
            if "loss" in row:
                self.assertGreater(float(row["predicted_schedule_s"]), 0)
        shorter = 0
        for stage in (0, 1):
            with h5py.File(os.path.join(run, "trace", f"trace_{stage:05}.h5"), "r") as f:
                counts = f["rows"][()]
                events, predicted = (
                    f["events"][: counts["events"]],
                    f["predicted"][: counts["predicted"]],
                )
                kinds = {
                    value: name
                    for name, value in h5py.check_enum_dtype(events.dtype["kind"]).items()
                }
                done = [
                    e
                    for e in events
                    if kinds[e["kind"]]
                    in (
                        "forward",
                        "recompute",
                        "backward",
                        "backward_input",
                        "backward_weight",
                        "send",
                        "recv",
                    )
                    and e["layer"] < 0
                    and e["micro_batch"] >= 0
                ]
                done.sort(key=lambda e: e["begin_s"])
                ops = [
                    [
                        (e["step"], kinds[e["kind"]], e["micro_batch"], e["chunk"], e["stage"])
                        for e in rows
                    ]
                    for rows in (predicted, done)
                ]
                self.assertEqual(*ops)
                seconds = {op: e["end_s"] - e["begin_s"] for op, e in zip(ops[0], predicted)}
                for (step, kind, mb, chunk, _), again in seconds.items():
                    if kind != "recompute":
                        continue
                    first = seconds[step, "forward", mb, chunk, stage]
                    if stage == 0:
                        self.assertAlmostEqual(first, again, delta=1e-12)
                    else:
                        self.assertLess(first, 0.95 * again, "the first forward skips the head")
                        shorter += 1
        self.assertGreater(shorter, 0)

    def test_ranks_with_unlike_tables_build_one_schedule(self):
        # The table stands in for a processor whose logarithms round otherwise: every rank reads one
        # of its own, from its own folder.
        import h5py

        for name, words in (("table", 4096), ("slow", 65536)):  # the head's share differs
            self.run_ballast(
                2,
                "profile",
                self.deck(dp=1, steps=2),
                "-d",
                self.out(name),
                "mesh.pp=2",
                "profile.lengths=[8,64,128]",
                "profile.prefixes=[64]",
                "profile.repeats=3",
                "profile.held_out=0",
                "profile.repair_limit=100",
                "profile.largest_message=65536",
                "model.layers=2",
                f"model.vocabulary={words}",
            )

        def schedules(name, slow):
            """Text of the run's schedules, the same on all ranks; those in `slow` read the other
            table."""
            places, run = self.out(name + "-places"), self.out(name)
            for rank in range(4):
                os.makedirs(os.path.join(places, str(rank)))
                shutil.copy(
                    os.path.join(self.out("slow" if rank in slow else "table"), "profile.h5"),
                    os.path.join(places, str(rank), "table.h5"),
                )
            command = self.command(
                4,
                "train",
                self.deck(dp=1, cp_inner=2, steps=3),
                "-d",
                run,
                "mesh.pp=2",
                "batching.method=chunkflow",
                "chunk.tokens=64",
                "chunk.k=1",
                "pipeline.schedule=zero_bubble",
                "profile.table=table.h5",
                "profile.repair_limit=100",
                "profile.allow_mismatch=true",
                "model.layers=2",
                "model.vocabulary=4096",
            )
            at = command.index(BALLAST)
            command[at:at] = ["sh", "-c", 'cd "$0/$PMI_RANK" && exec "$@"', places]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
            )
            self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
            self.assertIn("predicted_schedule_s", self.steps(run)[0], "the table was not taken")
            return [plan["schedules"] for plan in self.stored(run).values()]

        plain = schedules("plain", ())
        self.assertTrue(
            plain != schedules("other", (0, 1, 2, 3)),
            "both tables give the same schedules: nothing is tested",
        )
        self.assertTrue(
            plain == schedules("mixed", (1, 2, 3)), "the first rank's times should count"
        )

    def test_chunks_train_like_packs_and_put_their_state_away(self):
        reference = None
        chunked = [
            "batching.method=chunkflow",
            "chunk.tokens=64",
            "pipeline.schedule=state_aware_1f1b",
            "eval.every_steps=3",
            *SHAPE,
        ]
        for ranks, pp, inner, extra in [
            (1, 1, 1, ["batching.method=packed"]),
            (1, 1, 1, []),
            (2, 2, 1, ["chunk.k=2", "chunk.offload=host"]),
            (2, 1, 2, ["chunk.offload=host", "chunk.window_tokens=128"]),
            (4, 2, 2, ["recompute.mode=full", "pipeline.schedule=zero_bubble"]),
        ]:
            run = self.out(f"c{pp}{inner}{len(extra)}")
            self.run_ballast(
                ranks,
                "train",
                self.deck(dp=1, cp_inner=inner, steps=3),
                "-d",
                run,
                f"mesh.pp={pp}",
                *chunked,
                *extra,
            )
            rows = self.steps(run)
            values = (
                [float(r["loss"]) for r in rows if "loss" in r]
                + [float(r["grad_norm"]) for r in rows if "grad_norm" in r]
                + [float(r["validation_loss"]) for r in rows if "validation_loss" in r]
            )
            reference = reference or values
            self.assertEqual(len(values), len(reference))
            for a, b in zip(reference, values):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=f"pp {pp} cp {inner} {extra}")


if __name__ == "__main__":
    unittest.main()

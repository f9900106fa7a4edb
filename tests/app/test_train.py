"""Whole-program tests of `ballast train` and `eval`: meshes, restarts, signals, killed ranks,
damaged files, full disks."""
import glob
import json
import os
import random
import re
import resource
import signal
import time
import unittest

from runs import RunCase


class Meshes(RunCase):
    def test_loss_is_the_same_on_every_mesh(self):
        meshes = [
            (1, 1, 1, 1, 1),
            (2, 2, 1, 1, 1),
            (2, 1, 1, 2, 1),
            (4, 2, 1, 2, 1),
            (4, 1, 2, 2, 1),
            (8, 2, 2, 2, 1),
            (4, 1, 1, 1, 4),
            (8, 2, 1, 2, 2),
        ]
        reference = None
        for ranks, dp, outer, inner, sp in meshes:
            deck, run = self.deck(dp=dp, cp_outer=outer, cp_inner=inner, sp=sp, steps=4), self.out(
                f"m{dp}{outer}{inner}{sp}"
            )
            self.run_ballast(ranks, "train", deck, "-d", run, "run.precision=fp64")
            losses = [float(v) for v in self.losses(run).values()]
            self.assertEqual(len(losses), 4)
            self.assertLess(losses[-1], losses[0])
            reference = reference or losses
            for a, b in zip(reference, losses):
                self.assertAlmostEqual(
                    a, b, delta=2e-6, msg=f"mesh dp {dp} cp {outer} x {inner} sp {sp}"
                )

    def test_impossible_mesh_shows_the_arithmetic(self):
        done = self.run_ballast(3, "train", self.deck(), "-d", self.out("x"), status=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("3", done.stderr + done.stdout)
        self.assertIn("mesh", done.stderr + done.stdout)

    def test_trace_holds_the_schedule_op_by_op(self):
        import h5py

        run = self.out("traced")
        self.run_ballast(4, "train", self.deck(dp=2, cp_inner=2), "-d", run)
        for path in glob.glob(os.path.join(run, "trace", "trace_*.h5")):
            with h5py.File(path, "r") as f:
                for name, _, meaning in f["steps"].attrs["columns"]:
                    self.assertTrue(meaning, f"{name} has no meaning in io/trace/trace_columns")
                events = f["events"][: f["rows"][0]] if f["rows"].shape else f["events"][()]
                kinds = {
                    value: name
                    for name, value in h5py.check_enum_dtype(events.dtype["kind"]).items()
                }
                for step in range(1, 7):
                    rows = [
                        e
                        for e in events
                        if e["step"] == step and kinds[e["kind"]] in ("forward", "backward")
                    ]
                    rows.sort(key=lambda e: e["begin_s"])
                    order = [(kinds[e["kind"]], int(e["micro_batch"])) for e in rows]
                    count = len(order) // 2
                    self.assertGreater(count, 0)
                    self.assertEqual(
                        order,
                        [op for m in range(count) for op in (("forward", m), ("backward", m))],
                    )

    def test_log_goes_down_and_zero_stages_agree(self):
        finals = {}
        for zero in (0, 1, 2):
            run = self.out(f"zero{zero}")
            self.run_ballast(
                4,
                "train",
                self.deck(dp=2, cp_inner=2, steps=5),
                "-d",
                run,
                f"optimizer.zero={zero}",
                "run.precision=fp64",
            )
            finals[zero] = float(self.losses(run)[5])
        self.assertAlmostEqual(finals[0], finals[1], delta=1e-6)
        self.assertAlmostEqual(finals[0], finals[2], delta=1e-6)

    # The first moment of a first step is a tenth of the gradient that the update took.
    def test_gradients_are_clipped_to_the_norm(self):
        import h5py

        def moments(name, ranks, limit):
            run = self.out(name)
            deck = self.deck(name + ".toml", dp=ranks, steps=1, every=1)
            more = [f"optimizer.clip_norm={limit!r}", "run.precision=fp64"]
            self.run_ballast(ranks, "train", deck, *more, "-d", run)
            with h5py.File(os.path.join(run, "checkpoints", self.checkpoints(run)[-1])) as f:
                found = {key: f["parameters"][key]["moment1"][()] for key in f["parameters"]}
            return found, float(self.steps(run)[0]["grad_norm"])

        free, norm = moments("free", 1, 0.0)
        squares = sum((value.astype(float) ** 2).sum() for value in free.values())
        self.assertAlmostEqual(10 * squares**0.5, norm, delta=1e-4 * norm)
        for name, ranks, limit, share in (
            ("above", 1, 2 * norm, 1.0),
            ("half", 1, 0.5 * norm, 0.5),
            ("tenth", 2, 0.1 * norm, 0.1),
        ):
            clipped, told = moments(name, ranks, limit)
            self.assertAlmostEqual(told, norm, delta=1e-4 * norm)  # as it was before
            for key, value in free.items():
                error = abs(clipped[key] - share * value).max() / abs(share * value).max()
                self.assertLess(error, 1e-4, (name, key))


class Restarts(RunCase):
    def test_restart_on_the_same_mesh_is_bit_identical(self):
        deck, whole, parts = self.deck(cp_inner=2), self.out("whole"), self.out("parts")
        self.run_ballast(4, "train", deck, "-d", whole)
        self.run_ballast(4, "train", deck, "-d", parts, "run.steps=3", "optimizer.decay_steps=6")
        self.run_ballast(4, "train", deck, "-d", parts, "-r", "latest")
        self.assertEqual(self.losses(whole), self.losses(parts))
        self.assertEqual(
            self.tensors(os.path.join(whole, "checkpoints", "step_00000006.h5")),
            self.tensors(os.path.join(parts, "checkpoints", "step_00000006.h5")),
        )

    def test_restart_on_another_mesh_sees_the_same_samples(self):
        whole, parts = self.out("whole"), self.out("parts")
        self.run_ballast(2, "train", self.deck(), "-d", whole, "run.precision=fp64")
        self.run_ballast(
            2,
            "train",
            self.deck(),
            "-d",
            parts,
            "run.precision=fp64",
            "run.steps=4",
            "optimizer.decay_steps=6",
        )
        self.run_ballast(
            4,
            "train",
            self.deck("other.toml", dp=1, cp_outer=2, cp_inner=2),
            "-d",
            parts,
            "run.precision=fp64",
            "-r",
            "latest",
        )
        a, b = self.losses(whole), self.losses(parts)
        self.assertEqual(sorted(a), sorted(b))
        for step in a:
            self.assertAlmostEqual(float(a[step]), float(b[step]), delta=2e-6)

    def test_checkpoints_count_tokens_and_seconds_from_the_first_step_on(self):
        import h5py

        deck, run = self.deck(steps=4), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=6")
        tokens, seconds = {}, {}
        for step, plan in self.stored(run).items():
            tokens[step] = sum(s[2] for m in plan["micro_batches"] for s in m["segments"])
        with open(os.path.join(run, "steps.jsonl")) as file:
            for line in map(json.loads, file):
                seconds[line["step"]] = line["step_time_s"]
        for last in (2, 4, 6):
            path = os.path.join(run, "checkpoints", f"step_{last:08}.h5")
            with h5py.File(path, "r") as file:
                told = dict(file.attrs)
            self.assertEqual(told["tokens_seen"], sum(tokens[s] for s in range(1, last + 1)))
            spent = sum(seconds[s] for s in range(1, last + 1))
            self.assertAlmostEqual(told["seconds_trained"], spent, delta=1e-9)

    def test_a_stopped_run_keeps_its_steps_and_told_how_long_the_rest_takes(self):
        """Though its deck wants no checkpoint, not even at the end."""
        run = self.out("run")
        deck = self.deck(steps=10**6, every=0)
        process = self.start(2, "train", deck, "-d", run, "checkpoint.at_end=false")
        try:
            self.wait_for_step(process, run, 12)
            os.kill(self.ranks_of(run)[0], signal.SIGTERM)
            output = process.communicate(timeout=60)[0]
        finally:
            self.stop_group(process)
        self.assertEqual(process.returncode, 75, output[-2000:])
        last = max(self.losses(run))
        self.assertEqual(self.checkpoints(run), [f"step_{last:08}.h5"])
        with open(os.path.join(run, "steps.jsonl")) as file:
            seconds = [json.loads(line)["step_time_s"] for line in file]
        for step in (2, 12):
            (left,) = re.findall(rf"^step {step}/.* left (.*)$", output, re.M)
            told = 0
            for part, factor in zip(re.findall(r"\d+", left)[::-1], (1, 60, 3600, 86400)):
                told += int(part) * factor
            expected = sum(seconds[:step]) / step * (10**6 - step)
            self.assertAlmostEqual(told, expected, delta=1 + 1e-4 * expected)

    def test_signals_and_wall_time_stop_with_75_and_go_on(self):
        whole = self.out("whole")
        deck = self.deck(steps=400, every=1000)
        for name, stop in (("term", signal.SIGTERM), ("usr1", signal.SIGUSR1)):
            run = self.out(name)
            process = self.start(2, "train", deck, "-d", run)
            try:
                self.wait_for_step(process, run, 3)
                ranks = self.ranks_of(run)
                self.assertEqual(len(ranks), 2)
                os.kill(random.choice(ranks), stop)  # one rank hears it, all agree
                output = process.communicate(timeout=60)[0]
            finally:
                self.stop_group(process)
            self.assertIn(process.returncode, (75,), output[-2000:])
            self.assertEqual(len(self.checkpoints(run)), 1)
            last = max(self.losses(run))
            self.run_ballast(
                2,
                "train",
                deck,
                "-d",
                run,
                "-r",
                "latest",
                f"run.steps={last + 2}",
                "optimizer.decay_steps=400",
            )
            self.assertEqual(sorted(self.losses(run)), list(range(1, last + 3)))
        run = self.out("wall")
        begin = time.time()
        self.run_ballast(
            2,
            "train",
            self.deck("wall.toml", steps=100000, every=0),
            "-d",
            run,
            "-t",
            "00:00:05",
            status=75,
        )
        self.assertLess(time.time() - begin, 20)
        self.assertEqual(len(self.checkpoints(run)), 1)

    def test_the_limit_leaves_room_for_an_evaluation(self):
        """None begins that could not end within the limit if it took as long as one before."""
        import h5py

        run, limit = self.out("run"), 3
        settings = ["data.source=distribution", "data.bin_tokens=[64]", "data.bin_share=[1]"]
        settings += ["data.samples=4000", "data.validation_share=0.9", "eval.every_steps=1"]
        settings += ["batching.global_tokens=64", "-t", f"00:00:{limit:02}"]
        deck = self.deck(dp=1, steps=10**6, every=0)
        self.run_ballast(1, "train", deck, "-d", run, *settings, status=75)
        with h5py.File(os.path.join(run, "trace", "trace_00000.h5"), "r") as file:
            begin = file["sessions/000"].attrs["started_unix_s"]  # not before the limit's clock
        with open(os.path.join(run, "steps.jsonl")) as file:
            times = [json.loads(row)["time"] - begin for row in file]  # a step, an evaluation, ...
        spent = [end - start for start, end in zip(times[::2], times[1::2])]
        self.assertGreater(len(spent), 1)
        for number, end in enumerate(times[1:-1:2], 1):  # after it the run went on
            self.assertLess(end + max(spent[:number]), limit + 0.1)  # until a line is written

    def ends_before_its_first_evaluation(self, *settings):
        """Which is due at the sixth step and takes longer than the limit; the steps are done."""
        run = self.out("run")
        settings += ("data.source=distribution", "data.bin_tokens=[64]", "data.bin_share=[1]")
        settings += ("eval.every_steps=6", "batching.global_tokens=64", "-t", "00:00:05")
        deck = self.deck(dp=1, steps=10**6, every=0)
        self.run_ballast(1, "train", deck, "-d", run, *settings, status=75)
        with open(os.path.join(run, "steps.jsonl")) as file:
            self.assertNotIn("validation_loss", file.read())
        self.assertEqual(max(self.losses(run)), 5)

    def test_the_limit_leaves_room_for_the_first_evaluation(self):
        """It has tokens of thousands of steps."""
        self.ends_before_its_first_evaluation("data.samples=200000", "data.validation_share=0.99")

    def test_the_limit_leaves_room_for_the_texts_of_the_first_evaluation(self):
        """They take passes over tokens of thousands of steps; the samples held out take none."""
        self.ends_before_its_first_evaluation(
            "data.samples=2000",
            "data.validation_share=0.05",
            "eval.generate_samples=80",
            "eval.generate_tokens=150",
        )

    def test_keep_and_folder_rules(self):
        deck, run = self.deck(steps=10, every=1), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        self.assertEqual(self.checkpoints(run), [f"step_{s:08}.h5" for s in (8, 9, 10)])
        again = self.run_ballast(2, "train", deck, "-d", run, status=None)
        self.assertNotEqual(again.returncode, 0)
        self.assertIn("-r latest", again.stderr + again.stdout)
        long = self.start(2, "train", self.deck("long.toml", steps=100000), "-d", self.out("busy"))
        try:
            self.wait_for_step(long, self.out("busy"), 1)
            second = self.run_ballast(
                2, "train", deck, "-d", self.out("busy"), "-r", "latest", status=None
            )
            self.assertNotEqual(second.returncode, 0)
            self.assertIn("in use", second.stderr + second.stdout)
        finally:
            self.stop_group(long)

    def test_damaged_latest_checkpoint_is_named_and_the_one_before_used(self):
        deck, run = self.deck(steps=6), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        newest = os.path.join(run, "checkpoints", "step_00000006.h5")
        with open(newest, "r+b") as f:
            f.truncate(os.path.getsize(newest) // 2)
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest")
        self.assertIn("step_00000006.h5", done.stdout + done.stderr)
        self.assertIn("step_00000004.h5", done.stdout)
        done = self.run_ballast(
            2,
            "train",
            deck,
            "-d",
            self.out("other"),
            "-r",
            os.path.join(run, "checkpoints", "step_00000004.h5"),
        )
        self.assertEqual(self.losses(run)[6], self.losses(self.out("other"))[6])


class Failures(RunCase):
    def test_a_killed_rank_ends_the_others_and_keeps_the_last_checkpoint(self):
        rng = random.Random(3)
        deck = self.deck(dp=2, cp_inner=2, steps=100000, every=1)
        for moment in range(10):
            run = self.out(f"kill{moment}")
            process = self.start(4, "train", deck, "-d", run)
            try:
                self.wait_for_step(process, run, 2 + rng.randint(0, 3))
                self.wait_for_checkpoint(process, run)
                time.sleep(rng.random() * 0.1)
                ranks = self.ranks_of(run)
                self.assertEqual(len(ranks), 4)
                os.kill(rng.choice(ranks), signal.SIGKILL)
                begin = time.time()
                process.communicate(timeout=30)
                self.assertLess(time.time() - begin, 30)
                self.assertNotEqual(process.returncode, 0)
            finally:
                self.stop_group(process)
            self.assertEqual(self.ranks_of(run), [])
            last = max(self.losses(run))
            done = self.run_ballast(
                4,
                "train",
                deck,
                "-d",
                run,
                "-r",
                "latest",
                f"run.steps={last + 2}",
                "optimizer.decay_steps=100000",
            )
            self.assertIn("continues", done.stdout)

    def test_a_killed_checkpoint_write_leaves_the_one_before(self):
        deck = self.deck(dp=2, steps=100000, every=1)
        caught = 0
        for trial in range(12):  # a busy machine may let a write finish before the kill arrives
            if caught == 2:
                break
            run = self.out(f"write{trial}")
            folder = os.path.join(run, "checkpoints")
            process = self.start(2, "train", deck, "-d", run)
            try:
                self.wait_for_step(process, run, 2)
                ranks, end = self.ranks_of(run), time.time() + 20
                while time.time() < end and not self.checkpoints(run):
                    pass  # written beside the steps, so it may come later than they
                while time.time() < end and not any(
                    f.endswith(".partial") for f in os.listdir(folder)
                ):
                    pass
                for rank in ranks:  # all at once, so that nobody tidies up
                    os.kill(rank, signal.SIGKILL)
                process.communicate(timeout=30)
                self.assertNotEqual(process.returncode, 0)
            finally:
                self.stop_group(process)
            caught += any(f.endswith(".partial") for f in os.listdir(folder))
            newest = int(self.checkpoints(run)[-1][5:13])
            done = self.run_ballast(
                2,
                "train",
                deck,
                "-d",
                run,
                "-r",
                "latest",
                f"run.steps={newest + 2}",
                "optimizer.decay_steps=100000",
            )
            self.assertIn(f"continues {os.path.join(folder, f'step_{newest:08}.h5')}", done.stdout)
            self.assertEqual([f for f in os.listdir(folder) if f.endswith(".partial")], [])
        self.assertGreater(caught, 0, "no kill fell into a write: the test has lost its subject")

    def test_full_disk_keeps_the_last_checkpoint(self):
        deck, run = self.deck(steps=4, every=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        before = self.tensors(os.path.join(run, "checkpoints", "step_00000004.h5"))
        size = os.path.getsize(os.path.join(run, "checkpoints", "step_00000004.h5"))

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

        done = self.run_ballast(
            2,
            "train",
            deck,
            "-d",
            run,
            "-r",
            "latest",
            "run.steps=8",
            "trace.enabled=false",
            status=None,
            preexec_fn=limit,
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(self.tensors(os.path.join(run, "checkpoints", "step_00000004.h5")), before)
        self.assertEqual(glob.glob(os.path.join(run, "checkpoints", "step_00000006.h5")), [])
        self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=8")

    def diverged(self, ranks, deck, *overrides):
        """What a run whose first update ruins its weights says as it ends."""
        ruin = [
            "optimizer.learning_rate=1e18",
            "optimizer.clip_norm=0",
            "optimizer.warmup_steps=0",
        ]
        done = self.run_ballast(
            ranks, "train", deck, "-d", self.out("nan"), *ruin, *overrides, status=None
        )
        self.assertNotEqual(done.returncode, 0)
        return done.stdout + done.stderr

    def test_nonfinite_loss_stops_and_names_the_place(self):
        text = self.diverged(2, self.deck(steps=50, every=5))
        self.assertIn("step", text)
        self.assertRegex(text, r"micro-batch \d+|arose in backward")

    def test_nonfinite_loss_names_a_state_that_is_older_than_the_last_one(self):
        """That one's update may have ruined the weights."""
        deck, waits = self.deck(steps=50, every=1), "checkpoint.snapshot_bytes=0"
        text = self.diverged(2, deck, waits)
        self.assertRegex(text, "step 2: loss = (nan|inf)")
        self.assertEqual(self.checkpoints(self.out("nan")), ["step_00000001.h5"])
        self.assertIn("there is no checkpoint of an earlier state", text)
        self.run_ballast(2, "train", deck, "-d", self.out("fine"), "run.steps=2")
        begun = os.path.join(self.out("fine"), "checkpoints", "step_00000002.h5")
        text = self.diverged(2, deck, waits, "-r", begun)
        self.assertRegex(text, "step 4: loss = (nan|inf)")
        names = ["step_00000002.h5", "step_00000003.h5"]
        self.assertEqual(self.checkpoints(self.out("nan")), names)
        older = os.path.join(self.out("nan"), "checkpoints", names[0])
        self.assertRegex(text, rf"continue with -r {re.escape(older)}\s")

    def test_ranks_that_share_micro_batches_find_a_nonfinite_loss_together(self):
        """Lists of ranks that share some micro-batches differ: those that hold the first bad one
        of the plan name it, and nobody waits for another."""
        text = self.diverged(
            4,
            self.deck(steps=50, every=0, dp=4),
            "run.hang_timeout_s=20",
            "batching.method=balanced",
            "batching.micro_batch_tokens=120",
        )
        self.assertRegex(text, r"first seen in micro-batch \d+ of data-parallel rank \d")
        self.assertNotIn("hang_timeout_s", text)

    def test_no_checkpoint_at_the_end_where_the_deck_says_so(self):
        for name, settings, count in (("without", ["checkpoint.at_end=false"], 0), ("with", [], 1)):
            run = self.out(name)
            self.run_ballast(2, "train", self.deck(steps=2, every=0), "-d", run, *settings)
            folder = os.path.join(run, "checkpoints")
            self.assertEqual(len(os.listdir(folder)) if os.path.isdir(folder) else 0, count)


class Evaluation(RunCase):
    def test_eval_equals_the_loss_in_the_log(self):
        run, twin = self.out("run"), self.out("eval.json")
        self.run_ballast(2, "train", self.deck(), "-d", run, "eval.every_steps=6")
        logged = [float(r["validation_loss"]) for r in self.steps(run) if "validation_loss" in r]
        self.assertEqual(len(logged), 1)
        self.run_ballast(
            4,
            "eval",
            self.deck("other.toml", dp=1, cp_outer=2, cp_inner=2),
            "-d",
            run,
            "-r",
            "latest",
            "--json",
            twin,
        )
        with open(twin) as f:
            found = json.load(f)
        self.assertAlmostEqual(found["validation_loss"], logged[0], delta=2e-5)
        self.assertGreater(found["loss_tokens"], 0)


if __name__ == "__main__":
    unittest.main()

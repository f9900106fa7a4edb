"""Lineage, model match, formats and failures of checkpoints, through the program."""
import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import time
import unittest

from runs import BALLAST, RunCase

HERE = os.path.dirname(os.path.abspath(__file__))
OLD = """[run]
seed = 11
steps = {steps}
[model]
layers = 1
hidden = 8
intermediate = 8
query_heads = 2
kv_heads = 1
head_dim = 4
vocabulary = 64
tied_embedding = true
[data]
source = "lengths"
lengths = [40, 50, 60, 70, 80, 90]
[batching]
method = "packed"
micro_batch_tokens = 100
global_tokens = 200
[trace]
enabled = false
"""


class Checkpoints(RunCase):
    def status(self, run):
        with open(os.path.join(run, "status.json")) as file:
            return json.load(file)

    def test_status_follows_a_run_that_lives(self):
        deck, run = self.deck(steps=100000, every=1), self.out("alive")
        process = self.start(2, "train", deck, "-d", run)
        try:
            self.wait_for_checkpoint(process, run)
            end = time.time() + 60
            while not self.status(run)["checkpoint"]:
                self.assertLess(time.time(), end, "status.json names no checkpoint")
                time.sleep(0.05)
            told = self.status(run)
            self.assertEqual(told["state"], "running")
            self.assertGreater(told["step"], 0)
            self.assertTrue(os.path.isfile(told["checkpoint"]), told)
        finally:
            self.stop_group(process)

    def test_status_says_which_rank_was_waited_for_in_vain(self):
        for culprit in (0, 1):
            deck, run = self.deck(steps=100000, every=1), self.out(f"hung{culprit}")
            process = self.start(2, "train", deck, "-d", run, "run.hang_timeout_s=3")
            try:
                self.wait_for_checkpoint(process, run)
                self.wait_for_step(process, run, 3)  # the run knows by now that it has one
                ranks = sorted(self.ranks_of(run))
                self.assertEqual(len(ranks), 2, "processes of the ranks in /proc")
                os.kill(ranks[culprit], signal.SIGSTOP)
                process.communicate(timeout=90)
            finally:
                self.stop_group(process)
            told = self.status(run)
            self.assertEqual(told["state"], "failed", told)
            self.assertRegex(told["why"], "rank [01] on .* without progress")
            self.assertTrue(os.path.isfile(told["checkpoint"]), told)

    def test_status_is_overwritten_where_no_new_file_has_room(self):
        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        fresh = os.path.join(run, "status.json.new0")
        again = ("train", deck, "-d", run, "-r", "latest")
        os.symlink("/dev/full", fresh)  # the first attempt ends as on a full disk
        self.run_ballast(2, *again, "run.steps=4")
        self.assertFalse(os.path.lexists(fresh), os.listdir(run))
        self.assertEqual(self.status(run)["step"], 4)
        os.makedirs(os.path.join(fresh, "full"))  # every attempt fails
        self.run_ballast(2, *again, "run.steps=6")
        told = self.status(run)
        self.assertEqual((told["state"], told["step"]), ("finished", 6))
        with open(os.path.join(run, "status.json"), "a") as file:
            file.write(" " * 10000)  # longer than what comes
        self.run_ballast(2, *again, "run.steps=7")
        self.assertEqual(self.status(run)["step"], 7)

    def test_a_status_that_cannot_be_overwritten_goes(self):
        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        status = os.path.join(run, "status.json")
        os.makedirs(os.path.join(status + ".new0", "full"))
        os.remove(status)
        os.symlink("/dev/full", status)
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=4")
        self.assertIn("status.json cannot be written", done.stderr)
        self.assertFalse(os.path.lexists(status), os.listdir(run))

    def test_a_folder_in_which_nothing_could_be_written_is_no_run(self):
        deck, run = self.deck(steps=2), self.out("full")
        os.mkdir(run)
        for name in ("log.txt", "lock"):
            open(os.path.join(run, name), "w").close()
        with open(os.path.join(run, "deck.toml"), "w") as f:
            f.write("[ru")
        self.run_ballast(2, "train", deck, "-d", run)
        again = self.run_ballast(2, "train", deck, "-d", run, status=1)
        self.assertIn("already holds a run", again.stderr)
        os.remove(os.path.join(run, "log.txt"))  # its checkpoints tell as well
        again = self.run_ballast(2, "train", deck, "-d", run, status=1)
        self.assertIn("already holds a run", again.stderr)

    def test_a_run_whose_folder_is_taken_away_leaves_what_comes_there_alone(self):
        deck = self.deck(steps=100000, every=1)
        for replaced in (False, True):
            run = self.out(f"moved-{replaced}")
            process = self.start(2, "train", deck, "-d", run)
            try:
                self.wait_for_checkpoint(process, run)
                os.remove(os.path.join(run, "lock"))  # made again: it is nobody else's
                time.sleep(0.3)
                self.assertIsNone(process.poll())
                self.assertTrue(os.path.exists(os.path.join(run, "lock")))
                os.rename(run, run + "-kept")
                if replaced:
                    os.makedirs(os.path.join(run, "checkpoints"))
                self.assertEqual(process.wait(60), 1)
            finally:
                self.stop_group(process)
            left = [names for _, _, names in os.walk(run)] if replaced else os.path.exists(run)
            self.assertEqual(left, [[], []] if replaced else False)
            self.run_ballast(2, "train", deck, "-d", run, "run.steps=1")
            again = [deck, "-d", run + "-kept", "-r", "latest", "run.steps=1"]
            done = self.run_ballast(2, "train", *again)
            self.assertIn("continues " + run + "-kept", done.stdout)

    def test_an_attempt_asks_whose_folder_it_would_write_into(self):
        other, run = self.out("other"), self.out("run")
        self.run_ballast(2, "train", self.deck(steps=3, every=1), "-d", other)
        deck = self.deck(steps=100000, every=1)

        def contents(folder):
            found = {}
            for place, _, names in os.walk(folder):
                for name in names:
                    with open(os.path.join(place, name), "rb") as file:
                        found[os.path.relpath(os.path.join(place, name), folder)] = file.read()
            return found

        theirs = contents(other)
        process = self.start(2, "train", deck, "-d", run, "checkpoint.max_failures=1000")
        try:
            self.wait_for_checkpoint(process, run)
            os.rename(run, run + "-kept")
            for line in process.stdout:
                if "failed: " in line:
                    break
            os.rename(other, run)
            out, _ = process.communicate(timeout=60)
        finally:
            self.stop_group(process)
        self.assertEqual(process.returncode, 1, out)
        self.assertIn("was replaced while this run was at work", out)
        self.assertEqual(contents(run), theirs)

    def test_a_folder_that_is_away_for_some_steps_costs_no_trace(self):
        import h5py

        deck, run = self.deck(steps=100000, every=0), self.out("run")
        away = run + "-away"
        process = self.start(2, "train", deck, "-d", run)
        try:
            self.wait_for_step(process, run, 3)
            os.rename(run, away)
            self.wait_for_step(process, away, max(self.losses(away)) + 3)
            os.rename(away, run)
            back = max(self.losses(run))
            self.wait_for_step(process, run, back + 3)
            os.kill(random.choice(self.ranks_of(run)), signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            self.stop_group(process)
        self.assertNotIn("without this rank's trace", out)
        for rank in range(2):
            with h5py.File(os.path.join(run, "trace", f"trace_{rank:05}.h5"), "r") as file:
                self.assertGreater(file["steps"]["step"].max(), back)

    def test_a_deck_that_cannot_be_kept_and_a_pipe_among_checkpoints_cost_nothing(self):
        deck, run = self.deck(steps=2), self.out("odd")
        self.run_ballast(2, "train", deck, "-d", run)
        os.remove(os.path.join(run, "deck.toml"))
        os.mkdir(os.path.join(run, "deck.toml"))
        os.mkfifo(os.path.join(run, "checkpoints", "step_00000300.h5"))
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=4")
        self.assertIn("deck.toml: is no regular file", done.stdout + done.stderr)
        self.assertIn("step_00000300.h5", done.stdout + done.stderr)
        self.assertIn("finished after step 4", done.stdout)

    def test_what_standard_output_does_not_take_is_told(self):
        deck = self.deck(steps=2)
        for command, status in (("check", 1), ("train", 0)):
            with open("/dev/full", "w") as full:
                line = [BALLAST, command, deck]
                line += ["mesh.dp=1", "-d", self.out("full")] if command == "train" else []
                done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn("standard output cannot be written", done.stderr)
        done = self.run_ballast(2, "train", deck, "-t", "", status=None)
        self.assertIn("is a variable of a script unset?", done.stderr)

    def test_latest_follows_the_branch_that_was_continued_last(self):
        deck, run = self.deck(steps=8), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        folder = os.path.join(run, "checkpoints")
        back = os.path.join(folder, "step_00000004.h5")
        done = self.run_ballast(
            2, "train", deck, "-d", run, "-r", back, "run.steps=5", "optimizer.learning_rate=0.02"
        )
        self.assertIn("overtaken_1", done.stdout)
        self.assertIn("optimizer.learning_rate: 0.01 before, 0.02 now", done.stdout)
        self.assertEqual(
            sorted(os.listdir(os.path.join(folder, "overtaken_1"))),
            ["step_00000006.h5", "step_00000008.h5"],
        )
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=6")
        self.assertIn("continues " + os.path.join(folder, "step_00000005.h5"), done.stdout)

    def test_latest_goes_on_from_a_file_of_another_folder(self):
        """Until the run has a checkpoint of its own: a job may be killed and queued again."""
        deck, run = self.deck(steps=6, every=0), self.out("run")
        keys = ("checkpoint.best=true", "eval.every_steps=2", "data.validation_share=0.3")
        self.run_ballast(
            2, "train", self.deck("from.toml", steps=4, every=4), "-d", self.out("from"), *keys
        )
        self.run_ballast(2, "train", deck, "-d", run, *keys)
        folder = os.path.join(run, "checkpoints")
        self.assertTrue(os.path.exists(os.path.join(folder, "best.h5")))
        begun = os.path.join(self.out("from"), "checkpoints", "step_00000004.h5")
        self.run_ballast(2, "train", deck, "-d", run, "-r", begun, "checkpoint.at_end=false")
        self.assertFalse(os.path.lexists(os.path.join(folder, "best.h5")), os.listdir(folder))
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=7")
        self.assertIn("continues " + os.path.join(folder, "step_00000004.h5"), done.stdout)
        self.assertEqual(self.checkpoints(run), ["step_00000004.h5", "step_00000007.h5"])
        away = self.out("away.h5")
        os.rename(begun, away)
        os.remove(os.path.join(folder, "step_00000007.h5"))
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", status=1)
        self.assertIn("no checkpoint is sound", done.stderr)
        os.rename(away, begun)  # what was out of reach has come back
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=7")
        self.assertIn("continues " + os.path.join(folder, "step_00000004.h5"), done.stdout)

    def test_own_files_by_other_names_are_own(self):
        deck, run = self.deck(steps=4, every=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        folder = os.path.join(run, "checkpoints")
        link = self.out("elsewhere.h5")
        os.symlink(os.path.join(folder, "step_00000002.h5"), link)
        for name, where in ((link, None), ("step_00000002.h5", folder)):
            self.run_ballast(2, "train", deck, "-d", run, "-r", name, cwd=where)
            self.assertEqual(self.checkpoints(run), ["step_00000002.h5", "step_00000004.h5"])

    def test_latest_goes_on_from_an_own_file_of_another_steps_name(self):
        deck, run = self.deck(steps=4, every=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        folder = os.path.join(run, "checkpoints")
        wrong = os.path.join(folder, "step_00000009.h5")
        os.rename(os.path.join(folder, "step_00000004.h5"), wrong)
        keys = ("run.steps=6", "checkpoint.every_steps=0", "checkpoint.at_end=false")
        self.run_ballast(2, "train", deck, "-d", run, "-r", wrong, *keys)
        self.assertEqual(self.checkpoints(run), ["step_00000002.h5", "step_00000004.h5"])
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", *keys)
        self.assertIn("continues " + os.path.join(folder, "step_00000004.h5"), done.stdout)

    def test_a_best_checkpoint_whose_link_fails_is_told(self):
        deck, run = self.deck(steps=4, every=0), self.out("run")
        os.makedirs(os.path.join(run, "checkpoints", "best.h5", "full"))
        keys = ("checkpoint.best=true", "eval.every_steps=2", "data.validation_share=0.3")
        done = self.run_ballast(2, "train", deck, "-d", run, *keys)
        self.assertIn("best.h5 cannot be made", done.stdout)

    def test_a_better_one_that_cannot_be_saved_leaves_the_best_that_is_there(self):
        """Until an evaluation beats that one again; `-r best` finds it."""
        deck, run = self.deck(steps=85, every=0), self.out("run")
        folder = os.path.join(run, "checkpoints")
        best = os.path.join(folder, "best.h5")
        keys = ("checkpoint.best=true", "eval.every_steps=40", "data.validation_share=0.3")
        keys += ("checkpoint.keep=1", "optimizer.learning_rate=0.001")
        process = self.start(2, "train", deck, "-d", run, *keys)
        while not os.path.lexists(best) and process.poll() is None:
            time.sleep(0.005)
        os.makedirs(os.path.join(folder, "step_00000080.h5", "full"))  # no file takes its place
        out, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, out)
        losses = [float(loss) for loss in re.findall(r"validation_loss ([\d.]+)", out)]
        self.assertLess(losses[1], losses[0])
        self.assertIn("step_00000080.h5 failed", out)
        self.assertEqual(os.readlink(best), "step_00000040.h5")
        self.assertTrue(os.path.exists(best), os.listdir(folder))
        on = self.run_ballast(2, "train", deck, "-d", self.out("on"), "-r", best, "run.steps=41")
        self.assertIn("step 41/41", on.stdout)

    def test_a_branch_that_is_taken_up_again_takes_no_best_from_the_other(self):
        deck, run = self.deck(steps=8), self.out("run")
        keys = ("checkpoint.best=true", "eval.every_steps=2", "data.validation_share=0.3")
        folder = os.path.join(run, "checkpoints")
        self.run_ballast(2, "train", deck, "-d", run, *keys)
        back = os.path.join(folder, "step_00000004.h5")
        other = ("optimizer.learning_rate=0.02", *keys)
        self.run_ballast(2, "train", deck, "-d", run, "-r", back, *other)
        left = os.path.join(folder, "overtaken_1", "step_00000008.h5")
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", left, "run.steps=9", *keys)
        self.assertIn("overtaken_2", done.stdout)
        best = os.path.join(folder, "best.h5")
        self.assertEqual(os.path.lexists(best), os.path.exists(best), os.listdir(folder))

    def test_a_file_names_its_run_and_its_parent(self):
        import h5py

        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=4")
        first, second = (
            dict(h5py.File(os.path.join(run, "checkpoints", f"step_{s:08}.h5"), "r").attrs)
            for s in (2, 4)
        )
        self.assertNotEqual(first["run"], second["run"])
        self.assertEqual(first["parent"], b"")
        self.assertIn(first["run"], second["parent"])
        self.assertIn(b"step_00000002.h5", second["parent"])
        self.assertEqual(self.status(run)["state"], "finished")
        self.assertTrue(self.status(run)["checkpoint"].endswith("step_00000004.h5"))

    def test_a_run_over_less_data_goes_on_with_the_next_epoch(self):
        deck, run = self.out("lengths.toml"), self.out("run")
        with open(deck, "w") as file:
            file.write(OLD.format(steps=2))
        self.run_ballast(1, "train", deck, "-d", run)
        less = ("-r", "latest", "run.steps=6", "data.lengths=[40]")
        done = self.run_ballast(1, "train", deck, "-d", run, *less)
        self.assertIn("goes on with the next epoch", done.stdout)
        self.assertEqual(max(self.losses(run)), 6)

    def test_a_best_loss_of_other_samples_is_no_bar(self):
        deck, run = self.deck(steps=4), self.out("run")
        keys = ("checkpoint.best=true", "eval.every_steps=2")
        self.run_ballast(2, "train", deck, "-d", run, *keys, "data.validation_share=0.3")
        more = ("-r", "latest", "run.steps=6", "optimizer.learning_rate=1e-7")
        done = self.run_ballast(
            2, "train", deck, "-d", run, *more, *keys, "data.validation_share=0.3"
        )
        self.assertNotIn("looked for anew", done.stdout)
        more = ("-r", "latest", "run.steps=8", "optimizer.learning_rate=1e-7")
        done = self.run_ballast(
            2, "train", deck, "-d", run, *more, *keys, "data.validation_share=0.6"
        )
        self.assertIn("looked for anew", done.stdout)
        self.assertIn("best checkpoint so far", done.stdout)

    def test_a_log_that_cannot_be_opened_costs_itself(self):
        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        os.remove(os.path.join(run, "log.txt"))
        os.makedirs(os.path.join(run, "log.txt"))
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", "run.steps=3")
        self.assertIn("goes on without its log", done.stderr)
        self.assertEqual(self.status(run)["state"], "finished")

    def test_a_run_whose_terminal_goes_stops_with_a_checkpoint(self):
        run = self.out("run")
        line = [os.environ["BALLAST_PROGRAM"], "train", self.deck(dp=1, steps=5000), "-d", run]
        with open(self.out("words"), "w+") as words:
            child = subprocess.Popen(line, stdout=words, stderr=subprocess.STDOUT)
            for _ in range(200):
                if os.path.exists(os.path.join(run, "steps.jsonl")):
                    break
                time.sleep(0.1)
            child.send_signal(signal.SIGHUP)
            self.assertEqual(child.wait(timeout=120), 75)
            words.seek(0)
            self.assertIn("SIGHUP", words.read())
        self.assertTrue(self.checkpoints(run))

    def test_a_run_outlives_the_reader_of_its_lines(self):
        run = self.out("run")
        line = (
            f"'{os.environ['BALLAST_PROGRAM']}' train '{self.deck(dp=1, steps=12)}' -d '{run}'"
            " | head -1"
        )
        subprocess.run(line, shell=True, check=True, capture_output=True, timeout=300)
        for _ in range(100):  # head does not wait for it
            if os.path.exists(os.path.join(run, "status.json")):
                if self.status(run)["state"] == "finished":
                    break
            time.sleep(0.2)
        self.assertEqual(self.status(run)["state"], "finished")

    def test_a_variable_of_kokkos_that_is_no_number_is_told_once(self):
        environment = {**os.environ, "KOKKOS_NUM_THREADS": "abc"}
        done = self.run_ballast(
            2, "train", self.deck(), "-d", self.out("run"), status=None, env=environment
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual((done.stdout + done.stderr).count("ballast: Kokkos does not start"), 1)

    def test_another_model_of_equal_shapes_is_refused(self):
        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        again = ("train", deck, "-d", run, "-r", "latest", "run.steps=3", "model.rope_theta=100.0")
        done = self.run_ballast(2, *again, status=1)
        self.assertIn("model.rope_theta", done.stdout + done.stderr)
        self.assertIn("--force-model", done.stdout + done.stderr)
        done = self.run_ballast(2, "eval", *again[1:], "data.validation_share=0.3")
        self.assertIn("another model than the deck's: model.rope_theta", done.stdout)
        self.assertIn("may have been trained on these: data.validation_share", done.stdout)
        self.run_ballast(2, *again, "--force-model")
        # Without adapters their keys say nothing of the model.
        self.run_ballast(2, *again, "run.steps=4", "lora.alpha=3")

    def test_another_model_is_refused_by_its_keys_and_moves_nothing(self):
        deck, run = self.deck(steps=6), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        kept = self.checkpoints(run)
        self.assertEqual(len(kept), 3)
        back = os.path.join(run, "checkpoints", kept[0])
        wide = ["model.hidden=64", "model.layers=3"]
        for where, words in (("latest", wide), (back, wide), (back, ["model.rope_theta=100.0"])):
            again = ("-d", run, "-r", where, "run.steps=7", *words)
            done = self.run_ballast(2, "train", deck, *again, status=1)
            lines = [line for line in done.stderr.split("\n") if "step_0" in line]
            self.assertEqual(len(lines), 1, done.stderr)
            for word in words:
                key, value = word.split("=")
                self.assertIn(key, lines[0])
                self.assertIn(value, lines[0])
            if words == wide:
                self.assertIn("model.hidden = 32 in the checkpoint, 64 in the deck", lines[0])
            self.assertEqual(self.checkpoints(run), kept)
        other = ("-r", back, "optimizer.kind=muon", "model.initial_std=0.5", "run.steps=7")
        done = self.run_ballast(2, "train", deck, "-d", run, *other, status=1)
        self.assertIn("optimizer.kind", done.stderr)
        self.assertNotIn("same blocks model", done.stderr)
        self.assertEqual(self.checkpoints(run), kept)
        done = self.run_ballast(2, "eval", deck, "-r", back, *wide, status=1)
        self.assertIn("model.layers = 2 in the checkpoint, 3 in the deck", done.stderr)

    def test_no_sound_checkpoint_is_no_new_start(self):
        deck, run = self.deck(steps=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        path = os.path.join(run, "checkpoints", "step_00000002.h5")
        with open(path, "r+b") as file:
            file.truncate(5000)
        for _ in range(2):
            done = self.run_ballast(2, "train", deck, "-d", run, "-r", "latest", status=1)
            self.assertIn("no checkpoint is sound", done.stdout + done.stderr)
        self.assertTrue(os.path.exists(path + ".damaged"))
        done = self.run_ballast(2, "train", deck, "-d", run, "-r", "", status=None)
        self.assertEqual(done.returncode, 2)

    def test_a_file_of_version_1_continues(self):
        old = os.path.join(self.folder, "old.h5")
        with gzip.open(os.path.join(HERE, "checkpoint_version_1.h5.gz")) as file:
            bytes_ = file.read()
        with open(old, "wb") as file:
            file.write(bytes_)
        deck = self.deck(text=OLD, steps=3)
        run = self.out("run")
        self.run_ballast(1, "train", deck, "-d", run, "-r", old, "optimizer.decay_steps=1")
        # What the program that wrote it went on to print.
        self.assertEqual(self.losses(run), {2: "4.160989", 3: "4.165277"})
        with open(old, "r+b") as file:
            file.seek(len(bytes_) - 3000)
            byte = file.read(1)
            file.seek(len(bytes_) - 3000)
            file.write(bytes([byte[0] ^ 1]))
        self.run_ballast(1, "train", deck, "-d", self.out("bad"), "-r", old, status=1)

    def test_a_failing_checkpoint_is_tried_again_and_ends_the_run_after_some(self):
        deck, run = self.deck(steps=4, every=2), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
            os.environ["UCX_TLS"] = "tcp,self"  # shared memory counts as files

        done = self.run_ballast(
            2, "train", deck, "-d", run, "-r", "latest", "run.steps=20", "trace.enabled=false",
            "checkpoint.max_failures=2", "checkpoint.keep=1", status=1, preexec_fn=limit,
        )  # fmt: skip
        text = done.stdout + done.stderr
        self.assertIn("the next attempt follows the next step", text)
        self.assertIn("2 in a row", text)
        self.assertIn("the checkpoints there stay until this one is whole", text)
        self.assertIn("raise the limit of a file's size (ulimit -f)", text)
        self.assertNotIn("free some space", text)
        self.assertNotIn("lower checkpoint.keep", text)
        self.assertIn("step_00000004.h5", text)
        self.assertEqual(self.status(run)["state"], "failed")
        self.assertEqual(max(self.losses(run)), 7)

    def test_a_trace_without_room_costs_the_trace_alone(self):
        deck, run = self.deck(steps=40, every=0), self.out("run")

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            os.environ["UCX_TLS"] = "tcp,self"

        done = self.run_ballast(
            2, "train", deck, "-d", run, "checkpoint.at_end=false", preexec_fn=limit
        )
        self.assertIn("goes on without this rank's trace", done.stderr)
        self.assertEqual(max(self.losses(run)), 40)
        self.assertEqual(self.status(run)["state"], "finished")

    def test_snapshots_are_as_good_as_waiting(self):
        decks = []
        for bytes_ in (0, 1 << 30):
            run = self.out(f"run{bytes_}")
            self.run_ballast(
                2, "train", self.deck(steps=6, every=1), "-d", run,
                f"checkpoint.snapshot_bytes={bytes_}", "checkpoint.keep=6",
            )  # fmt: skip
            decks.append(
                [
                    self.tensors(os.path.join(run, "checkpoints", f"step_{s:08}.h5"))
                    for s in range(1, 7)
                ]
            )
        self.assertEqual(decks[0], decks[1])

    def test_the_limit_counts_from_the_start_of_the_process(self):
        begin = time.time()
        done = self.run_ballast(
            2, "train", self.deck(steps=100000, every=0), "-d", self.out("run"), "-t", "00:00:04",
            status=None,
        )  # fmt: skip
        self.assertIn(done.returncode, (0, 75))
        self.assertEqual(self.status(self.out("run"))["state"], "stopped")
        self.assertEqual(self.status(self.out("run"))["why"], "wall-time limit")
        self.assertLess(time.time() - begin, 4 + 4)  # mpiexec and a busy machine take their part


if __name__ == "__main__":
    unittest.main()

"""Storage that refuses calls, through the program: what cannot be read stays, what cannot be locked
is told, an attempt that succeeds ends the attempts, and status.json says what a start came to."""
import json
import os
import re
import signal
import unittest

from runs import RunCase

FAULTS = os.environ.get("BALLAST_FAULTS", "")
# errno: ENOENT, ENFILE, ESTALE, ENOLCK, EIO
GONE, NO_FILES, STALE, NO_LOCKS, IO_ERROR = 2, 23, 116, 37, 5


@unittest.skipUnless(FAULTS, "BALLAST_FAULTS names no library (tests/campaign/faults.c)")
class Faults(RunCase):
    def faulty(self, faults, *arguments, status=0):
        env = self.environment(LD_PRELOAD=FAULTS, BALLAST_FAULT=faults)
        return self.run_ballast(2, *arguments, status=status, env=env)

    def test_a_checkpoint_that_a_rank_cannot_read_stays_and_ends_the_start(self):
        deck, run = self.deck(steps=12, every=4), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)
        folder = os.path.join(run, "checkpoints")
        before, newest = sorted(os.listdir(folder)), "step_00000012.h5"
        again = ("train", deck, "-d", run, "-r", "latest", "run.steps=13")
        for fault in (
            "1 open step_ 1 broken 2",
            f"0 open {newest} 1 fail {NO_FILES}",
            f"0 pread {newest} 2 fail {STALE}",
        ):
            done = self.faulty(fault, *again, status=1)
            self.assertIn(newest, done.stderr, fault)
            self.assertIn("may be sound", done.stderr, fault)
            self.assertEqual(sorted(os.listdir(folder)), before, fault)
        done = self.run_ballast(2, *again)
        self.assertIn(f"continues {folder}/{newest}", done.stdout)

    def test_an_attempt_that_succeeds_ends_the_attempts(self):
        deck, run = self.deck(steps=39, every=10), self.out("run")
        keys = ("checkpoint.keep=30", "checkpoint.at_end=false")
        done = self.faulty(
            f"0 fsync step_00000030 1 fail {IO_ERROR}", "train", deck, "-d", run, *keys
        )
        self.assertIn("step_00000030.h5 failed", done.stdout)
        steps = [int(re.search(r"\d+", name)[0]) for name in self.checkpoints(run)]
        self.assertEqual(steps[:2], [10, 20])
        self.assertEqual(len(steps), 3, steps)

    def test_a_file_system_without_locks_is_told_from_another_run(self):
        deck = self.deck(steps=2)
        train = ("train", deck, "-d")
        done = self.faulty(f"0 flock lock 1 broken {NO_LOCKS}", *train, self.out("unlocked"))
        self.assertIn("cannot be locked: No locks available", done.stderr)
        self.assertIn("finished after step 2", done.stdout)
        done = self.faulty(f"0 flock lock 1 fail {IO_ERROR}", *train, self.out("odd"), status=1)
        self.assertIn("cannot be locked: Input/output error", done.stderr)
        self.assertNotIn("in use by another run", done.stderr)

    def test_status_says_that_a_start_was_refused(self):
        deck, run = self.deck(steps=4), self.out("run")
        self.run_ballast(2, "train", deck, "-d", run)

        def refused(restart):
            self.run_ballast(2, "train", deck, "-d", run, "-r", restart, "run.steps=6", status=1)
            with open(os.path.join(run, "status.json")) as file:
                told = json.load(file)
            self.assertEqual((told["state"], told["step"]), ("failed", 4), told)
            self.assertIn("step_00000004.h5", told["checkpoint"])
            return told["why"]

        for name in self.checkpoints(run):
            os.truncate(os.path.join(run, "checkpoints", name), 1000)
        self.assertIn("no checkpoint is sound", refused("latest"))
        self.assertIn("elsewhere.h5", refused(self.out("elsewhere.h5")))  # not the last session's

    def test_a_rank_that_did_not_see_the_fresh_folder_says_how_it_ended(self):
        deck, run = self.deck(steps=100000, every=0), self.out("run")
        unseen = self.environment(LD_PRELOAD=FAULTS, BALLAST_FAULT=f"1 stat {run}$ 1 fail {GONE}")
        process = self.start(2, "train", deck, "-d", run, "run.hang_timeout_s=3", env=unseen)
        try:
            self.wait_for_step(process, run, 3)
            ranks = sorted(self.ranks_of(run))
            self.assertEqual(len(ranks), 2, "processes of the ranks in /proc")
            os.kill(ranks[0], signal.SIGSTOP)
            process.communicate(timeout=90)
        finally:
            self.stop_group(process)
        with open(os.path.join(run, "status.json")) as file:
            told = json.load(file)
        self.assertEqual(told["state"], "failed", told)
        self.assertRegex(told["why"], "rank 1 on .* without progress")


if __name__ == "__main__":
    unittest.main()

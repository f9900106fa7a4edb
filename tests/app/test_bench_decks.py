"""ballast bench on decks: what trains is what is timed, weights are those that are named, cases of
a deck do not touch each other, and what could not be measured is said."""
import json
import os
import unittest

from runs import DECK, RunCase

SLASH = ["attention.pattern=vertical_slash", "attention.last_q=32"]
SLASH += ["attention.vertical_share=0.5", "attention.slash_share=0.3"]
LONG = ["data.max_tokens=900", "batching.micro_batch_tokens=1000"]
CASES = """
[[case]]
name = "big"
model.hidden = 256
model.intermediate = 512
[[case]]
name = "small"
model.hidden = 32
"""


class BenchDecks(RunCase):
    def bench(self, ranks, *arguments):
        path = self.out("bench.json")
        self.run_ballast(ranks, "bench", *arguments, "--json", path)
        with open(path) as f:
            return json.load(f)

    def refused(self, *arguments):
        return self.run_ballast(1, "bench", *arguments, status=1).stderr

    def test_memory_is_of_each_case(self):
        deck = self.deck("cases.toml", DECK + CASES, dp=1)
        big, small = self.bench(1, "step", deck, "warmup=0", "repeats=1")["cases"]
        alone = self.bench(1, "step", deck, "--case", "small", "warmup=0", "repeats=1")
        (alone,) = alone["cases"]
        self.assertGreater(big["peak_memory_gib"], 2 * small["peak_memory_gib"])
        self.assertAlmostEqual(small["peak_memory_gib"] / alone["peak_memory_gib"], 1, delta=0.02)

    @unittest.skipIf(os.path.exists("/dev/nvidiactl"), "a GPU may answer here")
    def test_a_gpu_that_is_not_there_is_said(self):
        gpu = ["run.backend=cuda", "model.head_dim=64"]
        # Nothing is opened or made before: not the data, nor a model that a host may not hold.
        said = self.refused("step", self.deck(dp=1), *gpu, f"data.paths=['{self.out('none')}']")
        self.assertIn("run.backend=host measures the host", said)

    def test_weights_of_a_checkpoint(self):
        """Those of a run in fp32 are judged in fp64; the newest of no folder is no file."""
        deck, run = self.deck(dp=1, steps=2, every=1), self.out("run")
        self.run_ballast(1, "train", deck, "-d", run)
        file = os.path.join(run, "checkpoints", "step_00000002.h5")
        own = self.bench(1, "leak", deck, *SLASH, *LONG, f"checkpoint={file}")
        initial = self.bench(1, "leak", deck, *SLASH, *LONG)
        self.assertNotEqual(
            own["largest_log_probability_change"], initial["largest_log_probability_change"]
        )
        for name in ("latest", "best"):
            said = self.refused("leak", deck, *SLASH, f"checkpoint={name}")
            self.assertIn("name the file", said)
        again = self.run_ballast(
            1,
            "train",
            deck,
            "-d",
            run,
            "-r",
            "latest",
            "run.steps=3",
            "run.precision=fp64",
            status=1,
        )
        self.assertIn("use the precision that it was written with", again.stderr)
        done = self.run_ballast(1, "eval", deck, "run.precision=fp64", "-r", file)
        self.assertIn("validation_loss", done.stdout)

    def test_a_leak_without_later_tokens_is_none(self):
        said = self.refused("leak", self.deck(dp=1), *SLASH, "align=1000")
        self.assertIn("has a token behind its cut", said)
        found = self.bench(1, "leak", self.deck(dp=1), *SLASH, "data.min_tokens=200")
        self.assertGreater(found["redrawn_tokens"], 4 * 90)

    def test_rows_are_a_bound(self):
        keys = [
            *SLASH,
            "data.source=lengths",
            "data.lengths=[256]",
            "data.validation_share=0",
            "at=0.75",
        ]
        keys += ["samples=1", "batching.micro_batch_tokens=256"]
        pairs = {
            rows: self.bench(1, "leak", self.deck(dp=1), *keys, f"rows={rows}")["pairs"]
            for rows in (96, 100, 191, 192)
        }
        self.assertEqual(pairs[96], pairs[100])
        self.assertEqual(pairs[96], pairs[191])
        self.assertLess(1.9 * pairs[96], pairs[192])

    def test_heads_keep_other_files_and_take_one_seed(self):
        deck, alone, out = self.deck(), self.deck("alone.toml", dp=1), self.out("other.toml")
        with open(out, "w") as file:
            file.write("# a deck")
        said = self.refused("heads", alone, *SLASH, f"out={out}")
        self.assertIn("no table of patterns by head", said)
        with open(out) as file:
            self.assertEqual(file.read(), "# a deck")
        said = self.refused("heads", alone, *SLASH, f"out={self.out('none/h.json')}")
        self.assertIn("cannot be written", said)
        said = self.refused("heads", self.deck("cases.toml", DECK + CASES, dp=1), *SLASH)
        self.assertIn("choose it with --case", said)
        keys = [*SLASH, *LONG, "samples=2", "pairs=0.6"]
        table = self.out("heads.json")
        found = self.bench(2, "heads", deck, *keys, "seed=", f"out={table}")
        again = self.bench(1, "heads", alone, *keys, f"seed={found['seed']}", f"out={table}")
        self.assertEqual(found["rules"], again["rules"])

    def test_profiles_name_a_mode_of_recomputation_once(self):
        said = self.run_ballast(
            1, "profile", self.deck(dp=1), 'profile.recompute=["none","none"]', status=1
        ).stderr
        self.assertIn("names a mode twice", said)


if __name__ == "__main__":
    unittest.main()

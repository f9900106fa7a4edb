"""jobs/matrix.py: every case trained, evaluated under every case of its group, resumable."""
import json
import pathlib
import subprocess
import sys
import unittest

from runs import BALLAST, RunCase

ROOT = pathlib.Path(__file__).resolve().parents[2]

DECK = """# Two tasks by two patterns, too small to learn anything.
[run]
steps = 3
[model]
layers = 1
hidden = 16
intermediate = 16
query_heads = 2
kv_heads = 2
head_dim = 8
vocabulary = 64
[data]
source = "needle"
samples = 50
needle_task = "values"
needle_lengths = [96, 160]
needle_pairs = [3]
needle_questions = [2]
needle_keys = 12
needle_values = 8
needle_held_out = 9
[batching]
method = "packed"
micro_batch_tokens = 160
global_tokens = 320
[trace]
enabled = false
[[case]]
name = "values: dense"
[[case]]
name = "values: moba"
attention.pattern = "moba"
attention.moba_block = 64
attention.moba_top_k = 1
[[case]]
name = "variables: dense"
data.needle_task = "variables"
[[case]]
name = "variables: moba"
data.needle_task = "variables"
attention.pattern = "moba"
attention.moba_block = 64
attention.moba_top_k = 1
"""


class Matrix(RunCase):
    def matrix(self, deck, *more):
        command = [sys.executable, str(ROOT / "jobs/matrix.py"), str(deck), "--out"]
        command += [str(self.folder / "m"), "--program", str(BALLAST), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.folder)
        self.deck_file = self.folder / "tasks.toml"
        self.deck_file.write_text(DECK)

    def test_every_case_is_evaluated_under_every_case_of_its_group(self):
        done = self.matrix(self.deck_file, "--seeds", "1", "2", "--jobs", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        cells = json.loads((self.folder / "m/matrix.json").read_text())["cells"]
        self.assertEqual(len(cells), 8)
        for cell in cells:
            names = [f"{cell['group']}: {p}" for p in ("dense", "moba")]
            self.assertEqual(list(cell["evaluated"]), names)
            for name in names:
                file = self.folder / "m" / (self.plain(cell["trained"]) + f"-{cell['seed']}")
                twin = json.loads((file / f"eval-{self.plain(name)}.json").read_text())
                self.assertEqual(twin["needle_accuracy"], cell["evaluated"][name])
                self.assertEqual(twin["needle"]["questions"], 18)
                classes = twin["loss_by_position"]
                tokens = sum(c["tokens"] for c in classes)
                self.assertEqual(tokens, twin["loss_tokens"])
                self.assertAlmostEqual(
                    sum(c["loss"] * c["tokens"] for c in classes) / tokens,
                    twin["validation_loss"],
                    places=5,
                )
        self.assertIn("values\n", done.stdout)
        self.assertIn("trained \\ evaluated", done.stdout)
        result = self.folder / "m/values__moba-2/eval-values__dense.json"
        written = result.stat().st_mtime_ns
        again = self.matrix(self.deck_file, "--seeds", "1", "2")
        self.assertEqual(again.stdout, done.stdout)
        self.assertEqual(result.stat().st_mtime_ns, written)

    def test_a_run_that_fails_is_named_and_the_others_stand(self):
        done = self.matrix(self.deck_file, "--only", "variables", "data.needle_held_out=0")
        self.assertEqual(done.returncode, 1)
        self.assertIn("eval --case 'variables: dense', seed 1", done.stderr)
        missing = self.matrix(self.deck_file, "--only", "nothing")
        self.assertEqual(missing.returncode, 1)
        self.assertIn("no case of", missing.stderr)

    @staticmethod
    def plain(name):
        return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


if __name__ == "__main__":
    unittest.main()

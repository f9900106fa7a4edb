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
        one_seed = self.matrix(self.deck_file, "--only", "values", "run.seed=9")
        self.assertIn("give --seeds", one_seed.stderr)
        self.assertEqual(one_seed.returncode, 2)
        missing = self.matrix(self.deck_file, "--only", "nothing")
        self.assertEqual(missing.returncode, 1)
        self.assertIn("no case of", missing.stderr)

    def test_an_evaluation_without_a_number_is_a_failed_cell(self):
        """The others stand, also when the matrix is started again."""
        program = self.folder / "ballast"
        program.write_text(
            "#!/usr/bin/env python3\nimport json, sys\n"
            "lost = sys.argv[1] == 'eval' and sys.argv[4] == 'values: moba'\n"
            "twin = {'validation_loss': None if lost else 2.5}\n"
            "json.dump(twin, open(sys.argv[sys.argv.index('--json') + 1], 'w'))\n"
        )
        program.chmod(0o755)
        more = ("--only", "values", "--seeds", "1", "2", "--program", str(program))
        for _ in range(2):
            done = self.matrix(self.deck_file, *more)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stdout, r"dense +2\.5000 ± 0\.0000 +failed\n")
            self.assertIn("eval-values__moba.json: validation_loss is no number", done.stderr)
            cells = json.loads((self.folder / "m/matrix.json").read_text())["cells"]
            self.assertEqual(len(cells), 4)
            want = {"values: dense": 2.5, "values: moba": None}
            self.assertEqual(cells[0]["evaluated"], want)

    def test_a_seed_is_given_once(self):
        done = self.matrix(self.deck_file, "--seeds", "1", "2", "1", "--jobs", "2")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--seeds names a seed twice", done.stderr)
        self.assertFalse((self.folder / "m").exists())

    def test_names_that_would_share_a_folder_are_refused(self):
        self.deck_file.write_text(DECK + '[[case]]\nname = "values_ dense"\n')
        done = self.matrix(self.deck_file)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("'values: dense' and 'values_ dense'", done.stderr)
        self.assertIn("rename one", done.stderr)
        self.assertFalse((self.folder / "m").exists())

    def test_results_made_with_other_settings_are_refused(self):
        only = ("--only", "values")
        # A word that no deck has starts no run, and binds the folder to nothing.
        self.assertEqual(self.matrix(self.deck_file, *only, "modle.layers=2").returncode, 1)
        self.assertEqual(self.matrix(self.deck_file, *only, "model.layers=2").returncode, 0)
        trained = self.folder / "m/values__dense-1/train.json"
        before = trained.read_text()
        for text, more, named in (
            (DECK, ("model.layers=1",), "overrides"),
            (DECK.replace("samples = 50", "samples = 60"), ("model.layers=2",), "[data]"),
            (DECK.replace("top_k = 1", "top_k = 2"), ("model.layers=2",), "case 'values: moba'"),
        ):
            self.deck_file.write_text(text)
            done = self.matrix(self.deck_file, *only, *more)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            for part in (named, "--out", "delete"):
                self.assertIn(part, done.stderr)
            self.assertEqual(trained.read_text(), before)
        # Another case, a comment and more seeds change no result that is there.
        self.deck_file.write_text("# text\n" + DECK + '[[case]]\nname = "values: other"\n')
        done = self.matrix(self.deck_file, "model.layers=2", *only, "--seeds", "1", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(trained.read_text(), before)
        # Results of a build that kept no record may be of anything.
        (self.folder / "m/made_with.json").unlink()
        done = self.matrix(self.deck_file, *only, "model.layers=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("made_with.json", done.stderr)

    def test_a_training_that_was_killed_goes_on(self):
        more = ("--only", "values: dense", "checkpoint.every_steps=1")
        whole = self.matrix(self.deck_file, *more)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        folder = self.folder / "m/values__dense-1"
        trained = json.loads((folder / "train.json").read_text())
        # As if it was killed in its last step, then as if it was before its first checkpoint.
        for kept in (2, 0):
            for result in folder.glob("*.json"):
                result.unlink()
            for file in folder.glob("checkpoints/*"):
                if file.name == "best.h5" or int(file.name[5:13]) > kept:
                    file.unlink()
            again = self.matrix(self.deck_file, *more)
            self.assertEqual(again.returncode, 0, again.stderr + again.stdout)
            self.assertEqual(again.stdout, whole.stdout)
            found = json.loads((folder / "train.json").read_text())
            self.assertEqual((found["step"], found["loss"]), (trained["step"], trained["loss"]))
            continued = "continues" in (folder / "train.log").read_text()
            self.assertEqual(continued, kept > 0)

    def test_a_launcher_that_hides_a_stop_and_results_that_are_cut_off(self):
        """MPICH's mpiexec may leave with 0 where the program left with 75."""
        program = self.folder / "program"
        program.write_text(
            f"""#!/bin/sh
[ "$1" = train ] || exec '{BALLAST}' "$@"
case $(cat '{self.folder}/next') in
  stop) '{BALLAST}' "$@" -t 0:00:01 run.steps=1000000; exit 0 ;;
  fail) exit 1 ;;
  *) exec '{BALLAST}' "$@" run.steps=$(cat '{self.folder}/next') ;;
esac
"""
        )
        program.chmod(0o755)
        folder = self.folder / "m/values__dense-1"

        def start(how):
            (self.folder / "next").write_text(str(how))
            return self.matrix(self.deck_file, "--only", "values: dense", "--program", str(program))

        first = start("stop")
        stopped = json.loads((folder / "status.json").read_text())
        self.assertEqual(stopped["state"], "stopped")
        self.assertEqual(first.returncode, 1, first.stdout)
        self.assertIn("status 0 (stopped early: the same command goes on", first.stderr)
        self.assertFalse((folder / "train.json").exists())
        failed = start("fail")
        self.assertIn("status 1, see", failed.stderr)
        # The stopped training goes on, and so does one whose result does not say that it is whole.
        for state, last in ("stopped", 3), ("empty", 6), ("unfinished", 9):
            if state == "empty":
                (folder / "train.json").write_text("")
            elif state == "unfinished":
                (folder / "train.json").write_text('{"finished": false}')
            again = start(stopped["step"] + last)
            self.assertEqual(again.returncode, 0, state + again.stderr)
            self.assertIn("# continues", (folder / "train.log").read_text())
            trained = json.loads((folder / "train.json").read_text())
            self.assertEqual(trained["step"], stopped["step"] + last)
            self.assertTrue(trained["finished"])
        (self.folder / "m/made_with.json").write_text("")
        again = start("fail")
        self.assertEqual(again.returncode, 1)
        self.assertIn("made_with.json is empty or damaged; choose another", again.stderr)

    @staticmethod
    def plain(name):
        return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


if __name__ == "__main__":
    unittest.main()

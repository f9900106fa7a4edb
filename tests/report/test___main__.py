"""The command line, as users start it."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import support
import synthetic


class Outputs(support.RunTest):
    def test_what_cannot_be_written_is_named(self):
        run = synthetic.known_run(self.folder / "run")
        plain = self.folder / "plain"
        plain.write_text("")
        for option, place in (
            ("--json", "/dev/full"),
            ("--perfetto", "/dev/full"),
            ("--json", plain / "m.json"),
            ("--out", plain),
        ):
            said = self.report(run, option, place, status=1, draw=False)
            self.assertEqual(said.count("\n"), 1, said)
            self.assertIn(f"cannot write {place}: ", said)
            self.assertIn("name another place", said)

    def test_standard_output_is_named_where_it_fails(self):
        run, folder = synthetic.known_run(self.folder / "run"), support.REPORT
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, folder, run], stdout=full, stderr=subprocess.PIPE, text=True
            )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("ballast-report: standard output cannot be written", done.stderr)
        self.assertTrue((run / "report" / "report.html").exists())

    def run_with_files(self):
        """A run and all that it wrote for itself."""
        run = synthetic.known_run(self.folder / "run")
        (run / "checkpoints").mkdir()
        for name in ("log.txt", "status.json", "steps.jsonl", "checkpoints/step_00000001.json"):
            (run / name).write_text('{"step": 1}\n')
        os.link(run / "status.json", self.folder / "linked.json")
        (self.folder / "link.json").symlink_to(run / "steps.jsonl")
        return run

    def held(self):
        """Every file below the test's folder with its bytes."""
        return {p: p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}

    def test_files_of_a_run_are_never_replaced(self):
        run = self.run_with_files()
        other = synthetic.known_run(self.folder / "other")
        (other / "status.json").write_text("{}")
        (run / "trace" / "empty.json").write_text("")
        before = self.held()
        names = ["log.txt", "deck.toml", "status.json", "steps.jsonl", "trace/trace_00000.h5"]
        names += ["trace/empty.json", "trace/new.json", "checkpoints/step_00000001.json"]
        names += ["../link.json", "../linked.json", "../other/status.json"]
        for option in ("--json", "--perfetto"):
            for named in (run, run / "trace"):
                for name in names:
                    if named != run and name in ("trace/empty.json", "trace/new.json"):
                        continue  # beside the report on a folder of traces
                    said = self.report(named, option, run / name, status=2, draw=False)
                    self.assertEqual(said.count("\n"), 1, said)
                    self.assertIn(str(run / name), said)
                    self.assertIn("name another", said)
        for name in ("trace", "trace/report", "checkpoints"):
            said = self.report(run, "--out", run / name, status=2, draw=False)
            self.assertIn(f"{run / name} lies in {run}", said)
        self.assertEqual(self.held(), before)

    def test_other_files_are_not_replaced_and_earlier_outputs_are(self):
        run, place = synthetic.known_run(self.folder / "run"), self.folder / "out"
        place.mkdir()
        files = {"m.json": "notes", "report.html": "# notes", "metrics.json": "x", "steps.csv": "a"}
        for name, text in files.items():
            (place / name).write_text(text)
            options = ("--json", place / name) if name == "m.json" else ("--out", place)
            said = self.report(run, *options, status=2, draw=False)
            self.assertIn(f"{place / name} is there and was not written by ballast-report", said)
            self.assertEqual((place / name).read_text(), text)
            (place / name).write_text("")
        options = ("--out", place, "--json", place / "m.json", "--perfetto", place / "p.json")
        for _ in range(2):  # over empty files, then over its own
            self.report(run, *options, draw=False)
            self.assertEqual((place / "m.json").read_text(), (place / "metrics.json").read_text())
            self.assertIn("traceEvents", json.loads((place / "p.json").read_text()))
        (place / "m.json").write_text("[1]")
        self.report(run, *options, draw=False)

    def test_two_outputs_have_two_places(self):
        run, both = synthetic.known_run(self.folder / "run"), self.folder / "both.json"
        report = run / "report"
        for options in (
            ("--json", both, "--perfetto", both),
            ("--perfetto", report / "metrics.json"),
            ("--json", report / "report.html"),
        ):
            self.assertIn("two outputs", self.report(run, *options, status=2, draw=False))
            self.assertFalse(both.exists() or report.exists())
        self.report(run, "--json", report / "metrics.json", draw=False)

    def test_a_page_of_a_profile_replaces_no_other_file(self):
        (self.folder / "profile.json").write_text("{}")
        (self.folder / "report.html").write_text("# notes")
        said = self.report(self.folder, "--out", self.folder, status=2)
        self.assertIn(f"{self.folder / 'report.html'} is there", said)

    def test_numbers_that_json_does_not_know_are_left_out(self):
        clean = support.command_line().clean
        values = {"a": np.nan, "b": [1.0, -np.inf], "c": {"d": np.inf, "e": "inf"}}
        self.assertEqual(clean(values), {"b": [1.0, None], "c": {"e": "inf"}})


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

    def test_names_that_are_no_utf_8(self):
        folder = tempfile.mkdtemp(prefix="ballast_report_")
        self.addCleanup(shutil.rmtree, os.fsencode(folder))
        run = synthetic.known_run(os.path.join(folder, os.fsdecode(b"bad\xff\xfe")))
        (run / "trace" / os.fsdecode(b"trace_\xff.h5")).write_text("no HDF5")
        done = subprocess.run(
            [sys.executable, str(support.REPORT), run, run, "--out", run / "report"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        printed = done.stdout.splitlines()[-1]
        self.assertEqual(printed, os.fsencode(run / "report" / "report.html"))
        with open(printed, encoding="utf-8") as page:
            self.assertIn("bad\ufffd\ufffd", page.read())
        cases = json.loads((run / "report" / "metrics.json").read_text())["cases"]
        self.assertEqual([c["name"] for c in cases], ["bad\ufffd\ufffd", "bad\ufffd\ufffd (2)"])

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

"""The command line, as users start it."""
import shutil
import subprocess
import sys
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

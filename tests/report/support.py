"""Path of the report's modules, and a temporary folder for each test."""
import contextlib
import csv
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
REPORT = Path(__file__).resolve().parents[2] / "app" / "report"
sys.path.insert(0, str(REPORT))
PROGRAM = os.environ.pop("BALLAST_PROGRAM", "")  # verdicts ask it where a test says so


def command_line():
    """The module of the command line, which bears the name of every program's."""
    spec = importlib.util.spec_from_file_location("ballast_report_main", REPORT / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RunTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ballast_report_"))
        self.addCleanup(shutil.rmtree, self.folder)

    def report(self, *arguments, status=0, draw=True):
        """Runs the command line; returns what it printed."""
        import page

        module = command_line()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(
            err
        ), unittest.mock.patch.object(page, "FIGURES", page.FIGURES if draw else {}):
            got = module.main([str(a) for a in arguments])
        self.assertEqual(got, status, err.getvalue())
        return out.getvalue() + err.getvalue()

    def body(self, folder):
        """The page's HTML without its scripts."""
        page = (Path(folder) / "report.html").read_text(encoding="utf-8")
        return re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.S)

    def figures(self, folder, run="run_"):
        """Name -> panels of a run's figures on the page; those of several runs together: ""."""
        page = (Path(folder) / "report.html").read_text(encoding="utf-8")
        text = page.split('id="panels">', 1)[1].split("</script>", 1)[0]
        found = {}
        for panel in json.loads(text):
            if panel["run"] == run:
                found.setdefault(panel["figure"], []).append(panel)
        return found

    def table(self, folder, name):
        """Rows of a run's CSV file."""
        with open(Path(folder) / name, newline="") as file:
            return list(csv.DictReader(file))

    def metrics(self, folder):
        return json.loads((Path(folder) / "metrics.json").read_text())

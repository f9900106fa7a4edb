"""Path of the report's modules, and a temporary folder for each test."""
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
REPORT = Path(__file__).resolve().parents[2] / "app" / "report"
sys.path.insert(0, str(REPORT))
os.environ.setdefault("MPLCONFIGDIR", tempfile.gettempdir())


class RunTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ballast_report_"))
        self.addCleanup(shutil.rmtree, self.folder)

    def report(self, *arguments, status=0, draw=True):
        """Runs the command line; returns what it printed.  Figures are coarse or left out here, for
        speed."""
        import importlib.util

        import page
        import style

        style.plt.rcParams["savefig.dpi"] = 40
        spec = importlib.util.spec_from_file_location("ballast_report_main", REPORT / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(
            err
        ), unittest.mock.patch.object(page, "FIGURES", page.FIGURES if draw else {}):
            got = module.main([str(a) for a in arguments])
        self.assertEqual(got, status, err.getvalue())
        return out.getvalue() + err.getvalue()

    def metrics(self, folder):
        return json.loads((Path(folder) / "metrics.json").read_text())

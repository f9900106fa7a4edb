"""Names of runs and of their files: no two are one, and all are checked before one is written."""
import ast
import csv
import json
import re
import shutil
import unittest
from unittest.mock import patch

import support
import synthetic
import comparison
import names
import tables


class Names(unittest.TestCase):
    def test_names_stay_where_they_can(self):
        self.assertEqual(names.distinct(["a", "b", "a", "a"]), ["a", "b", "a (2)", "a (3)"])
        self.assertEqual(names.distinct(["a", "a", "a (2)"]), ["a", "a (3)", "a (2)"])
        for given, wanted in (
            (["comparison"], [""]),
            (["a", "b c"], ["a_", "b_c_"]),
            (["moba", "moba_dense"], ["moba_", "moba_dense_"]),
            (["moba", "moba_ring"], ["moba_", "moba_ring-2_"]),
            (["moba_ring", "moba"], ["moba_ring_", "moba-2_"]),
            (["comparison", "a"], ["comparison-2_", "a_"]),
            (["r 1", "r_1", "r_1-2", "r.1"], ["r_1_", "r_1-3_", "r_1-2_", "r.1_"]),
        ):
            self.assertEqual(names.file_prefixes(given), wanted)

    def test_headings_are_those_of_the_tables(self):
        """Of every Table(...) in the source: its name, and the first of its columns."""
        found = {}
        for module in (tables, comparison):
            tree = ast.parse((support.REPORT / f"{module.__name__}.py").read_text())
            for function in (f for f in tree.body if isinstance(f, ast.FunctionDef)):
                nodes = list(ast.walk(function))
                lists = {
                    n.targets[0].id: n.value
                    for n in nodes
                    if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
                }
                for call in nodes:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Table":
                        columns = call.args[2]
                        columns = lists.get(getattr(columns, "id", ""), columns)
                        while isinstance(columns, ast.BinOp):
                            columns = columns.left
                        found[call.args[0].value] = columns.elts[0].value.lower()
        self.assertEqual(found, {**tables.HEADINGS, **comparison.HEADINGS})


class Page(support.RunTest):
    def test_a_name_that_looks_like_html_costs_no_figure(self):
        """A script that holds both a comment's begin and a script's never ends."""
        runs = [synthetic.known_run(self.folder / name) for name in ("<!--<script>", "b")]
        self.report(*runs, "--out", self.folder / "out")
        page = (self.folder / "out" / "report.html").read_text(encoding="utf-8")
        panels, groups = re.findall(
            r'<script type="application/json" id="[^"]*">(.*)\n?</script>', page
        )
        self.assertEqual((panels + groups).count("<"), 0)
        self.assertIn(
            "<!--<script>",
            [d["name"] for p in json.loads(panels) for d in p.get("data", ()) if "name" in d],
        )


class Files(support.RunTest):
    def runs(self, *paths):
        """Copies of one run."""
        run = synthetic.known_run(self.folder / "original")
        return [shutil.copytree(run, self.folder / path) for path in paths]

    def held(self, folder):
        return {p.name: p.read_text() for p in folder.iterdir()} if folder.is_dir() else {}

    def test_no_file_replaces_another(self):
        (one,) = self.runs("one")
        self.report(one, draw=False)
        every = {p.stem for p in (one / "report").glob("*.csv")}
        self.assertLess({"steps", "ring_steps"}, every)
        paths = ["moba", "moba_ring", "comparison", "r 1", "r_1", "a", "y/a", "a (2)"]
        shutil.rmtree(self.folder / "original")
        runs, out = self.runs(*paths), self.folder / "out"
        for _ in range(2):  # then over its own
            self.report(*runs, "--out", out, draw=False)
            cases = [c["name"] for c in self.metrics(out)["cases"]]
            self.assertEqual(cases, [*paths[:6], "a (3)", "a (2)"])
            wanted = {f"{p}{t}" for p in names.file_prefixes(cases) for t in every}
            self.assertEqual(len(wanted), len(paths) * len(every))
            wanted |= {"comparison", "comparison_steps"}
            self.assertEqual({p.stem for p in out.glob("*.csv")}, wanted)
        for file, column in (("comparison_steps", "moba (s)"), ("comparison-2_steps", "loss")):
            with open(out / f"{file}.csv", newline="") as text:
                self.assertIn(column, next(csv.reader(text)))
        self.assertIn("begin with moba_ring-2_.", self.body(out))

    def test_a_table_of_another_run_is_an_earlier_output(self):
        moba, ring, other = self.runs("moba", "moba_ring", "other")
        out = self.folder / "out"
        self.report(moba, other, "--out", out, draw=False)
        self.assertTrue((out / "moba_ring_steps.csv").read_text().startswith("direction"))
        self.report(ring, other, "--out", out, draw=False)
        self.assertTrue((out / "moba_ring_steps.csv").read_text().startswith("step"))
        self.assertTrue((out / "moba_steps.csv").is_file())  # stays

    def test_tables_are_checked_before_anything_is_written(self):
        a, b = self.runs("a", "b")
        out = self.folder / "out"
        out.mkdir()
        (out / "b_segments.csv").write_text("notes")
        before = self.held(out)
        said = self.report(a, b, "--out", out, status=2, draw=False)
        self.assertIn(f"{out / 'b_segments.csv'} is there and was not written by", said)
        self.assertEqual(self.held(out), before)

    def test_a_table_shares_its_place_with_no_other_output(self):
        a, b = self.runs("a", "b")
        out = self.folder / "out"
        for option, file in (("--json", "b_steps.csv"), ("--perfetto", "comparison.csv")):
            said = self.report(a, b, "--out", out, option, out / file, status=2, draw=False)
            self.assertIn(f"{out / file}: two outputs", said)
            self.assertFalse(out.exists())

    def test_a_table_that_is_cut_short_names_its_file(self):
        (run,) = self.runs("run")
        with patch("page.MOST_ROWS", 2):
            self.report(run, run, "--out", self.folder / "out", draw=False)
        self.assertIn("more rows: run__2__regions.csv", self.body(self.folder / "out"))


if __name__ == "__main__":
    unittest.main()

"""Traces explain themselves: every column has a unit and a meaning, and the page says the same."""
import re
import subprocess
import sys
import textwrap
import unittest

import h5py

import support  # noqa: F401  (paths)
import synthetic
import trace_page


class TestTracePage(support.RunTest):
    def test_page_says_what_the_file_says(self):
        tables = trace_page.render(trace_page.write_trace(self.folder))
        _, page, _ = trace_page.split(trace_page.PAGE.read_text(encoding="utf-8"))
        self.assertEqual(
            page, tables, "run python3 tests/report/trace_page.py to renew docs/trace.md"
        )

    def test_code_of_the_page_finds_what_it_says(self):
        rank = synthetic.Rank(0, 1)
        rank.event("step", 0, 1, step=0)
        rank.event("attention_forward", 0, 1, step=0)
        rank.step(0)
        rank.plan("ring", 7, 0, {"of": "the ring"})  # runs store it first
        rank.plan("step", 5, 0, {"of": "the step"})
        synthetic.write(self.folder / "RUN", [rank])
        page = trace_page.PAGE.read_text(encoding="utf-8")
        blocks = re.findall(r"(?:^    .*\n)+", page, re.M)
        code = "".join(b for b in blocks if b.startswith("    import"))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code) + "\nprint(attention_s)"],
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.splitlines()[-2:], ["{'of': 'the step'}", "1.0"])

    def test_every_data_set_and_column_is_described(self):
        path = trace_page.write_trace(self.folder)
        with h5py.File(path, "r") as file:
            self.assertTrue(file.attrs["description"])
            for name, dataset in file.items():
                self.assertTrue(dataset.attrs["description"], name)
                columns = dataset.attrs.get("columns", ())
                if getattr(dataset, "dtype", None) is None or name == "rows":
                    continue
                if dataset.dtype.names:
                    told = [trace_page.text(row[0]) for row in columns]
                    self.assertEqual(told, list(dataset.dtype.names))
                else:
                    self.assertEqual(trace_page.text(dataset.attrs["units"]), "B")
                self.assertTrue(all(row["description"] for row in columns), name)

    def test_kinds_open_as_an_enumeration(self):
        path = trace_page.write_trace(self.folder)
        with h5py.File(path, "r") as file:
            events = file["events"]
            names = {v: k for k, v in h5py.check_enum_dtype(events.dtype["kind"]).items()}
            self.assertEqual(names[int(events[0]["kind"])], "step")
            told = [trace_page.text(row[0]) for row in events.attrs["kinds"]]
            self.assertEqual(told, [names[i] for i in range(len(names))])

    def test_unknown_scalar_is_kept_without_a_meaning(self):
        rank = synthetic.Rank(0, 1)
        rank.step(0, peak_bytes_workspace=3.0, of_a_later_program=2.0)
        path = synthetic.write(self.folder, [rank]) / "trace" / "trace_00000.h5"
        with h5py.File(path, "r") as file:
            told = {trace_page.text(n): (u, m) for n, u, m in file["steps"].attrs["columns"]}
        self.assertEqual(trace_page.text(told["peak_bytes_workspace"][0]), "B")
        self.assertFalse(told["of_a_later_program"][1])

    def test_h5dump_shows_names_and_units(self):
        try:
            shown = subprocess.run(
                ["h5dump", "-a", "/events/columns", trace_page.write_trace(self.folder)],
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            self.skipTest("h5dump is not installed (package hdf5-tools)")
        self.assertIn('"begin_s"', shown.stdout)
        self.assertIn('"FLOP"', shown.stdout)


if __name__ == "__main__":
    unittest.main()

"""Profile folders and budgets of dynamic sparsity tuning in the report."""
import json
import unittest

import synthetic
from support import RunTest
from synthetic import Rank


def profile(folder):
    folder.mkdir()
    rows = []
    for tokens in (256, 512):
        for budget, pattern in ((0, "dense"), (2, "moba"), (4, "moba")):
            for direction in ("forward", "backward"):
                rows.append(
                    {
                        "part": "attention",
                        "pattern": pattern,
                        "query_tokens": tokens,
                        "prefix_tokens": 0,
                        "budget": budget,
                        "sp": 1,
                        "recompute": "none",
                        "pass": direction,
                        "median_s": 1e-6 * tokens * (budget or 8),
                        "spread_s": 0,
                        "bytes": 0,
                    }
                )
    points = [
        {
            "lengths": [300] * n,
            "budget": 3,
            "measured_s": 0.01 * n,
            "table_s": 0.0105 * n,
            "flops_s": 0.013 * n,
            "length_s": 0.02 * n,
        }
        for n in (1, 2, 3)
    ]
    facts = {
        "identity": {"hardware": "a <GPU>", "kernels": "abc"},
        "notes": ["a note & more"],
        "rows": rows,
        "held_out": points,
        "held_out_error": 0.05,
        "flops_error": 0.3,
        "length_error": 1.0,
        "links": [{"level": "inner", "latency_s": 3e-6, "bytes_per_s": 3e11}],
    }
    (folder / "profile.json").write_text(json.dumps(facts))
    return folder


class ProfilePage(RunTest):
    def test_page(self):
        folder = profile(self.folder / "p")
        self.assertIn("report.html", self.report(folder))
        text = self.body(folder / "report")
        for part in ("a &lt;GPU&gt;", "a note &amp; more", "inner", "300.00"):
            self.assertIn(part, text)
        figures = self.figures(folder / "report", "")
        self.assertEqual((len(figures["latency"]), len(figures["predictions"])), (1, 3))

    def test_numbers_of_the_page(self):
        """The error of FLOPs is their own, and a link's latency is in microseconds."""
        folder = profile(self.folder / "p")
        self.report(folder)
        text = self.body(folder / "report")
        self.assertIn("FLOPs alone: median error 30.0 %", text)
        self.assertIn("<td>3.00</td>", text)

    def test_latencies_are_those_without_a_prefix(self):
        """Dense forward and backward of 256 tokens: 2.048 ms each."""
        folder = profile(self.folder / "p")
        path = folder / "profile.json"
        facts = json.loads(path.read_text())
        facts["rows"].append({**facts["rows"][0], "prefix_tokens": 256, "median_s": 1.0})
        path.write_text(json.dumps(facts))
        self.report(folder)
        (panel,) = self.figures(folder / "report", "")["latency"]
        self.assertAlmostEqual(panel["data"][0]["y"][0], 2 * 2.048)

    def test_profiles_of_one_name_have_two_folders(self):
        (self.folder / "other").mkdir()
        paths = [profile(self.folder / "p"), profile(self.folder / "other" / "p")]
        self.report(*paths, "--out", self.folder / "out")
        pages = sorted((self.folder / "out").glob("*/report.html"))
        self.assertEqual([page.parent.name for page in pages], ["p", "p (2)"])

    def test_damaged_or_mixed(self):
        folder = profile(self.folder / "p")
        self.assertIn("alone", self.report(folder, self.folder / "run", status=2))
        (folder / "profile.json").write_text("{")
        self.assertIn("profile.json", self.report(folder, status=2))


class Budgets(RunTest):
    def test_choices_of_all_ranks(self):
        ranks = [Rank(r, 2, {"pp": 2}, {"pp": r}) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 1, step=0)
            r.plan("step", 5, 0, synthetic.batch_plan((0, 1, [2048])))
            r.plan("budgets", 6 + r.rank, 0, [[0, r.rank, 32, 20 + r.rank, 0.05 - r.rank]])
            r.step(0, loss=1.0, tokens=2048)
        import analysis
        from load import load_run

        a = analysis.analyse(load_run(synthetic.write(self.folder / "run", ranks)))
        self.assertEqual(sorted(a.budgets.tolist()), [[32, 20, 0.05], [32, 21, -0.95]])
        self.report(self.folder / "run")
        self.assertIn("budgets", self.figures(self.folder / "run" / "report"))


if __name__ == "__main__":
    unittest.main()

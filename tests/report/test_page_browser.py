"""The page in a headless Chromium: it loads alone, draws every figure, filters, steps, and fits a
phone."""
import unittest

import browser
import support
import synthetic
from synthetic import Rank

RANKS_OF = """
(id) => document.getElementById(id).data[0].y.map(Number)
"""


@unittest.skipUnless(
    browser.find(), "no Chromium: install chromium-headless-shell or name one in BALLAST_BROWSER"
)
class Page(support.RunTest):
    def open(self, folder, **size):
        page = folder / "report.html"
        shown = browser.Browser(page, **size)
        self.addCleanup(shown.__exit__)
        shown.wait("document.body && document.body.dataset.drawn")
        self.assertEqual(shown.errors, [])
        outside = [r for r in shown.requests if not r.startswith(("file://", "data:", "blob:"))]
        self.assertEqual(outside, [])
        return shown

    def training_page(self):
        run = synthetic.training_run(self.folder / "run", dp=2, cp=2, steps=6, straggler=1)
        self.report(run)
        return run / "report"

    def panel(self, report, figure, number=0):
        return self.figures(report)[figure][number]["id"]

    def test_every_panel_is_drawn(self):
        report = self.training_page()
        shown = self.open(report)
        panels = [p["id"] for figure in self.figures(report).values() for p in figure]
        self.assertGreater(len(panels), 8)
        for panel in panels:
            marks = f"#{panel} .main-svg .plot, #{panel} .main-svg .heatmaplayer"
            self.assertGreater(shown.value(f"document.querySelectorAll('{marks}').length"), 0)

    def test_choice_of_ranks(self):
        report = self.training_page()
        shown = self.open(report)
        heatmap, timeline = self.panel(report, "heatmap"), self.panel(report, "timeline")
        self.assertEqual(shown.value(f"({RANKS_OF})('{heatmap}')"), [0, 1, 2, 3])
        self.choose(shown, "dp 1")
        self.assertEqual(shown.value(f"({RANKS_OF})('{heatmap}')"), [2, 3])
        rows = f"document.getElementById('{heatmap}').data[0].z.length"
        self.assertEqual(shown.value(rows), 2)
        lanes = f"[...new Set(document.getElementById('{timeline}').data[0].y)]"
        self.assertEqual(shown.value(lanes), ["2", "3"])
        self.choose(shown, "all")
        self.assertEqual(shown.value(rows), 4)
        self.assertEqual(shown.errors, [])

    def choose(self, shown, label):
        shown.value(
            "(() => { const s = document.querySelector('select[data-run]');"
            f" s.value = [...s.options].find((o) => o.text === '{label}').value;"
            " s.dispatchEvent(new Event('change')); })()"
        )

    def test_slider_leads_through_the_steps(self):
        report = self.training_page()
        shown = self.open(report)
        panel = self.panel(report, "timeline")
        begin = f"JSON.stringify(document.getElementById('{panel}').data[0].base)"
        before = shown.value(begin)
        label = (
            f"(() => {{ const s = document.querySelector('input[data-panel={panel}]');"
            " s.value = 3; s.dispatchEvent(new Event('input'));"
            " return s.parentNode.querySelector('output').textContent; })()"
        )
        self.assertEqual(shown.value(label), "step 4")
        self.assertNotEqual(shown.value(begin), before)
        self.assertEqual(shown.errors, [])

    def test_phone(self):
        shown = self.open(self.training_page(), width=390, height=800)
        self.assertLessEqual(shown.value("document.documentElement.scrollWidth"), 390)
        widths = "[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth)"
        self.assertLessEqual(max(shown.value(widths)), 390)

    def test_several_runs_and_recall(self):
        first = Rank(0, 1)
        first.event("step", 0.0, 1.0, step=0)
        rows = [[0, 0, -1, 0, h, 8, 100, 0.9, 0.03, 0.5, 0.1, 0.2, 0.5, 0.1] for h in range(2)]
        first.plan("recall", 1, 0, rows)
        first.plan("coverage", 3, 0, [[0, 0, -1, 0, 1, 0.4, 0], [0, 0, -1, 0, 4, 0.9, 1]])
        first.budget(0, 0, 0, 4, 10, 20)
        one = synthetic.write(self.folder / "one", [first])
        two = synthetic.training_run(self.folder / "two", steps=3)
        self.report(one, two, "--out", self.folder / "both")
        shown = self.open(self.folder / "both")
        drawn = int(shown.value("document.body.dataset.drawn"))
        count = sum(
            len(panels)
            for run in ("", "one_", "two_")
            for panels in self.figures(self.folder / "both", run).values()
        )
        self.assertEqual(drawn, count)
        self.assertEqual(len(self.figures(self.folder / "both", "one_")["recall"]), 4)


if __name__ == "__main__":
    unittest.main()

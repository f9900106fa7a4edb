"""Simulated ops beside measured ones: known numbers, and what is shown where one side is
missing."""
import csv
import json
import re
import time
import unittest.mock
from types import SimpleNamespace

import h5py
import numpy as np
import synthetic
from support import RunTest
from synthetic import Rank
import prediction

# stage -> ops in order: kind, micro-batch, predicted begin and end, measured begin and end (of step
# 0; step 1 takes twice as long)
OPS = {
    0: [
        ("forward", 0, 0, 1, 0, 1.5),
        ("send", 0, 1, 1, 1.5, 1.6),
        ("recv", 0, 1, 4, 1.6, 4.5),
        ("backward", 0, 4, 6, 4.5, 7.0),
    ],
    1: [
        ("recv", 0, 0, 1, 0.5, 2.0),
        ("forward", 0, 1, 2, 2.0, 2.5),
        ("backward_input", 0, 2, 4, 2.5, 4.0),
        ("send", 0, 4, 4, 4.0, 4.1),
        ("backward_weight", 0, 4, 5, 4.1, 5.0),
    ],
}


def pipeline_run(folder, predicted_on=(0, 1), steps=2):
    ranks = [Rank(s, 2, {"pp": 2}, {"pp": s}) for s in range(2)]
    for r in ranks:
        for step in range(steps):
            t0, scale = 100.0 + 50 * step, 1 + step
            r.event("step", t0, t0 + 20, step=step)
            for kind, mb, p0, p1, m0, m1 in OPS[r.rank]:
                r.event(
                    kind, t0 + scale * m0, t0 + scale * m1, step=step, mb=mb, chunk=0, stage=r.rank
                )
                if r.rank in predicted_on:
                    r.predicted(kind, p0, p1, step=step, mb=mb, chunk=0, stage=r.rank)
            r.event(
                "offload", t0 + 0.2, t0 + 0.4, step=step, mb=0, layer=1, stage=r.rank
            )  # inside a layer: no op of the schedule
    return synthetic.write(folder, ranks)


class Prediction(RunTest):
    def test_known_numbers(self):
        run = pipeline_run(self.folder / "r")
        with h5py.File(run / "trace" / "trace_00001.h5") as file:
            self.assertEqual(int(file.attrs["format_version"]), 5)
            rows = file["predicted"][: int(file["rows"][()]["predicted"])]
            self.assertEqual(
                [
                    (int(r["step"]), float(r["begin_s"]), float(r["end_s"]))
                    for r in rows
                    if r["step"] == 1
                ],
                [(1, p0, p1) for _, _, p0, p1, _, _ in OPS[1]],
            )
        self.report(run)
        m = self.metrics(run / "report")
        self.assertAlmostEqual(m["predicted_schedule_s"], 6)
        self.assertAlmostEqual(m["schedule_s"], (7 + 14) / 2)
        self.assertAlmostEqual(m["prediction_error"], ((1 - 6 / 7) + (1 - 6 / 14)) / 2)
        self.assertAlmostEqual(m["predicted_bubble_ratio"], 1 - (3 + 4) / 12)
        useful = (1.5 + 2.5) + (0.5 + 1.5 + 0.9)
        self.assertAlmostEqual(m["schedule_bubble_ratio"], 1 - useful / 14)
        first, second = m["predicted_stages"]
        self.assertEqual((first["stage"], second["stage"]), (0, 1))
        self.assertNotIn("offload", first)
        for name, stage, predicted, measured in (
            ("backward", first, 2, 1.5 * 2.5),
            ("recv", first, 3, 1.5 * 2.9),
            ("busy", first, 3, 1.5 * 4.0),
            ("wait", first, 3, 1.5 * 3.0),
            ("backward_weight", second, 1, 1.5 * 0.9),
            ("backward_input", second, 2, 1.5 * 1.5),
        ):
            self.assertAlmostEqual(stage[name]["predicted_s"], predicted, msg=name)
            self.assertAlmostEqual(stage[name]["measured_s"], measured, msg=name)
        with open(run / "report" / "prediction.csv", newline="") as file:
            rows = {(r["stage"], r["ops"]): r for r in csv.DictReader(file)}
        self.assertAlmostEqual(float(rows["stage 0", "backward"]["predicted / measured"]), 2 / 3.75)
        self.assertAlmostEqual(float(rows["all", "step time"]["measured (s)"]), 10.5)
        page = self.body(run / "report")
        self.assertEqual(len(self.figures(run / "report")["prediction"][0]["by_step"]), 2)
        self.assertIn('id="run_prediction"', page)
        self.assertRegex(page, re.compile("Simulated and measured schedule"))

    def test_without_predictions(self):
        for name, on in (("none", ()), ("half", (1,))):
            run = pipeline_run(self.folder / name, predicted_on=on)
            self.report(run)
            self.assertNotIn("prediction_error", self.metrics(run / "report"))
            self.assertNotIn("prediction", self.figures(run / "report"))

    def test_restart_shows_the_later_run_alone(self):
        r = Rank(0, 1)
        for step, end in ((0, 2), (1, 3)):
            r.event("forward", 10 * step, 10 * step + end, step=step, mb=0)
            r.predicted("forward", 0, end, step=step, mb=0)
        again = Rank(0, 1, segment=1)
        again.event("forward", 0, 4, step=1, mb=0)
        again.predicted("forward", 0, 5, step=1, mb=0)
        r.lines += again.lines
        run = synthetic.write(self.folder / "r", [r])
        self.report(run, draw=False)
        m = json.loads((run / "report" / "metrics.json").read_text())
        self.assertAlmostEqual(m["predicted_schedule_s"], (2 + 5) / 2)
        self.assertAlmostEqual(m["schedule_s"], (2 + 4) / 2)

    def test_the_time_of_a_stage_is_the_mean_of_its_replicas(self):
        ranks = [Rank(r, 2, {"dp": 2}, {"dp": r}) for r in range(2)]
        for r in ranks:
            r.event("step", 0, 9, step=0)
            r.event("forward", 0, 2 + 2 * r.rank, step=0, mb=0)
            r.predicted("forward", 0, 2, step=0, mb=0)
        run = synthetic.write(self.folder / "r", ranks)
        self.report(run, draw=False)
        (stage,) = self.metrics(run / "report")["predicted_stages"]
        self.assertAlmostEqual(stage["busy"]["measured_s"], (2 + 4) / 2)

    def test_sides_of_many_steps_are_paired_in_one_pass(self):
        """Steps 1 to 60,000 simulated in disorder, 2 to 60,001 measured."""
        count = 60_000
        names = ("step", "session", "micro_batch", "layer", "kind")
        table = np.full(count, -1, [(name, "i4") for name in names])
        table["session"], table["micro_batch"] = 0, 0
        predicted, measured = table.copy(), table.copy()
        predicted["step"], measured["step"] = np.arange(count, 0, -1), np.arange(2, count + 2)
        with unittest.mock.patch.object(prediction, "code", lambda kind: -1):
            session = SimpleNamespace(number=4)
            trace = SimpleNamespace(events=measured, sessions=[session], predicted=predicted)
            begin = time.process_time()
            both = prediction._both_sides(SimpleNamespace(traces={0: trace}))
            self.assertLess(time.process_time() - begin, 3)
        self.assertEqual(list(both), list(range(2, count + 1)))
        for step in (2, 777, count):
            number, sides = both[step]
            self.assertEqual((number, [s["step"].tolist() for s in sides[0]]), (4, [[step]] * 2))

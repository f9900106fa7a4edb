"""tests/bars: its decks are valid, its commands run at laptop size, its figures are read from what
programs print."""
import json
import os
import subprocess
import sys

from runs import BALLAST, RunCase

ROOT = os.environ["BALLAST_ROOT"]
BARS = [sys.executable, os.path.join(ROOT, "tests", "bars"), "--programs", os.path.dirname(BALLAST)]


class Bars(RunCase):
    def run_bars(self, *arguments, code=0):
        done = subprocess.run(
            [*BARS, *arguments], capture_output=True, text=True, timeout=550, check=False
        )
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout

    def test_every_deck_takes_its_overrides(self):
        lines = self.run_bars("--check").splitlines()
        self.assertGreater(len(lines), 50)
        self.assertEqual([line for line in lines if not line.endswith(": ok")], [])

    def test_commands_run_on_the_host(self):
        out = self.out("bars")
        printed = self.run_bars("--host", "--gpus", "2", "--out", out, "ring", "memory", "hbp")
        self.assertNotIn("no figure", printed)
        with open(os.path.join(out, "figures.json")) as file:
            figures = {f["what"]: f for f in json.load(file)}
        # Memory is exact on the host too: chunks and windows bound it, not the sequence.
        self.assertEqual(
            figures["peak memory of a 256K sequence / 32K, chunks of 2K, offloaded"]["held"],
            "held",
            printed,
        )
        self.assertGreater(figures["128K + short mix: hbp, x isf at SP 1"]["value"], 0)

    def test_figures_are_read_from_what_is_printed(self):
        folder = os.path.join(self.out("bars"), "attention")
        os.makedirs(folder)
        outputs = {
            "check": "  0.1 s  dense\n0 failures\n",
            "time": (
                "dense 32K D128 16/2                fwd     6.680 ms  658.0 TF/s | bwd    22.100 ms"
                "  498.0 TF/s | det   25.500 ms | index   0.100 ms\npacked, all: fwd 514.0 bwd"
                " 445.0 both 462.0 TF/s = 0.770 of dense; useful share of tiles: fwd 0.942 bwd"
                " 0.933\n5% of 128K, aligned runs of 2      fwd     1.000 ms  501.0 TF/s | bwd    "
                " 1.000 ms  386.0 TF/s | det    1.000 ms | index   0.180 ms\nvertical slash 128K,"
                " built here    conversion  1.400 + fwd =   7.300 ms (fwd  500.0 TF/s) | bwd  "
                " 25.000 ms  500.0 TF/s | observe  1.600 select  1.000 ms\n"
            ),
            "peers": (
                "cudnn 32K 16/2 D128    fwd     6.680 ms   658.0 TF/s | bwd    11.050 ms   995.0"
                " TF/s\nflex 5%      fwd     1.000 ms   334.0 TF/s | bwd     1.000 ms   193.0"
                " TF/s\n"
            ),
        }
        for name, text in outputs.items():
            with open(os.path.join(folder, name + ".txt"), "w") as file:
                file.write(text)
        self.run_bars(
            "--again", "--gpus", "1", "--out", os.path.dirname(folder), "attention", code=1
        )  # some are missed, some absent
        with open(os.path.join(os.path.dirname(folder), "figures.json")) as file:
            figures = {f["what"]: (f["value"], f["held"]) for f in json.load(file)}
        self.assertEqual(figures["dense 32K, 16/2 heads, D 128, forward, x cuDNN"], (1.0, "held"))
        self.assertEqual(
            figures["dense 32K, 16/2 heads, D 128, backward, x cuDNN"], (0.5, "MISSED")
        )
        self.assertEqual(
            figures["dense 32K, 14/2 heads, D 64, forward, x cuDNN"], (None, "no figure")
        )
        slowest, held = figures["deterministic backward, x the default's time, the slowest line"]
        self.assertAlmostEqual(slowest, 25.5 / 22.1)
        self.assertEqual(held, "held")
        self.assertEqual(
            figures["5 % of 128K, aligned runs of 2, forward, per pair, x FlexAttention"],
            (1.5, "held"),
        )
        self.assertEqual(
            figures["5 % of 128K, aligned runs of 2, backward, per pair, x FlexAttention"],
            (2.0, "held"),
        )
        self.assertEqual(
            figures["packed lengths, forward + backward, x own dense rate"], (0.77, "MISSED")
        )
        self.assertEqual(
            figures["vertical slash 128K, index + forward, x MTraining's kernels"], (2.0, "held")
        )
        self.assertAlmostEqual(
            figures["vertical slash 128K, backward, x MTraining's kernels"][0], 2.92
        )

    def test_predictions_are_read_from_the_log_of_a_run(self):
        """The screen has no seconds of schedules; the first step warms up."""
        out = self.out("bars")
        run = os.path.join(out, "prediction", "run-run chunks K 4")
        os.makedirs(run)
        with open(run[: -len("/run-run chunks K 4")] + "/run chunks K 4.txt", "w") as file:
            file.write("step 2/4  loss 1.5\n")
        with open(os.path.join(run, "log.txt"), "w") as file:
            for step, predicted in ((1, 9), (2, 0.8), (3, 1.1), (4, 1.05)):
                file.write(
                    f"step={step} loss=1.5 schedule_s=1.0 predicted_schedule_s={predicted} x=1\n"
                )
        self.run_bars("--again", "--gpus", "2", "--out", out, "prediction", code=1)
        with open(os.path.join(out, "figures.json")) as file:
            figures = {f["what"]: f["value"] for f in json.load(file)}
        self.assertAlmostEqual(figures["predicted step time, median error"], 0.1)
        self.assertAlmostEqual(figures["chunks K 4: predicted / measured, median of steps"], 1.05)

    def test_a_ring_stands_beside_its_peer(self):
        folder = os.path.join(self.out("bars"), "ring")
        os.makedirs(folder)
        with open(os.path.join(folder, "flat.json"), "w") as file:
            json.dump(
                {"forward": {"median_s": 0.03}, "both": {"median_s": 0.125}, "efficiency": 0.96},
                file,
            )
        for name, text in {
            "flat": "ring\n",
            "peer": (
                "context_parallel cudnn 131072 tokens 16 heads 4 ranks: ring 120.00 ms, whole"
                " 456.00 ms, efficiency 0.950\n"
            ),
        }.items():
            with open(os.path.join(folder, name + ".txt"), "w") as file:
                file.write(text)
        self.run_bars("--again", "--gpus", "2", "--out", os.path.dirname(folder), "ring", code=1)
        with open(os.path.join(os.path.dirname(folder), "figures.json")) as file:
            figures = {f["what"]: (f["value"], f["held"]) for f in json.load(file)}
        self.assertEqual(
            figures["its forward + backward, x PyTorch's context_parallel over cuDNN"],
            (0.96, "MISSED"),
        )
        self.assertEqual(figures["efficiency of that"][0], 0.95)

    def test_cases_on_the_same_samples_are_compared_step_by_step(self):
        folder = os.path.join(self.out("bars"), "hbp")
        os.makedirs(folder)
        for name, steps in (
            ("hbp", [1.0, 4.0, 2.0]),
            ("isf-sp1", [2.0, 7.0, 90.0]),
            ("isf-sp2", [1.5, 4.0, 2.2]),
        ):  # one step disturbed
            with open(os.path.join(folder, name + ".json"), "w") as file:
                json.dump({"cases": [{"median_s": sorted(steps)[1], "steps_s": steps}]}, file)
            with open(os.path.join(folder, name + ".txt"), "w") as file:
                file.write("ended\n")
        self.run_bars("--again", "--gpus", "4", "--out", os.path.dirname(folder), "hbp")
        with open(os.path.join(os.path.dirname(folder), "figures.json")) as file:
            figures = {f["what"]: (f["value"], f["held"]) for f in json.load(file)}
        self.assertEqual(figures["128K + short mix: hbp, x isf at SP 1"], (2.0, "held"))
        self.assertAlmostEqual(figures["the same, x isf at its best SP above 1"][0], 1.1)

    def test_placement_needs_no_gpu(self):
        out = self.out("bars")
        printed = self.run_bars("--gpus", "0", "--out", out, "placement")
        with open(os.path.join(out, "figures.json")) as file:
            figures = {f["what"]: f for f in json.load(file)}
        self.assertEqual({f["held"] for f in figures.values()}, {"", "held"}, printed)
        self.assertGreaterEqual(figures["hbp-909e272, x balanced"]["value"], 1.35)
        self.assertGreaterEqual(figures["packed, x balanced"]["value"], 1.1)
        self.assertIn("flexsp-like (not trained), x balanced", figures)

"""Whole-program tests of Hierarchical Balance Packing's training: groups whose packs several ranks share."""
import os
import unittest

from runs import RunCase

HBP = ["batching.method=hbp", "batching.groups=[80,160,300]", "batching.global_tokens=2500"]


class AdaptiveSequenceParallelism(RunCase):
    def train(self, name, ranks, *overrides, **values):
        run = self.out(name)
        self.run_ballast(ranks, "train", self.deck(name + ".toml", **{"steps": 5, "every": 0, **values}), "-d", run, *overrides)
        return run

    def curve(self, run):
        return [(float(r["loss"]), float(r["grad_norm"])) for r in self.steps(run) if "loss" in r]

    def test_losses_are_those_of_one_rank_on_every_mesh(self):
        one = self.curve(self.train("one", 1, "run.precision=fp64", "batching.global_tokens=2500", dp=1))
        self.assertEqual(len(one), 5)
        runs = [(4, {"dp": 4}, "[1,2,4]", "[-1,1,2]", 0), (4, {"dp": 4}, "[1,1,4]", "[]", 2), (4, {"dp": 2, "cp_inner": 2}, "[1,2,2]", "[0,1,2]", 1), (2, {"dp": 2}, "[1,2,2]", "[]", 2)]
        for i, (ranks, mesh, degrees, recompute, zero) in enumerate(runs):
            run = self.train(f"adaptive{i}", ranks, "run.precision=fp64", *HBP, f"batching.group_ranks={degrees}", f"batching.group_recompute={recompute}", f"optimizer.zero={zero}", **mesh)
            for (a, b), (c, d) in zip(one, self.curve(run)):
                self.assertAlmostEqual(a, c, delta=2e-6, msg=str(runs[i]))
                self.assertAlmostEqual(b, d, delta=2e-5, msg=str(runs[i]))

    def test_restart_is_bit_identical_and_the_trace_names_the_degrees(self):
        import h5py
        degrees = [*HBP, "batching.group_ranks=[1,2,4]", "data.validation_share=0.2", "eval.every_steps=2"]
        whole = self.train("whole", 4, *degrees, dp=4, steps=6)
        parts = self.train("parts", 4, *degrees, "optimizer.decay_steps=6", dp=4, steps=3, every=3)
        self.run_ballast(4, "train", self.deck("again.toml", dp=4, steps=6, every=3), "-d", parts, "-r", "latest", *degrees)
        self.assertEqual(self.losses(whole), self.losses(parts))
        self.assertTrue(any("validation_loss" in row for row in self.steps(whole)))
        with h5py.File(os.path.join(whole, "trace", "trace_00000.h5"), "r") as f:
            text = f["plan_text"][()].tobytes().decode(errors="replace")
        for degree in (2, 4):
            self.assertIn(f" sp {degree}:", text)


if __name__ == "__main__":
    unittest.main()

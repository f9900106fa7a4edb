"""Whole-program tests of plans: what `check`, `pack` and `plan` show is what `train` executes, and
all ranks hold one plan."""
import json
import unittest

from runs import RunCase

MODEL = ["model.layers=4"]
METHODS = {
    "packed": (["batching.method=packed", "mesh.dp=8"], 8),
    "zero 2": (["batching.method=none", "optimizer.zero=2", "mesh.dp=8"], 8),
    "stages": (["batching.method=lbb", "mesh.dp=2", "mesh.pp=4"], 8),
    "chunks": (
        [
            "batching.method=chunkflow",
            "chunk.tokens=64",
            "pipeline.schedule=zero_bubble",
            "mesh.dp=4",
            "mesh.pp=2",
            "loss.normaliser=token_mean",
        ],
        8,
    ),
    "hbp": (
        [
            "batching.method=hbp",
            "batching.groups=[64,128,300]",
            "batching.group_ranks=[1,2,4]",
            "mesh.dp=8",
        ],
        8,
    ),
    "balanced": (["batching.method=balanced", "batching.micro_batch_tokens=100", "mesh.dp=8"], 8),
    "joined rings": (
        ["batching.method=balanced", "batching.micro_batch_tokens=60", "mesh.dp=6"],
        6,
    ),
    "balanced windows": (
        [
            "batching.method=balanced",
            "batching.micro_batch_tokens=60",
            "batching.window=4",
            "optimizer.zero=2",
            "mesh.dp=4",
            "mesh.cp_inner=2",
            "ring.layout=document_zigzag",
        ],
        8,
    ),
    "rings": (["batching.method=spfhp", "mesh.dp=2", "mesh.cp_inner=2", "mesh.sp=2"], 8),
}


class Plans(RunCase):
    def shown(self, command, deck, *overrides):
        twin = self.out("twin.json")
        self.run_ballast(1, command, deck, *overrides, "--plans", "3", "--json", twin)
        with open(twin) as f:
            found = json.load(f)
        self.assertNotIn("plans_refused", found)
        return found["plans"]

    def test_what_is_shown_is_what_runs(self):
        for name, (overrides, ranks) in METHODS.items():
            with self.subTest(name):
                deck, run = self.deck(steps=3, dp=1, every=0), self.out(name.replace(" ", ""))
                overrides = [*MODEL, *overrides]
                self.run_ballast(ranks, "train", deck, "-d", run, *overrides)
                executed = self.stored(run)
                self.assertEqual(sorted(executed), [1, 2, 3])
                if name == "joined rings":  # 4 heads: a group of 6 is a ring of 3 over 2
                    splits = [
                        m["split"]
                        for plan in executed.values()
                        for m in plan["micro_batches"]
                        if m.get("ranks", 1) == 6
                    ]
                    self.assertIn([2, 1, 3], splits)
                for command in ("pack", "check"):
                    shown = self.shown(command, deck, *overrides)
                    self.assertEqual(
                        [p["hash"] for p in shown],
                        [executed[step]["hash"] for step in (1, 2, 3)],
                        f"{name}: {command}",
                    )
                    self.assertEqual(shown, list(executed.values()))
                # `plan` shows decks that have something to plan.
                shown = self.shown("plan", deck, *overrides, "pipeline.search=64")
                self.assertEqual(shown, list(executed.values()))

    def test_plans_are_stored_every_n_steps_or_never(self):
        for every, steps in ((1, [1, 2, 3, 4]), (3, [1, 4]), (0, [])):
            run = self.out(f"every{every}")
            self.run_ballast(
                2, "train", self.deck(steps=4), "-d", run, f"trace.plans_every={every}"
            )
            self.assertEqual(sorted(self.stored(run)), steps)
            self.assertEqual(self.stored(run, rank=1), {})

    def test_a_rank_with_another_plan_ends_the_run(self):
        for rank in (0, 3):
            done = self.run_ballast(
                4,
                "train",
                self.deck(steps=3, dp=4),
                "-d",
                self.out(f"bit{rank}"),
                status=None,
                env=self.environment(BALLAST_PERTURB_PLAN=str(rank)),
            )
            self.assertNotEqual(done.returncode, 0)
            text = done.stdout + done.stderr
            self.assertEqual(text.count("the ranks hold different plans"), 1, text)

    def test_a_rank_with_other_costs_changes_nothing(self):
        arguments = ["mesh.pp=2", "pipeline.schedule=zero_bubble", "model.layers=4"]
        losses = []
        for rank in ("", "0", "1"):
            run = self.out(f"costs{rank}")
            self.run_ballast(
                4,
                "train",
                self.deck(steps=3, dp=2),
                "-d",
                run,
                *arguments,
                env=self.environment(BALLAST_PERTURB_COSTS=rank),
            )
            losses.append(self.losses(run))
        self.assertEqual(losses[0], losses[2])  # rank 0 plans
        for step, loss in losses[0].items():
            self.assertAlmostEqual(float(loss), float(losses[1][step]), delta=1e-5)


if __name__ == "__main__":
    unittest.main()

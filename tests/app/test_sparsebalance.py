"""Training with dynamic sparsity tuning and sparsity-aware batching: budgets in the trace, the same
on all ranks of a ring, restarts, refusals."""
import glob
import json
import os
import sys

import h5py

from runs import RunCase

sys.path.insert(0, os.path.join(os.environ["BALLAST_ROOT"], "app", "report"))
import load  # noqa: E402

BUDGETS = [
    "dst.enabled=true",
    "batching.method=sab",
    "attention.pattern=moba",
    "attention.moba_block=64",
    "attention.moba_top_k=3",
    "costs.forward_token_s=1e-6",
    "costs.forward_pair_s=1e-7",
    "data.max_tokens=900",
    "batching.micro_batch_tokens=1200",
    "batching.global_tokens=6000",
]


class SparseBalance(RunCase):
    def choices(self, run):
        """rank -> step -> [(micro-batch, layer, base, budget, loss)] and rank -> mesh
        coordinates."""
        found, at = {}, {}
        for path in glob.glob(os.path.join(run, "trace", "*.h5")):
            trace, _ = load.read_rank(path)
            steps = found.setdefault(trace.rank, {})
            for step, plan in trace.plan_steps:
                kind, _, rows = trace.plans[plan]
                if kind == "budgets":
                    steps[int(step)] = [tuple(map(float, row)) for row in rows]
            at[trace.rank] = trace.last.at
        return found, at

    def averages(self, path):
        with h5py.File(path, "r") as f:
            return list(f["state/extra/budget_averages"][()])

    def test_budgets_of_a_ring_agree_and_keep_the_bound(self):
        run = self.out("run")
        self.run_ballast(4, "train", self.deck(steps=3, dp=2, cp_inner=2), *BUDGETS, "-d", run)
        found, at = self.choices(run)
        self.assertEqual(sorted(found), [0, 1, 2, 3])
        seen = set()
        for rank, steps in found.items():
            self.assertEqual(sorted(steps), [1, 2, 3])
            other = next(r for r in found if r != rank and at[r]["dp"] == at[rank]["dp"])
            self.assertEqual(steps, found[other])
            for choices in steps.values():
                self.assertEqual({c[1] for c in choices}, {0.0, 1.0})
                for _, _, base, budget, loss in choices:
                    self.assertEqual(base, 3)
                    self.assertLessEqual(loss, 0.1 + 1e-6)
                    # A budget below the base loses coverage, one above gains.
                    self.assertGreaterEqual(loss * (base - budget), 0)
                    seen.add(budget)
        self.assertGreater(len(seen), 1)
        self.assertTrue(any(b > 3 for b in seen), seen)

    def test_budgets_are_those_of_one_rank_on_any_mesh(self):
        expected = losses = None
        for name, ranks, mesh in (
            ("one", 1, {}),
            ("sp", 2, {"sp": 2}),
            ("sp-cp", 4, {"sp": 2, "cp_inner": 2}),
        ):
            run = self.out(name)
            self.run_ballast(
                ranks,
                "train",
                self.deck(steps=2, **{"dp": 1, **mesh}),
                *BUDGETS,
                "batching.method=none",
                "-d",
                run,
            )
            found, _ = self.choices(run)
            self.assertEqual(len(found), ranks)
            curve = [float(row["loss"]) for row in self.steps(run) if "loss" in row]
            if expected is None:
                expected, losses = found[0], curve
                self.assertGreater(
                    len(
                        {budget for choices in expected.values() for _, _, _, budget, _ in choices}
                    ),
                    1,
                )
            for steps in found.values():
                for step, choices in steps.items():
                    self.assertEqual(
                        [c[:4] for c in choices],
                        [c[:4] for c in expected[step]],
                        f"{name} step {step}",
                    )
                    for (*_, loss), (*_, of_one) in zip(choices, expected[step]):
                        self.assertAlmostEqual(loss, of_one, delta=5e-6)
            for a, b in zip(curve, losses):
                self.assertAlmostEqual(a, b, delta=2e-5)

    def test_needle_deck_tunes_budgets(self):
        deck = os.path.join(os.environ["BALLAST_ROOT"], "inputs", "sparsebalance", "needle.toml")
        few = [
            "run.steps=3",
            "model.layers=2",
            "curriculum.steps=0",
            "data.needle_length_share=[4,0,0,2,1]",
            "data.needle_held_out=2",
            "eval.every_steps=3",
            "checkpoint.every_steps=0",
        ]
        for case, bound in (("fixed", 0), ("p=0.1", 0.1), ("p=0.3", 0.3)):
            run = self.out(case)
            self.run_ballast(1, "train", deck, "--case", case, *few, "-d", run)
            choices = [c for step in self.choices(run)[0][0].values() for c in step]
            self.assertEqual({c[2] for c in choices}, {4.0})
            budgets = {c[3] for c in choices}
            self.assertLessEqual(max(c[4] for c in choices), bound + 1e-6)
            if case == "fixed":
                self.assertEqual(budgets, {4.0})
            else:
                self.assertLess(min(budgets), 4)
                self.assertGreater(max(budgets), 4)

    def test_bench_step_tells_the_budgets_of_all_ranks(self):
        run, twin = self.out("run"), self.out("bench.json")
        few = [*BUDGETS, "optimizer.learning_rate=0"]
        self.run_ballast(2, "train", self.deck(steps=3, dp=2), *few, "-d", run)
        chosen = [c for of in self.choices(run)[0].values() for s in (2, 3) for c in of[s]]
        bench = ["bench", "step", self.deck(steps=3, dp=2), *few, "warmup=1", "repeats=2"]
        done = self.run_ballast(2, *bench, "--json", twin)
        with open(twin) as f:
            found = json.load(f)
        want = [sum(c[i] for c in chosen) / len(chosen) for i in (3, 4)]
        self.assertAlmostEqual(found["budget"], want[0], delta=1e-9)
        self.assertAlmostEqual(found["coverage_loss"], want[1], delta=1e-6)
        self.assertAlmostEqual(
            found["largest_coverage_loss"], max(c[4] for c in chosen), delta=1e-6
        )
        self.assertIn("coverage given up", done.stdout)

    def test_overheads_are_measured(self):
        run, twin = self.out("run"), self.out("twin.json")
        self.run_ballast(2, "train", self.deck(steps=3, dp=2), *BUDGETS, "-d", run, "--json", twin)
        with open(twin) as f:
            found = json.load(f)
        # By hand from the traces: the rank that spends most in a step, the first step left out.
        spent, whole = {}, {}
        for path in glob.glob(os.path.join(run, "trace", "*.h5")):
            trace, _ = load.read_rank(path)
            for step in (2, 3):
                mine = trace.events[trace.events["step"] == step]
                for kind in ("tuning", "planning"):
                    of = mine[mine["kind"] == load.KINDS.index(kind)]
                    spent[kind, step] = max(
                        spent.get((kind, step), 0), float((of["end_s"] - of["begin_s"]).sum())
                    )
                    self.assertGreater(len(of), 0)
                whole[step] = float(trace.steps["step_time_s"][trace.steps["step"] == step][0])
        for key, kind in (("dst_overhead_share", "tuning"), ("sab_overhead_share", "planning")):
            want = (spent[kind, 2] + spent[kind, 3]) / (whole[2] + whole[3])
            self.assertAlmostEqual(found[key], want, delta=0.2 * want)
            self.assertGreater(found[key], 0)
            self.assertLess(found[key], 0.5)
        with open(os.path.join(run, "log.txt")) as f:
            log = f.read()
        self.assertIn("# dst_overhead_share = ", log)
        self.assertIn("# sab_overhead_share = ", log)
        plain = [b for b in BUDGETS if not b.startswith(("dst.enabled", "batching.method"))]
        self.run_ballast(
            2, "train", self.deck(steps=2, dp=2), *plain, "-d", self.out("plain"), "--json", twin
        )
        with open(twin) as f:
            self.assertFalse([key for key in json.load(f) if "overhead" in key])

    def test_averages_of_a_session_without_tuning_are_none(self):
        deck, run = self.deck(steps=2, dp=2), self.out("run")
        self.run_ballast(2, "train", deck, *BUDGETS, "-d", run)
        self.averages(os.path.join(run, "checkpoints", "step_00000002.h5"))
        plain = [b for b in BUDGETS if not b.startswith(("dst.enabled", "batching.method"))]
        self.run_ballast(2, "train", deck, *plain, "-d", run, "-r", "latest", "run.steps=4")
        with h5py.File(os.path.join(run, "checkpoints", "step_00000004.h5"), "r") as file:
            self.assertNotIn("budget_averages", file["state/extra"])

    def test_chunks_choose_for_themselves(self):
        run = self.out("chunks")
        chunked = [b for b in BUDGETS if not b.startswith("batching.method")] + [
            "batching.method=chunkflow",
            "chunk.tokens=256",
            "pipeline.schedule=state_aware_1f1b",
        ]
        self.run_ballast(2, "train", self.deck(steps=2, dp=2), *chunked, "-d", run)
        found, _ = self.choices(run)
        for steps in found.values():
            for choices in steps.values():
                self.assertEqual(
                    len(choices), len({c[:2] for c in choices})
                )  # a second forward asks no more
                self.assertGreater(len(choices), 2)
                self.assertLessEqual(max(c[4] for c in choices), 0.1 + 1e-6)

    def test_restart_goes_on_bit_for_bit_over_stages(self):
        deck = self.deck(steps=6, dp=2, every=3)
        mesh = ["mesh.pp=2", *BUDGETS]
        self.run_ballast(4, "train", deck, *mesh, "-d", self.out("whole"))
        self.run_ballast(
            4,
            "train",
            deck,
            *mesh,
            "run.steps=3",
            "optimizer.decay_steps=6",
            "-d",
            self.out("parts"),
        )
        self.run_ballast(
            4,
            "train",
            deck,
            *mesh,
            "optimizer.decay_steps=6",
            "-d",
            self.out("parts"),
            "-r",
            "latest",
        )
        self.assertEqual(self.losses(self.out("whole")), self.losses(self.out("parts")))
        last = self.checkpoints(self.out("whole"))[-1]
        self.assertEqual(
            self.tensors(os.path.join(self.out("whole"), "checkpoints", last)),
            self.tensors(os.path.join(self.out("parts"), "checkpoints", last)),
        )
        averages = [
            self.averages(os.path.join(self.out(run), "checkpoints", last))
            for run in ("whole", "parts")
        ]
        self.assertEqual(*averages)
        self.assertNotEqual(set(averages[0]), {3.0})  # they have moved from the base
        found, at = self.choices(self.out("whole"))
        for rank, steps in found.items():  # a stage chooses for its own layers
            self.assertEqual(
                {c[1] for choices in steps.values() for c in choices}, {float(at[rank]["pp"])}
            )
        again, _ = self.choices(self.out("parts"))
        self.assertEqual(found, again)

    def test_a_step_is_balanced_by_the_budgets_of_the_step_before(self):
        """Whether that was the same start's or not."""
        deck = self.deck(steps=3, dp=2, every=1)
        line = [deck, *BUDGETS, "dst.threshold=1", "dst.anchor=min", "costs.forward_pair_s=1e-6"]
        plans = {}
        for name, decay in (("quick", 0), ("slow", 0.99)):
            run = self.out(name)
            self.run_ballast(2, "train", *line, f"sab.decay={decay}", "-d", run)
            plans[name] = {step: plan["hash"] for step, plan in self.stored(run).items()}
        self.assertEqual(plans["quick"][1], plans["slow"][1])
        self.assertNotEqual(plans["quick"][2], plans["slow"][2])
        first = os.path.join(self.out("quick"), "checkpoints", "step_00000001.h5")
        self.run_ballast(2, "train", *line, "sab.decay=0", "-d", self.out("on"), "-r", first)
        again = {step: plan["hash"] for step, plan in self.stored(self.out("on")).items()}
        self.assertEqual(again, {step: plans["quick"][step] for step in (2, 3)})

    def test_what_cannot_combine_is_refused(self):
        deck = self.deck(dp=1)
        for overrides, message in (
            (["dst.enabled=true"], "has none"),
            (
                BUDGETS
                + [
                    "batching.method=hbp",
                    "batching.groups=[300,900]",
                    "batching.group_ranks=[1,2]",
                ],
                "packs of one rank",
            ),
            (BUDGETS + ["costs.forward_pair_s=0"], "profile.table"),
            (BUDGETS + ["attention.pattern=vertical_slash"], "dst.base_budget"),
            (BUDGETS + ["dst.budgets=[1,2]"], "lacks"),
            (BUDGETS + ["attention.index=generated"], "routing scores"),
        ):
            done = self.run_ballast(
                1, "train", deck, *overrides, "-d", self.out("refused"), status=1
            )
            self.assertIn(message, done.stderr)

    # One budget and one clock, whoever asks: SAB weighs what the deck's pattern computes.
    def test_sab_weighs_what_is_computed(self):
        deck = self.deck(dp=2)
        base = [o for o in BUDGETS if not o.startswith(("dst.", "attention."))]
        base += ["data.samples=64", "costs.forward_pair_s=1e-5"]

        def figures(*more):
            found = []
            for command in ("pack", "plan"):
                twin = self.out(command + ".json")
                self.run_ballast(1, command, deck, *base, *more, "--json", twin)
                with open(twin) as f:
                    found.append(json.load(f))
            return found[0]["load_balance"], found[1]["step_time"]

        dense = figures()
        # Keys of tuning and of another pattern, which this run does not read.
        self.assertEqual(figures("attention.moba_top_k=1", "dst.base_budget=1"), dense)
        moba = ["attention.pattern=moba", "attention.moba_block=64"]
        budget = figures(*moba, "attention.moba_top_k=2")
        self.assertLess(budget[1], 0.8 * dense[1])
        self.assertEqual(figures(*moba, "attention.moba_top_k=2", "dst.base_budget=9"), budget)
        self.assertLess(figures(*moba, "attention.moba_top_k=1")[1], budget[1])

    # Tables may hold the recomputation that trains, or another: both plan and train.
    def test_budgets_by_a_table_under_recomputation(self):
        measure = [
            "profile.lengths=[128,256,512]",
            "profile.budgets=[1,2,4]",
            "profile.repeats=1",
            "profile.warmup=0",
            "profile.held_out=0",
            "profile.repair_limit=1000",
        ]
        budgets = [o for o in BUDGETS if not o.startswith("costs.")]
        deck = self.deck(dp=2, steps=2)
        for measured, trained in (("full", "full"), ("none", "full")):
            table = self.out(measured + ".h5")
            more = [*budgets, *measure, f"profile.table={table}"]
            folder = self.out("profile-" + measured)
            self.run_ballast(
                1,
                "profile",
                self.deck("one.toml", dp=1),
                *more,
                f'profile.recompute=["{measured}"]',
                "-d",
                folder,
            )
            more += [f"recompute.mode={trained}", "profile.repair_limit=1000"]
            self.run_ballast(1, "check", deck, *more)
            run = self.out(f"run-{measured}-{trained}")
            self.run_ballast(2, "train", deck, *more, "-d", run)
            self.assertTrue(self.choices(run)[0][0])

    def test_a_table_of_another_layer_is_refused(self):
        table = self.out("table.h5")
        base = [
            "attention.pattern=moba",
            "attention.moba_block=64",
            "profile.lengths=[128,256]",
            "profile.budgets=[1,2]",
            "profile.repeats=1",
            "profile.warmup=0",
            "profile.held_out=0",
            "profile.repair_limit=1000",
            f"profile.table={table}",
        ]
        self.run_ballast(1, "profile", self.deck(dp=1), *base, "-d", self.out("profile"))
        limits = ["profile.repair_limit=100", f"profile.table={table}"]
        self.run_ballast(
            1, "train", self.deck(dp=1, steps=1), *BUDGETS, *limits, "-d", self.out("good")
        )
        done = self.run_ballast(
            1,
            "train",
            self.deck(dp=1, steps=1),
            *BUDGETS,
            *limits,
            "model.hidden=64",
            "-d",
            self.out("bad"),
            status=1,
        )
        self.assertIn("hidden 32", done.stderr)
        self.assertIn("hidden 64", done.stderr)
        self.run_ballast(
            1,
            "train",
            self.deck(dp=1, steps=1),
            *BUDGETS,
            *limits,
            "model.hidden=64",
            "profile.allow_mismatch=true",
            "-d",
            self.out("allowed"),
        )
        with open(os.path.join(self.out("allowed"), "log.txt")) as log:
            self.assertIn("hidden 64", log.read())

"""Whole-program tests of Hierarchical Balance Packing's training: groups whose packs several ranks
share."""
import json
import os
import unittest

from runs import RunCase

HBP = ["batching.method=hbp", "batching.groups=[80,160,300]", "batching.global_tokens=2500"]


class Hbp(RunCase):
    def train(self, name, ranks, *overrides, **values):
        run = self.out(name)
        self.run_ballast(
            ranks,
            "train",
            self.deck(name + ".toml", **{"steps": 5, "every": 0, **values}),
            "-d",
            run,
            *overrides,
        )
        return run

    def curve(self, run):
        return [(float(r["loss"]), float(r["grad_norm"])) for r in self.steps(run) if "loss" in r]


class AdaptiveSequenceParallelism(Hbp):
    def test_losses_are_those_of_one_rank_on_every_mesh(self):
        one = self.curve(
            self.train("one", 1, "run.precision=fp64", "batching.global_tokens=2500", dp=1)
        )
        self.assertEqual(len(one), 5)
        runs = [
            (4, {"dp": 4}, "[1,2,4]", "[-1,1,2]", 0),
            (4, {"dp": 4}, "[1,1,4]", "[]", 2),
            (4, {"dp": 2, "cp_inner": 2}, "[1,2,2]", "[0,1,2]", 1),
            (2, {"dp": 2}, "[1,2,2]", "[]", 2),
        ]
        for i, (ranks, mesh, degrees, recompute, zero) in enumerate(runs):
            run = self.train(
                f"adaptive{i}",
                ranks,
                "run.precision=fp64",
                *HBP,
                f"batching.group_ranks={degrees}",
                f"batching.group_recompute={recompute}",
                f"optimizer.zero={zero}",
                **mesh,
            )
            for (a, b), (c, d) in zip(one, self.curve(run)):
                self.assertAlmostEqual(a, c, delta=2e-6, msg=str(runs[i]))
                self.assertAlmostEqual(b, d, delta=2e-5, msg=str(runs[i]))

    def test_restart_is_bit_identical_and_the_trace_names_the_degrees(self):
        import h5py

        degrees = [
            *HBP,
            "batching.group_ranks=[1,2,4]",
            "data.validation_share=0.2",
            "eval.every_steps=2",
        ]
        whole = self.train("whole", 4, *degrees, dp=4, steps=6)
        parts = self.train("parts", 4, *degrees, "optimizer.decay_steps=6", dp=4, steps=3, every=3)
        self.run_ballast(
            4,
            "train",
            self.deck("again.toml", dp=4, steps=6, every=3),
            "-d",
            parts,
            "-r",
            "latest",
            *degrees,
        )
        self.assertEqual(self.losses(whole), self.losses(parts))
        self.assertTrue(any("validation_loss" in row for row in self.steps(whole)))
        ranks = {m.get("ranks", 1) for p in self.stored(whole).values() for m in p["micro_batches"]}
        self.assertEqual(ranks, {1, 2, 4})


class UlyssesWithOthers(Hbp):
    def test_stages_chunks_and_rings_with_shared_sequences_equal_one_rank(self):
        one = self.curve(self.train("one", 1, "run.precision=fp64", dp=1, steps=4))
        chunks = ["batching.method=chunkflow", "chunk.tokens=96", "chunk.k=1"]
        runs = [
            (4, {"dp": 1, "sp": 2}, ["mesh.pp=2", "pipeline.schedule=1f1b"]),
            (
                4,
                {"dp": 1, "sp": 2},
                ["mesh.pp=2", "pipeline.schedule=zero_bubble", "recompute.mode=full"],
            ),
            (2, {"dp": 1, "sp": 2}, chunks),
            (
                4,
                {"dp": 1, "sp": 2, "cp_inner": 2},
                chunks + ["chunk.offload=host", "chunk.window_tokens=96"],
            ),
            (
                4,
                {"dp": 1, "sp": 2},
                chunks + ["mesh.pp=2", "pipeline.schedule=state_aware_1f1b", "optimizer.zero=2"],
            ),
        ]
        for i, (ranks, mesh, more) in enumerate(runs):
            for (a, b), (c, d) in zip(
                one,
                self.curve(
                    self.train(f"with{i}", ranks, "run.precision=fp64", *more, steps=4, **mesh)
                ),
            ):
                self.assertAlmostEqual(a, c, delta=2e-6, msg=str(runs[i]))
                self.assertAlmostEqual(b, d, delta=2e-5, msg=str(runs[i]))


class SamplesBeyondGroups(Hbp):
    def test_are_refused_before_the_first_step_on_every_rank(self):
        done = self.run_ballast(
            2,
            "train",
            self.deck(dp=2, steps=50),
            "batching.method=hbp",
            "batching.groups=[80,160]",
            "-d",
            self.out("run"),
            status=1,
        )
        self.assertRegex(
            done.stderr,
            (
                r"(?m)^ballast: [1-9]\d* of \d+ samples have more tokens than the longest group's"
                r" 160 \(batching.groups\), the longest 300; add a group"
            ),
        )
        self.assertNotIn("step=", done.stdout)
        line = ["batching.method=hbp", "batching.groups=[80,160]"]
        checked = self.run_ballast(1, "check", self.deck(dp=2), *line, status=1)
        self.assertIn("than the longest group's 160", checked.stdout + checked.stderr)
        self.run_ballast(
            2,
            "train",
            self.deck(dp=2, steps=1),
            "batching.method=hbp",
            "batching.groups=[80,160]",
            "batching.long=split",
            "-d",
            self.out("split"),
        )

    def test_padding_of_sparse_blocks_makes_no_sample_too_long(self):
        sparse = ["attention.pattern=moba", "attention.moba_block=64", "attention.moba_top_k=2"]
        groups = ["batching.method=hbp", "batching.groups=[80,300]"]  # 300 pad to 320
        deck = self.deck(dp=2, steps=2, every=0)
        self.run_ballast(1, "check", deck, *sparse, *groups)
        self.run_ballast(2, "train", deck, *sparse, *groups, "-d", self.out("padded"))


class LossNormalisers(Hbp):
    def test_ranks_that_share_a_micro_batch_change_no_normaliser(self):
        firsts = {}
        for normaliser in ("ave_token", "token_mean", "sample_mean", "sequence_mean", "sum"):
            curves = [
                self.curve(
                    self.train(
                        f"{normaliser}{i}",
                        ranks,
                        "run.precision=fp64",
                        f"loss.normaliser={normaliser}",
                        "optimizer.learning_rate=0.001",
                        dp=2,
                        steps=2,
                        **mesh,
                    )
                )
                for i, (ranks, mesh) in enumerate([(2, {}), (4, {"sp": 2}), (4, {"cp_inner": 2})])
            ]
            for other in curves[1:]:
                for (a, b), (c, d) in zip(curves[0], other):
                    self.assertAlmostEqual(a, c, delta=2e-6 * abs(a), msg=normaliser)
                    self.assertAlmostEqual(b, d, delta=2e-5 * abs(b), msg=normaliser)
            firsts[normaliser] = curves[0][0][0]
        self.assertGreater(firsts["sum"], 100 * firsts["ave_token"])
        self.assertEqual(len(set(firsts.values())), 5, firsts)


class Curriculum(Hbp):
    def test_short_samples_first_also_over_a_restart(self):
        short = [
            *HBP,
            "batching.group_ranks=[1,1,2]",
            "batching.global_tokens=400",
            "curriculum.steps=3",
            "curriculum.max_tokens=250",
        ]
        whole = self.train("whole", 2, *short, dp=2, steps=6)
        with open(os.path.join(whole, "log.txt")) as f:
            self.assertIn(
                "# curriculum: the first 3 steps take samples of at most 250 tokens", f.read()
            )
        longest = self.longest(whole)
        self.assertTrue(all(n <= 250 for n in longest[:3]), longest)
        self.assertTrue(any(n > 250 for n in longest[3:]), longest)
        parts = self.train("parts", 2, *short, "optimizer.decay_steps=6", dp=2, steps=2, every=2)
        changed = self.run_ballast(
            2,
            "train",
            self.deck("again.toml", dp=2, steps=6),
            "-d",
            parts,
            "-r",
            "latest",
            *short,
            "curriculum.steps=4",
            status=None,
        )
        self.assertNotEqual(changed.returncode, 0)
        self.assertIn("another curriculum", changed.stderr + changed.stdout)
        self.run_ballast(
            2, "train", self.deck("again.toml", dp=2, steps=6), "-d", parts, "-r", "latest", *short
        )
        self.assertEqual(self.losses(whole), self.losses(parts))
        # Where samples decide a batch's size, its tokens may change.
        short.append("batching.global_samples=3")
        run = self.train("samples", 2, *short, dp=2, steps=2, every=2)
        again = self.deck("again.toml", dp=2, steps=3)
        more = [*short, "batching.global_tokens=999"]
        self.run_ballast(2, "train", again, "-d", run, "-r", "latest", *more)

    def longest(self, run):
        """Longest sample of every step, from the executed plans."""
        return [
            max(end for m in plan["micro_batches"] for _, _, end, _ in m["segments"])
            for plan in self.stored(run).values()
        ]


class Selection(Hbp):
    DECK = os.path.join(os.environ.get("BALLAST_ROOT", ""), "inputs", "hbp", "table5.toml")

    def facts(self, command, case, *overrides):
        twin = self.out("twin.json")
        self.run_ballast(
            1, command, self.DECK, "--case", case, "data.samples=60000", *overrides, "--json", twin
        )
        with open(twin) as f:
            facts = json.load(f)
        return facts["cases"][0] if "cases" in facts else facts

    def time_of(self, groups, ranks, recompute):
        return self.facts(
            "pack",
            "hbp",
            f"batching.groups={groups}",
            f"batching.group_ranks={ranks}",
            f"batching.group_recompute={recompute}",
        )["run_seconds"]

    def test_selected_groups_are_as_good_as_hand_set_ones(self):
        found = self.facts("plan", "hbp")
        self.assertLess(found["selection_seconds"], 180)
        selected = self.time_of(found["groups"], found["group_ranks"], found["group_recompute"])
        hand_set = [
            ([16384, 131072], [1, 8], [23, 24]),
            ([32768, 131072], [1, 8], [30, 24]),
            ([8192, 131072], [1, 8], [10, 24]),
            ([32768, 131072], [4, 8], [11, 24]),
            ([4096, 16384, 131072], [1, 2, 8], [0, 11, 24]),
        ]
        times = [self.time_of(*groups) for groups in hand_set]
        self.assertLessEqual(selected, 1.03 * min(times), f"{found['groups']} {times}")
        naive = self.facts("pack", "isf-sp8")["run_seconds"]
        self.assertGreater(naive, 1.3 * selected)
        again = self.facts(
            "plan",
            "hbp",
            "batching.groups=[]",
            "batching.group_ranks=[]",
            "batching.group_recompute=[]",
        )  # none are needed beforehand
        self.assertEqual(again["groups"], found["groups"])
        unlimited = ["batching.select_refine=false", "batching.select_memory_gib=0"]
        printed = self.facts("plan", "hbp", *unlimited)
        self.assertEqual(printed["run_s"], printed["algorithm_1_run_s"])
        printed = self.facts("plan", "hbp", "batching.select_refine=false")
        self.assertLessEqual(printed["algorithm_1_run_s"], printed["run_s"])  # kept within memory
        self.assertLess(found["run_s"], printed["run_s"])
        for facts in (found, printed):
            self.assertLess(facts["bytes"], 75 * 2**30)
        tight = self.facts("plan", "hbp", "batching.select_memory_gib=66")
        self.assertGreaterEqual(sum(tight["group_recompute"]), sum(found["group_recompute"]))
        none = ["batching.groups=[]", "batching.group_ranks=[]", "batching.group_recompute=[]"]
        step = ["--case", "hbp", "batching.scope=step", *none]  # an epoch is not trained
        self.assertIn("to be selected", self.run_ballast(1, "check", self.DECK, *step).stdout)
        lacking = self.run_ballast(1, "pack", self.DECK, "--case", "hbp", *none, status=None)
        self.assertNotEqual(lacking.returncode, 0)
        self.assertIn("`ballast plan` selects groups", lacking.stderr)
        refused = self.run_ballast(
            1, "plan", self.DECK, "--case", "hbp", "batching.select_memory_gib=20", status=None
        )
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("at no degree", refused.stderr)


class MeasuredDeck(Hbp):
    def test_groups_selected_from_a_measured_table_are_as_good_as_five_hand_set_ones(self):
        deck, table = (
            os.path.join(os.environ["BALLAST_ROOT"], "inputs", "hbp", "selected.toml"),
            f"profile.table={self.out('table.h5')}",
        )
        self.run_ballast(
            4,
            "profile",
            deck,
            "--case",
            "selected",
            table,
            "profile.repeats=3",
            "profile.warmup=1",
            "profile.held_out=0",
            "profile.repair_limit=10",
            "-d",
            self.out("profile"),
        )
        self.run_ballast(
            1, "pack", deck, table, "profile.repair_limit=10", "--json", self.out("pack.json")
        )
        with open(self.out("pack.json")) as f:
            seconds = {c["name"]: c["run_seconds"] for c in json.load(f)["cases"]}
        selected = seconds.pop("selected")
        self.assertEqual(len(seconds), 5)
        self.assertLessEqual(selected, 1.03 * min(seconds.values()), seconds)


class StoredGroups(Hbp):
    """From a measured layer to a training run: profile, selection, table, train."""

    def test_selected_groups_go_through_the_table_into_the_run(self):
        import re

        import h5py

        table = self.out("table.h5")
        wants = [
            "batching.method=hbp",
            "batching.groups_from=profile",
            f"profile.table={table}",
            "batching.select_lengths=[80,160,300]",
            "run.precision=fp64",
            "batching.global_tokens=2500",
            "batching.select_memory_gib=0.01",
            "profile.repair_limit=10",
        ]
        bins = [
            "profile.lengths=[64,128,320]",
            "profile.recompute=[none,full]",
            "profile.repeats=3",
            "profile.warmup=1",
            "profile.held_out=0",
            "profile.largest_message=65536",
        ]

        def run(command, *overrides, dp=2, status=0, **values):
            return self.run_ballast(
                dp if command in ("train", "profile") else 1,
                command,
                self.deck("deck.toml", steps=4, every=0, dp=dp, **values),
                *wants,
                *overrides,
                status=status,
            )

        def refused(command, *overrides, **more):
            done = run(command, *overrides, status=None, **more)
            self.assertNotEqual(done.returncode, 0)
            return done.stdout + done.stderr

        self.assertIn("does not exist", refused("train"))
        checked = refused("check")
        self.assertIn("one group of 300 tokens is shown", checked)
        self.assertIn("`train` would stop here", checked)
        self.assertIn("one group of 300 tokens is shown", run("check", "--elsewhere").stdout)
        done = run("profile", "-d", self.out("profile"), *bins, "--json", self.out("profile.json"))
        self.assertIn(f"stored in {table}", done.stdout)
        with open(self.out("profile.json")) as f:
            found = json.load(f)["selection"]
        self.assertEqual(found["stored_in"], table)
        self.assertLess(found["selection_seconds"], 180)
        self.assertLessEqual(found["run_s"], found["algorithm_1_run_s"])
        self.assertEqual(found["groups"][-1], 300)
        stated = [
            f"batching.{key}={found[key]}".replace(" ", "")
            for key in ("groups", "group_ranks", "group_recompute")
        ]

        # The run is that of the groups stated by hand; its effective deck holds them.
        run("train", "-d", self.out("stored"))
        run("train", "-d", self.out("stated"), "batching.groups_from=deck", *stated)
        self.assertEqual(self.losses(self.out("stored")), self.losses(self.out("stated")))
        with open(os.path.join(self.out("stored"), "deck.toml")) as f:
            deck = f.read()
        self.assertRegex(deck, re.escape(f"groups = {found['groups']}"))
        self.assertIn('groups_from = "deck"', deck)
        with open(os.path.join(self.out("stored"), "log.txt")) as f:
            self.assertIn(f"# packing groups of profile table {table}", f.read())
        run("pack", "--json", self.out("pack.json"))
        with open(self.out("pack.json")) as f:
            self.assertEqual([g["group_tokens"] for g in json.load(f)["groups"]], found["groups"])

        # Other uses are refused with both sides, unless the deck allows them.
        for override, part in (
            ("data.max_tokens=250", "data of the selection: "),
            ("batching.select_memory_gib=0.02", "select_memory_gib 0.01"),
            ("model.layers=3", "model of the selection: 2 layers"),
            ("model.intermediate=96", "layer of the table"),
            ("optimizer.zero=0", "optimizer.zero 1"),
            ("optimizer.kind=muon", "optimizer.kind"),
            ("attention.pattern=moba", "attention of the selection: dense"),
            ("batching.select_lengths=[160,300]", "[80, 160, 300]"),
            ("batching.global_tokens=1500", "batching.global_tokens 2500"),
            ("batching.packing=isf", "packing alike"),
            ("batching.select_refine=false", "here: batching.select_refine off"),
        ):
            message = refused("train", override)
            self.assertIn(part, message)
            self.assertIn("profile.allow_mismatch", message)
        self.assertIn("mesh.dp 2", refused("pack", dp=4))
        if any(ranks > 1 for ranks in found["group_ranks"]):
            self.assertIn("joins data-parallel ranks itself", refused("check", "mesh.sp=2"))
        self.assertIn(
            "note: memory of the selection",
            run(
                "train",
                "-d",
                self.out("allowed"),
                "batching.select_memory_gib=0.02",
                "profile.allow_mismatch=true",
            ).stdout,
        )

        # A second selection joins the first; the same one again takes its own place.
        run("plan", "batching.select_memory_gib=0.02")
        run("plan", "batching.select_memory_gib=0.02")
        with h5py.File(table) as f:
            self.assertEqual(len(f["groups"]), 2)
        for limit in ("0.01", "0.02"):
            run("pack", f"batching.select_memory_gib={limit}")


if __name__ == "__main__":
    unittest.main()

"""Whole-program tests of `ballast plan`: the decks reproduce the figures that their papers and our
pages state."""
import glob
import json
import os
import subprocess
import unittest

from runs import BALLAST, RunCase

INPUTS = os.path.join(
    os.environ.get("BALLAST_ROOT", os.path.join(os.path.dirname(__file__), "..", "..")), "inputs"
)


class Plan(RunCase):
    def plan(self, deck, *overrides, status=0):
        twin = self.out("twin.json")
        done = subprocess.run(
            [BALLAST, "plan", os.path.join(INPUTS, deck), *overrides, "--json", twin],
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
        )
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        if status != 0:
            return done.stderr
        with open(twin) as f:
            return json.load(f)

    def test_mtraining_table_4(self):
        facts = self.plan("mtraining/table4.toml")
        for key, expected in [
            ("flat_forward_ms", 34.10),
            ("flat_backward_ms", 111.81),
            ("hierarchical_forward_ms", 19.53),
            ("hierarchical_backward_ms", 88.56),
        ]:
            self.assertAlmostEqual(facts[key], expected, delta=0.01)
        # Forward sends no dKV; backward begins with a hop of keys, and of two levels the inner
        # one's sum stands alone before the last hop home, which the own shard hides.
        self.assertAlmostEqual(facts["hierarchical_forward_plan_ms"], 19.53, delta=0.01)
        self.assertAlmostEqual(
            facts["hierarchical_backward_plan_ms"], 88.56 + 0.13 + 0.29, delta=0.01
        )
        self.assertAlmostEqual(
            facts["flat_backward_plan_ms"],
            1.86 + 1.90 + 0.98 + 2.65 + 29 * 3.40 + 2 * 2.65,
            delta=0.01,
        )

    def test_sparsebalance_table_1(self):
        cases = {c["name"]: c for c in self.plan("sparsebalance/table1.toml")["cases"]}
        self.assertEqual(len(cases), 12)
        for prefix in ("", "dp 4 "):
            imbalance = [
                cases[prefix + name]["imbalance"]
                for name in ("Baseline", "+DST", "+SAB", "+SAB+DST")
            ]
            self.assertEqual(imbalance, sorted(imbalance, reverse=True))
            self.assertGreater(cases[prefix + "+LBB+DST"]["imbalance"], imbalance[3] - 0.02)
            self.assertGreaterEqual(cases[prefix + "+SAB+DST"]["speedup"], 1.33)
            self.assertEqual(cases[prefix + "Baseline"]["speedup"], 1)
            for name in ("Baseline", "+SAB", "+LBB"):
                self.assertEqual(cases[prefix + name]["coverage_loss"], 0)
            for name in ("+DST", "+SAB+DST", "+LBB+DST"):
                self.assertLessEqual(cases[prefix + name]["largest_coverage_loss"], 0.1 + 1e-12)
        for name, expected in [("Baseline", 2.0), ("+DST", 1.9), ("+SAB", 1.4), ("+SAB+DST", 1.29)]:
            self.assertAlmostEqual(cases[name]["imbalance"], expected, delta=0.1)

    def test_sab_beside_a_pipeline(self):
        facts = self.plan(
            "sparsebalance/table1.toml", "--case", "+SAB", "pipeline.schedule=1f1b", "run.steps=2"
        )["cases"][0]
        self.assertLess(facts["imbalance"], 1.8)
        self.assertGreater(facts["bubble_ratio"], 0)
        self.assertGreater(facts["first_batch_bubble_ratio"], 0)  # of the pipeline's own table
        self.assertNotEqual(facts["first_batch_step_time"], facts["step_time"])

    def test_tuned_budgets_are_planned_under_every_method(self):
        keys = ["data.source=lengths", "data.lengths=[100,200,300]", "dst.enabled=true"]
        keys += ["batching.global_tokens=600", "run.steps=2"]
        for method in ("balanced", "packed", "lbb", "sab", "none"):
            facts = self.plan(
                "sparsebalance/one_gpu.toml", "--case", "moba", f"batching.method={method}", *keys
            )["cases"][0]
            self.assertGreater(facts["step_time"], 0, method)

    def test_all_tables_agree_on_one_batch(self):
        deck = self.out("two_tables.toml")
        with open(deck, "w") as f:
            f.write(
                """[run]
steps = 1
[mesh]
dp = 2
[model]
layers = 4
hidden = 64
intermediate = 192
query_heads = 4
kv_heads = 2
head_dim = 16
vocabulary = 256
[data]
source = "lengths"
lengths = [4096, 512, 256, 3000, 128, 700, 2048, 900]
[batching]
method = "none"
global_samples = 8
[attention]
pattern = "moba"
moba_block = 64
moba_top_k = 4
[chunk]
k = 2
[pipeline]
schedule = "1f1b"
[dst]
anchor = "mean"
[costs]
forward_token_s = 1e-6
forward_pair_s = 2e-9
"""
            )
        times = set()
        for pp in (1, 2, 3):
            for schedule in ("1f1b", "gpipe", "state_aware_1f1b", "zero_bubble"):
                for tuned in ("false", "true"):
                    facts = self.plan(
                        deck,
                        f"mesh.pp={pp}",
                        f"pipeline.schedule={schedule}",
                        f"dst.enabled={tuned}",
                    )
                    self.assertEqual(facts["first_batch_step_time"], facts["step_time"])
                    self.assertEqual(facts["first_batch_bubble_ratio"], facts["bubble_ratio"])
                    times.add(round(facts["step_time"], 9))
        self.assertGreater(len(times), 8)  # both tables see the schedule and the budgets
        ratios = set()
        for steps in (1, 2):  # the ratio is of all batches together
            keys = [f"run.steps={steps}", f"pipeline.plan_steps={steps}", "mesh.pp=3"]
            facts = self.plan(deck, *keys, "batching.global_samples=4", "mesh.dp=1")
            self.assertAlmostEqual(
                facts["first_batch_bubble_ratio"], facts["bubble_ratio"], places=9
            )
            ratios.add(round(facts["bubble_ratio"], 9))
        self.assertEqual(len(ratios), 2)

    def test_mtraining_table_5(self):
        cases = {c["name"]: c for c in self.plan("mtraining/table5.toml")["cases"]}
        striped, zigzag = cases["striped-64"], cases["zigzag"]
        self.assertAlmostEqual(striped["density"], 0.05, delta=0.001)
        self.assertLessEqual(striped["worker_imbalance"], 1.05)
        self.assertLessEqual(striped["step_imbalance"], 1.20)
        self.assertLess(striped["shuffled_worker_imbalance"], 1.02)
        self.assertLess(striped["shuffled_step_imbalance"], 1.02)
        self.assertGreaterEqual(zigzag["critical_path"], 1.4)
        self.assertGreater(zigzag["worker_imbalance"], 1.5)
        for name in ("dense striped-64", "dense zigzag"):
            self.assertLess(cases[name]["worker_imbalance"], 1.02)
            self.assertLess(cases[name]["step_imbalance"], 1.02)

    def test_chunkflow_figures(self):
        for deck, overrides, bubble, step_time in [
            ("figure2", ["data.lengths=[2,2,2,2]"], 3 / 7, 42),
            ("figure2", [], 4 / 7, 56),
            ("figure7", [], 0.6, 60),
            ("figure6", ["chunk.k=1"], 1 - 24 / 44, 44),
            ("figure6", ["chunk.k=2"], 1 - 24 / 42, 42),
        ]:
            facts = self.plan(f"chunkflow/{deck}.toml", *overrides)
            self.assertAlmostEqual(
                facts["bubble_ratio"], bubble, places=9, msg=f"{deck} {overrides}"
            )
            self.assertAlmostEqual(facts["step_time"], step_time, places=9)
            k = (
                int(overrides[0].split("=")[1])
                if overrides and overrides[0].startswith("chunk.k")
                else 1
            )
            self.assertTrue(
                all(n <= k + 3 - s for s, n in enumerate(facts["peak_live_activations"])), facts
            )

    def test_halves_of_backward_fill_waits(self):
        for deck, overrides, before, after in [
            ("figure2", ["data.lengths=[2,2,2,2]"], 42, 30),
            ("figure6", ["chunk.k=1"], 44, 32),
            ("figure7", [], 60, 44),
        ]:
            whole, halves = (
                self.plan(f"chunkflow/{deck}.toml", *overrides, f"pipeline.schedule={s}")
                for s in ("state_aware_1f1b", "zero_bubble")
            )
            self.assertAlmostEqual(whole["step_time"], before, places=9)
            self.assertAlmostEqual(halves["step_time"], after, places=9)
            self.assertTrue(all(n <= 4 for n in halves["peak_live_activations"]), halves)
        cases = {
            c["name"]: c
            for c in self.plan("chunkflow/zero_bubble.toml", "run.seed=1", "pipeline.search=8")[
                "cases"
            ]
        }
        for k in (1, 2, 4):
            self.assertLess(
                cases[f"zero-bubble, K {k}"]["step_time"],
                0.8 * cases[f"state-aware, K {k}"]["step_time"],
            )

    def test_chunks_shorten_a_long_tailed_step(self):
        cases = {
            c["name"]: c for c in self.plan("chunkflow/table6.toml", "pipeline.search=2")["cases"]
        }
        base = cases.pop("1f1b, one sample each")
        for name, case in cases.items():
            self.assertLess(case["step_time"], base["step_time"] * 1.5, name)
        self.assertLess(cases["8K, K 4"]["step_time"], cases["32K, K 1"]["step_time"])

    def test_chunks_at_the_papers_scales(self):
        whole, plain = (
            {
                c["name"]: c["step_time"]
                for c in self.plan("chunkflow/figure8_scale.toml", "pipeline.plan_steps=6", *extra)[
                    "cases"
                ]
            }
            for extra in ([], ["costs.forward_micro_batch_s=0"])
        )
        for case in whole:
            if case.endswith("1f1b"):
                name = case[: -len("1f1b")]
                self.assertGreater(
                    whole[case] / whole[name + "chunks"], plain[case] / plain[name + "chunks"], name
                )
                self.assertGreater(
                    whole[case] / whole[name + "chunks"], 1.4 if "32K" in name else 2.0, name
                )
        # One stage: as long in chunks as in samples, but for what a micro-batch costs whatever its
        # length: 2.8 ms, and twice that backward.
        self.assertAlmostEqual(plain["7B, 32K, 1f1b"], plain["7B, 32K, chunks"], delta=1e-9)
        self.assertGreater(whole["7B, 32K, 1f1b"] - plain["7B, 32K, 1f1b"], 250 * 3 * 2.8e-3)

    def test_times_are_means_over_the_batches(self):
        deck = ["chunkflow/figure2.toml", "data.lengths=[4,2,1,1,2,2,2,2]", "data.samples=8"]
        one, two = self.plan(*deck), self.plan(*deck, "pipeline.plan_steps=2")
        self.assertAlmostEqual(one["step_time"], 56, places=9)
        self.assertAlmostEqual(two["step_time"], (56 + 42) / 2, places=9)
        self.assertEqual(two["micro_batches"], 8)
        # Of four stages and 24 and 24 units of each: sums, not the mean of 4/7 and 3/7.
        self.assertAlmostEqual(two["bubble_ratio"], 1 - 48 / 98, places=9)

    def test_an_unwritable_twin_is_found_before_the_work(self):
        deck = os.path.join(INPUTS, "chunkflow/figure2.toml")
        for command in (
            [BALLAST, "plan", deck],
            [BALLAST, "train", deck, "mesh.pp=1", "-d", self.out("run")],
        ):
            done = subprocess.run(
                [*command, "--json", self.out("absent") + "/twin.json"],
                capture_output=True,
                text=True,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
            self.assertEqual(done.returncode, 1)
            self.assertIn(
                "twin.json: the file cannot be written: No such file or directory", done.stderr
            )
            self.assertEqual(done.stdout, "")

    def test_nothing_to_plan_and_bad_costs(self):
        self.assertIn("nothing to plan", self.plan("quickstart.toml", status=1))
        self.assertIn(
            'batching.select_lengths with batching.method = "hbp"',
            self.plan("quickstart.toml", "batching.select_lengths=[512,1024]", status=1),
        )
        self.assertIn(
            "costs.backward_inner_hop_ms = 0.1 is below",
            self.plan("mtraining/table4.toml", "costs.backward_inner_hop_ms=0.1", status=1),
        )
        self.assertIn(
            "ring.stripe = 1: sparse attention",
            self.plan("mtraining/table5.toml", "ring.stripe=1", "--case", "striped-64", status=1),
        )

    def test_train_refuses_what_is_only_planned(self):
        for deck, overrides, mention in [
            ("chunkflow/figure2.toml", ["mesh.pp=1", "batching.scope=epoch"], "batching.scope")
        ]:
            done = self.run_ballast(
                1,
                "train",
                os.path.join(INPUTS, deck),
                *overrides,
                "-d",
                self.out("run"),
                status=None,
            )
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(mention, done.stderr)

    def test_search_finds_the_fastest_pair_that_fits(self):
        small = [
            "data.samples=512",
            "batching.global_samples=32",
            "chunk.search_tokens=[4096,16384]",
            "chunk.search_k=[1,4]",
            "chunk.search_steps=1",
            "pipeline.search=1",
        ]
        facts = self.plan("chunkflow/search.toml", *small)
        fitting = [p for p in facts["search"] if p["fits"]]
        self.assertEqual(len(facts["search"]), 4)
        self.assertEqual(facts["best_step_time"], min(p["step_time"] for p in fitting))
        self.assertEqual(
            facts["best_overrides"][2:],
            [f"chunk.tokens={facts['best_chunk_tokens']}", f"chunk.k={facts['best_k']}"],
        )
        printed = self.run_ballast(
            1, "plan", os.path.join(INPUTS, "chunkflow/search.toml"), *small
        ).stdout
        command = printed[printed.index("train with it: mpiexec -n 4 ballast train ") :]
        self.assertIn(" data.samples=512 batching.global_samples=32 pipeline.search=1 ", command)
        self.assertNotIn("chunk.search_", command)
        deck = self.out("cases.toml")
        with open(os.path.join(INPUTS, "chunkflow/search.toml")) as read, open(deck, "w") as write:
            write.write(read.read() + '\n[[case]]\nname = "of 4 K"\n\n[[case]]\nname = "other"\n')
        printed = self.run_ballast(1, "plan", deck, "--case", "of 4 K", *small).stdout
        self.assertIn(f"ballast train {deck} --case 'of 4 K' data.samples=512 ", printed)
        self.assertEqual(
            self.plan("chunkflow/search.toml", *small, "pipeline.schedule=zero_bubble")[
                "best_overrides"
            ][1],
            "pipeline.schedule=zero_bubble",
        )
        free = self.plan("chunkflow/search.toml", *small, "chunk.search_memory_gib=0")
        times = [p["step_time"] for p in free["search"]]
        self.assertTrue(all(p["fits"] for p in free["search"]), "0 is no limit")
        self.assertLess(min(times), max(times))
        self.assertEqual(free["best_step_time"], min(times))
        # Activations grow with chunk size and K; a limit between leaves the small ones.
        need = {(p["chunk_tokens"], p["k"]): p["fullest_rank_bytes"] for p in facts["search"]}
        self.assertLess(need[4096, 1], need[4096, 4])
        self.assertLess(need[4096, 4], need[16384, 4])
        limit = (need[4096, 1] + min(need[4096, 4], need[16384, 1])) / 2 / 2**30
        facts = self.plan("chunkflow/search.toml", *small, f"chunk.search_memory_gib={limit}")
        self.assertEqual((facts["best_chunk_tokens"], facts["best_k"]), (4096, 1))
        self.assertIn(
            "no pair of chunk.search_tokens",
            self.plan("chunkflow/search.toml", *small, "chunk.search_memory_gib=1.0", status=1),
        )

    def test_search_lists_pairs_that_the_rules_refuse(self):
        facts = self.plan(
            "chunkflow/search.toml",
            "data.samples=64",
            "batching.global_samples=16",
            "chunk.search_tokens=[4000,4096]",
            "chunk.search_k=[1]",
            "chunk.search_steps=1",
            "attention.pattern=moba",
        )
        refused, planned = facts["search"]
        self.assertIn("4000", refused["refused"])
        self.assertEqual(planned["chunk_tokens"], 4096)
        self.assertEqual(facts["best_chunk_tokens"], 4096)

    # MTraining 5.4: sparsity decides a step, and the layout how a ring shares it.
    def test_sparse_patterns_take_their_share(self):
        def step(case, *more):
            deck = "mtraining/step512k.toml"
            facts = self.plan(deck, "--case", case, "pipeline.schedule=1f1b", *more)
            return facts["cases"][0]["step_time"]

        dense, flat = step("dense"), step("flat")
        # Measured 12.4 and 92.2 s on four H200s.
        self.assertTrue(0.08 * dense < flat < 0.16 * dense, (flat, dense))
        # Whole rounds of stripes are even; zigzag's halves see few of the slashes' distances.
        self.assertGreater(step("zigzag"), 1.03 * flat)
        self.assertLess(step("flat", "attention.generated_density=0.02"), flat)
        # What a pattern that chooses its pairs leaves out is stated.
        online = ["attention.index=pattern", "attention.pattern=xattention", "ring.stripe=128"]
        whole = step("flat", *online)
        left = step("flat", *online, "attention.expected_sparsity=0.75")
        self.assertGreater(whole, 0.9 * dense)
        self.assertLess(left, 0.4 * whole)

    def test_every_deck_passes_check(self):
        decks = glob.glob(os.path.join(INPUTS, "**", "*.toml"), recursive=True)
        self.assertGreater(len(decks), 40)
        for deck in decks:
            done = self.check(deck)
            if "is for `ballast pack`" in done.stderr:  # whole epochs are planned, not trained
                done = self.check(deck, "batching.scope=step")
            self.assertEqual(done.returncode, 0, deck + "\n" + done.stderr)

    def check(self, deck, *overrides):
        return subprocess.run(
            [BALLAST, "check", deck, "--elsewhere", *overrides],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
        )


if __name__ == "__main__":
    unittest.main()

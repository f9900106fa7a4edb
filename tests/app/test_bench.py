"""ballast bench on the host: figures are sane, results are checked against
fp64, mistakes are named."""
import json
import os
import unittest

import h5py

from runs import RunCase


class Bench(RunCase):
    def bench(self, ranks, *arguments):
        path = self.out("bench.json")
        self.run_ballast(ranks, "bench", *arguments, "repeats=2", "--json", path)
        with open(path) as f:
            return json.load(f)

    def refused(self, ranks, *arguments):
        return self.run_ballast(ranks, "bench", *arguments, status=1).stderr

    def test_attention_over_dense_packed_and_block_list_indexes(self):
        lengths = self.out("lengths.txt")
        with open(lengths, "w") as f:
            f.write("7\n300\n64\n129\n")
        for settings in (
            [],
            ["segments=5"],
            ["lengths=random"],
            ["lengths=" + lengths],
            ["density=0.2", "run=2"],
            ["dtype=f64", "density=0.3", "lengths=random"],
        ):
            found = self.bench(1, "attention", "tokens=1000", "q_heads=4", *settings)
            limit = 1e-11 if found["dtype"] == "f64" else 1e-5
            for name, error in found["error"].items():
                self.assertLess(error, limit, f"{name} {settings}")
                self.assertGreater(error, 0, f"{name} {settings}: nothing was compared")
            for direction in ("forward", "backward"):
                self.assertGreater(found[direction]["gflops"], 0)
        kept = self.bench(
            1, "attention", "tokens=4096", "q_heads=2", "check=false", "density=0.25", "run=2"
        )["kept"]
        self.assertTrue(0.2 < kept < 0.35, kept)

    def test_numbers_with_leading_zeros_are_refused_as_in_decks(self):
        for setting in ("repeats=010", "seed=00"):
            found = self.refused(1, "gemm", setting)
            self.assertIn(f"bench setting {setting} is not", found)
        step = self.refused(1, "step", self.deck(), "run.steps=010")
        self.assertIn("run.steps", step)

    def test_ring_flat_and_hierarchical(self):
        for ranks, settings in (
            (1, []),
            (2, ["dtype=f64"]),
            (4, ["outer=2"]),
            (4, ["layout=striped", "stripe=32"]),
        ):
            found = self.bench(ranks, "ring", "tokens=700", "q_heads=4", *settings)
            self.assertEqual(found["ranks"], ranks)
            self.assertLess(
                max(found["error"].values()), 1e-11 if found["dtype"] == "f64" else 1e-5
            )
            self.assertGreater(found["efficiency"], 0)
            self.assertAlmostEqual(
                found["efficiency"],
                found["whole"]["median_s"] / ranks / found["both"]["median_s"],
                places=6,
            )

    def test_rates_are_those_of_the_median_time(self):
        """A pair of a head takes 4 D FLOPs forward and 10 D backward; a product takes 2 m n k."""
        sizes = ["tokens=200", "q_heads=4", "kv_heads=2", "head_dim=16", "check=false"]
        found = self.bench(1, "attention", *sizes)
        pairs = 4 * 200 * 201 / 2
        for direction, of_pair in (("forward", 4), ("backward", 10)):
            flops = found[direction]["gflops"] * 1e9 * found[direction]["median_s"]
            self.assertAlmostEqual(flops / (of_pair * 16 * pairs), 1, places=6)
        found = self.bench(1, "gemm", "m=96", "n=64", "k=160")
        flops = found["gflops"] * 1e9 * found["median_s"]
        self.assertAlmostEqual(flops / (2 * 96 * 64 * 160), 1, places=6)

    def test_steps_tell_tokens_of_a_rank_and_memory_of_the_fullest(self):
        deck, run = self.deck(steps=3), self.out("run")
        found = self.bench(2, "step", deck, "warmup=1")
        self.run_ballast(2, "train", deck, "-d", run)
        # Steps of unlike tokens: all of them over all time.  Of alike ones the median step decides.
        rate, each = found["tokens_per_s_per_rank"], found["tokens_per_step"]
        self.assertAlmostEqual(rate * 2 * sum(found["steps_s"]) / (2 * each), 1, places=6)
        alike = ["data.source=lengths", "data.lengths=[200]", "data.validation_share=0"]
        alike += ["batching.global_tokens=400", "batching.micro_batch_tokens=200"]
        same = self.bench(2, "step", deck, *alike, "warmup=1")
        self.assertEqual(same["tokens_per_step"], 400)
        rate = same["tokens_per_s_per_rank"]
        self.assertAlmostEqual(rate * same["median_s"] * 2 / 400, 1, places=6)
        peaks = []
        for rank in range(2):
            with h5py.File(os.path.join(run, "trace", f"trace_{rank:05}.h5")) as trace:
                peaks += list(trace["steps"]["peak_bytes_total"][:3])
        self.assertAlmostEqual(found["peak_memory_gib"] * 2**30 / max(peaks), 1, delta=0.01)

    def test_heads_that_stay_dense_take_all_pairs(self):
        out = self.out("heads.json")
        keys = ["data.max_tokens=900", "batching.micro_batch_tokens=1000", f"out={out}"]
        keys += ["samples=2", "pairs=0.5", "queries=last", "attention.last_q=32"]
        self.run_ballast(1, "bench", "heads", self.deck(dp=1), *keys, "dense_below=1")
        with open(out) as file:
            found = json.load(file)
        for rule in sum(found["rules"], []):
            self.assertEqual(rule["pattern"], "dense")
            self.assertEqual((rule["recall"], rule["pairs"]), (1, 1))
        self.assertEqual((found["recall"], found["pairs"]), (1, 1))

    def test_a_leak_is_a_share_of_the_pairs(self):
        slash = ["attention.pattern=vertical_slash", "attention.last_q=32"]
        slash += ["attention.vertical_share=0.5", "attention.slash_share=0.3"]
        slash += ["data.max_tokens=900", "batching.micro_batch_tokens=1000", "samples=4"]
        path = self.out("leak.json")
        self.run_ballast(1, "bench", "leak", self.deck(dp=1), *slash, "--json", path)
        with open(path) as file:
            leak = json.load(file)
        self.assertGreater(leak["pairs"], leak["tokens"])
        self.assertGreater(leak["changed_pairs_share"], 0)
        for whole, share in (("pairs", "changed_pairs_share"), ("tokens", "changed_tokens_share")):
            self.assertLessEqual(leak[share], 1)
            changed = leak[share] * leak[whole]
            self.assertAlmostEqual(changed, round(changed), delta=1e-6 * leak[whole])

    def test_a_profile_of_kernels_needs_a_gpu(self):
        self.assertIn("run.backend=cuda", self.refused(2, "step", self.deck(), "profile=1"))
        self.assertIn("set backend=cuda", self.refused(2, "ring", "tokens=512", "profile=1"))

    def test_segments_of_one_token_have_no_gradients_to_compare(self):
        for seed in (1, 2, 3, 2**63 + 5):
            sizes = ["tokens=64", "segments=63", "dtype=f64", f"seed={seed}"]
            found = self.bench(1, "attention", *sizes)
            self.assertEqual(found["seed"], seed)
            self.assertLess(max(found["error"].values()), 1e-11)

    def test_mistakes_are_named(self):
        broken = self.out("broken.txt")
        for text in ("5 x 7", "1.5", f"{1 << 70}"):
            with open(broken, "w") as file:
                file.write(text)
            said = self.refused(1, "attention", f"lengths={broken}")
            self.assertIn("no file of positive lengths", said)
        self.assertIn("whole number", self.refused(1, "gemm", "seed=-1"))
        self.assertIn("do not divide", self.refused(2, "ring", "outer=3"))
        self.assertIn("no multiple", self.refused(1, "attention", "q_heads=3", "kv_heads=2"))
        self.assertIn("contradict", self.refused(1, "attention", "segments=2", "lengths=random"))
        self.assertIn(
            "no file of positive lengths", self.refused(1, "attention", "lengths=/nonexistent")
        )
        self.assertIn('did you mean "tokens"', self.refused(1, "ring", "token=5"))
        self.assertIn("must be host or cuda", self.refused(1, "gemm", "backend=gpu"))
        self.assertIn("one of them needs two", self.refused(1, "attention", "tokens=1"))
        self.assertIn("must be at most", self.refused(1, "gemm", f"n={1 << 62}"))
        large = [f"{key}={2 * 10**9}" for key in ("tokens", "q_heads", "kv_heads", "head_dim")]
        self.assertIn("more elements than can be counted", self.refused(1, "attention", *large))


if __name__ == "__main__":
    unittest.main()

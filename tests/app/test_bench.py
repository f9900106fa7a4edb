"""ballast bench attention, gemm and ring on the host: figures are sane, results are checked against
fp64, mistakes are named."""
import json
import unittest

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

    def test_a_profile_of_kernels_needs_a_gpu(self):
        self.assertIn("run.backend=cuda", self.refused(2, "step", self.deck(), "profile=1"))
        self.assertIn("set backend=cuda", self.refused(2, "ring", "tokens=512", "profile=1"))

    def test_mistakes_are_named(self):
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

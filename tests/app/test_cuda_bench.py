"""Benchmarks and profiles on a GPU: what they print is checked by themselves.  Skips, with the
reason, where no GPU answers."""
import json
import unittest

from runs import RunCase
from cuda_case import GPUS, WIDE
from test_cuda import MOBA


@unittest.skipIf(GPUS == 0, "no GPU answers here (nvidia-smi lists none)")
class CudaBench(RunCase):
    """The benchmarks refuse a wrong result themselves; their tables are printed for the record."""

    def bench(self, ranks, *arguments):
        done = self.run_ballast(ranks, "bench", *arguments, "backend=cuda", timeout=300)
        print(done.stdout)

    def test_gemm(self):
        self.bench(1, "gemm")
        self.bench(1, "gemm", "m=1000", "n=264", "k=4096")

    def test_attention(self):
        for settings in (
            ["tokens=8192"],
            ["tokens=8192", "lengths=random"],
            ["tokens=16384", "density=0.05", "run=2"],
            ["tokens=4095", "head_dim=64", "q_heads=14"],
            ["tokens=4095", "head_dim=96"],
            ["tokens=4095", "head_dim=256"],
        ):
            self.bench(1, "attention", "q_heads=16", "kv_heads=2", "head_dim=128", *settings)

    def test_profile_of_queries_that_route_themselves(self):
        """A table of MoBA as it trains, stored prefixes included; a few percent of noise aside, a
        sixteenth of the blocks costs less than dense attention."""
        twin = self.out("twin.json")
        moba = MOBA[:1] + ["attention.moba_block=128", "profile.prefixes=[4096]"]
        grid = ["profile.lengths=[4096,16384]", "profile.budgets=[8,32]", "profile.held_out=4"]
        shape = ["model.query_heads=8", "profile.target_s=5", "profile.repair_limit=2"]
        deck = self.deck("profile.toml", WIDE, dp=1, steps=1, every=0)
        cuda = ["run.backend=cuda", "--json", twin, "-d", self.out("profile")]
        self.run_ballast(1, "profile", deck, *moba, *grid, *shape, *cuda, timeout=240)
        with open(twin) as file:
            rows = json.load(file)["rows"]
        times = {
            (r["pattern"], r["query_tokens"], r["prefix_tokens"], r["budget"], r["pass"]): r[
                "median_s"
            ]
            for r in rows
            if r["part"] == "attention"
        }
        for passed in ("forward", "backward"):
            self.assertLess(
                times["moba", 16384, 0, 8, passed], times["dense", 16384, 0, 0, passed], passed
            )
            self.assertGreater(times["moba", 16384, 4096, 8, passed], 0)

    def test_ring(self):
        for ranks, outer in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)):
            for layout in ("zigzag", "striped"):
                self.bench(
                    ranks,
                    "ring",
                    "tokens=16384",
                    "q_heads=16",
                    "kv_heads=2",
                    "head_dim=128",
                    f"outer={outer}",
                    f"layout={layout}",
                )


if __name__ == "__main__":
    unittest.main()

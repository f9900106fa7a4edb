"""Whole-program tests of sparse attention: the same losses on every mesh, ring and layout."""
import unittest

from runs import RunCase

# (ranks, dp, cp_outer, cp_inner, layout, stripe)
MESHES = [(1, 1, 1, 1, "zigzag", 64), (2, 1, 1, 2, "striped", 128), (4, 1, 2, 2, "zigzag", 64)]


class Sparse(RunCase):
    def losses_of(self, mesh, *overrides):
        ranks, dp, outer, inner, layout, stripe = mesh
        run = self.out("-".join(str(m) for m in mesh) + str(abs(hash(overrides))))
        self.run_ballast(ranks, "train", self.deck(dp=dp, cp_outer=outer, cp_inner=inner, steps=2, every=0), "-d", run, "run.precision=fp64",
                         f"ring.layout={layout}", f"ring.stripe={stripe}", "batching.micro_batch_tokens=640", *overrides)
        return [float(v) for v in self.losses(run).values()]

    def expect_same_on_every_mesh(self, *overrides):
        reference = self.losses_of(MESHES[0], *overrides)
        self.assertEqual(len(reference), 2)
        for mesh in MESHES[1:]:
            for a, b in zip(reference, self.losses_of(mesh, *overrides)):
                self.assertAlmostEqual(a, b, delta=2e-6, msg=str(mesh))
        return reference

    def test_generated_index(self):
        generated = ["attention.index=generated", "attention.generated_band_tokens=64", "attention.generated_columns=8"]
        sparse = self.expect_same_on_every_mesh(*generated, "attention.generated_density=0.3")
        for a, b in zip(sparse, self.losses_of((4, 1, 1, 2, "striped", 64), *generated, "attention.generated_density=0.3", "mesh.sp=2")):
            self.assertAlmostEqual(a, b, delta=2e-6, msg="each Ulysses rank has its own heads' patterns")
        dense = self.losses_of(MESHES[0])
        self.assertNotEqual(sparse, dense)
        for a, b in zip(dense, self.losses_of(MESHES[0], *generated, "attention.generated_density=1")):
            self.assertAlmostEqual(a, b, delta=2e-6, msg="density 1 is dense")

    def test_patterns(self):
        patterns = {"vertical_slash": ["attention.vertical_share=0.5", "attention.slash_share=0.5", "attention.last_q=32"],
                    "moba": ["attention.moba_block=64", "attention.moba_top_k=2"],
                    "xattention": ["attention.xattention_block=64", "attention.xattention_threshold=0.3"]}
        full = {"vertical_slash": "attention.slash_share=1", "moba": "attention.moba_top_k=1000", "xattention": "attention.xattention_threshold=1"}
        dense = self.losses_of(MESHES[0])
        for pattern, settings in patterns.items():
            with self.subTest(pattern):
                sparse = self.expect_same_on_every_mesh(f"attention.pattern={pattern}", *settings)
                self.assertNotEqual(sparse, dense)
                for a, b in zip(dense, self.losses_of(MESHES[0], f"attention.pattern={pattern}", *settings, full[pattern])):
                    self.assertAlmostEqual(a, b, delta=2e-6, msg="a full budget is dense")

    def test_bad_budgets_are_refused(self):
        for setting, mention in [("attention.vertical_share=0", "vertical_share"), ("attention.slash_share=1.5", "slash_share"), ("attention.last_q=0", "last_q"),
                                 ("attention.moba_block=100", "multiple of 64"), ("attention.xattention_stride=48", "divide 64"),
                                 ("ring.stripe=96", "stripes must not cut")]:
            done = self.run_ballast(1, "train", self.deck(dp=1), "-d", self.out("bad"), "attention.pattern=vertical_slash", "ring.layout=striped", setting, status=None)
            self.assertNotEqual(done.returncode, 0, setting)
            self.assertIn(mention, done.stderr)


if __name__ == "__main__":
    unittest.main()
